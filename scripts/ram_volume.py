"""A tuttifs volume on files in memory, formatted, mounted, and taken away again: for measurements and tests."""

import argparse
import concurrent.futures
import contextlib
import fcntl
import glob
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time


PREFIX, LOCK = "tuttifs-ram-", "ram-volume.lock"  # of a volume's directory; in it
UMOUNT_SECONDS = 60  # for the daemon to end; then the mount is detached, with which it ends as well


class OutOfTime(Exception):
    """There is no time left to make a volume."""


def is_mount(path):
    """By the kernel's table: os.path.ismount looks at the mount itself, which a dead daemon does not answer for."""
    with open("/proc/self/mounts", errors="surrogateescape") as f:
        places = (line.split()[1] for line in f)
        return any(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), place) == path for place in places)


def unmount(tuttifs, mount):
    """Of a mount, whether its daemon lives or not, nothing is left."""
    if is_mount(mount):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run([tuttifs, "umount", mount], stdin=subprocess.DEVNULL, timeout=UMOUNT_SECONDS)
    if is_mount(mount):
        subprocess.run(["umount", "-l", mount], stdin=subprocess.DEVNULL)


def remove(directory):
    """Not while it is mounted: a daemon would live on without its drives, where no later run finds it."""
    mount = os.path.join(directory, "mnt")
    if is_mount(mount):
        say(f"{mount} cannot be unmounted: {directory} stays until a later run can")
    else:
        shutil.rmtree(directory, ignore_errors=True)


def say(text):
    print(text, file=sys.stderr, flush=True)


def what_lock_says(directory):
    return b"a tuttifs volume in memory: %s\n" % os.fsencode(os.path.basename(directory))


@contextlib.contextmanager
def opened(path, flags, **options):
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | flags, **options)
    try:
        yield fd
    finally:
        os.close(fd)


def take_away_left(tuttifs, where):
    """Takes volumes away whose makers were killed: nobody holds their lock any more. Others may write to where as well:
    what is not this user's, and has no lock as RamVolume makes it, is left alone."""
    for directory in glob.glob(os.path.join(glob.escape(os.path.realpath(where)), PREFIX + "*")):
        with contextlib.suppress(OSError), opened(directory, os.O_DIRECTORY) as place:
            if os.fstat(place).st_uid != os.geteuid():
                continue
            with opened(LOCK, os.O_NONBLOCK, dir_fd=place) as lock:
                says = what_lock_says(directory)
                if not stat.S_ISREG(os.fstat(lock).st_mode) or os.read(lock, len(says) + 1) != says:
                    continue
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                say(f"{directory} was left by a run that was killed, and goes")
                unmount(tuttifs, os.path.join(directory, "mnt"))
                remove(directory)


class RamVolume:
    """with RamVolume(...) as v: v.mount is the mount point."""

    def __init__(self, tuttifs, where, drives, drive_bytes, pollers, options=(), end=float("inf"), ahead=True):
        """options: of the mount, beside the number of pollers and where its sockets are. end: when making it is given
        up, on time.monotonic. ahead: drives are written once before they are used."""
        self.end, self.ahead = end, ahead
        self.tuttifs, self.pollers, self.options = os.path.abspath(tuttifs), pollers, list(options)
        where = os.path.realpath(where)  # as the kernel's table has it
        take_away_left(self.tuttifs, where)
        needed, free = drives * drive_bytes, shutil.disk_usage(where).free
        if needed > free:
            raise SystemExit(f"{where} has {free >> 20} MiB free, {needed >> 20} are needed: another --where, or a "
                             "smaller case")
        self.dir = tempfile.mkdtemp(prefix=PREFIX, dir=where)
        self.mount = os.path.join(self.dir, "mnt")
        self.log = os.path.join(self.dir, "log")
        self.paths = [os.path.join(self.dir, f"drive{i}") for i in range(drives)]
        self.drive_bytes = -(-drive_bytes // (1 << 20)) << 20

    def __enter__(self):
        for s in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C does: no mount is left behind
            signal.signal(s, lambda number, _: sys.exit(128 + number))
        self.lock = open(os.path.join(self.dir, LOCK + ".new"), "wb", buffering=0)
        try:
            # Held for as long as this process lives; whoever finds it by its last name finds it held.
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            self.lock.write(what_lock_says(self.dir))
            os.rename(self.lock.name, os.path.join(self.dir, LOCK))
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
        try:
            unmount(self.tuttifs, self.mount)
            if kind is not None and os.path.exists(self.log):
                with open(self.log, errors="replace") as f:
                    sys.stderr.write("the daemon's log:\n" + f.read()[-4000:])
        finally:
            remove(self.dir)
            self.lock.close()


def main():
    """Takes away what is left, by the flags of the program that left it."""
    p = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    p.add_argument("--where", default="/dev/shm")
    p.add_argument("--tuttifs", default="bin/tuttifs")
    a, _ = p.parse_known_args()
    take_away_left(os.path.abspath(a.tuttifs), a.where)


if __name__ == "__main__":
    main()
