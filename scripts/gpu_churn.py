#!/usr/bin/env python3
"""Keeps PyTorch's allocator growing and shrinking on a GPU, with some compute in between, until its input ends.

It says "ready" when it has begun: tests of the rings run beside it.
"""

import os
import random
import sys
import threading

import torch

MOST = 4 << 30  # bytes held at a time


def main():
    device = torch.device("cuda", int(os.environ.get("TUTTIFS_GPU") or 0))
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), ended.set()), daemon=True).start()
    a = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)
    torch.cuda.synchronize(device)
    print("ready", flush=True)
    held, rounds = [], 0
    while not ended.is_set():
        size = random.choice([4 << 10, 1 << 20, 20 << 20, 256 << 20])
        held.append(torch.empty(random.randint(1, size), dtype=torch.uint8, device=device))
        held[-1].fill_(rounds & 0xFF)
        a = torch.nn.functional.normalize(a @ a)
        while sum(t.numel() for t in held) > MOST or random.random() < 0.4 and held:
            held.pop(random.randrange(len(held)))
        rounds += 1
        if rounds % 16 == 0:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # gives back to the driver what is free


if __name__ == "__main__":
    main()
