"""Tests of what is left of a volume in memory when its daemon or its maker is killed: `python3 -m unittest -v
test_ram_volume` in this directory. They mount: TUTTIFS_BINARY names the command, and root and /dev/fuse are needed."""

import contextlib
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from unittest import mock

import ram_volume
from ram_volume import RamVolume, is_mount, take_away_left, what_lock_says

BINARY = os.environ.get("TUTTIFS_BINARY", "")
MAKER = """
import sys
from ram_volume import RamVolume
with RamVolume(sys.argv[1], sys.argv[2], 1, 64 << 20, 1, ahead=False) as volume:
    print(volume.mount, flush=True)
    sys.stdin.read()
"""

STANDS_IN = """
import os, runpy, signal, sys
from ram_volume import RamVolume
_, _, program, *words = sys.argv
if program == "scripts/bubbles.py":
    binary, where = words[words.index("--tuttifs") + 1], words[-1].partition("=")[2]
    with RamVolume(binary, where, 1, 64 << 20, 1, ahead=False) as volume:
        print(volume.mount, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
sys.argv[:3] = [program]
runpy.run_path(program, run_name="__main__")
"""


def daemon(mount):
    with open(os.path.join(mount, ".tuttifs", "version")) as f:
        return json.load(f)["pid"]


def ended(pid):
    """Whether a process has ended; it may be that nobody waits for it."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for_end(pid):
    deadline = time.monotonic() + 60
    while not ended(pid):
        if time.monotonic() > deadline:
            raise AssertionError(f"process {pid} has not ended within a minute")
        time.sleep(0.01)


class Left(unittest.TestCase):
    """What take_away_left takes, and what it leaves alone. Nothing is mounted."""

    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.where = os.path.realpath(directory.name)
        self.outside = os.path.join(self.where, "outside")
        self.left("outside", what_lock_says("tuttifs-ram-link"))

    def left(self, name, says):
        directory = os.path.join(self.where, name)
        os.mkdir(directory)
        for file, text in ((ram_volume.LOCK, says), ("thesis.txt", b"all of it")):
            with open(os.path.join(directory, file), "wb") as f:
                f.write(text)
        return directory

    def taken(self):
        """Names that go, and what is said."""
        before = set(os.listdir(self.where))
        with contextlib.redirect_stderr(io.StringIO()) as said:
            take_away_left("/nowhere/tuttifs", self.where)
        return before - set(os.listdir(self.where)), said.getvalue()

    def test_taken(self):
        self.left("tuttifs-ram-a", what_lock_says("tuttifs-ram-a"))
        self.left("tuttifs-b", what_lock_says("tuttifs-b"))
        self.left("tuttifs-ram-notes", b"")
        self.left("tuttifs-ram-copy", what_lock_says("tuttifs-ram-a"))
        self.left("tuttifs-ram-longer", what_lock_says("tuttifs-ram-longer") + b"x")
        os.symlink(self.outside, os.path.join(self.where, "tuttifs-ram-link"))
        os.mkfifo(os.path.join(self.where, "tuttifs-ram-pipe"))
        self.left("tuttifs-ram-\udcff", b"")
        for name, make in (("fifo", os.mkfifo), ("directory", os.mkdir), ("none", lambda path: None),
                           ("linked", lambda path: os.symlink(os.path.join(self.outside, ram_volume.LOCK), path))):
            os.mkdir(os.path.join(self.where, "tuttifs-ram-" + name))
            make(os.path.join(self.where, "tuttifs-ram-" + name, ram_volume.LOCK))
        held = self.left("tuttifs-ram-held", what_lock_says("tuttifs-ram-held"))
        with open(os.path.join(held, ram_volume.LOCK)) as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            taken, said = self.taken()
            self.assertEqual(taken, {"tuttifs-ram-a"})
            self.assertEqual(said.count("\n"), 1)
        self.assertEqual(self.taken()[0], {"tuttifs-ram-held"})
        self.assertEqual(sorted(os.listdir(self.outside)), [ram_volume.LOCK, "thesis.txt"])

    def test_of_others(self):
        self.left("tuttifs-ram-a", what_lock_says("tuttifs-ram-a"))
        with mock.patch("os.geteuid", lambda: os.getuid() + 1):
            self.assertEqual(self.taken(), (set(), ""))

    def test_mounted(self):
        """What cannot be unmounted stays whole, for a later run to find."""
        volume = RamVolume("/nowhere/tuttifs", self.where, 1, 1 << 20, 1)
        directory = self.left("tuttifs-ram-a", what_lock_says("tuttifs-ram-a"))
        with mock.patch("ram_volume.is_mount", lambda path: True), \
                mock.patch("subprocess.run", return_value=mock.Mock(returncode=0)):
            taken, said = self.taken()
            self.assertEqual(taken, set())
            self.assertIn(f"{directory} stays", said)
            with contextlib.redirect_stderr(io.StringIO()) as said, volume:
                pass
            self.assertIn(f"{volume.dir} stays", said.getvalue())
        self.assertTrue(os.path.exists(volume.paths[0]))
        self.assertEqual(self.taken()[0], {os.path.basename(directory), os.path.basename(volume.dir)})


@unittest.skipUnless(BINARY, "TUTTIFS_BINARY is not given")
@unittest.skipUnless(os.geteuid() == 0 and os.path.exists("/dev/fuse"), "needs root and /dev/fuse")
class Killed(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="a volume ")  # the kernel's table writes blanks otherwise
        self.addCleanup(directory.cleanup)
        self.where = directory.name

    def test_daemon(self):
        """Whoever uses the mount sees the error, and nothing is left."""
        with contextlib.redirect_stderr(io.StringIO()), self.assertRaises(OSError):
            with RamVolume(BINARY, self.where, 1, 64 << 20, 1, ahead=False) as volume:
                pid = daemon(volume.mount)
                os.kill(pid, signal.SIGKILL)
                wait_for_end(pid)
                self.assertTrue(is_mount(volume.mount))
                volume.stats()
        self.assertFalse(is_mount(volume.mount))
        self.assertEqual(os.listdir(self.where), [])

    def test_maker(self):
        """What it leaves goes when the next volume is made there, and what lives stays."""
        makers, mounts, daemons = [], [], []
        for _ in range(3):
            maker = subprocess.Popen([sys.executable, "-B", "-c", MAKER, BINARY, self.where], text=True,
                                     cwd=os.path.dirname(os.path.abspath(__file__)),
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            makers.append(maker)
            mounts.append(maker.stdout.readline().rstrip("\n"))
            daemons.append(daemon(mounts[-1]))
        for maker in makers[:2]:
            maker.kill()
            maker.wait()
        os.kill(daemons[0], signal.SIGKILL)
        wait_for_end(daemons[0])
        ram_volume.unmount("/nowhere/tuttifs", mounts[0])
        self.assertFalse(is_mount(mounts[0]), "it goes without the command as well")
        os.mkdir(os.path.join(self.where, "tuttifs-of-others"))
        with contextlib.redirect_stderr(io.StringIO()) as said:
            take_away_left(BINARY, self.where)
        for mount in mounts[:2]:
            self.assertFalse(is_mount(mount))
            self.assertIn(os.path.dirname(mount), said.getvalue())
        wait_for_end(daemons[1])
        self.assertEqual(daemon(mounts[2]), daemons[2])
        self.assertEqual(sorted(os.listdir(self.where)),
                         sorted(["tuttifs-of-others", os.path.basename(os.path.dirname(mounts[2]))]))
        makers[2].communicate()
        self.assertEqual(makers[2].returncode, 0)
        self.assertEqual(os.listdir(self.where), ["tuttifs-of-others"])
        for maker in makers[:2]:
            maker.stdin.close()
            maker.stdout.close()

    def test_shell(self):
        """bubbles.sh takes the volume of a killed bubbles.py away itself."""
        scripts = os.path.dirname(os.path.abspath(__file__))
        with tempfile.TemporaryDirectory() as d:
            python = os.path.join(d, "python")
            with open(python, "w") as f:
                f.write(f"#!{sys.executable} -B\n" + STANDS_IN)
            os.chmod(python, 0o700)
            words = ["--limit", "30", "--hits", "90", "--tuttifs", BINARY, f"--where={self.where}"]
            done = subprocess.run([os.path.join(scripts, "bubbles.sh"), *words], stdin=subprocess.DEVNULL,
                                  env={**os.environ, "PYTHON": python, "PYTHONPATH": scripts}, capture_output=True,
                                  text=True)
        self.assertEqual(done.returncode, 128 + signal.SIGKILL, done.stderr)
        mount = done.stdout.rstrip("\n")
        self.assertEqual(os.path.dirname(os.path.dirname(mount)), self.where)
        self.assertIn(os.path.dirname(mount) + " was left", done.stderr)
        self.assertFalse(is_mount(mount))
        self.assertEqual(os.listdir(self.where), [])


if __name__ == "__main__":
    unittest.main()
