"""bubbles.py with PyTorch: what computes, its memory and its clock."""

import argparse

import torch

import kv_model
from kv_model import Dram, Model, same_bits


class Timer:
    """Points in time of the stream that computes, by its own clock; of the host without a GPU."""

    def __init__(self, n):
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(n)]

    def mark(self, i):
        self.events[i].record()

    def between(self, i, j):
        """Milliseconds. The device has come to both."""
        return self.events[i].elapsed_time(self.events[j])


class Subject:
    """A model whose prompts' KV is random, and once more what its pool holds."""

    def __init__(self, a, blocks):
        if not a.cpu:
            torch.cuda.set_device(a.device)
        m = argparse.Namespace(**vars(a))
        m.tokens = blocks * a.block  # Model takes its pool's size from there
        self.model = Model(m)
        for t in self.model.pool:
            t.normal_()
        self.whole = [t.clone() for t in self.model.pool]
        self.tokens = kv_model.random_tokens(self.model, m.tokens)
        self.cuda = self.model.cuda
        self.about = {"gpu": torch.cuda.get_device_name(self.model.device) if self.cuda else None,
                      "torch": torch.__version__}

    def timer(self, n):
        return Timer(n) if self.cuda else None

    def stream(self):
        return torch.cuda.current_stream() if self.cuda else None

    def reset(self, clear):
        """The pool as it was made, or full of zeros."""
        for t, whole in zip(self.model.pool, self.whole):
            t.zero_() if clear else t.copy_(whole)

    def forward(self, begin, end, before, after):
        return self.model.forward(self.tokens[begin:end], begin, before, after)

    def first_token(self, part):
        """On the host, once it is computed."""
        return int(part[1].argmax())

    def same(self, cached, parts, wanted):
        """Raises where the prefix or what was computed differs from what is wanted by a bit."""
        model, prefix = self.model, self.model.table_device[:cached]
        for layer, (t, whole) in enumerate(zip(model.pool, self.whole)):
            for i in (0, 1):
                got, want = (p.select(model.kv_axis, i).index_select(0, prefix) for p in (t, whole))
                if not same_bits(got, want):
                    raise SystemExit(f"layer {layer} was not restored as it was")
        for got, want in zip(parts, wanted):
            for what, x, y in zip(("hidden states", "logits"), got, want):
                if not same_bits(x, y):
                    raise SystemExit(f"{what} differ from those of the HBM-resident run")

    def take(self, first, last):
        """What the pool holds of blocks of the prompt, by layer."""
        model, blocks = self.model, self.model.table_device[first:last]
        return [t.index_select(1 - model.kv_axis, blocks) for t in model.pool]

    def is_taken(self, first, last, taken):
        return all(same_bits(x, y) for x, y in zip(self.take(first, last), taken))

    def host_memory(self):
        """The same blocks in pinned host memory."""
        dram = Dram(self.model, self.whole)
        dram.fill()
        return dram

    def link(self):
        """GB/s of large copies from pinned host memory."""
        if not self.cuda:
            return None
        source = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(256 << 20, dtype=torch.uint8, device=self.model.device)
        rates, timer = [], Timer(2)
        for _ in range(12):
            timer.mark(0)
            target.copy_(source, non_blocking=True)
            timer.mark(1)
            self.model.synchronize()
            rates.append(target.numel() / timer.between(0, 1) / 1e6)
        return sorted(rates)[len(rates) // 2]


def run(bench):
    with torch.inference_mode():
        bench(Subject)
