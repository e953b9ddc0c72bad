"""bubbles.py without PyTorch: compute is slept, as long as a small model's would take. KV is in the host's memory."""

import mmap
import random
import time
import zlib

from kv_store import tuttifs

RUN_BYTES_A_TOKEN = 512           # of K, and of V, of one layer
SECONDS_A_TOKEN = 10e-6           # of one layer: a prefix hides up to some 95 % of the prompt, at 2 GB/s
SECONDS_A_PAIR = 2e-10            # more, for each cached token that a new one attends to


class SleepModel:
    def __init__(self, a, blocks):
        self.layers, self.block, self.device, self.dtype_name = a.layers, a.block, "cpu", "bf16"
        self.places = random.Random(2).sample(range(blocks), blocks)
        self.pool = [memoryview(mmap.mmap(-1, blocks * self.block_bytes())) for _ in range(a.layers)]

    def run_bytes(self):
        return self.block * RUN_BYTES_A_TOKEN

    def block_bytes(self):
        """Of a layer: V follows K."""
        return 2 * self.run_bytes()

    def paged(self):
        return tuttifs.Paged.of([m.cast("B", [len(self.places), self.block_bytes()]) for m in self.pool], 0)

    def event(self):
        return None

    def synchronize(self):
        pass

    def slice(self, block):
        """Of the pool, for a block of the prompt."""
        at = self.places[block] * self.block_bytes()
        return slice(at, at + self.block_bytes())


class Subject:
    """The same for bubble_run.py as that of bubble_torch.py."""

    def __init__(self, a, blocks):
        self.model = SleepModel(a, blocks)
        for layer, m in enumerate(self.model.pool):
            m[:] = random.Random(layer).randbytes(len(m))
        self.whole = [bytes(m) for m in self.model.pool]
        self.about = {"gpu": None, "torch": None}

    def timer(self, n):
        return None

    def stream(self):
        return None

    def reset(self, clear):
        for m, whole in zip(self.model.pool, self.whole):
            m[:] = bytes(len(m)) if clear else whole

    def forward(self, begin, end, before, after):
        """Reads what is cached, so that what comes too late shows, and writes something new."""
        model, sums = self.model, []
        cached, blocks = begin // model.block, end // model.block
        for layer, m in enumerate(model.pool):
            if before:
                before(layer)
            sums.append([zlib.crc32(m[model.slice(i)]) for i in range(cached)])
            for i in range(cached, blocks):
                m[model.slice(i)] = random.Random(f"{layer} {i}").randbytes(model.block_bytes())
            time.sleep((end - begin) * (SECONDS_A_TOKEN + SECONDS_A_PAIR * (begin + end) / 2))
            after(layer)
        return sums

    def first_token(self, part):
        return len(part)

    def same(self, cached, parts, wanted):
        if parts != wanted:
            raise SystemExit("a layer was not restored as it was when it was needed")

    def take(self, first, last):
        return [[bytes(m[self.model.slice(i)]) for i in range(first, last)] for m in self.model.pool]

    def is_taken(self, first, last, taken):
        return self.take(first, last) == taken

    def link(self):
        return None


def run(bench):
    bench(Subject)
