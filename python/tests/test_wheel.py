"""The wheel: what is in it, and that it works where nothing else of the tree is."""

import base64
import csv
import hashlib
import os
import subprocess
import sys
import tempfile
import unittest
import zipfile

PYTHON = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def run(*words, **environ):
    """A command that finds nothing of the tree."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("TUTTIFS_")}
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=os.sep,
                          env={**kept, **environ})
    if done.returncode:
        raise AssertionError(f"{words}: {done.stdout}{done.stderr}")
    return done.stdout


class Wheel(unittest.TestCase):
    def setUp(self):
        if not {"TUTTIFS_LIBRARY", "TUTTIFS_BINARY"} <= set(os.environ):
            self.skipTest("TUTTIFS_LIBRARY and TUTTIFS_BINARY name nothing to pack")
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.dir = directory.name
        self.built = {k: os.environ[k] for k in ("TUTTIFS_LIBRARY", "TUTTIFS_BINARY")}

    def build(self, where):
        backend = os.path.join(PYTHON, "wheel_backend.py")
        return run(sys.executable, "-B", backend, os.path.join(self.dir, where), **self.built).strip()

    def test_contents(self):
        for name, variable in (("library", "TUTTIFS_LIBRARY"), ("command", "TUTTIFS_BINARY")):
            self.built[variable] = os.path.join(self.dir, name)
            with open(self.built[variable], "wb") as f:
                f.write(b"\0GLIBC_2.4\0GLIBC_2.31\0GLIBC_2.28\0" + bytes(1000))
        path = self.build("a")
        self.assertRegex(os.path.basename(path), r"^tuttifs-[\d.]+-py3-none-manylinux_2_31_\w+\.whl$")
        with zipfile.ZipFile(path) as z:
            self.assertIsNone(z.testzip())
            names = z.namelist()
            record = next(n for n in names if n.endswith("RECORD"))
            for name, digest, size in csv.reader(z.read(record).decode().splitlines()):
                if name != record:
                    data = z.read(name)
                    got = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                    self.assertEqual((f"sha256={got}", str(len(data))), (digest, size), name)
            self.assertEqual([n for n, *_ in csv.reader(z.read(record).decode().splitlines())], names)
            for needed in ("tuttifs/__init__.py", "tuttifs/py.typed", "tuttifs/_native/libtuttifs.so.1",
                           "tuttifs/_native/tuttifs"):
                self.assertIn(needed, names)
            self.assertFalse([n for n in names if "test" in n or "__pycache__" in n])
        with open(path, "rb") as a, open(self.build("b"), "rb") as b:
            self.assertEqual(a.read(), b.read(), "equal contents, equal bytes")

    def test_nothing_built(self):
        self.built["TUTTIFS_LIBRARY"] = "/nowhere"
        with self.assertRaisesRegex(AssertionError, "run make build lib first, or set TUTTIFS_LIBRARY"):
            self.build("a")

    def test_installed(self):
        """As pip installs it, built by the way of pyproject.toml."""
        if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
            self.skipTest("python3 has no pip here")
        if sys.version_info < (3, 11):
            self.skipTest("to build needs tomli, which may not be there, before Python 3.11")
        target = os.path.join(self.dir, "installed")
        run(sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "install", "--no-index", "--no-deps",
            "--target", target, PYTHON, **self.built)
        about = run(sys.executable, "-c", "import tuttifs, tuttifs._lib as l; print(tuttifs.__file__, "
                    "l.loaded().path, tuttifs.binary())", PYTHONPATH=target)
        inside = os.path.join(target, "tuttifs")
        self.assertEqual(about.split(), [f"{inside}/__init__.py", f"{inside}/_native/libtuttifs.so.1",
                                         f"{inside}/_native/tuttifs"])
        version = run(sys.executable, "-m", "tuttifs", "--version", PYTHONPATH=target)
        self.assertEqual(version, run(self.built["TUTTIFS_BINARY"], "--version"))
        self.assertEqual(run(os.path.join(target, "bin/tuttifs"), "--version", PYTHONPATH=target), version)

    def test_in_an_environment_of_its_own(self):
        """The wheel, in an environment with nothing else: the package, the library and the command work there."""
        made = subprocess.run([sys.executable, "-m", "venv", os.path.join(self.dir, "venv")], capture_output=True, text=True)
        if made.returncode:
            self.skipTest(f"python3 has no venv here: {made.stdout.strip()}")
        wheel, python = self.build("a"), os.path.join(self.dir, "venv/bin/python")
        run(python, "-m", "pip", "-q", "--disable-pip-version-check", "install", "--no-index", wheel)
        for command in ((python, "-m", "tuttifs"), (os.path.join(self.dir, "venv/bin/tuttifs"),)):
            self.assertIn("usage: tuttifs COMMAND", run(*command, "--help"))
        about = run(python, "-c", "import tuttifs, tuttifs._lib as l; print(l.loaded().version[0] == l.MAJOR, "
                    "tuttifs.__file__)")
        self.assertTrue(about.startswith(f"True {self.dir}/venv/"), about)
