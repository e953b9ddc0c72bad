"""Engines as processes, and what a test asks of them."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "../../examples"))

from vllm_restore import kv_transfer_config  # noqa: E402

START_SECONDS, ANSWER_SECONDS = 400, 200
FILE, BLOCK = 64, 32  # tokens

# One thread, a small cache: these engines are to be right, not fast.
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
               "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def connector(path: str, **extra: Any) -> Dict[str, Any]:
    """The configuration of an engine with a mount: that of the example."""
    return {"kv_transfer_config": kv_transfer_config(path, **{
        "revision": "seed 1", "file_tokens": FILE, "staging_bytes": 4 << 20, "retry_seconds": 0.5, **extra})}


class Engine:
    """An engine that runs. `with` ends it."""

    program, environment = os.path.join(HERE, "serve.py"), ENVIRONMENT

    def __init__(self, model: str, log: str, **options: Any) -> None:
        self.log = log
        words = {"model": model, "max_model_len": 512, "block_size": BLOCK, "enforce_eager": True, "max_num_seqs": 8,
                 "dtype": "float32", "max_num_batched_tokens": 512, **options}
        self._err = open(log, "ab")
        self.process = subprocess.Popen([sys.executable, self.program, json.dumps(words)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._err,
                                        env={**os.environ, **self.environment}, start_new_session=True)
        self._read = b""

    def ready(self) -> "Engine":
        self._answer(START_SECONDS)
        return self

    def _answer(self, seconds: float) -> Any:
        assert self.process.stdout is not None
        limit = time.monotonic() + seconds
        while b"\n" not in self._read:
            more = b""
            if select.select([self.process.stdout], [], [], max(0, limit - time.monotonic()))[0]:
                more = os.read(self.process.stdout.fileno(), 1 << 20)
            if not more:
                with open(self.log, errors="replace") as f:
                    raise RuntimeError("the engine does not answer:\n" + "".join(f.readlines()[-60:]))
            self._read += more
        line, self._read = self._read.split(b"\n", 1)
        return json.loads(line)

    def ask(self, **order: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        return self._answer(ANSWER_SECONDS)

    def generate(self, prompts: List[List[int]], tokens: int = 12, **more: Any) -> List[Dict[str, Any]]:
        outputs: List[Dict[str, Any]] = self.ask(do="generate", prompts=prompts, tokens=tokens, **more)["outputs"]
        return outputs

    def reset(self) -> None:
        """Forgets the engine's own cache, so that the next hits are the mount's."""
        assert self.ask(do="reset")["reset"]

    def sleep(self) -> None:
        """Sleeps and wakes: its own cache is gone."""
        assert self.ask(do="sleep")["awake"]

    def count(self, name: str) -> float:
        return self.counts()[f"vllm:{name}"]

    def counts(self) -> Dict[str, float]:
        counts: Dict[str, float] = self.ask(do="metrics")
        return counts

    def kill(self) -> None:
        """kill -9 of all its processes."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._close()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b'{"do": "end"}\n')
        self.process.stdin.flush()
        self._answer(60)
        self.process.wait(60)
        self._close()

    def _close(self) -> None:
        for f in (self.process.stdin, self.process.stdout, self._err):
            assert f is not None
            f.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: Optional[type], *_: Any) -> None:
        if self.process.poll() is None:
            self.kill()
