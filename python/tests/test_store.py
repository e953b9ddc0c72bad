"""Storing and restoring on a real mount, and what is refused there."""

import asyncio
import ctypes as C
import gc
import os
import re
import threading
import unittest

import tuttifs
from volume import IDENTITY, SESSION, Cache, Mounted, View, Volume, need_mount, restore, store

PROMPT = list(range(100, 134))  # eight files of four tokens, and two tokens


class RoundTrip(Mounted):
    def test_round_trip(self):
        keys = tuttifs.keys(PROMPT, 4)
        self.assertEqual(self.pool.peek(keys), 0)
        self.assertEqual(len(self.pool.pin(keys)), 0)
        store(self.pool, self.memory, self.cache, keys, [3, 1, 7, 5, 20, 18, 2, 11])
        self.assertEqual(self.pool.peek(keys), 8)
        self.assertEqual(self.pool.peek(tuttifs.keys(PROMPT[:12] + [0] * 8, 4)), 3)
        some = [bytes(32), keys[6], keys[2], bytes([7]) * 32, keys[7]]
        self.assertEqual(self.pool.present(some), [False, True, True, False, True])
        self.assertEqual((self.pool.present(some, tenant=1), self.pool.present([])), ([False] * 5, []))
        restore(self, self.pool, self.memory, self.cache, keys, [4, 6, 8, 10, 12, 14, 16, 18])
        stats = self.pool.stats()
        self.assertEqual((stats.files, stats.commits, stats.bad), (8, 8, 0))
        self.assertGreaterEqual(stats.hits, 8)

    def test_continued(self):
        """What is stored already is left out, and a chain is stored behind its beginning."""
        keys = tuttifs.keys(PROMPT, 4)
        store(self.pool, self.memory, self.cache, keys[:3], [0, 1, 2])
        self.cache.fill(list(range(8)))
        with self.pool.reserve(keys) as all_of_it:
            self.assertEqual([x.status for x in all_of_it][:4], [tuttifs.Status.EXISTS] * 3 + [tuttifs.Status.NEW])
            with self.pool.store(all_of_it, self.memory, list(range(8))) as layers:
                self.assertEqual(layers.slots, [3, 4, 5, 6, 7])
            self.assertEqual(all_of_it[2:6].to_be_written(), [1, 2, 3])
        self.assertEqual(self.pool.peek(keys), 3, "what was not committed was given up")
        with self.pool.reserve(keys, start=3) as rest, self.pool.store(rest, self.memory, list(range(3, 8))) as layers:
            self.assertEqual(len(rest), 5)
            layers.move_all(3)
            rest.commit()
        restore(self, self.pool, self.memory, self.cache, keys, list(range(8, 16)))
        with self.pool.reserve(keys) as nothing, self.pool.store(nothing, self.memory, list(range(8))) as layers:
            self.assertEqual(layers.slots, [])
            layers.move_all(3)
            nothing.commit()
        with self.pool.reserve(keys, start=8) as empty, self.pool.store(empty, self.memory, []) as layers:
            layers.move_all(3)
            empty.abort()
            empty.commit()
        with self.pool.pin(keys[:0]) as leases, self.pool.retrieve(leases, self.memory, []) as layers:
            layers.move_all(3)

    def test_leases(self):
        keys = tuttifs.keys(PROMPT, 4)
        store(self.pool, self.memory, self.cache, keys, list(range(8)))
        with self.pool.pin(keys, request=5) as leases:
            self.assertEqual(list(self.pool.pin(keys, request=5)), list(leases))
            part = leases[2:5]
            self.assertEqual([part[0], part[-1]], [leases[2], leases[4]])
            self.assertEqual(part[1:][0], leases[3])
            self.assertEqual(len(leases[5:2]), 0)
            self.assertEqual(leases[0].tokens, 4)
            self.assertEqual(len(leases[0].seed), 16)
            for wrong in (8, -9):
                with self.assertRaises(IndexError):
                    leases[wrong]
            with self.assertRaises(ValueError):
                leases[::2]
            self.cache.clear()
            with self.pool.retrieve(part, self.memory, [9, 10, 11]) as layers:
                layers.move_all(3)
            self.assertEqual(self.cache.block(1, 10), self.cache.content(1, 3))
            self.pool.report_bad(leases[0])  # it is whole, and stays
            self.assertEqual(self.pool.peek(keys), 8)
        with self.assertRaises(tuttifs.NotFoundError) as caught:
            self.pool._lib.release(self.pool._h, 5)
        self.assertEqual(caught.exception.code, tuttifs.Code.ENOENT)
        self.assertIsInstance(caught.exception, LookupError)

    def test_events(self):
        """What another engine stores, and what is evicted or removed, is told in order."""
        keys = tuttifs.keys(PROMPT, 4)
        store(self.pool, self.memory, self.cache, keys[:1], [0])
        events = self.pool.events()
        self.assertEqual((events.poll(), events.lost), ([], 0))
        with self.store.session(**SESSION) as other:
            pool = other.pool(self.pool.name, IDENTITY, self.cache.paged().objects())
            with other.register(self.cache.paged()) as memory:
                store(pool, memory, self.cache, keys[:4], [0, 1, 2, 3])
        self.assertEqual(events.poll(), [tuttifs.Event(k, 0, False) for k in keys[1:4]])
        os.unlink(os.path.join(self.volume.path, self.pool.name, "blocks", keys[3].hex()[:2], keys[3].hex()))
        self.volume.run("evict", self.volume.path, self.pool.name, "--prefix", keys[2].hex())
        gone = [e.key for e in events.poll() if e.removed]
        self.assertEqual((gone, events.lost), ([keys[3], keys[2], keys[1], keys[0]], 0))
        self.assertEqual(events.poll(), [])
        self.assertEqual(self.pool.peek(keys), 0)

    def test_layer_by_layer(self):
        keys = tuttifs.keys(PROMPT, 4)
        store(self.pool, self.memory, self.cache, keys, list(range(8)))
        self.cache.clear()
        with self.pool.pin(keys) as leases, self.pool.retrieve(leases, self.memory, list(range(8))) as layers:
            transfers = [layers.begin(layer) for layer in range(3)]
            for layer, transfer in enumerate(transfers):
                transfer.wait_on(None)
                self.assertEqual(self.cache.block(layer, 7), self.cache.content(layer, 7))
                transfer.wait()
                transfer.wait()
                transfer.wait_on(None)
            self.assertEqual(layers.failed(), {})
            layers.begin(0)  # is left for close to wait for

    def test_async(self):
        keys = tuttifs.keys(PROMPT, 4)

        async def main():
            self.cache.fill(list(range(8)))
            with self.pool.reserve(keys) as reservation:
                with self.pool.store(reservation, self.memory, list(range(8))) as layers:
                    await asyncio.gather(*(layers.begin(layer) for layer in range(3)))
                    layers.finish()
                await reservation.commit_async()
            self.cache.clear()
            ticks = 0

            async def tick():
                nonlocal ticks
                while True:
                    ticks += 1
                    await asyncio.sleep(0)

            beside = asyncio.create_task(tick())
            with self.pool.pin(keys) as leases, self.pool.retrieve(leases, self.memory, list(range(8))) as layers:
                for transfer in [layers.begin(layer) for layer in range(3)]:
                    await transfer
                    await transfer
                layers.check()
            self.assertGreater(ticks, 0, "the event loop went on")
            beside.cancel()

        asyncio.run(main())
        self.cache.same(self, list(range(8)))

    def test_async_errors(self):
        reservation = self.pool.reserve(tuttifs.keys(PROMPT, 4))
        with self.assertRaises(tuttifs.IncompleteError):
            asyncio.run(reservation.commit_async())

    def test_ranks(self):
        """Two members of a session store their halves: nothing is visible before the second has committed."""
        caches = [self.cache, Cache()]
        objects = self.cache.paged().objects(2)
        joined = self.store.join(self.session.token, **SESSION)
        self.addCleanup(joined.close)
        keys, blocks, errors = tuttifs.keys(PROMPT, 4), list(range(8)), []
        pools = [s.pool("ranks", IDENTITY, objects) for s in (self.session, joined)]
        memories = [s.register(c.paged()) for s, c in zip((self.session, joined), caches)]
        reservations = [p.reserve(keys, reserve=9) for p in pools]
        self.assertEqual([r[0].status for r in reservations], [tuttifs.Status.NEW, tuttifs.Status.JOINED])
        for rank in (0, 1):
            caches[rank].fill(blocks, first=rank)
            with pools[rank].store(reservations[rank], memories[rank], blocks, rank=rank) as layers:
                layers.move_all(3)

        def commit():
            try:
                reservations[0].commit([0])
            except tuttifs.Error as e:
                errors.append(e)

        first = threading.Thread(target=commit)
        first.start()
        self.assertEqual(pools[1].peek(keys), 0)
        reservations[1].commit([1])
        first.join()
        self.assertEqual(errors, [])
        with pools[1].pin(keys) as leases, pools[1].retrieve(leases, memories[1], blocks[::-1], rank=1) as layers:
            layers.move_all(3)
        self.assertEqual(caches[1].block(2, 7), Cache.content(2, 1))

        # A pin of one request is all members' that repeat it: one that leaves takes it from nobody, one that releases
        # it does so for all.
        third = self.store.join(self.session.token, **SESSION)
        pinned = [s.pool("ranks", IDENTITY, objects).pin(keys, request=77) for s in (self.session, joined, third)]
        self.assertEqual([list(p) for p in pinned], [list(pinned[0])] * 3)
        third.close()
        self.volume.run("evict", self.volume.path, "ranks", "--all")
        self.assertEqual(pools[0].peek(keys), 8)
        pinned[1].release()
        with self.assertRaises(tuttifs.NotFoundError):
            pinned[0].release()
        self.volume.run("evict", self.volume.path, "ranks", "--all")
        self.assertEqual(pools[0].peek(keys), 0)

    def test_flat(self):
        """Layers at offsets of flat memory: the session's own, and any other."""
        keys = tuttifs.keys(PROMPT, 4)
        store(self.pool, self.memory, self.cache, keys, list(range(8)))
        dma = self.session.dma()
        for memory, view, padded in ((self.session.register_flat(dma[:65536]), dma, False),
                                     (self.session.register_flat(dma[:65536], padded=True), dma, True),
                                     (self.session.register_flat(memoryview(bytearray(65536))), None, False)):
            view = memory._session._keep[memory._h.value] if view is None else view
            with self.pool.pin(keys) as leases, self.pool.retrieve(leases) as layers:
                layers.begin_at(1, memory, [4096 * (7 - i) for i in range(8)]).wait()
                layers.check()
                self.assertEqual(bytes(view[4096:8192]), Cache.content(1, 6))
                with self.assertRaises(tuttifs.InvalidError):
                    layers.begin_at(1, memory, [0])
                with self.assertRaises(tuttifs.InvalidError):
                    layers.begin(1)
            memory.close()
            memory.close()

    def test_scheduler(self):
        with self.store.session(**SESSION, no_budget=True, reads_not_first=False) as session:
            self.assertIn("scheduler learns, without budgets", session.describe())
            nothing = tuttifs.Offer(load=True, known=False, restore_ns=0, recompute_ns=0)
            self.assertEqual(session.offer(64, 128, 3), nothing)
            for wrong in ((0, 128, 3), (64, 128, 0), (1 << 31, 128, 3)):
                with self.assertRaises(tuttifs.InvalidError):
                    session.offer(*wrong)
            session.prefill(64, 128, 3)
            for layer in range(3):
                session.layer_done(layer)
            session.decode_step(193)
            session.end_pass()
            stats = session.scheduler_stats()
            self.assertEqual((stats.passes, stats.layers, stats.decode_steps, stats.bubbles), (1, 3, 1, 0))
            self.assertEqual(session.layer_bubbles(3), [0, 0, 0])
            with self.assertRaises(tuttifs.NotSupportedError):
                session.layer_done(0, 1 << 20)
            with self.assertRaises(tuttifs.InvalidError):
                session.prefill(0, 128, 3)
        with self.assertRaises(tuttifs.InvalidError):
            self.store.session(slack_table="/proc/version")

    def test_sessions_memory_outlives_its_views(self):
        session = self.store.session(**SESSION)
        view = session.dma()[100:200]
        session.register_flat(session.dma())
        session.close()
        view[0] = 7
        self.assertEqual(view[0], 7)
        token = session.token  # it has not ended yet
        del view
        gc.collect()
        with self.assertRaises(tuttifs.StaleError):
            self.store.join(token, **SESSION)

    def test_sessions_end_with_their_objects(self):
        session = self.store.session(**SESSION)
        session.register(Cache().paged())
        token = session.token
        del session
        gc.collect()
        with self.assertRaises(tuttifs.StaleError):
            self.store.join(token, **SESSION)


class Damage(Mounted):
    def test_damage(self):
        """A file with another seed is a miss, alone."""
        keys = tuttifs.keys(PROMPT, 4)
        store(self.pool, self.memory, self.cache, keys, list(range(8)))
        with self.pool.pin(keys) as leases:
            leases._array[2].seed[5] ^= 1
            with self.pool.retrieve(leases, self.memory, list(range(8))) as layers:
                with self.assertRaises(tuttifs.ChecksumError) as caught:
                    layers.move_all(3)
                self.assertIn("1 of 8 files failed, the first is that of lease 2", str(caught.exception))
                failed = layers.failed()
            self.assertEqual(list(failed), [2])
            self.assertEqual(failed[2].code, tuttifs.Code.EILSEQ)
        self.assertEqual(self.cache.block(0, 2), bytes(4096))
        self.assertEqual(self.cache.block(0, 3), Cache.content(0, 3))


    def test_commit_from_loads(self):
        """What was computed from a load is stored if the load was whole."""
        keys = tuttifs.keys(PROMPT, 4)
        store(self.pool, self.memory, self.cache, keys[:4], [0, 1, 2, 3])
        for bad in (True, False):
            with self.pool.pin(keys) as leases, self.pool.reserve(keys, start=4) as slots:
                self.assertEqual((len(leases), len(slots)), (4, 4))
                leases._array[1].seed[3] ^= bad
                with self.pool.retrieve(leases, self.memory, [0, 1, 2, 3]) as load, \
                        self.pool.store(slots, self.memory, [4, 5, 6, 7]) as computed:
                    load.begin(0)
                    computed.move_all(3)
                    if bad:
                        with self.assertRaises(tuttifs.ChecksumError) as caught:
                            slots.commit(loads=[load])
                        self.assertIn("given up", str(caught.exception))
                        with self.assertRaises(tuttifs.NotFoundError):
                            slots.commit()
                    else:
                        asyncio.run(slots.commit_async(loads=[load]))
            self.assertEqual(self.pool.peek(keys), 4 if bad else 8)
        with self.pool.reserve(tuttifs.keys(PROMPT[1:5], 4)) as slots, self.assertRaises(tuttifs.ClosedError):
            slots.commit(loads=[load])


class Refusals(Mounted):
    def refused(self, kind, f, *arguments, **named):
        with self.assertRaises(kind) as caught:
            f(*arguments, **named)
        self.assertTrue(str(caught.exception))
        self.assertEqual(caught.exception.code, kind.default)

    def test_refusals(self):
        keys = tuttifs.keys(PROMPT, 4)
        invalid = tuttifs.InvalidError
        self.refused(tuttifs.NotMountedError, tuttifs.Store, "/")
        self.refused(invalid, tuttifs.Store, "/a\0b")
        self.refused(invalid, self.store.join, b"short")
        self.refused(tuttifs.StaleError, self.store.join, bytes(16))
        self.refused(invalid, self.store.session, auto=True)
        self.refused(invalid, self.store.session, polling=True)
        self.refused(invalid, self.store.session, depth=3)
        with self.assertRaises(TypeError):
            self.store.session(lane=3)
        objects = self.cache.paged().objects()
        self.refused(tuttifs.ExistsError, self.session.pool, self.pool.name, IDENTITY, objects[:1])
        self.refused(tuttifs.IdentityError, self.session.pool, "other", {}, objects)
        self.refused(tuttifs.IdentityError, self.session.pool, "other", {**IDENTITY, "model": "auto"}, objects)
        self.refused(tuttifs.IdentityError, self.session.pool, "other", "no JSON", objects)
        self.refused(invalid, self.session.pool, "a\0b", IDENTITY, objects)
        self.refused(invalid, self.session.pool, "other", IDENTITY, [])
        self.refused(invalid, self.store.session, lanes=1 << 32)
        self.refused(invalid, self.session.pool, "other", IDENTITY, objects, max_slots=1 << 32)
        for wrong in (tuttifs.Object(1 << 16, 0, (8,)), tuttifs.Object(0, -1, (8,)), tuttifs.Object(0, 0, (1 << 32,))):
            self.refused(invalid, self.session.pool, "other", IDENTITY, [wrong])
        for tenant in (-1, 1 << 32):  # the neighbour's, were it cut
            self.refused(invalid, self.pool.peek, keys, tenant=tenant)
            self.refused(invalid, self.pool.pin, keys, tenant=tenant)
            self.refused(invalid, self.pool.reserve, keys, tenant=tenant)
        self.refused(invalid, self.pool.pin, keys, request=1 << 64)
        self.refused(invalid, self.pool.peek, [b"short"])
        self.refused(invalid, self.pool.pin, [b"short"])
        self.refused(invalid, self.pool.reserve, keys, start=9)
        self.refused(tuttifs.NotSupportedError, self.session.register,
                     tuttifs.Paged.of([View(bytearray(2 * 6 * 64), (2, 6, 64))], 1))
        self.refused(invalid, self.session.register_flat, memoryview(b"read-only"))
        self.refused(invalid, self.session.register_flat, View(bytearray(64), (4, 4), (16, 1)))

    def test_layers(self):
        keys = tuttifs.keys(PROMPT, 4)
        invalid = tuttifs.InvalidError
        with self.pool.reserve(keys) as reservation:
            self.refused(invalid, self.pool.store, reservation, self.memory, [1, 2])
            self.refused(invalid, self.pool.store, reservation, self.memory)
            self.refused(invalid, self.pool.store, reservation, self.memory, [Cache.blocks] * 8)
            self.refused(invalid, self.pool.store, reservation, self.memory, list(range(8)), rank=1)
            self.refused(invalid, self.pool.store, reservation, self.memory, list(range(8)), rank=1 << 16)
            self.refused(invalid, self.pool.store, reservation, self.memory, list(range(-1, 7)))
            self.refused(invalid, self.pool.store, reservation, self.memory, [0.5] * 8)
            self.refused(invalid, reservation.commit, [1 << 16])
            self.refused(invalid, reservation.commit, [])
            self.refused(invalid, self.pool.retrieve, reservation, self.memory, list(range(8)))
            with self.pool.store(reservation, self.memory, list(range(8))) as layers:
                self.refused(tuttifs.IncompleteError, layers.finish)
                self.refused(invalid, layers.begin, 3)
                self.refused(tuttifs.NotSupportedError, layers.begin, 0, after=1)

                class Event:
                    cuda_event = 0

                self.refused(invalid, layers.begin, 0, after=Event())
        self.assertEqual(self.pool.stats().slots_used, 0, "what could not be committed was given up")
        with self.pool.reserve(keys) as reservation:
            reservation.abort()
            self.refused(tuttifs.NotFoundError, reservation.commit)

    def test_incomplete(self):
        """`with` lets the error of a commit through, and what was whole is there."""
        keys = tuttifs.keys(PROMPT, 4)
        for whole in (0, 4):
            with self.assertRaises(tuttifs.IncompleteError):
                with self.pool.reserve(keys) as reservation:
                    with self.pool.store(reservation[:whole], self.memory, list(range(whole))) as layers:
                        layers.move_all(3)
                    reservation.commit()
            self.refused(tuttifs.NotFoundError, reservation.abort)
            self.refused(tuttifs.IncompleteError, reservation.commit)  # which waits for what is on its way
            self.assertEqual(self.pool.peek(keys), whole)

    def test_closed(self):
        session = self.store.session(**SESSION)
        pool = session.pool("closed", IDENTITY, self.cache.paged().objects())
        memory = session.register(self.cache.paged())
        with pool.reserve(tuttifs.keys(PROMPT, 4)) as reservation:
            layers = pool.store(reservation, memory, list(range(8)))
            transfer = layers.begin(0)
            session.close()
            self.refused(tuttifs.ClosedError, layers.begin, 0)
            self.refused(tuttifs.ClosedError, transfer.wait)
            self.refused(tuttifs.ClosedError, transfer.wait)
        self.refused(tuttifs.ClosedError, pool.peek, [])
        for x in (layers, memory, pool, session):
            x.close()
            x.close()
        self.refused(tuttifs.ClosedError, session.describe)
        self.store.close()
        self.store.close()
        self.refused(tuttifs.ClosedError, self.store.session)

    def test_gpu(self):
        with self.store.session("cuda", auto=True, **{**SESSION, "dma_bytes": 0, "bounce_bytes": 0}) as session:
            if not session.stats().gpu:
                self.refused(tuttifs.NoDeviceError, self.store.session, "cuda")
                self.assertGreater(session.stats().lanes, 0)
            self.assertIn("bounce", session.describe())

    def test_no_space(self):
        pool = self.session.pool("small", IDENTITY, self.cache.paged().objects(), max_slots=4)
        keys = tuttifs.keys(PROMPT, 4)
        self.refused(tuttifs.NoSpaceError, pool.reserve, keys)
        with pool.reserve(keys, partial=True) as some:
            self.assertEqual(len(some), 4)


class Restart(unittest.TestCase):
    """What was committed is there after the daemon's end, and what was open says so."""

    def test_restart(self):
        need_mount()
        keys, cache = tuttifs.keys(PROMPT, 4), Cache()
        with Volume() as volume:
            with tuttifs.Store(volume.path) as mount, mount.session(**SESSION) as session:
                pool = session.pool("kept", IDENTITY, cache.paged().objects())
                store(pool, session.register(cache.paged()), cache, keys, list(range(8)))
            volume.unmount()
            volume.mount()
            for _ in range(2):
                with tuttifs.Store(volume.path) as mount, mount.session(**SESSION) as session:
                    pool = session.pool("kept", IDENTITY, cache.paged().objects())
                    restore(self, pool, session.register(cache.paged()), cache, keys, list(range(8, 16)))
                    volume.kill()
                    for call in (pool.stats, lambda: pool.peek(keys), lambda: pool.pin(keys)):
                        with self.assertRaises(tuttifs.StaleError):
                            call()
                volume.mount()


class Structures(unittest.TestCase):
    def test_errors(self):
        e = tuttifs.errors.error(-84, "text")
        self.assertIsInstance(e, tuttifs.ChecksumError)
        self.assertEqual((e.code, e.text, str(e)), (84, "text", "text"))
        later = tuttifs.errors.error(-4242, "of a later version")
        self.assertEqual((type(later), later.code), (tuttifs.Error, 4242))
        for code in tuttifs.Code:
            self.assertEqual(tuttifs.errors.error(-code, "x").code, code)
            self.assertIsNot(type(tuttifs.errors.error(-code, "x")), tuttifs.Error)
        self.assertIsInstance(tuttifs.errors.error(-110, "x"), TimeoutError)
        self.assertIsInstance(tuttifs.errors.error(-22, "x"), ValueError)

    def test_header(self):
        """Codes and statuses are those of the header."""
        with open(os.path.join(os.path.dirname(__file__), "../../include/libtuttifs.h")) as f:
            header = f.read()
        codes = dict(re.findall(r"^\tTUTTIFS_(E\w+) = (\d+),?", header, re.M))
        self.assertEqual({name: int(n) for name, n in codes.items()}, {c.name: c.value for c in tuttifs.Code})
        statuses = dict(re.findall(r"^#define TUTTIFS_LEASE_(\w+) (\d+)u", header, re.M))
        self.assertEqual({name: int(n) for name, n in statuses.items()},
                         {s.name: s.value for s in tuttifs.Status if s != tuttifs.Status.OTHER})

    def test_statuses(self):
        leases = tuttifs.Leases((tuttifs._lib.Lease * 1)(tuttifs._lib.Lease(status=77)), 1)
        self.assertEqual(leases[0].status, tuttifs.Status.OTHER)
        self.assertFalse(leases[0].status.to_be_written)

    def test_keys_may_hold_zeros(self):
        self.assertEqual(C.sizeof(tuttifs._lib.Item), 72)
        item = tuttifs._lib.Item()
        C.memmove(C.addressof(item) + tuttifs._lib.Item.parent.offset, bytes(31) + b"\1", 32)
        self.assertEqual(bytes(item.parent), bytes(31) + b"\1")
