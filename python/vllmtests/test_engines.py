"""TuttifsConnector in real engines: what is restored gives the same tokens as what is computed."""

import contextlib
import json
import os
import random
import shutil
import socket
import sys
import tempfile
import time
import unittest
from typing import Any, Callable, Dict, List, Set

import msgspec
import zmq

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../tests"))

import model
from engine import FILE, Engine, connector
from volume import IDENTITY, SESSION, Volume, need_mount

import tuttifs
from tuttifs.vllm.metrics import COUNTS

TOKENS, MANY = 12, 120
FILE_BYTES = FILE * model.LAYERS * 2 * model.KV_HEADS * model.HEAD * 4  # K and V, float32


def prompt(seed: int, length: int) -> List[int]:
    r = random.Random(seed)
    return [r.randrange(3, model.VOCABULARY) for _ in range(length)]


def whole(prompt: List[int]) -> int:
    """Tokens of a prompt that can be restored: those of whole files, and not the last one."""
    return (len(prompt) - 1) // FILE * FILE


def computed(prompt: List[int]) -> int:
    """Files that a request leaves behind: its last token is never an input."""
    return (len(prompt) + TOKENS - 1) // FILE


def eventually(what: Callable[[], bool], text: str) -> None:
    limit = time.monotonic() + 60
    while not what():
        if time.monotonic() > limit:
            raise AssertionError(f"not within a minute: {text}")
        time.sleep(0.2)


PROMPTS = {name: prompt(seed, length) for seed, (name, length) in enumerate(
    [("short", 63), ("exact", 128), ("odd", 200), ("long", 330), ("damage", 260), ("away", 150), ("full", 190),
     ("tenant", 140), ("other", 210), ("woken", 170),
     ("asleep", 180)])}
PROMPTS["branch"] = PROMPTS["long"][:150] + prompt(99, 80)


class Restored(unittest.TestCase):
    """Scenarios in their order, because an engine takes long to start: later ones find what earlier ones stored."""

    @classmethod
    def setUpClass(cls) -> None:
        need_mount()
        cls.dir = tempfile.mkdtemp(prefix="tuttifs-vllm-")
        cls.addClassCleanup(shutil.rmtree, cls.dir, True)
        cls.model = model.make(os.path.join(cls.dir, "model"))
        cls.volume = Volume()
        cls.addClassCleanup(cls.volume.close)
        with cls.engine("reference", enable_prefix_caching=False) as e:
            cls.tokens = dict(zip(PROMPTS, (o["tokens"] for o in e.ready().generate(list(PROMPTS.values()), TOKENS))))
            cls.many = [o["tokens"] for o in e.generate([PROMPTS["away"], PROMPTS["tenant"]], MANY)]
            e.end()

    @classmethod
    def engine(cls, name: str, **options: Any) -> Engine:
        return Engine(cls.model, os.path.join(cls.dir, name + ".log"), **options)

    def same(self, e: Engine, *names: str, **more: Any) -> Dict[str, int]:
        """Generates, compares every token with what no cache gives, and returns the tokens that were cached."""
        outputs = e.generate([PROMPTS[n] for n in names], TOKENS, **more)
        for n, o in zip(names, outputs):
            self.assertEqual(o["tokens"], self.tokens[n], n)
        return {n: o["cached"] for n, o in zip(names, outputs)}

    def names(self) -> List[str]:
        """The files that the engines have stored: in pools of their own, by the mount's own account."""
        return [name for pool in os.listdir(self.volume.path) if pool.startswith("vllm-")
                for _, _, names in os.walk(os.path.join(self.volume.path, pool, "blocks")) for name in names]

    def read(self) -> int:
        """Bytes that engines have read from the drives since the mount."""
        with open(os.path.join(self.volume.path, ".tuttifs/stats")) as f:
            n: int = json.load(f)["io"]["bytes_read"]
        return n

    def files(self) -> int:
        return len(self.names())

    def has(self, name: str) -> bool:
        """Whether all of a prompt is stored."""
        return {k.hex() for k in tuttifs.keys(PROMPTS[name], FILE)} <= set(self.names())

    def stored(self, files: int) -> None:
        """Waits until so many files are stored, of which there must not be more."""
        eventually(lambda: self.files() >= files, f"{files} files stored")
        self.assertEqual(self.files(), files)

    def test_1_one_engine(self) -> None:
        with self.engine("one", **connector(self.volume.path, fixed_weights=True)) as e:
            e.ready()
            self.restores(e)
            self.keeps_tenants_apart(e)
            self.survives_damage(e)
            self.survives_the_daemon(e)
            self.survives_a_full_volume(e)
            self.wakes(e)
            self.assertEqual(e.count("tuttifs_tainted_files"), 0)
            e.reset()
            self.same(e, "odd", "branch")
            eventually(lambda: self.has("odd") and self.has("branch"), "what the next engines look for")
            e.kill()

    def restores(self, e: Engine) -> None:
        first = ["short", "exact", "odd", "long"]
        self.assertEqual(self.same(e, *first), dict.fromkeys(first, 0))
        files = sum(computed(PROMPTS[n]) for n in first)
        self.stored(files)
        e.reset()
        self.assertEqual(self.same(e, *first), {n: whole(PROMPTS[n]) for n in first})
        self.assertEqual(e.count("tuttifs_hit_tokens"), sum(whole(PROMPTS[n]) for n in first))
        # What a branch shares with a prompt, 150 tokens, are two files. It is stored once.
        e.reset()
        self.assertEqual(self.same(e, "branch"), {"branch": 128})
        self.stored(files + computed(PROMPTS["branch"]) - 2)
        # Behind what an engine has itself it loads the rest.
        self.assertEqual(self.same(e, "long"), {"long": whole(PROMPTS["long"])})
        e.reset()
        self.assertEqual(self.same(e, "branch", "long"), {n: whole(PROMPTS[n]) for n in ("branch", "long")})
        self.counted(e)

    def counted(self, e: Engine) -> None:
        """What vLLM shows of the connector is what has happened."""
        counts = {n[len("vllm:tuttifs_"):]: v for n, v in e.counts().items() if n.startswith("vllm:tuttifs_")}
        self.assertEqual(set(counts), set(COUNTS))
        self.assertEqual(counts["stored_files"], self.files())
        self.assertEqual(counts["stored_bytes"], self.files() * FILE_BYTES)
        self.assertEqual(counts["loaded_bytes"], counts["loaded_files"] * FILE_BYTES)
        self.assertGreater(counts["loaded_files"], 0)
        for name in ("failed_files", "unstored_files", "declined_files", "tainted_files", "lookup_errors"):
            self.assertEqual(counts[name], 0, name)

    def keeps_tenants_apart(self, e: Engine) -> None:
        for more in ({"params": {"tuttifs_tenant": 5}}, {"params": {"tuttifs_tenant": 6}}, {"salt": "a"},
                     {"salt": "b"}):
            before = self.files()
            e.reset()
            self.assertEqual(self.same(e, "tenant", **more), {"tenant": 0}, more)
            self.stored(before + computed(PROMPTS["tenant"]))
            e.reset()
            self.assertEqual(self.same(e, "tenant", **more), {"tenant": whole(PROMPTS["tenant"])}, more)

    def survives_damage(self, e: Engine) -> None:
        before = self.files()
        self.same(e, "damage")
        self.stored(before + computed(PROMPTS["damage"]))
        self.damage("damage", 2)
        e.reset()
        self.same(e, "damage")
        self.assertEqual(e.count("tuttifs_failed_files"), 1)
        self.stored(before + computed(PROMPTS["damage"]))  # what was damaged is computed again, and stored
        e.reset()
        self.assertEqual(self.same(e, "damage"), {"damage": whole(PROMPTS["damage"])})
        self.assertEqual(e.count("tuttifs_failed_files"), 1)

    def damage(self, name: str, file: int) -> None:
        """Flips a bit in the first object of a prompt's file, on its drive."""
        found = []
        keys = tuttifs.keys(PROMPTS[name], FILE)
        for directory, _, names in os.walk(self.volume.path):
            found += [os.path.join(directory, n) for n in names if n == keys[file].hex()]
        self.assertEqual(len(found), 1)
        line = os.getxattr(found[0], "user.tuttifs.extents").decode().splitlines()[0]
        _, drive, unit, _ = (int(word) for word in line.split())
        with open(self.volume.drives[drive], "r+b") as f:
            f.seek(unit * 4096 + 77)
            byte = f.read(1)[0]
            f.seek(unit * 4096 + 77)
            f.write(bytes([byte ^ 0x10]))

    def survives_the_daemon(self, e: Engine) -> None:
        before = self.files()
        self.same(e, "away")
        self.stored(before + computed(PROMPTS["away"]))
        self.volume.kill()
        e.reset()
        self.assertEqual(self.same(e, "away", "long"), {"away": 0, "long": 0})  # nothing to be had, and nothing wrong
        self.volume.mount()

        def back() -> bool:
            e.reset()
            return self.same(e, "away", "long") == {n: whole(PROMPTS[n]) for n in ("away", "long")}
        eventually(back, "hits after the daemon's return")

    def survives_a_full_volume(self, e: Engine) -> None:
        """Another pool has all the space that is left: the engine's pool keeps what it has, and evicts what is old."""
        before = self.files()
        with tuttifs.Store(self.volume.path) as store, store.session(**SESSION) as session, \
                contextlib.ExitStack() as held:
            pool = session.pool("ballast", IDENTITY, [tuttifs.Object(0, 0, (1 << 20,))])
            keys = [bytes([i >> 8, i & 255]) * 16 for i in range(1, 2000)]
            with self.assertRaises(tuttifs.NoSpaceError):
                while True:
                    keys = keys[len(held.enter_context(pool.reserve(keys, partial=True))):]
            stored = 0
            while self.files() == before + stored:
                self.assertLess(stored, 1000)
                e.generate([prompt(1000 + stored + i, FILE + 1) for i in range(8)], 1)
                stored += 8
                eventually(self.settled, "stores that end")
            e.reset()
            self.same(e, "full", "long")

        def room() -> bool:
            e.reset()
            self.same(e, "full", "odd")
            return self.has("full") and self.has("odd")
        eventually(room, "stores when there is room again")

    def wakes(self, e: Engine) -> None:
        """What sleeps and wakes with the same weights finds its prefixes, and stores new ones."""
        before = self.files()
        e.sleep()
        self.assertEqual(self.same(e, "odd"), {"odd": whole(PROMPTS["odd"])})
        e.sleep()
        self.same(e, "woken")
        self.stored(before + computed(PROMPTS["woken"]))

    def settled(self) -> bool:
        """Whether the number of files stays."""
        n = self.files()
        time.sleep(0.3)
        return self.files() == n

    def test_2_two_engines(self) -> None:
        """After the first was killed: what it had stored is there, for two engines at a time."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        events = zmq.Context.instance().socket(zmq.SUB)
        self.addCleanup(events.close, 0)
        events.subscribe(b"")
        events.connect(f"tcp://127.0.0.1:{port}")
        self.seen: Dict[str, Set[bytes]] = {"BlockStored": set(), "BlockRemoved": set()}
        told = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
        with self.engine("two", async_scheduling=True, kv_events_config=told, **connector(self.volume.path)) as a, \
                self.engine("three", async_scheduling=False, max_model_len=352, num_gpu_blocks_override=13,
                            **connector(self.volume.path)) as b:
            for e in (a.ready(), b.ready()):
                self.assertEqual(self.same(e, "odd", "branch"), {n: whole(PROMPTS[n]) for n in ("odd", "branch")})
            before = self.files()
            self.assertEqual(self.same(a, "other"), {"other": 0})
            self.stored(before + computed(PROMPTS["other"]))
            self.assertEqual(self.same(b, "other"), {"other": whole(PROMPTS["other"])})
            self.assertEqual(self.files(), before + computed(PROMPTS["other"]))
            self.preempts(b)
            self.same(a, "odd")  # events are taken along by the next step
            wanted = set(tuttifs.keys(PROMPTS["other"], FILE))
            eventually(lambda: wanted <= self.told(events)["BlockStored"], "events of what was stored")
            self.assertFalse(wanted & self.seen["BlockRemoved"])
            # Somebody removes them: it is told without any request that looks for them.
            self.remove("other")

            def gone() -> bool:
                self.same(a, "short")
                return wanted <= self.told(events)["BlockRemoved"]
            eventually(gone, "events of what was removed")
            a.reset()
            self.assertEqual(self.same(a, "other"), {"other": 0})
            eventually(lambda: self.has("other"), "what was removed is stored again")
            a.end()
            b.end()

    def preempts(self, e: Engine) -> None:
        """Two requests outgrow the engine's blocks: one gives its own back, and comes again."""
        before = e.count("num_preemptions")
        e.reset()
        outputs = e.generate([PROMPTS["away"], PROMPTS["tenant"]], MANY)
        self.assertGreater(e.count("num_preemptions"), before)
        self.assertEqual([o["tokens"] for o in outputs], self.many)
        eventually(lambda: self.has("away") and self.has("tenant"), "what was preempted is stored")
        e.reset()
        outputs = e.generate([PROMPTS["away"], PROMPTS["tenant"]], MANY)
        self.assertEqual([o["tokens"] for o in outputs], self.many)
        self.assertEqual([o["cached"] for o in outputs], [whole(PROMPTS["away"]), whole(PROMPTS["tenant"])])

    def told(self, events: Any) -> Dict[str, Set[bytes]]:
        """The keys that an engine has published as stored on the mount, and as removed from it, until now."""
        while events.poll(0):
            for event in msgspec.msgpack.decode(events.recv_multipart()[-1])[1]:
                if event["type"] in self.seen and event.get("ownership") == "tuttifs":
                    self.seen[event["type"]] |= set(event["block_hashes"])
        return self.seen

    def remove(self, name: str) -> None:
        """Removes a prompt's files from the mount."""
        keys = {k.hex() for k in tuttifs.keys(PROMPTS[name], FILE)}
        for directory, _, names in os.walk(self.volume.path):
            for n in keys & set(names):
                os.unlink(os.path.join(directory, n))

    def test_3_layerwise(self) -> None:
        with self.engine("layerwise", **connector(self.volume.path, layerwise=True, scheduler=False)) as e:
            e.ready()
            self.assertEqual(self.same(e, "odd", "other"), {n: whole(PROMPTS[n]) for n in ("odd", "other")})
            self.assertEqual(e.count("tuttifs_failed_files"), 0)
            self.damage("odd", 1)
            e.reset()
            self.same(e, "odd", "other")  # the step that loads is the one that fails, and is done again
            self.assertEqual(e.count("tuttifs_failed_files"), 1)
            # Nobody has said that its weights stay the same: after sleep it uses nothing that is stored, and stores
            # nothing.
            e.sleep()
            before = self.files()
            self.assertEqual(self.same(e, "other", "asleep"), {"other": 0, "asleep": 0})
            self.assertTrue(self.settled())
            self.assertEqual(self.files(), before)
            e.end()

    def test_4_two_ranks(self) -> None:
        """Tensor parallelism: an identity of its own, every rank's part in every file."""
        with self.engine("ranks", tensor_parallel_size=2, **connector(self.volume.path)) as e:
            e.ready()
            before = self.files()
            self.assertEqual(self.same(e, "odd", "long"), {"odd": 0, "long": 0})
            self.stored(before + computed(PROMPTS["odd"]) + computed(PROMPTS["long"]))
            e.reset()
            self.assertEqual(self.same(e, "odd", "long"), {n: whole(PROMPTS[n]) for n in ("odd", "long")})
            e.end()

    def test_5_hybrid(self) -> None:
        """Layers with a window, and layers without: a prefix hits where both groups have what the next token needs."""
        hybrid = model.make(os.path.join(self.dir, "hybrid"), base=model.HYBRID)
        with Engine(hybrid, os.path.join(self.dir, "hybrid.log"), **connector(self.volume.path)) as e:
            e.ready()
            before, prompts = self.files(), [PROMPTS[n] for n in ("odd", "long", "short")]
            computing = e.generate(prompts, TOKENS)
            self.assertEqual([o["cached"] for o in computing], [0, 0, 0])
            # Each group has its own files.
            self.stored(before + 2 * sum(computed(p) for p in prompts))
            e.reset()
            restored = e.generate(prompts, TOKENS)
            self.assertEqual([o["cached"] for o in restored], [whole(p) for p in prompts])
            self.assertEqual([o["tokens"] for o in restored], [o["tokens"] for o in computing])
            # Of 320 tokens the window's group loads its last two files.
            self.assertEqual(e.count("tuttifs_loaded_files"), sum(whole(p) for p in prompts) // FILE + 2 + 2)
            e.end()

    def test_6_latent(self) -> None:
        """Latent attention: all ranks hold the same KV, of which one rank stores all and one reads all."""
        mla = model.make(os.path.join(self.dir, "mla"), base=model.MLA)
        with Engine(mla, os.path.join(self.dir, "mla.log"), tensor_parallel_size=2, block_size=16,
                    **connector(self.volume.path)) as e:
            e.ready()
            before, prompts = self.files(), [PROMPTS[n] for n in ("odd", "long")]
            # vLLM's latent attention for CPUs does not repeat itself when it computes several prompts, or one with
            # and without a prefix: only restores are compared.
            for p in prompts:
                self.assertEqual(e.generate([p], TOKENS)[0]["cached"], 0)
            self.stored(before + sum(computed(p) for p in prompts))
            tokens, files = [], sum(whole(p) for p in prompts) // FILE
            size = FILE * model.LAYERS * (model.MLA["kv_lora_rank"] + model.MLA["qk_rope_head_dim"]) * 4
            for n in (1, 2):
                read = self.read()
                for p in prompts:
                    e.reset()
                    (o,) = e.generate([p], TOKENS)
                    self.assertEqual(o["cached"], whole(p))
                    tokens.append(o["tokens"])
                self.assertEqual(e.count("tuttifs_loaded_files"), n * 2 * files)  # by each rank
                self.assertIn(self.read() - read, range(files * size, files * (size + 8192)))  # with trailers
            self.assertEqual(tokens[:2], tokens[2:])
            self.assertEqual(e.count("tuttifs_stored_files"), sum(computed(p) for p in prompts))  # by one rank
            self.assertEqual(e.count("tuttifs_failed_files"), 0)
            e.end()


if __name__ == "__main__":
    unittest.main()
