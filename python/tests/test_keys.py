"""Content keys: the vectors that all implementations meet, and the library's answer to the same prompts."""

import array
import ctypes as C
import json
import os
import random
import unittest

import tuttifs
from tuttifs import _lib

VECTORS = os.path.join(os.path.dirname(__file__), "../../contentkey/testdata/keys.json")


def by_library(tokens, tokens_per_file, *, tenant=0, adapter=b"", salt=b"", media=(), last=None, files=0):
    """`tuttifs.keys` through C."""
    ids = array.array("I", tokens)
    items = (_lib.Media * max(1, len(media)))(*[_lib.Media(m.start, m.tokens, m.id, len(m.id)) for m in media])
    prompt = _lib.Prompt(tokens_per_file=tokens_per_file, tenant=tenant, adapter=adapter, adapter_bytes=len(adapter),
                         salt=salt, salt_bytes=len(salt), media=items, media_count=len(media), last=last, files=files)
    out, n = C.create_string_buffer(32 * (len(ids) + 1)), C.c_uint64()
    _lib.loaded().keys(C.byref(prompt), (C.c_uint32 * max(1, len(ids)))(*ids), len(ids), out, C.byref(n))
    return [out.raw[32 * i:32 * (i + 1)] for i in range(n.value)]


BOTH = (tuttifs.keys, by_library)


class Vectors(unittest.TestCase):
    def test_vectors(self):
        with open(VECTORS) as f:
            vectors = json.load(f)
        self.assertGreater(len(vectors), 25)
        for v in vectors:
            media = [tuttifs.Media(m["start"], m["tokens"], bytes.fromhex(m["id"])) for m in v["media"] or []]
            about = {"tenant": v["tenant"], "adapter": bytes.fromhex(v["adapter"]), "salt": bytes.fromhex(v["salt"]),
                     "media": media}
            per, wanted = v["tokens_per_file"], [bytes.fromhex(k) for k in v["keys"] or []]
            for implementation in BOTH:
                with self.subTest(v["name"], by=implementation.__name__):
                    if v["refused"]:
                        with self.assertRaises(tuttifs.InvalidError):
                            implementation(v["tokens"], per, **about)
                        continue
                    self.assertEqual(implementation(v["tokens"], per, **about), wanted)
                    for i in range(1, len(wanted) + 1):
                        more = implementation(v["tokens"][i * per:], per, last=wanted[i - 1], files=i, **about)
                        self.assertEqual(wanted[:i] + more, wanted)


class Properties(unittest.TestCase):
    def test_same_as_the_library(self):
        r = random.Random(1)
        some = lambda n: bytes(r.randrange(3) for _ in range(r.randrange(n + 1)))  # noqa: E731
        for _ in range(300):
            media = sorted({tuttifs.Media(r.randrange(12), 1 + r.randrange(9), some(2) + b"\1")
                            for _ in range(r.randrange(4))})
            tokens = [r.choice((0, 1, 256, 2**32 - 1)) for _ in range(r.randrange(20))]
            about = {"tenant": r.randrange(2), "adapter": some(2), "salt": some(2), "media": media}
            per = 1 + r.randrange(5)
            keys = tuttifs.keys(tokens, per, **about)
            self.assertEqual(keys, by_library(tokens, per, **about))
            for n in range(len(tokens)):
                self.assertEqual(tuttifs.keys(tokens[:n], per, **about), keys[:n // per])

    def test_what_is_taken(self):
        wanted = tuttifs.keys([1, 2, 3, 4], 2, adapter=b"a", salt="\u00fc".encode())
        self.assertEqual(wanted, tuttifs.keys(array.array("q", [1, 2, 3, 4]), 2, adapter="a", salt="\u00fc"))
        self.assertEqual(wanted, tuttifs.keys(iter((1, 2, 3, 4)), 2, adapter=bytearray(b"a"), salt="\u00fc"))
        media = tuttifs.Media(0, 1, b"x")
        self.assertEqual(tuttifs.keys([1], 1, media=[tuple(media)]), tuttifs.keys([1], 1, media=[media]))
        try:
            import numpy
        except ImportError:
            self.skipTest("python3 has no numpy here")
        self.assertEqual(wanted, tuttifs.keys(numpy.array([1, 2, 3, 4]), 2, adapter="a", salt="\u00fc"))

    def test_refusals(self):
        for wrong in ({"tokens": [-1]}, {"tokens": [2**32]}, {"tokens": [1.5]}, {"tokens": "text"},
                      {"tokens_per_file": 0}, {"tenant": -1}, {"tenant": 2**32}, {"files": 1},
                      {"last": b"short", "files": 1}, {"last": bytes(32)}, {"salt": bytes(2**16 + 1)},
                      {"media": [(-1, 1, b"x")]}, {"media": [(0, 1, b"x")] * 2},
                      {"last": bytes(32), "files": 2**40 + 1}, {"last": bytes(32), "files": 2**40}):
            with self.subTest(wrong), self.assertRaises(tuttifs.InvalidError):
                tuttifs.keys(**{"tokens": [1], "tokens_per_file": 1, **wrong})
