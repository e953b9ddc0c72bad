"""What the programs share that compute with PyTorch: a model over a paged pool, and its KV in host memory."""

import ctypes
import os
import queue
import shutil
import subprocess
import tempfile
import threading

import torch
import torch.nn.attention
import torch.nn.functional as F

from kv_store import note, tuttifs


class Model:
    """Llama 3's layers with random weights, over a paged pool."""

    def __init__(self, a):
        self.device, self.layers, self.block = torch.device(a.device), a.layers, a.block
        self.heads, self.kv_heads, self.head = (4, 2, 32) if a.cpu else (32, 8, 128)
        self.hidden, self.ffn, self.vocab = (128, 448, 1000) if a.cpu else (4096, 14336, 32000)
        self.dtype = torch.float32 if a.cpu else torch.bfloat16
        g = torch.Generator(device=self.device).manual_seed(1)

        def weight(rows, columns):
            w = torch.empty(rows, columns, device=self.device, dtype=self.dtype)
            return w.normal_(std=columns ** -0.5, generator=g)

        q, kv = self.heads * self.head, self.kv_heads * self.head
        self.embedding = weight(self.vocab, self.hidden)
        self.output = weight(self.vocab, self.hidden)
        self.norm = torch.ones(self.hidden, device=self.device, dtype=self.dtype)
        self.weights = [{"qkv": weight(q + 2 * kv, self.hidden), "o": weight(self.hidden, q),
                         "up": weight(2 * self.ffn, self.hidden), "down": weight(self.hidden, self.ffn)}
                        for _ in range(a.layers)]
        self.split = (q, kv, kv)
        blocks = a.tokens // a.block
        shape = (2, blocks) if a.layout == "kv-first" else (blocks, 2)
        self.pool = [torch.zeros(*shape, a.block, self.kv_heads, self.head, device=self.device, dtype=self.dtype)
                     for _ in range(a.layers)]
        self.kv_axis = 0 if a.layout == "kv-first" else 1
        # The prompt's blocks lie scattered in the pool.
        self.table = torch.randperm(blocks, generator=torch.Generator().manual_seed(2))
        self.table_device, self.places = self.table.to(self.device), self.table.tolist()
        self.cuda = self.device.type == "cuda"
        self.dtype_name = str(self.dtype).split(".")[1]
        self.attention = self.choose_attention()
        angle = torch.outer(torch.arange(a.tokens, dtype=torch.float64),
                            500000.0 ** -(torch.arange(0, self.head, 2, dtype=torch.float64) / self.head))
        self.cos, self.sin = (f(angle).to(self.device, self.dtype).unsqueeze(1) for f in (torch.cos, torch.sin))

    def run_bytes(self):
        """Bytes of K, and of V, of one block of one layer."""
        return self.block * self.kv_heads * self.head * self.pool[0].element_size()

    def paged(self):
        """The pool, as it is registered."""
        return tuttifs.Paged.of(self.pool, 1 - self.kv_axis)

    def event(self):
        """Behind what is enqueued so far; None without a GPU, where nothing is left to wait for."""
        if not self.cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def synchronize(self):
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def rope(self, x, begin):
        cos, sin = self.cos[begin:begin + len(x)], self.sin[begin:begin + len(x)]
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)

    def attend(self, layer, q, end):
        """Attention of the last len(q) of end tokens on all of them, gathered from the pool."""
        blocks = self.table_device[:-(-end // self.block)]
        k, v = (self.pool[layer].select(self.kv_axis, i).index_select(0, blocks).flatten(0, 1)[:end] for i in (0, 1))
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        return self.attention(q, k, v).squeeze(0).transpose(0, 1).flatten(1)

    def choose_attention(self):
        """A kernel for grouped heads, causal from the lower right, that gives what the definition does."""
        def plain(q, k, v):
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

        def flash(q, k, v):  # FlashAttention's causal is from the lower right, and it groups heads
            return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]

        def flash_repeated(q, k, v):
            groups = self.heads // self.kv_heads
            return flash(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))

        if self.device.type != "cuda":
            return plain
        q, k, v = (torch.randn(1, heads, tokens, self.head, device=self.device, dtype=self.dtype)
                   for heads, tokens in ((self.heads, 128), (self.kv_heads, 320), (self.kv_heads, 320)))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            wanted = plain(q, k, v)
        for kernel in (flash, flash_repeated):
            try:
                if torch.allclose(kernel(q, k, v), wanted, atol=0.02, rtol=0.02):
                    return kernel
            except RuntimeError as e:
                note(f"attention: {e}")
        raise SystemExit("no attention kernel of this PyTorch gives the right result")

    def forward(self, tokens, begin, before=None, after=None):
        """Computes tokens at positions from begin on and writes their KV to the pool. before(layer) comes before the
        layer's cache is read, after(layer) behind the layer. Returns all tokens' hidden states and the last one's
        logits."""
        end = begin + len(tokens)
        at = torch.arange(begin, end, device=self.device)
        block, offset = self.table_device[at // self.block], at % self.block
        x = F.embedding(tokens, self.embedding)
        for layer, w in enumerate(self.weights):
            q, k, v = F.linear(F.rms_norm(x, (self.hidden,), self.norm), w["qkv"]).split(self.split, dim=-1)
            q = self.rope(q.unflatten(-1, (self.heads, self.head)), begin)
            k = self.rope(k.unflatten(-1, (self.kv_heads, self.head)), begin)
            v = v.unflatten(-1, (self.kv_heads, self.head))
            for i, new in ((0, k), (1, v)):
                self.pool[layer].select(self.kv_axis, i).index_put_((block, offset), new)
            if before:
                before(layer)
            x = x + F.linear(self.attend(layer, q, end), w["o"])
            gate, up = F.linear(F.rms_norm(x, (self.hidden,), self.norm), w["up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, w["down"])
            if after:
                after(layer)
        x = F.rms_norm(x, (self.hidden,), self.norm)
        return x, F.linear(x[-1:], self.output)

    def prefill(self, tokens, begin, piece, before=None):
        """forward in pieces; the first waits for the cache."""
        states = []
        while begin < len(tokens):
            x, logits = self.forward(tokens[begin:begin + piece], begin, before)
            states.append(x)
            begin, before = begin + piece, None
        return torch.cat(states), logits


def random_tokens(model, n):
    g = torch.Generator().manual_seed(3)
    return torch.randint(model.vocab, (n,), generator=g).to(model.device)


def object_bytes(a):
    """Of a block and layer of Model(a)."""
    return 2 * a.block * (2 * 32 * 4 if a.cpu else 8 * 128 * 2)


def same_bits(got, want):
    return torch.equal(got.view(torch.uint8), want.view(torch.uint8))


# One call of the driver for each copy, in C, so that no interpreter stands between them.
COPY_EACH = r"""
#include <stddef.h>
typedef int (*copy_t)(unsigned long long, const void *, size_t, void *);
int copy_each(copy_t copy, const unsigned long long *to, const unsigned long long *from, size_t bytes, size_t n,
              void *stream)
{
	int bad = 0;
	for (size_t i = 0; i < n && !bad; i++)
		bad = copy(to[i], (const void *)from[i], bytes, stream);
	return bad;
}
"""


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""
    _fields_ = [("order", ctypes.c_int), ("source", ctypes.c_int * 2), ("target", ctypes.c_int * 2),
                ("flags", ctypes.c_uint)]


class Dram:
    """Blocks in pinned host memory: an object's K and V lie together, as on a drive. contents are those of the model's
    pool, or of a copy of it."""

    def __init__(self, model, contents=None):
        self.model, self.contents, run = model, contents or model.pool, model.run_bytes()
        self.host = self.memory()
        self.stream = torch.cuda.Stream(model.device)
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.context = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(self.context))
        self.each = self.compile()
        self.lists = []
        for layer, t in enumerate(model.pool):
            to, source = [], []
            for i, block in enumerate(model.places):
                for j in (0, 1):
                    part = t.select(model.kv_axis, j)
                    to.append(part.data_ptr() + block * part.stride(0) * part.element_size())
                    source.append(self.address(layer, i, j))
            array = ctypes.c_ulonglong * len(to)
            self.lists.append((array(*to), array(*source), (ctypes.c_size_t * len(to))(*[run] * len(to))))

    def memory(self):
        return torch.empty(self.model.layers, len(self.model.table), 2 * self.model.run_bytes(), dtype=torch.uint8,
                           pin_memory=True)

    def address(self, layer, block, kv):
        """Of K (kv is 0) or V of a block of the prompt in host memory."""
        return self.host[layer].data_ptr() + (2 * block + kv) * self.model.run_bytes()

    def call(self, name, *arguments):
        code = getattr(self.driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")

    def compile(self):
        directory = tempfile.mkdtemp()
        try:
            source, library = os.path.join(directory, "copy.c"), os.path.join(directory, "copy.so")
            with open(source, "w") as f:
                f.write(COPY_EACH)
            subprocess.run([os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
            return ctypes.CDLL(library).copy_each
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def fill(self, first=0, last=None):
        """Takes the blocks from first on, and before last, out of the contents."""
        blocks = self.model.table_device[first:last]
        for layer, t in enumerate(self.contents):
            k, v = (t.select(self.model.kv_axis, j).index_select(0, blocks) for j in (0, 1))
            both = torch.stack([k, v], dim=1)
            self.host[layer, first:last].copy_(both.flatten(1).view(torch.uint8))
        torch.cuda.synchronize()

    def begin(self, blocks, batch=False):
        """Begins to bring the first blocks in, layer by layer, from a thread of its own."""
        self.stream.wait_stream(torch.cuda.current_stream())
        self.enqueued = [threading.Event() for _ in self.lists]
        self.events = [torch.cuda.Event() for _ in self.lists]
        self.error = None
        self.thread = threading.Thread(target=self.copy, args=(2 * blocks, batch))
        self.thread.start()

        def before(layer):
            self.enqueued[layer].wait()
            torch.cuda.current_stream().wait_event(self.events[layer])
        return before

    def copy(self, n, batch):
        try:
            torch.cuda.set_device(self.model.device)
            self.call("cuCtxSetCurrent", self.context)
            stream, first = ctypes.c_void_p(self.stream.cuda_stream), ctypes.c_size_t(0)
            attributes = CopyAttributes(order=1)  # sources are read in stream order
            for layer, (to, source, sizes) in enumerate(self.lists):
                if batch:
                    self.call("cuMemcpyBatchAsync_v2", to, source, sizes, ctypes.c_size_t(n), ctypes.byref(attributes),
                              ctypes.byref(first), ctypes.c_size_t(1), stream)
                elif self.each(self.driver.cuMemcpyHtoDAsync_v2, to, source, ctypes.c_size_t(sizes[0]),
                               ctypes.c_size_t(n), stream):
                    raise RuntimeError("cuMemcpyHtoDAsync failed")
                self.events[layer].record(self.stream)
                self.enqueued[layer].set()
        except Exception as e:  # told by end; nobody waits for ever
            self.error = e
        finally:
            for e in self.enqueued:
                e.set()

    def begin_store(self, first, last):
        """Begins to take blocks first to last - 1 out, a copy for each run, of every layer that store names."""
        self.back = torch.cuda.Stream(self.model.device)
        self.produced = queue.SimpleQueue()
        self.storer = threading.Thread(target=self.copy_back, args=(2 * first, 2 * (last - first)))
        self.storer.start()

    def store(self, layer, after):
        """Takes a layer's blocks out behind an event."""
        self.produced.put((layer, after))

    def copy_back(self, first, n):
        try:
            torch.cuda.set_device(self.model.device)
            self.call("cuCtxSetCurrent", self.context)
            array, at = ctypes.c_ulonglong * n, first * ctypes.sizeof(ctypes.c_ulonglong)
            for layer, after in iter(self.produced.get, None):
                device, host, sizes = self.lists[layer]
                self.back.wait_event(after)
                if self.each(self.driver.cuMemcpyDtoHAsync_v2, array.from_buffer(host, at),
                             array.from_buffer(device, at), ctypes.c_size_t(sizes[0]), ctypes.c_size_t(n),
                             ctypes.c_void_p(self.back.cuda_stream)):
                    raise RuntimeError("cuMemcpyDtoHAsync failed")
            self.back.synchronize()
        except Exception as e:
            self.error = e

    def end_store(self):
        self.produced.put(None)
        self.storer.join()
        if self.error:
            raise self.error

    def end(self):
        self.thread.join()
        if self.error:
            raise self.error
