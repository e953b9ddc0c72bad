"""What the programs share that measure a model's KV over a volume: its flags, and the KV in a session on a mount."""

import hashlib
import importlib.util
import os
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "python"))
import tuttifs  # noqa: E402


TORCH = importlib.util.find_spec("torch") is not None  # --help needs none
DEVICES = "cuda, cuda:N, or cpu for tiny shapes and the CPU executor"


def add_arguments(p, device_help=DEVICES):
    """The flags of all these programs; settle completes them."""
    p.add_argument("--device", default="cuda", help=device_help)
    p.add_argument("--layers", type=int, default=32, help="of the model")
    p.add_argument("--block", type=int, default=64, help="tokens of a block and file: 64 make objects of 256 KiB")
    p.add_argument("--layout", choices=["kv-first", "blocks-first"], help="[2, blocks, ...] or [blocks, 2, ...]")
    p.add_argument("--pollers", type=int, default=0, help="the daemon's polling threads (default: by the cores)")
    p.add_argument("--staging-mib", type=int, default=0, help="0: the default")
    p.add_argument("--bounce-mib", type=int, default=0, help="0: the default")
    p.add_argument("--where", default="/dev/shm", help="directory for the drives")
    p.add_argument("--tuttifs", default=os.path.join(ROOT, "bin/tuttifs"))
    p.add_argument("--lib", default=os.path.join(ROOT, "build/lib/libtuttifs.so"))


def settle(p, a):
    a.device = "cuda:0" if a.device == "cuda" else a.device
    a.cpu = a.device == "cpu"
    a.layout = a.layout or ("blocks-first" if a.cpu else "kv-first")
    a.pollers = a.pollers or max(1, min(10, (os.cpu_count() or 1) * 5 // 8))
    if not os.path.isdir(a.where) or not os.access(a.where, os.W_OK | os.X_OK):
        p.error(f"--where {a.where}: no directory that can be written to")
    if not os.path.isfile(a.tuttifs) or not os.access(a.tuttifs, os.X_OK):
        p.error(f"--tuttifs {a.tuttifs}: no program; 'make build' makes bin/tuttifs")
    if not os.path.isfile(a.lib):
        p.error(f"--lib {a.lib}: no library; 'make lib' makes build/lib/libtuttifs.so")
    if a.cpu and a.layout == "kv-first":
        p.error("the CPU executor takes one run a block: --layout blocks-first")
    os.environ["TUTTIFS_LIBRARY"] = os.path.abspath(a.lib)


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
