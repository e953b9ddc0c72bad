"""Content keys: a SHA-256 chain over a prompt's tokens, tenant, adapter, salt and media (docs/keys.md).

This needs neither the library nor a mount.
"""

from __future__ import annotations

import array
import hashlib
import struct
from typing import Any, Iterable, List, NamedTuple, Optional, Sequence, Union

from .errors import InvalidError

BYTES_MAX = 1 << 16  # of an adapter, a salt, an item's id
MEDIA_MAX = 1 << 16
POSITION_MAX = 1 << 40
TOKENS_PER_FILE_MAX = 1 << 20

_ROOT_TAG, _FILE_TAG = b"tuttifs prompt 1", b"tuttifs kvfile 1"


class Media(NamedTuple):
    """What is computed in place of some tokens: an image, sound, embeddings."""

    start: int  # position of its first token in the prompt
    tokens: int  # that it takes the place of
    id: bytes  # a digest of its content


def keys(tokens: Iterable[int], tokens_per_file: int, *, tenant: int = 0, adapter: Union[bytes, str] = b"",
         salt: Union[bytes, str] = b"", media: Sequence[Media] = (), last: Optional[bytes] = None,
         files: int = 0) -> List[bytes]:
    """The keys of a prompt's whole files, root first: 32 bytes for each `tokens_per_file` tokens.

    tokens: ids of 0 to 2**32 - 1: a sequence, or a 1-dimensional integer array or tensor.
    tenant: as in `Pool.peek` and so on.
    adapter, salt: empty for none; text counts as its UTF-8 bytes.
    media: sorted by start, then tokens, then id; no two equal.
    last, files: to continue a chain: the key of the last file before the tokens, and how many files those are. Media
        positions are then still counted from the prompt's beginning.

    Raises `InvalidError` where a rule of docs/keys.md is broken.
    """
    adapter, salt = _text(adapter, "adapter"), _text(salt, "salt")
    media = [Media(*m) for m in media]
    _check(tokens_per_file, tenant, adapter, salt, media)
    ids = _ids(tokens)
    if last is None:
        if files:
            raise InvalidError(f"content keys: {files} files before the tokens, without the last one's key")
        last = hashlib.sha256(struct.pack("<16sIIQQ", _ROOT_TAG, tokens_per_file, tenant, len(adapter), len(salt))
                              + adapter + salt).digest()
    elif len(last) != 32 or not 0 < files <= POSITION_MAX // tokens_per_file:
        raise InvalidError(f"content keys: to be continued behind {files} files and a key of {len(last)} bytes")
    count = len(ids) // 4 // tokens_per_file
    if len(ids) // 4 > POSITION_MAX - files * tokens_per_file:
        raise InvalidError(f"content keys: {len(ids) // 4} tokens behind {files} files")
    chain, waiting = [], media
    for i in range(count):
        begin = (files + i) * tokens_per_file
        # What is over before this file is over for all that follow.
        waiting = [m for m in waiting if m.start + m.tokens > begin]
        items = [m for m in waiting if m.start < begin + tokens_per_file]
        h = hashlib.sha256(struct.pack("<16s32sII", _FILE_TAG, last, tokens_per_file, len(items)))
        h.update(ids[4 * i * tokens_per_file:4 * (i + 1) * tokens_per_file])
        for m in items:
            h.update(struct.pack("<QQQ", m.start, m.tokens, len(m.id)) + m.id)
        last = h.digest()
        chain.append(last)
    return chain


def _text(value: Union[bytes, str], what: str) -> bytes:
    data = value.encode() if isinstance(value, str) else bytes(value)
    if len(data) > BYTES_MAX:
        raise InvalidError(f"content keys: {what} of {len(data)} bytes, at most {BYTES_MAX} are possible: "
                           "give a digest")
    return data


def _ids(tokens: Any) -> memoryview:
    """Token ids as the little-endian words that are hashed."""
    if hasattr(tokens, "tolist"):  # of NumPy or PyTorch: elements one by one would be slow
        tokens = tokens.tolist()
    try:
        return memoryview(array.array("I", tokens)).cast("B")
    except (OverflowError, TypeError) as e:
        raise InvalidError(f"content keys: token ids are integers from 0 to 2**32 - 1: {e}") from None


def _check(tokens_per_file: int, tenant: int, adapter: bytes, salt: bytes, media: Sequence[Media]) -> None:
    if not 0 < tokens_per_file <= TOKENS_PER_FILE_MAX:
        raise InvalidError(f"content keys: {tokens_per_file} tokens a file, 1 to {TOKENS_PER_FILE_MAX} are possible")
    if not 0 <= tenant < 1 << 32:
        raise InvalidError(f"content keys: tenant {tenant}")
    if len(media) > MEDIA_MAX:
        raise InvalidError(f"content keys: {len(media)} media items, at most {MEDIA_MAX} are possible")
    before = None
    for i, (start, tokens, name) in enumerate(media):
        if not 0 <= start <= POSITION_MAX or not 0 < tokens <= POSITION_MAX:
            raise InvalidError(f"content keys: media item {i} has {tokens} tokens from {start} on")
        if not 0 < len(name) <= BYTES_MAX:
            raise InvalidError(f"content keys: media item {i} has an id of {len(name)} bytes, 1 to {BYTES_MAX} are "
                               "possible: give its content's digest")
        if before is not None and before >= (start, tokens, bytes(name)):
            raise InvalidError(f"content keys: media item {i} does not stand behind the one before it: sort by "
                               "start, tokens and id")
        before = (start, tokens, bytes(name))
