"""What the programs share that measure a model's KV over a volume: its flags, and the KV in a session on a mount."""

import argparse
import hashlib
import importlib.util
import math
import os
import re
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "python"))
import tuttifs  # noqa: E402


TORCH = importlib.util.find_spec("torch") is not None  # --help needs none
DEVICES = "cuda, cuda:N, or cpu for tiny shapes and the CPU executor"
LEFT = "what a killed run has left there goes when the next one begins"
DRIVES_MAX, POLLERS_MAX = 64, 64  # of a volume, of a process on a mount


def number(kind=int, least=1, most=math.inf):
    """A type of argparse's: a number within bounds."""
    wanted = f"a {'whole ' if kind is int else ''}number from {least}" + (f" to {most}" if most < math.inf else "")

    def parse(text):
        try:
            n = kind(text)
        except ValueError:
            n = math.nan
        if not least <= n <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: want {wanted}")
        return n
    return parse


def numbers(kind):
    """A type of argparse's: several of a kind, separated by commas."""
    return lambda text: [kind(x) for x in text.split(",")]


def device(*others):
    """A type of argparse's: a GPU, or one of these words."""
    def parse(text):
        if text not in others and not re.fullmatch(r"cuda(:\d+)?", text):
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(('cuda', 'cuda:N', *others))}")
        return text
    return parse


def add_arguments(p, device_help=DEVICES, devices=("cpu",)):
    """The flags of all these programs; settle completes them."""
    p.add_argument("--device", type=device(*devices), default="cuda", help=device_help)
    p.add_argument("--layers", type=number(), default=32, help="of the model")
    p.add_argument("--block", type=number(), default=64, help="tokens of a block and file: 64 make objects of 256 KiB")
    p.add_argument("--layout", choices=["kv-first", "blocks-first"], help="[2, blocks, ...] or [blocks, 2, ...]")
    p.add_argument("--staging-mib", type=number(least=0), default=0, help="0: the default")
    p.add_argument("--bounce-mib", type=number(least=0), default=0, help="0: the default")
    add_volume_arguments(p)


def add_volume_arguments(p, pollers="the daemon's polling threads (default: by the cores)"):
    """Those of a volume in memory; check_files looks at them."""
    p.add_argument("--pollers", type=number(least=0, most=POLLERS_MAX), default=0, help=pollers)
    p.add_argument("--where", default="/dev/shm", help="directory for the drives; " + LEFT)
    add_program_arguments(p)


def add_program_arguments(p):
    p.add_argument("--tuttifs", default=os.path.join(ROOT, "bin/tuttifs"))
    p.add_argument("--lib", default=os.path.join(ROOT, "build/lib/libtuttifs.so"))


def settle(p, a):
    settle_device(p, a)
    a.layout = a.layout or ("blocks-first" if a.cpu else "kv-first")
    a.pollers = a.pollers or max(1, min(10, (os.cpu_count() or 1) * 5 // 8))
    if a.cpu and a.layout == "kv-first":
        p.error("the CPU executor takes one run a block: --layout blocks-first")
    check_files(p, a)


def settle_device(p, a):
    a.device = "cuda:0" if a.device == "cuda" else a.device
    a.cpu = a.device == "cpu"
    if a.device.startswith("cuda"):
        check_gpus(p, int(a.device.partition(":")[2]) + 1)


def check_gpus(p, n):
    import torch
    if torch.cuda.device_count() < n:
        p.error(f"PyTorch finds {torch.cuda.device_count()} GPUs here, and {n} are needed; --device cpu needs none")


def check_files(p, a):
    if not os.path.isdir(a.where) or not os.access(a.where, os.W_OK | os.X_OK):
        p.error(f"--where {a.where}: no directory that can be written to")
    if not os.path.isfile(a.tuttifs) or not os.access(a.tuttifs, os.X_OK):
        p.error(f"--tuttifs {a.tuttifs}: no program; 'make build' makes bin/tuttifs")
    if not os.path.isfile(a.lib):
        p.error(f"--lib {a.lib}: no library; 'make lib' makes build/lib/libtuttifs.so")
    os.environ["TUTTIFS_LIBRARY"] = os.path.abspath(a.lib)


def check_output(p, flag, path):
    """Says before measuring that a file could not be written afterwards."""
    where = os.path.dirname(path) or "."
    # Some write beside it and rename: that would put a file in the place of a link or a device.
    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path) or not os.access(path, os.W_OK)):
        p.error(f"{flag} {path}: no regular file that can be written to")
    if not os.path.basename(path) or not os.path.isdir(where) or not os.access(where, os.W_OK | os.X_OK):
        p.error(f"{flag} {path}: no file in a directory that can be written to")


def check_whole_blocks(p, flag, tokens, block, least=1):
    if tokens % block or tokens < least * block:
        p.error(f"{flag} {tokens}: want a multiple of --block, which is {block}"
                + (f", and {least} blocks at least" if least > 1 else ""))


def note(text):
    print(text, file=sys.stderr, flush=True)


class Store:
    """A model's pool, registered in a session of its own on a mount, and keys for a prompt as long as the pool.

    A model has layers, block (tokens), places (the pool's block for each block of the prompt), device, dtype_name,
    run_bytes() (of K, and of V, of one block and layer), paged() (the pool), event() and synchronize()."""

    def __init__(self, a, model, mount, **options):
        self.model, self.mount = model, tuttifs.Store(mount)
        self.session = self.mount.session(model.device, staging_bytes=a.staging_mib << 20,
                                          bounce_bytes=a.bounce_mib << 20, **options)
        identity = {"model": "llama-3-8b-shaped", "revision": "random", "weights_epoch": 1,
                    "dtype": model.dtype_name, "quantisation": "none", "scale_format": "none", "layout": "NHD",
                    "page_bytes": 2 * model.run_bytes(), "block_tokens": a.block, "file_tokens": a.block, "tp": 1,
                    "pp": 1, "cp": 1, "group": "full"}
        paged = model.paged()
        self.pool = self.session.pool("llama", identity, paged.objects())
        begin = time.perf_counter()
        self.memory = self.session.register(paged)
        self.registration = {"seconds": time.perf_counter() - begin, "device_bytes": self.memory.device_bytes,
                             "runs": paged.blocks * sum(len(c.runs) for c in paged.classes)}
        self.keys = chain(b"prompt", len(model.places))

    def event(self):
        """Behind what is enqueued so far; None without a GPU, where nothing is left to wait for."""
        return self.model.event()

    def put(self, blocks):
        """Stores the prompt's first blocks, and returns how long it took."""
        self.model.synchronize()
        begin = time.perf_counter()
        with self.pool.reserve(self.keys[:blocks]) as slots:
            after = self.event()
            with self.pool.store(slots, self.memory, self.model.places[:blocks]) as layers:
                layers.move_all(self.model.layers, after)
                slots.commit()
        return time.perf_counter() - begin

    def pin(self, request, blocks):
        leases = self.pool.pin(self.keys[:blocks], request)
        if len(leases) != blocks:
            raise RuntimeError(f"{len(leases)} of {blocks} blocks found")
        return leases

    def close(self):
        self.session.close()
        self.mount.close()


def chain(parent, n):
    """Keys of n blocks behind a parent."""
    keys = []
    for i in range(n):
        parent = hashlib.sha256(parent + i.to_bytes(4, "little")).digest()
        keys.append(parent)
    return keys
