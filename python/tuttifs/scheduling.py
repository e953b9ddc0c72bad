"""What a session is told of compute, and what its scheduler says. docs/scheduler.md has the rules."""

from __future__ import annotations

import ctypes as C
import dataclasses
from typing import Any, List

from . import _lib
from ._lib import Library
from .layers import event_handle


@dataclasses.dataclass(frozen=True)
class Offer:
    """Whether a prefix is worth restoring."""

    load: bool  # restore it; also where nothing is known
    known: bool  # windows and rates are, and the times say something
    restore_ns: int  # the pass over the new tokens, with the restore of the others
    recompute_ns: int  # the pass over all of them


@dataclasses.dataclass(frozen=True)
class SchedulerStats:
    """What a session's scheduler has counted since it was made; `struct tuttifs_scheduler_stats` has the meanings."""

    passes: int
    layers: int
    decode_steps: int
    bubbles: int  # layers before which compute stood for reads
    bubble_ns: int
    first_bubble_ns: int
    read_hidden_ns: int
    read_exposed_ns: int
    write_ns: int
    deferred_objects: int
    deferred_bytes: int
    issued_off_bytes: int  # of deferred writes, by why they went
    issued_age_bytes: int
    issued_high_bytes: int
    issued_window_bytes: int
    issued_decode_bytes: int
    issued_idle_bytes: int
    oldest_age_ns: int
    overruns: int
    beside: int
    offers: int
    offers_refused: int
    estimates: int
    estimated_ns: int
    took_ns: int
    error_ns: int
    window_ns: int
    window_factor: float
    read_factor: float
    write_factor: float


class Scheduled:
    """The part of `Session` about its scheduler. Nothing here waits; all of it may be told ahead of the device."""

    _lib: Library
    _h: C.c_void_p
    _events: List[List[Any]]  # of this pass and the one before: the library may look at them

    def _begins(self) -> None:
        self._events = [[]] + self._events[:1]

    def prefill(self, input: int, prefix: int, layers: int) -> None:
        """A pass of so many layers begins, over input new tokens behind prefix cached ones; the one before has ended.
        Transfers that are begun from now on are for it."""
        self._lib.prefill(self._h, input, prefix, layers)
        self._begins()

    def layer_done(self, layer: int, after: Any = None) -> None:
        """A layer of the pass, and all before it, is computed; the last one's ends the pass.

        after: a PyTorch event that was recorded behind it, or the driver's handle: it is done when that has come. It is
            not recorded again before the second pass after this one. Not with the CPU.
        """
        self._lib.layer_done(self._h, layer, event_handle(after))
        if after is not None:
            self._events[0].append(after)

    def decode_step(self, length: int) -> None:
        """A decode step begins, over a context of so many tokens in all."""
        self._lib.decode_step(self._h, length)
        self._begins()

    def end_pass(self) -> None:
        """Nothing computes any more, once what was told before has come."""
        self._lib.end_pass(self._h)

    def offer(self, input: int, cached: int, layers: int) -> Offer:
        """Weighs restoring a prefix of cached tokens before input new ones, in a pass of so many layers.
        What prefill refuses is refused here too."""
        o = _lib.Offer()
        self._lib.offer(self._h, input, cached, layers, C.byref(o))
        return Offer(bool(o.load), bool(o.known), o.restore_ns, o.recompute_ns)

    def scheduler_stats(self) -> SchedulerStats:
        """What the scheduler has counted since the session was made."""
        s = _lib.SchedulerStats()
        self._lib.scheduler_stats(self._h, C.byref(s))
        return SchedulerStats(**{f.name: getattr(s, f.name) for f in dataclasses.fields(SchedulerStats)})

    def layer_bubbles(self, layers: int) -> List[int]:
        """The nanoseconds that compute stood before each layer, in all passes so far."""
        ns = (C.c_uint64 * layers)()
        self._lib.layer_bubbles(self._h, ns, layers)
        return list(ns)
