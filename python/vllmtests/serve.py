"""One engine as a process of its own: requests and answers are lines of JSON, so that tests can start, kill and compare
engines.

    {"do": "generate", "prompts": [[...], ...], "tokens": n, ...}
                       ->  {"outputs": [{"tokens": [...], "cached": n}, ...]}
    {"do": "reset"}    forgets the engine's own cache of prefixes
    {"do": "metrics"}  ->  the counters of the connector, and of preemptions
    {"do": "sleep"}    sleeps and wakes
    {"do": "end"}
"""

import json
import os
import sys
from typing import Any, Dict

PREEMPTIONS = "vllm:num_preemptions"


def main() -> None:
    out = os.fdopen(os.dup(1), "w")  # for answers alone: what the engine prints goes where errors go
    os.dup2(2, 1)
    options: Dict[str, Any] = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams
    llm = LLM(skip_tokenizer_init=True, seed=0, disable_log_stats=False, **options)

    def answer(value: Any) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    answer({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "generate":
            extra = {"kv_transfer_params": order["params"]} if "params" in order else None
            sampling = SamplingParams(temperature=0, max_tokens=order["tokens"], ignore_eos=True, detokenize=False,
                                      extra_args=extra)
            prompts = [{"prompt_token_ids": p, **({"cache_salt": order["salt"]} if "salt" in order else {})}
                       for p in order["prompts"]]
            done = llm.generate(prompts, sampling, use_tqdm=False)
            answer({"outputs": [{"tokens": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens} for o in done]})
        elif order["do"] == "reset":
            answer({"reset": llm.reset_prefix_cache()})
        elif order["do"] == "sleep":
            llm.sleep(level=1)
            answer({"awake": llm.wake_up()})
        elif order["do"] == "metrics":
            answer({m.name: m.value for m in llm.get_metrics() if "tuttifs" in m.name or m.name == PREEMPTIONS})
        else:
            break
    shutdown = getattr(llm.llm_engine.engine_core, "shutdown", None)
    if shutdown is not None:
        shutdown()
    answer({"ended": True})


if __name__ == "__main__":
    main()
