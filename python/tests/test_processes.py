"""Forked, spawned and other processes; what importing does; other users of signals in the process."""

import multiprocessing
import os
import subprocess
import sys
import textwrap
import time
import unittest

import tuttifs
from volume import IDENTITY, SESSION, Cache, Mounted, Volume, need_mount, restore, store

KEYS = tuttifs.keys(list(range(32)), 4)
BLOCKS = list(range(8))
HERE = os.path.dirname(os.path.abspath(__file__))


def round_trip(path):
    """What a worker does: a session of its own."""
    cache, test = Cache(), unittest.TestCase()
    with tuttifs.Store(path) as mount, mount.session(**SESSION) as session:
        pool = session.pool("workers", IDENTITY, cache.paged().objects())
        memory = session.register(cache.paged())
        store(pool, memory, cache, KEYS, BLOCKS)
        restore(test, pool, memory, cache, KEYS, BLOCKS[::-1])


def worker(path, pipe):
    try:
        round_trip(path)
        pipe.send("done")
    except Exception as e:
        pipe.send(f"{type(e).__name__}: {e}")


def python(program, *arguments, **environ):
    """A program in an interpreter of its own."""
    path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])
    return subprocess.run([sys.executable, "-B", "-c", textwrap.dedent(program), *arguments], text=True,
                          capture_output=True, cwd=HERE, timeout=120,
                          env={**os.environ, "PYTHONPATH": path, **environ})


class Workers(unittest.TestCase):
    """Workers of a parent that has imported the package, and not used the library."""

    def run_worker(self, method, preload):
        # In an interpreter of its own: this one has used the library.
        done = python("""
            import multiprocessing, sys
            import test_processes
            if __name__ == "__main__":
                context = multiprocessing.get_context(sys.argv[2])
                if sys.argv[3]:
                    context.set_forkserver_preload(["tuttifs"])
                pipe, other = context.Pipe()
                for _ in range(2):
                    process = context.Process(target=test_processes.worker, args=(sys.argv[1], other))
                    process.start()
                    print(pipe.recv() if pipe.poll(60) else "no answer")
                    process.join()
                    print(process.exitcode)
            """, self.volume.path, method, preload)
        self.assertEqual((done.stdout, done.stderr, done.returncode), ("done\n0\ndone\n0\n", "", 0))

    def setUp(self):
        self.volume = Volume()
        self.addCleanup(self.volume.close)

    def test_fork(self):
        self.run_worker("fork", "")

    def test_spawn(self):
        self.run_worker("spawn", "")

    def test_forkserver(self):
        self.run_worker("forkserver", "")
        self.run_worker("forkserver", "preload")


class Forked(Mounted):
    """A child of a process that has used the library."""

    def in_child(self, body):
        """Runs body in a forked child, and returns what it wrote."""
        r, w = os.pipe()
        pid = os.fork()
        if pid == 0:
            text = "nothing"
            try:
                os.close(r)
                text = body()
            except BaseException as e:
                text = f"{type(e).__name__}: {e}"
            finally:
                os.write(w, text.encode())
                os._exit(0)
        os.close(w)
        with os.fdopen(r) as f:
            text = f.read()
        self.assertEqual(os.waitpid(pid, 0)[1], 0)
        return text

    def test_refused(self):
        store(self.pool, self.memory, self.cache, KEYS, BLOCKS)
        leases = self.pool.pin(KEYS)
        layers = self.pool.retrieve(leases, self.memory, BLOCKS)
        transfer = layers.begin(0)

        def every_call():
            calls = [lambda: tuttifs.Store("/"), self.store.session, lambda: self.store.join(bytes(16)),
                     self.session.describe, self.session.stats, self.session.dma, lambda: self.session.token,
                     lambda: self.pool.peek(KEYS), lambda: self.pool.pin(KEYS), lambda: self.pool.reserve(KEYS),
                     self.pool.stats, leases.release, lambda: layers.begin(1), layers.failed, layers.finish,
                     transfer.wait_on, transfer.wait, layers.close, self.memory.close, self.pool.close,
                     self.session.close, self.store.close]
            refused = 0
            for call in calls:
                try:
                    call()
                except tuttifs.ForkedError as e:
                    refused += e.code == tuttifs.Code.ECHILD and "spawn" in str(e)
            return f"{refused} of {len(calls)}"

        begin = time.monotonic()
        self.assertEqual(self.in_child(every_call), "22 of 22")
        self.assertLess(time.monotonic() - begin, 60, "nothing hung")
        self.assertEqual(self.in_child(lambda: str(len(tuttifs.keys([1, 2], 1)))), "2", "keys need no library")

        def every_function():
            """All of the library, with arguments that would be wrong otherwise."""
            so, functions = self.store._lib._so, tuttifs._lib.FUNCTIONS
            codes = [getattr(so, f"tuttifs_{name}")(*[None if a in (tuttifs._lib.vp, tuttifs._lib.cp) else 0 for a in types])
                     for name, types in functions.items()]
            return f"{codes.count(-tuttifs.Code.ECHILD)} of {len(codes)}, {so.tuttifs_version() >> 16}"

        count = len(tuttifs._lib.FUNCTIONS)
        self.assertEqual(self.in_child(every_function), f"{count} of {count}, {tuttifs._lib.MAJOR}")
        transfer.wait()  # the parent goes on
        layers.close()
        leases.release()
        restore(self, self.pool, self.memory, self.cache, KEYS, BLOCKS[::-1])

    def test_a_child_that_ends_properly(self):
        """Its interpreter's end touches nothing of the parent's."""
        context = multiprocessing.get_context("fork")
        process = context.Process(target=sys.exit, args=(0,))
        process.start()
        process.join()
        self.assertEqual(process.exitcode, 0)
        pid = os.fork()
        if pid == 0:
            sys.stdout = sys.stderr = open(os.devnull, "w")
            import atexit
            atexit._run_exitfuncs()  # finalizers too
            os._exit(0)
        self.assertEqual(os.waitpid(pid, 0)[1], 0)
        self.assertEqual(self.pool.peek(KEYS), 0)


class Importing(unittest.TestCase):
    def test_loads_nothing(self):
        """Neither libtuttifs nor a driver nor PyTorch nor NumPy, and no thread."""
        done = python("""
            import os, sys
            import tuttifs
            tuttifs.keys([1, 2], 1)
            loaded = open("/proc/self/maps").read()
            print("libtuttifs" in loaded, "libcuda" in loaded, len(os.listdir("/proc/self/task")),
                  "torch" in sys.modules, "numpy" in sys.modules)
            """)
        self.assertEqual((done.stdout, done.stderr), ("False False 1 False False\n", ""))

    def test_no_driver_without_a_gpu_session(self):
        """A session of the CPU never opens libcuda: a context in a process that is to fork would spoil its children."""
        need_mount()
        with Volume() as volume:
            done = python("""
                import sys
                import tuttifs
                from volume import SESSION
                with tuttifs.Store(sys.argv[1]) as mount, mount.session(**SESSION) as session:
                    print("libtuttifs" in open("/proc/self/maps").read(), "libcuda" in open("/proc/self/maps").read())
                """, volume.path)
            self.assertEqual((done.stdout, done.stderr), ("True False\n", ""))

    def test_no_library(self):
        done = python("import tuttifs; tuttifs.Store('/')", TUTTIFS_LIBRARY="/nowhere/libtuttifs.so.1")
        self.assertIn("ImportError: libtuttifs cannot be loaded: /nowhere/libtuttifs.so.1", done.stderr)
        self.assertIn("make wheel", done.stderr)

    def test_command(self):
        done = subprocess.run([sys.executable, "-B", "-m", "tuttifs", "--version"], text=True, capture_output=True)
        self.assertEqual(done.returncode, 0)
        self.assertRegex(done.stdout, "^tuttifs ")
        done = python("import tuttifs.__main__ as m; m.main()", TUTTIFS_BINARY="/nowhere/tuttifs")
        self.assertNotEqual(done.returncode, 0)


class Beside(unittest.TestCase):
    """Others that want signals in the same process."""

    def setUp(self):
        self.volume = Volume()
        self.addCleanup(self.volume.close)

    def test_faulthandler(self):
        """Before the library is loaded and after it, which is where Python's handlers replace Go's."""
        for when in ("before", "after"):
            for crash in (False, True):
                with self.subTest(when=when, crash=crash):
                    done = python("""
                        import ctypes, faulthandler, signal, sys, time
                        import tuttifs
                        import test_processes
                        if sys.argv[2] == "before":
                            faulthandler.enable()
                        test_processes.round_trip(sys.argv[1])
                        faulthandler.enable()
                        faulthandler.register(signal.SIGUSR1, all_threads=True)
                        for _ in range(3):
                            test_processes.round_trip(sys.argv[1])
                            signal.raise_signal(signal.SIGUSR1)
                        with tuttifs.Store(sys.argv[1]) as mount, mount.session():
                            # Only while no Python runs: its dumps from another thread read frames that change.
                            faulthandler.dump_traceback_later(0.05)
                            time.sleep(0.5)
                        print("done", flush=True)
                        if sys.argv[3] == "True":
                            ctypes.string_at(8)  # a fault in C, beside Go
                        """, self.volume.path, when, str(crash))
                    self.assertIn("done\n", done.stdout)
                    self.assertEqual(done.stderr.count("Current thread"), 3 + crash, done.stderr[-2000:])
                    self.assertEqual(done.stderr.count("Timeout ("), 1)
                    self.assertEqual("Fatal Python error: Segmentation fault" in done.stderr, crash)
                    self.assertEqual(done.returncode, -11 if crash else 0, done.stderr[-2000:])

    def test_second_go_runtime(self):
        other = os.environ.get("TUTTIFS_SECOND_GO")
        if not other:
            self.skipTest("TUTTIFS_SECOND_GO names no other library made by Go: go test ./python makes one")
        for first in ("tuttifs", "other"):
            with self.subTest(first=first):
                done = python("""
                    import ctypes, sys, threading
                    import test_processes, tuttifs

                    def load():
                        other = ctypes.CDLL(sys.argv[2])
                        other.Churn.restype = ctypes.c_uint64
                        return other

                    if sys.argv[3] == "other":
                        other = load()
                    test_processes.round_trip(sys.argv[1])
                    if sys.argv[3] == "tuttifs":
                        other = load()
                    sums, threads = [], []
                    for _ in range(3):
                        threads.append(threading.Thread(target=lambda: sums.append(other.Churn(200))))
                    for t in threads:
                        t.start()
                    for _ in range(5):
                        test_processes.round_trip(sys.argv[1])
                    for t in threads:
                        t.join()
                    print(sums, other.Fault())
                    """, self.volume.path, other, first)
                self.assertEqual((done.stdout, done.stderr), ("[19900, 19900, 19900] 1\n", ""))
