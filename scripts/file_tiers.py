"""A prompt's KV in files, as serving engines keep it, over a model's paged pool: what compare_torch.py compares a mount
with.

Blocks come to the pool by way of pinned host memory, in which they lie in chunks as they do in their files: a read of a
file is one read into the memory that the copy engine reads. All blocks of a request are in the pool before its first
layer computes."""

import concurrent.futures
import ctypes
import os
import shutil
import threading
import types

import torch

from kv_model import CopyAttributes, Dram


def buffer(tensor):
    """The bytes of a tensor in host memory, without NumPy."""
    return memoryview((ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())).cast("B")


class Chunks:
    """Where a prompt's blocks lie in host memory: chunk by chunk, in a chunk layer by layer, K and V of each block."""

    def __init__(self, model, blocks, memory):
        self.model, self.blocks, self.run = model, blocks, model.run_bytes()
        self.bytes = model.layers * blocks * 2 * self.run
        self.memory = memory[:-(-len(model.table) // blocks) * self.bytes]
        self.view = buffer(self.memory)

    def address(self, layer, block, kv):
        chunk, i = divmod(block, self.blocks)
        return self.memory.data_ptr() + chunk * self.bytes + ((layer * self.blocks + i) * 2 + kv) * self.run

    def of(self, blocks):
        """How many chunks so many blocks are."""
        if blocks % self.blocks:
            raise ValueError(f"{blocks} blocks are no whole chunks of {self.blocks}")
        return blocks // self.blocks


class GpuCopies(Dram):
    """The copy engine between chunks and the pool, one call for all runs of a layer."""

    def __init__(self, model, chunks):
        self.chunks = chunks
        super().__init__(model)

    def memory(self):
        return self.chunks.memory

    def address(self, layer, block, kv):
        return self.chunks.address(layer, block, kv)

    def load(self, blocks):
        """Begins to bring the first blocks in, and returns what has a layer's compute wait for that layer."""
        return self.begin(blocks, batch=True)

    def take(self, first, last):
        """Brings blocks first to last - 1 out of the pool, and returns when they are in host memory."""
        self.stream.wait_stream(torch.cuda.current_stream())
        n, at = 2 * (last - first), 2 * first * ctypes.sizeof(ctypes.c_ulonglong)
        array, attributes = ctypes.c_ulonglong * n, CopyAttributes(order=1)
        for device, host, sizes in self.lists:
            self.call("cuMemcpyBatchAsync_v2", array.from_buffer(host, at), array.from_buffer(device, at), sizes,
                      ctypes.c_size_t(n), ctypes.byref(attributes), ctypes.byref(ctypes.c_size_t(0)),
                      ctypes.c_size_t(1), ctypes.c_void_p(self.stream.cuda_stream))
        self.stream.synchronize()


class CpuCopies:
    """The same without a GPU: by memmove, in the caller's thread."""

    def __init__(self, model, chunks):
        self.model, self.chunks = model, chunks

    def runs(self, first, last):
        for layer, t in enumerate(self.model.pool):
            for block in range(first, last):
                for kv in (0, 1):
                    part = t.select(self.model.kv_axis, kv)
                    at = part.data_ptr() + self.model.places[block] * part.stride(0) * part.element_size()
                    yield at, self.chunks.address(layer, block, kv)

    def load(self, blocks):
        for device, host in self.runs(0, blocks):
            ctypes.memmove(device, host, self.chunks.run)
        return lambda layer: None

    def take(self, first, last):
        for device, host in self.runs(first, last):
            ctypes.memmove(host, device, self.chunks.run)

    def end(self):
        pass


def copies(model, chunks):
    return (GpuCopies if model.cuda else CpuCopies)(model, chunks)


class HostMemory:
    """All blocks in pinned host memory; a layer's compute waits for that layer."""

    about = "pinned host memory, layer by layer ahead of compute, one call of the copy engine for each layer"

    def __init__(self, model, memory):
        self.copies = copies(model, Chunks(model, 1, memory))

    def use(self, names):
        pass

    def put(self, blocks):
        self.copies.take(0, blocks)

    def begin(self, blocks):
        return self.copies.load(blocks)

    def end(self):
        self.copies.end()

    def drop(self):
        pass

    def close(self):
        pass


class Files:
    """A file for each chunk. begin, a request's loads, ends when all files are read; then they are copied."""

    def __init__(self, model, memory, directory, block_multiple, piece_blocks):
        self.chunks = Chunks(model, block_multiple, memory)
        self.copies = copies(model, self.chunks)
        self.root, self.block_multiple, self.piece = directory, block_multiple, piece_blocks

    def use(self, names):
        """Files that follow have these names."""
        self.directory = os.path.join(self.root, names)
        os.makedirs(self.directory, exist_ok=True)
        self.paths = [self.path(i) for i in range(self.chunks.of(len(self.chunks.model.table)))]

    def put(self, blocks):
        """Stores the first blocks as an engine's steps would, piece by piece, and returns when all files are there."""
        stores = []
        for first in range(0, blocks, self.piece):
            last = min(first + self.piece, blocks)
            self.copies.take(first, last)
            stores += self.write(self.chunks.of(first), self.chunks.of(last))
        for store in stores:
            store.result()
        self.spoil()

    def spoil(self):
        """So that a chunk that is not read cannot pass for one that is."""
        self.chunks.memory.view(-1, self.chunks.bytes)[:, :64].fill_(0xa5)

    def begin(self, blocks):
        n = self.chunks.of(blocks)
        if not all(self.found(n)):
            raise RuntimeError(f"files are missing in {self.directory}")
        self.read(n)
        before = self.copies.load(blocks)

        def all_before(layer):
            if layer == 0:
                for i in range(self.chunks.model.layers):
                    before(i)
        return all_before

    def end(self):
        self.copies.end()
        self.spoil()

    def drop(self):
        shutil.rmtree(self.directory)

    def close(self):
        self.threads.shutdown()


class VllmFiles(Files):
    """As vLLM's `fs` tier: a file for each block, written under another name and renamed; one of 16 threads reads all
    files of a request, one writes those of a step. With vLLM's own functions where they can be imported."""

    def __init__(self, model, memory, directory, piece_blocks):
        self.io = vllm_io()
        super().__init__(model, memory, directory, 1, piece_blocks)
        self.threads = concurrent.futures.ThreadPoolExecutor(16)
        self.direct = self.io.probe_o_direct(directory)
        self.about = (f"vLLM's fs tier: {self.io.about}; {'direct' if self.direct else 'buffered'} I/O, a file of "
                      f"{self.chunks.bytes >> 10} KiB for each block, one thread a request")

    def path(self, i):
        name = f"{i:064x}"
        # Two levels of directories, by the key's first five digits: a hash's, so they are as good as random.
        mixed = f"{i * 2654435761 % (1 << 20):05x}"
        return os.path.join(self.directory, mixed[:3], mixed[3:] + "_g0", name + ".bin")

    def offsets(self, first, last):
        return [i * self.chunks.bytes for i in range(first, last)]

    def found(self, n):
        return self.io.batch_lookup(self.paths[:n])

    def write(self, first, last):
        return [self.threads.submit(self.io.batch_store_block, self.paths[first:last], self.chunks.view,
                                    self.offsets(first, last), self.chunks.bytes, self.direct)]

    def read(self, n):
        self.threads.submit(self.io.batch_load_block, self.paths[:n], self.chunks.view, self.offsets(0, n),
                            self.chunks.bytes, self.direct).result()


class LocalDisk(Files):
    """As LMCache's local disk: a file for each chunk of 256 tokens, an index in memory, four threads for reads and for
    writes, which write in place."""

    def __init__(self, model, memory, directory, piece_blocks, threads=4):
        super().__init__(model, memory, directory, max(1, 256 // model.block), piece_blocks)
        self.threads = concurrent.futures.ThreadPoolExecutor(threads)
        self.direct = takes_direct(directory)
        self.index = set()
        self.about = (f"LMCache's local disk: its scheme, in this program's words; "
                      f"{'direct' if self.direct else 'buffered'} I/O (by default LMCache's is buffered), a file of "
                      f"{self.chunks.bytes >> 10} KiB for each {self.block_multiple * model.block} tokens, "
                      f"{threads} threads")

    def path(self, i):
        return os.path.join(self.directory, f"chunk@{i:016x}.pt")

    def chunk(self, i):
        return self.chunks.view[i * self.chunks.bytes:(i + 1) * self.chunks.bytes]

    def found(self, n):
        return [path in self.index for path in self.paths[:n]]

    def write(self, first, last):
        return [self.threads.submit(self.write_one, i) for i in range(first, last)]

    def write_one(self, i):
        write_file(self.paths[i], self.chunk(i), self.direct)
        self.index.add(self.paths[i])

    def read(self, n):
        list(self.threads.map(self.read_one, range(n)))

    def read_one(self, i):
        read_file(self.paths[i], self.chunk(i), self.direct)


def takes_direct(directory):
    """Whether files there can be written past the page cache."""
    path = os.path.join(directory, "probe")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600))
        return True
    except OSError:
        return False
    finally:
        if os.path.exists(path):
            os.unlink(path)


def write_file(path, view, direct):
    fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | (os.O_DIRECT if direct else 0), 0o644)
    try:
        done = os.write(fd, view)
    finally:
        os.close(fd)
    if done != len(view):
        raise OSError(f"{path}: {done} of {len(view)} bytes were written")


def read_file(path, view, direct):
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        done = os.readv(fd, [view])
    finally:
        os.close(fd)
    if done != len(view):
        raise OSError(f"{path}: {done} of {len(view)} bytes were read")


def vllm_io():
    """vLLM's functions for blocks in files, or the same in few words where there is no vLLM."""
    try:
        from vllm.v1.kv_offload.tiering.fs import io
    except ImportError:
        return PlainIo
    try:
        from vllm.fs_io_C import batch_lookup
        about = "vLLM's own functions, in C"
    except ImportError:
        def batch_lookup(paths):
            return [os.path.exists(p) for p in paths]
        about = "vLLM's own functions, in Python"
    return types.SimpleNamespace(probe_o_direct=io.probe_o_direct, batch_lookup=batch_lookup, about=about,
                                 batch_store_block=io.batch_store_block, batch_load_block=io.batch_load_block)


class PlainIo:
    about = "its scheme, in this program's words"
    probe_o_direct = staticmethod(takes_direct)

    @staticmethod
    def batch_lookup(paths):
        return [os.path.exists(p) for p in paths]

    @staticmethod
    def batch_store_block(paths, view, offsets, size, direct):
        for path, at in zip(paths, offsets):
            other = f"{path}_{threading.get_ident()}.tmp"
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_file(other, view[at:at + size], direct)
            os.replace(other, path)

    @staticmethod
    def batch_load_block(paths, view, offsets, size, direct):
        for path, at in zip(paths, offsets):
            read_file(path, view[at:at + size], direct)
