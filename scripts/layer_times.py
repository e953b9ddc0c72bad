#!/usr/bin/env python3
"""How long one layer of a Llama-3-8B-shaped model computes, for `tuttifs profile model --layer-times`.

For each number of new tokens and of cached ones before them, passes over a few layers are timed from the point where
one layer reads its cache to where the next one does: exactly a layer, without embedding and output. The median of all
layers and passes counts. The layer is that of kv_model.py, with random weights over a paged pool; its gathering
of the pool's blocks is part of the time. A pass of one new token is a decode step, launched kernel by kernel.

  scripts/layer_times.py -o h200.json
  scripts/layer_times.py --device cpu --new 1,16,64 --cached 0,64,128 --block 16   # tiny shapes, without a GPU
"""

import argparse
import json
import os
import statistics
import sys
import time

import kv_store
from kv_store import TORCH, note, number, numbers

if TORCH:
    import torch

    from kv_model import Model


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", type=kv_store.device("cpu"), default="cuda", help="cuda, cuda:N, or cpu for tiny shapes")
    p.add_argument("--new", type=numbers(number()), help="new tokens of a pass",
                   default=[1, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536])
    p.add_argument("--cached", type=numbers(number(least=0)), help="cached tokens before them",
                   default=[0, 1024, 4096, 16384, 32768, 65536, 131072])
    p.add_argument("--block", type=number(), default=64, help="tokens of a block of the pool")
    p.add_argument("--layers", type=number(least=2), default=3, help="of a pass; all but the last are timed")
    p.add_argument("--warm-up", type=number(least=0), default=3, help="passes of each place that do not count")
    p.add_argument("--runs", type=number(), default=7, help="passes of each place that count")
    p.add_argument("-o", "--output", default="-", help="the file; - is standard output")
    a = p.parse_args()
    if not TORCH:
        p.error("this needs PyTorch")
    kv_store.settle_device(p, a)
    if a.output != "-":
        kv_store.check_output(p, "-o", a.output)
    a.new, a.cached = sorted(set(a.new)), sorted(set(a.cached))
    # What Model takes beside these: the pool's size and layout.
    a.tokens = -(-(a.new[-1] + a.cached[-1]) // a.block) * a.block
    a.layout = "kv-first"
    return a


class Passes:
    """Passes over a model that take the time at the same point of each layer."""

    def __init__(self, a):
        self.model, self.runs, self.warm_up = Model(a), a.runs, a.warm_up
        for pool in self.model.pool:
            pool.normal_()  # a cache of zeros would need less power, and raise the clocks

    def mark(self):
        if self.model.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def once(self, tokens, cached):
        """Milliseconds of each layer but the last, by the GPU's own clock where there is one."""
        marks = []
        self.model.forward(tokens, cached, lambda layer: marks.append(self.mark()))
        self.model.synchronize()
        if self.model.device.type != "cuda":
            return [1e3 * (y - x) for x, y in zip(marks, marks[1:])]
        return [x.elapsed_time(y) for x, y in zip(marks, marks[1:])]

    def layer_ms(self, new, cached):
        tokens = torch.randint(self.model.vocab, (new,), device=self.model.device)
        for _ in range(self.warm_up):
            self.once(tokens, cached)
        return statistics.median(ms for _ in range(self.runs) for ms in self.once(tokens, cached))


def driver_version():
    try:
        with open("/sys/module/nvidia/version") as f:
            return f.read().strip()
    except OSError:
        return ""


def measure(a):
    if not a.cpu:
        torch.cuda.set_device(a.device)
    begin = time.perf_counter()
    passes = Passes(a)
    model, rows = passes.model, []
    for new in a.new:
        for cached in a.cached:
            ms = passes.layer_ms(new, cached)
            rows.append({"input": new, "prefix": cached, "ms": round(ms, 6)})
            note(f"{new} new, {cached} cached: {ms:.3f} ms")
    dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}[model.dtype]
    report = {"layer_times_version": 1, "seconds": round(time.perf_counter() - begin, 3),
              "shape": {"heads": model.heads, "kv_heads": model.kv_heads, "head_size": model.head,
                        "hidden": model.hidden, "ffn": model.ffn, "dtype": dtype},
              "rows": rows}
    if not a.cpu:
        report["gpu"] = torch.cuda.get_device_name(model.device)
        report["driver"] = driver_version() or "unknown"
    text = json.dumps(report, indent=1) + "\n"
    if a.output == "-":
        sys.stdout.write(text)
        return
    with open(a.output + ".new", "w") as f:
        f.write(text)
    os.replace(a.output + ".new", a.output)


def main():
    a = arguments()
    with torch.inference_mode():
        measure(a)


if __name__ == "__main__":
    main()
