"""Tests of what is left of a volume in memory when its daemon or its maker is killed: `python3 -m unittest -v
test_ram_volume` in this directory. They mount: TUTTIFS_BINARY names the command, and root and /dev/fuse are needed."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from ram_volume import RamVolume, is_mount, take_away_left

BINARY = os.environ.get("TUTTIFS_BINARY", "")
MAKER = """
import sys
from ram_volume import RamVolume
with RamVolume(sys.argv[1], sys.argv[2], 1, 64 << 20, 1, ahead=False) as volume:
    print(volume.mount, flush=True)
    sys.stdin.read()
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
    while not ended(pid):
        time.sleep(0.01)


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


if __name__ == "__main__":
    unittest.main()
