"""The page's example is run as it stands there."""

import os
import subprocess
import sys
import unittest

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
