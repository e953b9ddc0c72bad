"""Tests that flags which make no sense are refused before anything begins, in a line each: `python3 -m unittest -v
test_flags` in this directory."""

import argparse
import contextlib
import importlib
import io
import os
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import kv_store

COMMON = ["--layers 0", "--block 0", "--block x", "--pollers -1", "--pollers 65", "--staging-mib -1", "--device gpu"]
REFUSED = {
    "llama_restore": [*COMMON, "--cached abc", "--cached 100", "--cached=-5", "--cached 50,,90", "--runs 0",
                      "--tokens 0", "--piece 0", "--drives 0", "--drives 65"],
    "compare_torch": [*COMMON, "--cached 0", "--runs 0", "--seconds nan", "--bandwidth-tokens 0", "--drives 0"],
    "bubbles": [*COMMON, "--limit x", "--lim 5", "--tokens 64,0", "--hits x", "--hits 101", "--seconds -1", "--runs 0",
                "--store-mib 0", "--drives tape"],
    "ranks_restore": ["--ranks 0", "--gpus 0", "--layers 0", "--files 0", "--runs 0", "--drives 0", "--pollers -1"],
    "layer_times": ["--device gpu", "--new 0", "--cached x", "--block 0", "--layers 1", "--warm-up -1", "--runs 0"],
    "compare_engines": ["--requests 0", "--longest 255", "--tokens-per-block 513", "--memory-mib 0", "--drives 0",
                        "--where /nowhere", "--trace /nowhere", "--json /nowhere/x"],
}


class Flags(unittest.TestCase):
    def refused(self, module, words):
        """What is said, which is one line behind the usage."""
        said = io.StringIO()
        with mock.patch.object(sys, "argv", [module + ".py", *words]), contextlib.redirect_stderr(said), \
                self.assertRaises(SystemExit) as end:
            importlib.import_module(module).arguments()
        self.assertEqual(end.exception.code, 2, words)
        lines = said.getvalue().splitlines()
        self.assertTrue(lines[-1].startswith(f"{module}.py: error: "), lines)
        self.assertEqual(sum(": error: " in line for line in lines), 1)
        return lines[-1]

    def test_refused(self):
        for module, cases in REFUSED.items():
            for words in cases:
                with self.subTest(module=module, words=words):
                    flag = words.replace("=", " ").split()[0]
                    self.assertIn(flag, self.refused(module, words.split()))

    def test_together(self):
        """Numbers that are good alone. --device none needs no PyTorch."""
        with tempfile.TemporaryDirectory() as d:
            programs = ["--where", d, "--tuttifs", sys.executable, "--lib", os.path.abspath(__file__)]
            for words, says in (("--tokens 8001", "--tokens 8001: want a multiple of --block, which is 64"),
                                ("--tokens 64", "--tokens 64: want"), ("--piece 100", "--piece 100: want"),
                                ("--hits 0,50", "--hits are above 0"), ("--layers 1", "--layers 2 or more"),
                                ("--png /nowhere/x.png", "--png /nowhere/x.png: no file"),
                                (f"-o {d}", "no regular file"),
                                ("--slack-table /nowhere", "no file that can be read")):
                with self.subTest(words=words), mock.patch.dict(os.environ):
                    self.assertIn(says, self.refused("bubbles", ["--device", "none", *programs, *words.split()]))

    def test_output(self):
        """What is there is a file that can be written to, and no way to another place."""
        with tempfile.TemporaryDirectory() as d:
            file, link, fifo, fixed = (os.path.join(d, name) for name in ("file", "link", "fifo", "fixed"))
            for path, mode in ((file, 0o600), (fixed, 0o444)):
                os.close(os.open(path, os.O_CREAT, mode))
            os.symlink(file, link)
            os.mkfifo(fifo)
            p, access = argparse.ArgumentParser(), os.access
            for path in (file, os.path.join(d, "new")):
                kv_store.check_output(p, "-o", path)
            # Root may write to what is read-only.
            with mock.patch("os.access", lambda path, mode: path != fixed and access(path, mode)):
                for path in (fixed, link, fifo, d, d + "/", d + "/none/x", file + "/x", "", "/dev/null", "/dev/stdout"):
                    with self.subTest(path=path), contextlib.redirect_stderr(io.StringIO()) as said, \
                            self.assertRaises(SystemExit):
                        kv_store.check_output(p, "-o", path)
                    self.assertIn(f"-o {path}: no ", said.getvalue())

    def test_number(self):
        whole, share = kv_store.number(least=0, most=3), kv_store.number(float, 0)
        self.assertEqual([whole(x) for x in ("0", "3")], [0, 3])
        self.assertEqual([share(x) for x in ("0", "2.5")], [0, 2.5])
        self.assertEqual(kv_store.numbers(whole)("1,2"), [1, 2])
        for kind, text, says in ((whole, "4", "'4': want a whole number from 0 to 3"), (whole, "1.5", "whole"),
                                 (whole, "", "''"), (share, "-0.1", "want a number from 0"), (share, "nan", "'nan'"),
                                 (kv_store.numbers(whole), "1,", "''")):
            with self.assertRaisesRegex(argparse.ArgumentTypeError, says):
                kind(text)

    def test_shell(self):
        """bubbles.sh ends what takes too long, and cannot by a limit that is none."""
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bubbles.sh")
        for words in (["--limit", "x"], ["--limit=-1"], ["--limit", "1e3"], ["--limit="]):
            done = subprocess.run([script, *words], capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stderr.count("\n"), done.stdout), (2, 1, ""), words)
            self.assertIn("--limit", done.stderr)


if __name__ == "__main__":
    unittest.main()
