"""Tests of what bubbles.py makes of its measurements: `python3 -m unittest -v test_bubbles` in this directory."""

import argparse
import copy
import importlib.util
import json
import os
import tempfile
import time
import unittest

import bubble_report as b
import ram_volume

LAYERS, BLOCK, OBJECT = 32, 64, 256 << 10
HITS = [50.0, 75.0, 87.5, 93.75, 95.0, 97.0, 98.0, 98.5, 99.0]


def arguments(**changes):
    values = {"layers": LAYERS, "block": BLOCK, "pollers": 12, "tokens": [65536, 131072], "hits": HITS,
              "drives": ["ram", "paper"], "ways": ["tuttifs", "per-object"], "backlog_ways": ["tuttifs"],
              "backlog_drives": ["paper"]}
    return argparse.Namespace(**{**values, **changes})


def compute_ms(plan):
    """Of a layer: something like an H200."""
    new, cached = plan["new_tokens"], plan["cached_tokens"]
    return 0.5 + 0.9e-3 * new + 3.9e-8 * new * (cached + new / 2)


def cell(plan, rate, floor=0.005):
    """What would be measured at so many GB/s."""
    compute, io = compute_ms(plan), plan["cached_tokens"] * OBJECT / BLOCK / rate / 1e6
    wait = max(0.0, io - compute) + floor

    def times(bubbles):
        return {"ttft": compute * LAYERS + sum(bubbles), "compute": compute * LAYERS, "bubbles": bubbles,
                "host": {"pin": 0.7, "trailers": 1.3}}
    runs = [times([io] + [wait] * (LAYERS - 1))] * 3
    return {**plan, **b.summary(runs, [times([floor] * LAYERS)] * 4)}


def report(a, rates, link=54.7):
    r = b.new(a)
    r.update(gpu="a GPU", torch="", object_bytes=OBJECT, link_gb_per_second=link)
    for _, _, plans in b.stages(a):
        r["cells"] += [cell(p, min(rates[p["way"]], b.DRIVES[p["drives"]].read or 1e9)) for p in plans]
    r["backlog"] = [{"drives": "paper", "way": "tuttifs", "tokens": 65536, "pairs": 5, "ratio": 0.99,
                     "read_only_gb_per_second": 20.0, "read_gb_per_second": 19.8, "write_gb_per_second": 0.2,
                     "write_only_gb_per_second": 11.9}]
    b.finish(r)
    return r


class Stages(unittest.TestCase):
    def test_order(self):
        stages = b.stages(arguments())
        self.assertEqual([(d, t, min(p["hit_percent"] for p in plans)) for d, t, plans in stages],
                         [("ram", 65536, 87.5), ("paper", 65536, 87.5), ("ram", 131072, 87.5), ("paper", 131072, 87.5),
                          ("ram", 65536, 50), ("paper", 65536, 50), ("ram", 131072, 50), ("paper", 131072, 50)])
        for drives, tokens, plans in stages:
            for p in plans:
                self.assertEqual((p["drives"], p["tokens"]), (drives, tokens))
                self.assertEqual(p["cached_tokens"] + p["new_tokens"], tokens)
                self.assertEqual(p["cached_tokens"] % BLOCK, 0)
                self.assertLess(abs(b.hit(p) - p["hit_percent"]), 100 * BLOCK / tokens)
                self.assertFalse(p["way"] == "per-object" and drives == "paper", "these copies know no drives")
                self.assertFalse(p["stores"] == "backlog" and (drives, tokens) != ("paper", 65536))

    def test_short_prompts(self):
        """No case twice, and always a cached and a new block."""
        for _, _, plans in b.stages(arguments(tokens=[128, 256])):
            keys = [b.cell_key(p) for p in plans]
            self.assertEqual(len(keys), len(set(keys)))
            for p in plans:
                self.assertGreaterEqual(p["cached_tokens"], BLOCK)
                self.assertGreaterEqual(p["new_tokens"], BLOCK)


class Summary(unittest.TestCase):
    def test_pairs(self):
        """A run counts against its neighbours: clocks that drift cancel out."""
        def times(x, bubbles):
            return {"ttft": x, "compute": x / 2, "bubbles": bubbles, "host": {"pin": x}}
        turns = [times(100, [1, 0, 0]), times(110, [1, 0, 0]), times(120, [1, 2, 0])]
        runs = [times(210, [5, 1, 3]), times(230, [7, 2, 0])]
        s = b.summary(runs, turns)
        self.assertEqual(s["ttft_ratios"], [2.0, 2.0])
        self.assertEqual(s["compute_ratio"], 2.0)
        self.assertEqual(s["bubble_ms"], {"first": 6, "rest": 3, "total": 9})
        self.assertEqual(s["layer_bubbles_ms"], [6, 1.5, 1.5])
        self.assertEqual((s["worst_layer_ms"], s["hbm_rest_ms"], s["runs"]), (2.5, 0, 2))
        self.assertEqual(s["host_ms"], {"pin": 220})


class Crossing(unittest.TestCase):
    def cells(self, rate, hits, **kind):
        a = arguments(hits=hits, tokens=[65536], drives=["ram"], ways=["tuttifs"], **kind)
        return [cell(p, rate) for _, _, plans in b.stages(a) for p in plans]

    def test_near_the_truth(self):
        """With cells on both sides it is where bytes take as long as compute, whatever the rate."""
        for rate in (20, 30, 40, 45, 50, 53):
            cells = self.cells(rate, [80 + x / 2 for x in range(40)])
            truth = b.limit(cells, rate, LAYERS, OBJECT / BLOCK)
            got = b.crossing(cells)
            self.assertLess(got["hidden_to"], got["exposed_from"])
            self.assertAlmostEqual(got["percent"], truth, delta=0.1)

    def test_bracket(self):
        got = b.crossing(self.cells(50, HITS))
        self.assertLessEqual(got["hidden_to"], got["percent"])
        self.assertLessEqual(got["percent"], got["exposed_from"])

    def test_one_exposed(self):
        """Nothing says where between the two it is: the lower one counts."""
        got = b.crossing(self.cells(50, [95, 99]))
        self.assertEqual(got["percent"], got["hidden_to"])

    def test_ends(self):
        got = b.crossing(self.cells(50, [90, 95]))
        self.assertEqual((got["percent"], got["exposed_from"]), (None, None))
        self.assertAlmostEqual(got["hidden_to"], 95, delta=0.1)
        got = b.crossing(self.cells(5, [90, 95]))
        self.assertEqual((got["percent"], got["hidden_to"]), (None, None))

    def test_first_exposed_counts(self):
        """A hit rate that is exposed is not made good by higher ones that are hidden."""
        cells = self.cells(50, [90, 93.75, 95, 97])
        cells[1]["bubble_ms"]["rest"] += 20
        got = b.crossing(cells)
        self.assertLess(got["percent"], 93.8)
        self.assertAlmostEqual(got["exposed_from"], 93.75, delta=0.1)

    def test_hidden(self):
        """At most 2 ms and 1 % of compute, beyond what events show where nothing is waited for."""
        c = {"hbm_rest_ms": 0.5, "hbm_compute_ms": 150.0}
        for rest, want in ((0.4, True), (2.0, True), (2.01, False)):
            self.assertEqual(b.is_hidden({**c, "bubble_ms": {"rest": rest}}), want)
        c["hbm_compute_ms"] = 4000.0
        for rest, want in ((2.5, True), (2.51, False)):
            self.assertEqual(b.is_hidden({**c, "bubble_ms": {"rest": rest}}), want)


class Report(unittest.TestCase):
    def setUp(self):
        self.report = report(arguments(), {"tuttifs": 52.5, "per-object": 21})

    def test_limits(self):
        """The link limits drives in memory, the drives those that are slower."""
        rows = {(r["drives"], r["tokens"], r["way"]): r for r in self.report["crossings"] if r["stores"] == "own"}
        self.assertEqual(rows["ram", 65536, "tuttifs"]["limit_gb_per_second"], 54.7)
        self.assertEqual(rows["paper", 65536, "tuttifs"]["limit_gb_per_second"], 29)
        self.assertLess(rows["paper", 65536, "tuttifs"]["limit_percent"],
                        rows["ram", 65536, "tuttifs"]["limit_percent"])
        self.assertLess(rows["ram", 65536, "per-object"]["percent"], rows["ram", 65536, "tuttifs"]["percent"])

    def test_bars(self):
        bars = {x["what"]: x for x in self.report["bars"]}
        crossing = bars["crossing point at 64 K, %"]
        self.assertEqual(crossing["met"], crossing["got"] >= 98)
        self.assertTrue(bars["bubbles in all at 93.75 %, ms"]["met"])
        self.assertTrue(bars["paper, reads during a backlog against alone"]["met"])
        worst = next(c for c in self.report["cells"] if (c["drives"], c["way"], c["tokens"]) == ("ram", "tuttifs", 65536))
        worst["compute_ratio"] = 1.02
        b.finish(self.report)
        missed = [x["what"] for x in self.report["bars"] if not x["met"] and "compute" in x["what"]]
        self.assertEqual(missed, [f"compute against undisturbed, ram, own stores, at worst ({worst['hit_percent']:g} %)"])

    def test_mixed(self):
        """Commands that were mixed are counted where a mount counts them, and any at all is too many."""
        self.assertIsNone(b.mixed({"io": {}}))
        self.assertEqual(b.mixed({"phases": {"0": {"mixed_commands": 2}, "1": {"mixed_commands": 3}}}), 5)
        self.assertIsNone(b.since(None, None))
        self.assertEqual(b.since(5, 2), 3)
        name = "commands that met the other direction on their drive"
        self.assertNotIn(name, [x["what"] for x in self.report["bars"]])
        for n in (0, 2):
            for c in self.report["cells"]:
                c["mixed_commands"] = 7 if c["way"] == "per-object" else 0
            self.report["backlog"][0]["mixed_commands"] = n
            b.finish(self.report)
            bar = next(x for x in self.report["bars"] if x["what"] == name)
            self.assertEqual((bar["got"], bar["met"]), (n, n == 0))
        self.assertIn("2 mixed commands", b.table(self.report))

    def test_bar_of_what_was_never_exposed(self):
        r = report(arguments(hits=[95.0, 98.0]), {"tuttifs": 500, "per-object": 500})
        crossing = next(x for x in r["bars"] if "crossing" in x["what"])
        self.assertTrue(crossing["met"])
        self.assertAlmostEqual(crossing["got"], 98.05, delta=0.01)

    def test_table(self):
        text = b.table(self.report)
        for part in ("a GPU", "Crossing points", "limit", "backlog", "this machine reads at 20.0 of the 29.0 GB/s",
                     "Bars", "met"):
            self.assertIn(part, text)
        self.assertNotIn("this machine writes", text)
        self.assertNotIn("Left out", text)
        self.report["left_out"] = [{**self.report["cells"][0], "reason": "no time"}]
        self.assertIn("ram, tuttifs: 1 cells: no time", b.table(self.report))

    def test_table_of_nothing(self):
        """A run that was cut before its first case, and one without a GPU."""
        r = b.new(arguments())
        r.update(gpu=None, torch="", object_bytes=OBJECT, link_gb_per_second=None, failures=["ram: broken"])
        b.finish(r)
        self.assertIn("failed: ram: broken", b.table(r))
        self.report.update(link_gb_per_second=None)
        b.finish(self.report)
        self.assertIn(" - ", b.table(self.report))

    def test_join(self):
        """Runs that were cut make one document, in which the last figures of a case count."""
        later = copy.deepcopy(self.report)
        later["cells"] = [dict(c) for c in later["cells"] if c["drives"] == "ram"]
        for c in later["cells"]:
            c["ttft_ms"] = 1.0
        earlier = self.report
        earlier["left_out"] = [{**later["cells"][0], "reason": "no time"},
                               {**later["cells"][0], "cached_tokens": 64, "reason": "no time"},
                               {"drives": "paper", "way": "tuttifs", "part": "backlog", "reason": "no time"}]
        with tempfile.TemporaryDirectory() as d:
            paths = [os.path.join(d, name) for name in ("a.json", "b.json")]
            b.save(earlier, paths[0])
            b.save(later, paths[1])
            whole = b.load(paths)
            self.assertEqual(len(whole["cells"]), len(earlier["cells"]))
            self.assertTrue(all((c["ttft_ms"] == 1) == (c["drives"] == "ram") for c in whole["cells"]))
            self.assertEqual([x["cached_tokens"] for x in whole["left_out"]], [64])
            later["gpu"] = "another"
            b.save(later, paths[1])
            with self.assertRaisesRegex(SystemExit, "another"):
                b.load(paths)
            with open(paths[1], "w") as f:
                json.dump({"bubbles_version": 99}, f)
            with self.assertRaisesRegex(SystemExit, "no document"):
                b.load(paths[1:])

    def test_no_time_to_make_a_volume(self):
        """It is given up in the middle, and leaves nothing."""
        with tempfile.TemporaryDirectory() as d:
            with self.assertRaisesRegex(ram_volume.OutOfTime, "making 2 MiB"):
                with ram_volume.RamVolume("tuttifs", d, 2, 2 << 20, 1, end=time.monotonic() - 1):
                    self.fail("it was made")
            self.assertEqual(os.listdir(d), [])

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "no matplotlib here")
    def test_plot(self):
        with tempfile.TemporaryDirectory() as d:
            path = os.path.join(d, "a.png")
            b.plot(self.report, path)
            with open(path, "rb") as f:
                self.assertEqual(f.read(8), b"\x89PNG\r\n\x1a\n")


if __name__ == "__main__":
    unittest.main()
