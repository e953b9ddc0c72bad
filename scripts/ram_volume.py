"""A tuttifs volume on files in memory, formatted, mounted, and taken away again: for measurements and tests."""

import concurrent.futures
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time


class OutOfTime(Exception):
    """There is no time left to make a volume."""


class RamVolume:
    """with RamVolume(...) as v: v.mount is the mount point."""

    def __init__(self, tuttifs, where, drives, drive_bytes, pollers, options=(), end=float("inf"), ahead=True):
        """options: of the mount, beside the number of pollers and where its sockets are. end: when making it is given
        up, on time.monotonic. ahead: drives are written once before they are used."""
        self.end, self.ahead = end, ahead
        self.tuttifs, self.pollers, self.options = os.path.abspath(tuttifs), pollers, list(options)
        needed, free = drives * drive_bytes, shutil.disk_usage(where).free
        if needed > free:
            raise SystemExit(f"{where} has {free >> 20} MiB free, {needed >> 20} are needed: another --where, or a "
                             "smaller case")
        self.dir = tempfile.mkdtemp(prefix="tuttifs-", dir=where)
        self.mount = os.path.join(self.dir, "mnt")
        self.log = os.path.join(self.dir, "log")
        self.paths = [os.path.join(self.dir, f"drive{i}") for i in range(drives)]
        self.drive_bytes = -(-drive_bytes // (1 << 20)) << 20

    def __enter__(self):
        for s in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C does: no mount is left behind
            signal.signal(s, lambda number, _: sys.exit(128 + number))
        try:
            os.mkdir(self.mount)
            os.mkdir(os.path.join(self.dir, "run"), 0o700)
            # Written ahead, because a first write to memory costs more than the transfer that is measured.
            begin = time.monotonic()
            with concurrent.futures.ThreadPoolExecutor(len(self.paths)) as fillers:
                list(fillers.map(self.fill, self.paths))
            self.filling = (time.monotonic() - begin) / (len(self.paths) * self.drive_bytes)  # seconds a byte
            self.run("mkfs", "-q", "-L", "ram", *self.paths)
            self.attach()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def attach(self):
        own = [f"pollers={self.pollers}", f"sockets={os.path.join(self.dir, 'run')}"]
        self.run("mount", "-o", ",".join(own + self.options), "--log", self.log, self.paths[0], self.mount)

    def remount(self, options):
        """Mounts what is there with other options."""
        self.run("umount", self.mount)
        self.options = list(options)
        self.attach()

    def stats(self):
        with open(os.path.join(self.mount, ".tuttifs", "stats")) as f:
            return json.load(f)

    def fill(self, path):
        piece = bytes(1 << 20)
        with open(path, "wb", buffering=0) as f:
            if not self.ahead:
                f.truncate(self.drive_bytes)
                return
            for _ in range(0, self.drive_bytes, len(piece)):
                if time.monotonic() > self.end:
                    raise OutOfTime(f"making {self.drive_bytes >> 20} MiB of {path}")
                f.write(piece)

    def run(self, *words):
        done = subprocess.run([self.tuttifs, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"tuttifs {words[0]}: {done.stderr.strip()}")

    def __exit__(self, kind, value, trace):
        if os.path.ismount(self.mount):
            subprocess.run([self.tuttifs, "umount", self.mount], stdin=subprocess.DEVNULL)
        if os.path.ismount(self.mount):
            subprocess.run(["umount", "-l", self.mount])
        if kind is not None and os.path.exists(self.log):
            with open(self.log, errors="replace") as f:
                sys.stderr.write("the daemon's log:\n" + f.read()[-4000:])
        shutil.rmtree(self.dir, ignore_errors=True)
