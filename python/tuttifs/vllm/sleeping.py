"""vLLM's sleep mode, in which the KV cache's memory goes away and comes back. It tells connectors nothing of it, so its
allocator is asked: everything that takes that memory away, or gives it back, goes through there."""

from __future__ import annotations

from typing import Any, Protocol

TAG = "kv_cache"  # of the KV cache's memory


class Sleeper(Protocol):
    def suspend(self) -> None: ...

    def resume(self) -> None: ...


def follow(allocator: Any, sleeper: Sleeper) -> None:
    """Has somebody suspend before an allocator of vLLM's (`MemAllocator`) takes the KV cache's memory away, and resume
    when it is there again."""
    sleep, discard, wake_up = allocator.sleep, allocator.discard, allocator.wake_up

    def sleeps(*arguments: Any, **named: Any) -> None:
        sleeper.suspend()
        sleep(*arguments, **named)

    def discards(tags: Any) -> None:
        if TAG in tags:
            sleeper.suspend()
        discard(tags)

    def wakes(tags: Any = None) -> None:
        wake_up(tags)
        if tags is None or TAG in tags:
            sleeper.resume()

    allocator.sleep, allocator.discard, allocator.wake_up = sleeps, discards, wakes
