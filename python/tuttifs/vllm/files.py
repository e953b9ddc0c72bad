"""The arithmetic between an engine's blocks and files of several blocks. Pure: neither vLLM nor a mount is needed.

A file has `file_tokens` tokens. Every group of layers with a block table of its own has its own block size, which
divides that, and a pool of its own. Block 0 of vLLM's tables is the null block: it stands where a sliding window has
passed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, List, Optional, Sequence, Tuple

from ..contentkeys import Media, keys
from ..errors import InvalidError

NULL_BLOCK = 0
OBJECT_BYTES = 64 << 10  # below, drives and links are slower
OBJECT_BYTES_MAX = 2 << 20
FILE_TOKENS_MAX = 4096


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers that share a block table."""

    index: int  # of vLLM's group
    layers: Tuple[str, ...]
    block_tokens: int
    block_bytes: Tuple[int, ...]  # of each layer, for one rank, without padding
    window: int = 0  # tokens of a sliding window, 0 for full attention

    def trailing(self, file_tokens: int) -> int:
        """How many of a prefix's last files a hit needs: those with a token that the next one attends to. 0: all."""
        return -(-max(1, self.window - 1) // file_tokens) if self.window else 0

    def file_bytes(self, file_tokens: int) -> int:
        return sum(self.block_bytes) * (file_tokens // self.block_tokens)


def choose_file_tokens(groups: Sequence[Group], wanted: int) -> int:
    """The tokens of a file: as wanted, or the fewest with which every group's smallest object has OBJECT_BYTES."""
    unit = math.lcm(*[g.block_tokens for g in groups])
    if wanted:
        if wanted % unit:
            raise InvalidError(f"file_tokens is {wanted}: the engine's blocks have {unit} tokens, so it must be a "
                               "multiple of that")
        return wanted
    n = unit
    while n < FILE_TOKENS_MAX and min(min(g.block_bytes) * n // g.block_tokens for g in groups) < OBJECT_BYTES:
        n *= 2
    return n


def pieces(size: int) -> List[int]:
    """A layer's bytes in a file as objects of at most OBJECT_BYTES_MAX, as equal as whole 4 KiB allow."""
    count = -(-size // OBJECT_BYTES_MAX)
    step = -(-(-(-size // count)) // 4096) * 4096
    return [min(step, size - at) for at in range(0, size, step)]


class Chain:
    """The content keys of one request's files, computed as far as they are asked for."""

    def __init__(self, file_tokens: int, tenant: int, adapter: bytes, salt: bytes, media: Sequence[Media]) -> None:
        self.file_tokens, self.tenant = file_tokens, tenant
        self._adapter, self._salt = adapter, salt
        self._media = sorted(set(media))
        self.keys: List[bytes] = []

    def upto(self, tokens: Sequence[int], files: int) -> List[bytes]:
        """The keys of the first `files` files of a prompt, of which earlier calls gave the beginning."""
        have, n = len(self.keys), self.file_tokens
        if files > have:
            last = self.keys[-1] if have else None
            self.keys += keys(tokens[have * n:files * n], n, tenant=self.tenant, adapter=self._adapter, salt=self._salt,
                              media=self._media, last=last, files=have)
        return self.keys[:files]


def hit(groups: Sequence[Group], file_tokens: int, chain: Sequence[bytes],
        peek: Callable[[Group, Sequence[bytes]], int]) -> int:
    """The longest prefix, in files, that every group can continue from: all of it in groups of full attention, the
    files of the window in the others. peek(group, keys) is the number of leading keys that are stored."""
    n = len(chain)
    for g in groups:
        if n and not g.window:
            n = peek(g, chain[:n])
    settled = False
    while n and not settled:
        settled = True
        for g in groups:
            if not g.window:
                continue
            first = max(0, n - g.trailing(file_tokens))
            found = peek(g, chain[first:n])
            if first + found < n:
                # Every prefix that ends behind the missing file and not a window later misses it too.
                n, settled = first + found, False
                break
    return n


def needed(group: Group, file_tokens: int, files: int) -> int:
    """The first file that a group needs of a prefix."""
    trailing = group.trailing(file_tokens)
    return max(0, files - trailing) if trailing else 0


def blocks_of(group: Group, file_tokens: int, table: Sequence[int], first: int, last: int) -> List[List[int]]:
    """The blocks of files first to last - 1."""
    n = file_tokens // group.block_tokens
    if len(table) < last * n:
        raise InvalidError(f"a block table of {len(table)} blocks ends within file {last - 1} of {n} blocks")
    return [list(table[i * n:(i + 1) * n]) for i in range(first, last)]


def keep_local(group: Group, file_tokens: int, blocks: List[List[int]], first: int, local_tokens: int) -> None:
    """Marks the blocks that the engine has already with NULL_BLOCK: they may be others' too, and are not written."""
    n = file_tokens // group.block_tokens
    have = local_tokens // group.block_tokens
    for i, file in enumerate(blocks, first):
        for j in range(n):
            if i * n + j < have:
                file[j] = NULL_BLOCK


def complete(known: int, computed: int, file_tokens: int) -> int:
    """Files that can be stored: their tokens are known, so not guessed, and computed. A partial tail is left out."""
    return max(0, min(known, computed)) // file_tokens


def media_of(features: Optional[Sequence[Any]]) -> List[Media]:
    """vLLM's multi-modal features. Its identifiers are digests of an item's content and of how it is preprocessed."""
    found = []
    for f in features or ():
        if not f.identifier:
            raise InvalidError("a multi-modal item without an identifier")
        found.append(Media(f.mm_position.offset, f.mm_position.length, str(f.identifier).encode()))
    return found
