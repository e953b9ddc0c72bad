"""What the scheduler's side and the workers' side tell each other, step by step. All of it can be pickled."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional, Tuple

from .files import Group


@dataclasses.dataclass(frozen=True)
class PoolSpec:
    """One group's pool."""

    group: Group
    name: str
    identity: Dict[str, Any]
    family: str  # "" for none
    objects: Tuple[Tuple[int, int, int], ...]  # layer, rank, bytes


@dataclasses.dataclass(frozen=True)
class Attached:
    """The session to join, and its pools in the order of the groups."""

    token: bytes
    file_tokens: int
    pools: Tuple[PoolSpec, ...]


@dataclasses.dataclass(frozen=True)
class LoadPart:
    """One group's files of a prefix: keys[i] into blocks[i]; NULL_BLOCK is not to be written."""

    group: int
    pin: int  # the scheduler's pin, which every rank repeats
    pinned: int  # how many of the keys that found
    first: int  # the first file's number in the prompt
    keys: List[bytes]
    blocks: List[List[int]]


@dataclasses.dataclass(frozen=True)
class Load:
    request: str
    tenant: int
    parts: List[LoadPart]
    wait: bool  # in this step, layer by layer


@dataclasses.dataclass(frozen=True)
class StorePart:
    """One group's new files of a chain: keys[first:] from blocks."""

    group: int
    reserve: int  # the reservation that all ranks join
    first: int
    keys: List[bytes]  # from the root
    blocks: List[List[int]]


@dataclasses.dataclass(frozen=True)
class Store:
    number: int
    request: str
    tenant: int
    parts: List[StorePart]


@dataclasses.dataclass(frozen=True)
class Pass:
    """What a step computes."""

    input: int  # new tokens of all its requests
    prefix: int  # tokens before them
    decode: bool  # no more than the next tokens of each


@dataclasses.dataclass(frozen=True)
class Weighed:
    """A request of which so many tokens are stored, so many more are to be computed in any case."""

    request: str
    cached: int
    input: int


@dataclasses.dataclass
class Step:
    """One step's work for every rank."""

    number: int
    settled: int  # the last step whose report the scheduler has had
    token: Optional[bytes]  # of the session, None while there is no mount
    attached: Optional[Attached]  # what that session has: told once, and kept by the ranks
    loads: List[Load]
    stores: List[Store]
    computes: Optional[Pass] = None
    weigh: List[Weighed] = dataclasses.field(default_factory=list)  # is loading faster than computing?


@dataclasses.dataclass
class Report:
    """What a rank, or all of them, have come to know since the last report."""

    step: int = 0
    failed: Dict[str, int] = dataclasses.field(default_factory=dict)  # request: the first file that did not arrive
    stores: Dict[int, Dict[int, List[int]]] = dataclasses.field(default_factory=dict)  # ended: by group, the new files
    worth: Dict[str, bool] = dataclasses.field(default_factory=dict)  # request: loading is faster, or nobody knows
    lacks: bytes = b""  # the token of a session that a rank could not join, or has lost

    def merge(self, other: "Report") -> "Report":
        self.step = min(self.step, other.step)
        for request, first in other.failed.items():
            self.failed[request] = min(first, self.failed.get(request, first))
        for request, load in other.worth.items():
            self.worth[request] = load and self.worth.get(request, True)
        self.lacks = self.lacks or other.lacks
        self.stores.update(other.stores)  # a commit succeeds for all ranks or for none
        return self
