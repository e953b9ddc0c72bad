"""The page's example is run as it stands there."""

import inspect
import json
import os
import shlex
import subprocess
import sys
import unittest

import tuttifs
from tuttifs.vllm.options import Options
from volume import Volume

PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../docs/python.md")


class Page(unittest.TestCase):
    maxDiff = None

    def test_example(self):
        with open(PAGE, encoding="utf-8") as f:
            example = f.read().split("```python\n")[1].split("```")[0]
        self.assertLessEqual(len([line for line in example.splitlines() if line]), 22)
        self.assertIn('"/mnt/kv"', example)
        with Volume() as volume:
            for wanted in ("0 of 20 files restored\n", "20 of 20 files restored\n"):
                done = subprocess.run([sys.executable, "-B", "-c", example.replace("/mnt/kv", volume.path)], text=True,
                                      capture_output=True)
                self.assertEqual((done.stdout, done.stderr, done.returncode), (wanted, "", 0))


class Engines(unittest.TestCase):
    """The set-ups of docs/engines.md that need no engine to be read; the others are tried beside their engines."""

    def blocks(self, begin, end):
        with open(os.path.join(os.path.dirname(PAGE), "engines.md"), encoding="utf-8") as f:
            section = f.read().split(f"\n## {begin}\n")[1].split(f"\n## {end}\n")[0]
        return section.split("```\n")[1::2]

    def test_vllm(self):
        connector, tier = self.blocks("vLLM", "SGLang")
        words = shlex.split(connector)
        self.assertEqual(words[:4], ["vllm", "serve", "MODEL", "--kv-transfer-config"])
        given = json.loads(words[4])
        self.assertEqual(Options.parse(given.pop("kv_connector_extra_config")).path, "/mnt/kv")
        self.assertEqual(given, {"kv_connector": "TuttifsConnector", "kv_connector_module_path": "tuttifs.vllm",
                                 "kv_role": "kv_both", "kv_load_failure_policy": "recompute"})
        lower, = json.loads("{" + tier + "}")["kv_connector_extra_config"]["secondary_tiers"]
        self.assertEqual((lower["type"], lower["module_path"], lower["path"]), ("TuttifsTier", "tuttifs.vllm.tier", "/mnt/kv"))


class Docstrings(unittest.TestCase):
    def test_all_that_is_public(self):
        """Whatever a user may call says what it does, in words of its own."""
        inherited = {name for base in (int, tuple, Exception) for name in dir(base)}
        without = []
        for name in tuttifs.__all__:
            thing = getattr(tuttifs, name)
            if not (thing.__doc__ or "").strip() or thing.__doc__.startswith(f"{name}("):
                without.append(name)
            for part, value in vars(thing).items() if inspect.isclass(thing) else ():
                called = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if part.startswith("_") or part in inherited or not inspect.isfunction(called):
                    continue
                if not inspect.getdoc(called):
                    without.append(f"{name}.{part}")
        self.assertEqual(without, [])
