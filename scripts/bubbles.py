#!/usr/bin/env python3
"""How long compute stands still for a cached prefix that is restored, by the share that is cached.

A Llama-3-8B-shaped model with random weights computes the rest of long prompts whose prefix comes from the drives layer
by layer, while the new tokens' KV goes there, on volumes that this program makes in memory. Events before and after
each layer's wait, in the stream that computes, say how long that stood still; runs are in turns with ones whose prefix
is in HBM. Hidden states, logits and the pool are compared with those bit for bit, and so is what was stored.

  tuttifs        the scheduler, and the phases of the drives
  no-scheduler   all layers are asked for at once, stores are written as they come; drives have phases
  no-separation  the same, and reads and writes mix on the drives
  no-phases      the scheduler, without phases of the drives
  buffer         a store buffer without a scheduler; the caller asks for two layers ahead of the one that it waits for
  by-hand        the same without the buffer
  polling        the same by polling kernels
  per-object     from pinned host memory, one copy for each run of each block, and back

Drives are `ram`, four files in memory, and `paper`, two that are held back to the profile of the Tutti paper's drives.
With `paper`, rates of restores without compute are measured beside a permanent backlog of stores as well.

  make build lib
  scripts/bubbles.sh                                        # on a machine with a GPU, PyTorch and much memory
  scripts/bubbles.py --plot a.json,b.json                   # the table and a.png, from what runs have written
  scripts/bubbles.py --device cpu --tokens 512 --layers 3 --block 16 --where /tmp   # tiny, without a GPU
  scripts/bubbles.py --device none                               # 8192 tokens, 4 layers, no PyTorch: compute is slept
"""

import argparse
import importlib.util
import os
import sys
import time

import bubble_report
import kv_store
from kv_store import number, numbers


SLEPT_TOKENS, SLEPT_LAYERS = 8192, 4  # without a GPU: two or three minutes


def one_of(known):
    def parse(text):
        names = [x for x in text.split(",") if x]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(known)}")
        return names
    return parse


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)  # bubbles.sh looks for some of the flags
    ways, drives = one_of(bubble_report.TITLES), one_of(bubble_report.DRIVES)
    p.add_argument("--plot", metavar="FILES", help="measure nothing: join these documents, print the table, draw the plot")
    p.add_argument("-o", "--output", default="bubbles.json", help="the document, written after each case")
    p.add_argument("--png", help="the plot; default: the document's name with .png")
    p.add_argument("--limit", type=number(float, 0), default=540,
                   help="seconds after which what is left is left out; setting up counts")
    p.add_argument("--tokens", type=numbers(number()),
                   help=f"of the prompts (default: 65536,131072; {SLEPT_TOKENS}, of {SLEPT_LAYERS} layers, with "
                        "--device none)")
    p.add_argument("--hits", type=numbers(number(float, 0, 100)),
                   default=[98, 93.75, 98.5, 97, 99, 95, 90, 87.5, 75, 50],
                   help="per cent of the prompt that are cached, in this order, but those below "
                        f"{bubble_report.LOW_PERCENT} last; rounded to whole blocks")
    p.add_argument("--drives", type=drives, default=list(bubble_report.DRIVES))
    p.add_argument("--ways", type=ways, default=["tuttifs", "no-scheduler", "no-separation", "polling", "per-object"])
    p.add_argument("--backlog-ways", type=ways, default=["tuttifs", "no-scheduler", "no-phases", "no-separation"],
                   help="that are measured beside a backlog of stores; none: ''")
    p.add_argument("--backlog-drives", type=drives, default=["paper"])
    p.add_argument("--runs", type=number(), default=5, help="of each case, at most")
    p.add_argument("--seconds", type=number(float, 0), default=5,
                   help="that the runs of a case should take; two at least")
    p.add_argument("--backlog-seconds", type=number(float, 0), default=0.6, help="of one rate beside a backlog")
    p.add_argument("--slack-table", help="the scheduler's; none: it learns")
    p.add_argument("--store-mib", type=number(), default=1024, help="the store buffer")
    p.add_argument("--piece", type=number(), default=32768, help="most new tokens of one forward pass")
    kv_store.add_arguments(p, kv_store.DEVICES + ", or none: compute is slept, without PyTorch", ("cpu", "none"))
    p.set_defaults(layers=0, started=time.monotonic())
    a = p.parse_args()
    if a.plot:
        return a
    tokens, layers = ([SLEPT_TOKENS], SLEPT_LAYERS) if a.device == "none" else ([65536, 131072], 32)
    a.tokens, a.layers = a.tokens or tokens, a.layers or layers
    if a.device != "none" and not importlib.util.find_spec("torch"):
        p.error("this needs PyTorch; --device none and --plot do not")
    if not a.pollers and a.device.startswith("cuda"):
        a.pollers = max(1, min(12, (os.cpu_count() or 1) * 3 // 4))
    kv_store.settle(p, a)
    for tokens in a.tokens:
        kv_store.check_whole_blocks(p, "--tokens", tokens, a.block, least=2)
    kv_store.check_whole_blocks(p, "--piece", a.piece, a.block)
    for flag, path in (("-o", a.output), ("--png", a.png)):
        if path is not None:
            kv_store.check_output(p, flag, path)
    if a.slack_table and not os.access(a.slack_table, os.R_OK):
        p.error(f"--slack-table {a.slack_table}: no file that can be read")
    if not all(0 < h < 100 for h in a.hits) or a.layers < 2:
        p.error("--hits are above 0 and below 100, --layers 2 or more")
    return a


def draw(report, path):
    if importlib.util.find_spec("matplotlib"):
        bubble_report.plot(report, path)
        print(f"drew {path}", file=sys.stderr)
    else:
        print("no matplotlib here: `scripts/bubbles.py --plot FILE` draws the plot where there is one", file=sys.stderr)


def main():
    a = arguments()
    if a.plot:
        files = a.plot.split(",")
        report = bubble_report.load(files)
        print(bubble_report.table(report))
        draw(report, a.png or os.path.splitext(files[0])[0] + ".png")
        return
    import bubble_run
    report = bubble_report.new(a)
    try:
        bubble_run.run(a, report, lambda: bubble_report.save(report, a.output))
    finally:
        if report["cells"] or report["backlog"] or report["failures"]:
            bubble_report.save(report, a.output)
            print(bubble_report.table(report), flush=True)
    draw(report, a.png or os.path.splitext(a.output)[0] + ".png")
    if report["failures"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
