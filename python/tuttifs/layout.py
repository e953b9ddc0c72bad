"""Where things are: the runs of a paged KV cache, from the strides of its tensors, and the objects of a pool.

This needs neither the library nor PyTorch nor NumPy.
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any, List, NamedTuple, Sequence, Tuple, Union

from .errors import InvalidError


class Run(NamedTuple):
    """A contiguous piece of an object."""

    bytes: int
    kind: int = 0  # docs/geometry.md: 0 K and V, 1 K, 2 V, 3 latents, 4 scales, 5 indexer rows, 6 state, 7 other


@dataclasses.dataclass(frozen=True)
class Object:
    """One layer's runs for one rank: the unit of I/O, at most 2 MiB. An int among the runs is `Run(bytes=int)`."""

    layer: int
    rank: int
    runs: Tuple[Union[Run, int], ...]


class StridedRun(NamedTuple):
    """A run of every block: block b's begins at address + b * stride."""

    address: int
    stride: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Class:
    """What every block has of one object: its runs, one behind the other."""

    layer: int
    runs: Tuple[StridedRun, ...]


class Extent(NamedTuple):
    """An array in memory: sizes and strides (bytes) of its axes."""

    address: int
    shape: Tuple[int, ...]
    strides: Tuple[int, ...]
    itemsize: int
    device: str  # "cpu", "cuda:0", ...


def extent(array: Any) -> Extent:
    """Where a PyTorch tensor, a NumPy array (anything with `__array_interface__`) or a memoryview is. It must be
    writable."""
    if isinstance(array, memoryview):
        if array.readonly or not array.c_contiguous:
            raise InvalidError("the memory is read-only, or has gaps")
        whole = (ctypes.c_uint8 * array.nbytes).from_buffer(array.cast("B"))
        return Extent(ctypes.addressof(whole), tuple(array.shape or ()), tuple(array.strides or ()), array.itemsize,
                      "cpu")
    if hasattr(array, "data_ptr"):
        size = array.element_size()
        return Extent(array.data_ptr(), tuple(array.shape), tuple(s * size for s in array.stride()), size,
                      str(array.device))
    interface = getattr(array, "__array_interface__", None)
    if interface is None:
        raise InvalidError(f"{type(array).__name__} is neither a PyTorch tensor nor a NumPy array")
    address, read_only = interface["data"]
    if read_only:
        raise InvalidError("the array is read-only")
    size, shape = int(interface["typestr"][2:]), tuple(interface["shape"])
    strides = interface.get("strides")
    if strides is None:
        strides, step = [], size
        for n in reversed(shape):
            strides.insert(0, step)
            step *= n
    return Extent(address, shape, tuple(strides), size, "cpu")


def runs_of_blocks(e: Extent, block_axis: int) -> Tuple[int, Tuple[StridedRun, ...]]:
    """The number of blocks along an axis, and the fewest runs that make up a block, in the order of their addresses.

    A tensor [2, blocks, tokens, heads, dim] with block_axis 1 has two, K and V; [blocks, 2, tokens, heads, dim] with
    block_axis 0 has one. Strides decide, not the order of axes: gaps between rows, and layers that lie between the
    blocks of another, are left out.
    """
    if not -len(e.shape) <= block_axis < len(e.shape):
        raise InvalidError(f"block axis {block_axis} of an array of shape {e.shape}")
    block_axis %= len(e.shape)
    if 0 in e.shape:
        raise InvalidError(f"an array of shape {e.shape} has no bytes")
    # Axes of one element have strides that mean nothing. What is left is apart if no axis reaches into the step of a
    # larger one.
    axes = sorted((s, n, i == block_axis) for i, (n, s) in enumerate(zip(e.shape, e.strides)) if n > 1)
    reach = e.itemsize
    for stride, n, _ in axes:
        if stride < reach:
            raise InvalidError(f"elements of an array of shape {e.shape} and strides {e.strides} overlap, or "
                               "run backwards")
        reach += stride * (n - 1)
    stride = next((s for s, _, block in axes if block), 0)
    size = e.itemsize
    outer: List[Tuple[int, int]] = []
    for s, n, block in axes:
        if block:
            continue
        if s == size and not outer:
            size *= n
        else:
            outer.append((s, n))
    starts = [e.address]
    for s, n in outer:  # ascending, so that addresses ascend
        starts = [start + k * s for k in range(n) for start in starts]
    return e.shape[block_axis], tuple(StridedRun(a, stride or size, size) for a in starts)


@dataclasses.dataclass(frozen=True)
class Paged:
    """The blocks of a paged KV cache: for every object of a rank (with one object a layer, the layer) a class."""

    blocks: int
    classes: Tuple[Class, ...]
    device: str = "cpu"
    keep: Tuple[Any, ...] = ()  # the arrays: they live as long as their registration

    @classmethod
    def of(cls, layers: Sequence[Any], block_axis: int, *, object_per_run: bool = False) -> "Paged":
        """The classes of the layers' tensors or arrays, which have equally many blocks along `block_axis`.

        layers: one array a layer, of any shape and dtype, on one device: [2, blocks, tokens, heads, dim] with
            block_axis 1, [blocks, 2, tokens, heads, dim] or MLA's [blocks, tokens, width] with 0, ... They may be views
            into one allocation: strides decide.
        object_per_run: where a block has several runs in a layer (K and V apart), makes an object of each. The CPU
            executor wants it, because its objects are contiguous. It is part of the pool's geometry: all engines of a
            pool do the same.

        Raises `InvalidError` for arrays that are read-only, overlap themselves, or differ in blocks, device or runs.
        """
        classes: List[Class] = []
        blocks, devices = set(), set()
        for layer, array in enumerate(layers):
            e = extent(array)
            n, runs = runs_of_blocks(e, block_axis)
            blocks.add(n)
            devices.add(e.device)
            classes.extend([Class(layer, (r,)) for r in runs] if object_per_run else [Class(layer, runs)])
        if len(blocks) != 1 or len(devices) != 1:
            raise InvalidError(f"layers with {sorted(blocks)} blocks on {sorted(devices)}: one number of "
                               "blocks and one device are wanted")
        if len({len(c.runs) for c in classes}) != 1:
            raise InvalidError("layers whose blocks have different numbers of runs: register them with object_per_run")
        return cls(blocks.pop(), tuple(classes), devices.pop(), tuple(layers))

    def objects(self, ranks: int = 1) -> List[Object]:
        """The objects of a pool whose ranks all have such blocks."""
        return [Object(c.layer, rank, tuple(Run(r.bytes) for r in c.runs))
                for c in self.classes for rank in range(ranks)]
