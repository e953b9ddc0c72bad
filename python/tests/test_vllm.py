"""The vLLM connector's parts that need neither vLLM nor PyTorch: arithmetic, keys, identities, and the scheduler's
side."""

import dataclasses
import os
import random
import tempfile
import time
import unittest
from types import SimpleNamespace

import tuttifs
from tuttifs.vllm import files, identity, options, scheduler
from tuttifs.vllm.files import Group
from tuttifs.vllm.messages import Pass, PoolSpec, Report, Weighed
from volume import Mounted, View

FULL = Group(0, ("a", "b"), 4, (2048, 2048))
WINDOW = Group(1, ("c",), 2, (1024,), window=9)


class Arithmetic(unittest.TestCase):
    def test_file_tokens(self):
        for block_tokens, block_bytes, wanted, result in (
                (16, 64 << 10, 0, 16), (16, 32 << 10, 0, 32), (16, 1 << 10, 0, 1024), (16, 1, 0, 4096),
                (128, 1 << 20, 0, 128), (16, 1 << 10, 48, 48), (16, 1 << 10, 40, None), (16, 1 << 10, 8, None)):
            g = [Group(0, ("a",), block_tokens, (block_bytes,))]
            if result is None:
                with self.assertRaises(tuttifs.InvalidError):
                    files.choose_file_tokens(g, wanted)
            else:
                self.assertEqual(files.choose_file_tokens(g, wanted), result)
        two = [Group(0, ("a",), 6, (1 << 20,)), Group(1, ("b",), 4, (1 << 20,))]
        self.assertEqual(files.choose_file_tokens(two, 0), 12)

    def test_pieces(self):
        for size in (1, 4095, 4096, 2 << 20, (2 << 20) + 1, 5 << 20, 12345678):
            p = files.pieces(size)
            self.assertEqual(sum(p), size)
            self.assertLessEqual(max(p), files.OBJECT_BYTES_MAX)
            self.assertEqual([n % 4096 for n in p[:-1]], [0] * (len(p) - 1))
            self.assertEqual(len(p), -(-size // files.OBJECT_BYTES_MAX))

    def test_trailing(self):
        for window, file_tokens, wanted in ((0, 4, 0), (1, 4, 1), (2, 4, 1), (5, 4, 1), (6, 4, 2), (9, 4, 2),
                                            (10, 4, 3)):
            self.assertEqual(dataclasses.replace(FULL, window=window).trailing(file_tokens), wanted)

    def test_complete(self):
        for known, computed, wanted in ((0, 0, 0), (8, 8, 2), (8, 11, 2), (11, 8, 2), (7, 100, 1), (-1, 4, 0)):
            self.assertEqual(files.complete(known, computed, 4), wanted)

    def test_blocks(self):
        table = [7, 3, 9, 5, 2]
        self.assertEqual(files.blocks_of(WINDOW, 4, table, 1, 2), [[9, 5]])
        with self.assertRaises(tuttifs.InvalidError):
            files.blocks_of(WINDOW, 4, table, 1, 3)
        for local, wanted in ((0, [[7, 3], [9, 5]]), (2, [[0, 3], [9, 5]]), (6, [[0, 0], [0, 5]]), 
                              (9, [[0, 0], [0, 0]])):
            blocks = files.blocks_of(WINDOW, 4, table, 0, 2)
            files.keep_local(WINDOW, 4, blocks, 0, local)
            self.assertEqual(blocks, wanted)
        blocks = files.blocks_of(WINDOW, 4, table, 1, 2)
        files.keep_local(WINDOW, 4, blocks, 1, 6)
        self.assertEqual(blocks, [[0, 5]])

    def test_hit_is_the_longest_that_all_groups_can_continue(self):
        r = random.Random(3)
        for _ in range(3000):
            n, file_tokens = r.randrange(9), 4
            groups = [dataclasses.replace(FULL, index=i, window=r.choice((0, 0, 3, 6, 12, 100))) for i in range(3)]
            chain = [bytes([i]) * 32 for i in range(n)]
            have = [{k for k in chain if r.random() < 0.7} for _ in groups]

            def peek(g, keys):
                return next((i for i, k in enumerate(keys) if k not in have[g.index]), len(keys))

            def fits(length):
                return all(k in have[g.index] for g in groups
                           for k in chain[files.needed(g, file_tokens, length):length])
            self.assertEqual(files.hit(groups, file_tokens, chain, peek), max(m for m in range(n + 1) if fits(m)))


class Chains(unittest.TestCase):
    def test_continued(self):
        r = random.Random(5)
        for _ in range(200):
            tokens = [r.randrange(1000) for _ in range(r.randrange(60))]
            media = [tuttifs.Media(r.randrange(40), 1 + r.randrange(9), bytes([r.randrange(3)])) for _ in range(3)]
            chain = files.Chain(4, 7, b"adapter", b"salt", media)
            wanted = tuttifs.keys(tokens, 4, tenant=7, adapter=b"adapter", salt=b"salt", media=sorted(set(media)))
            for n in sorted(r.randrange(len(wanted) + 1) for _ in range(4)):
                self.assertEqual(chain.upto(tokens, n), wanted[:n])
            self.assertEqual(chain.upto(tokens, len(wanted)), wanted)

    def test_media(self):
        place = SimpleNamespace(offset=3, length=5)
        found = files.media_of([SimpleNamespace(identifier="x", mm_position=place)])
        self.assertEqual(found, [tuttifs.Media(3, 5, b"x")])
        self.assertEqual(files.media_of(None), [])
        with self.assertRaises(tuttifs.InvalidError):
            files.media_of([SimpleNamespace(identifier="", mm_position=place)])


class Choices(unittest.TestCase):
    def test_parsed(self):
        o = options.Options.parse({"path": "/mnt/kv", "file_tokens": 64, "retry_seconds": 1})
        self.assertEqual((o.path, o.file_tokens, o.retry_seconds, o.layerwise), ("/mnt/kv", 64, 1, False))

    def test_refused(self):
        for given in ({}, {"path": ""}, {"path": 3}, {"path": "/", "file_token": 64},
                      {"path": "/", "file_tokens": "64"}, {"path": "/", "file_tokens": -1},
                      {"path": "/", "layerwise": 1}, {"path": "/", "file_tokens": True},
                      {"path": "/", "staging_bytes": 1000}):
            with self.subTest(given), self.assertRaises(tuttifs.InvalidError):
                options.Options.parse(given)

    def test_tenant(self):
        self.assertEqual(options.tenant_of(None, 3), 3)
        self.assertEqual(options.tenant_of({"tuttifs_tenant": 4, "other": 1}, 3), 4)
        for bad in (-1, 1 << 32, "4", None, 1.0, True):
            with self.assertRaises(tuttifs.InvalidError):
                options.tenant_of({"tuttifs_tenant": bad}, 3)


FACTS = identity.Facts(model="m/Small", revision="r", weights_epoch=0, config={"rope": 1}, model_dtype="bfloat16",
                       quantisation="none", tp=1, pp=1, cp=1, file_tokens=4)
GROUP = identity.GroupFacts(FULL, "group 0, FullAttentionSpec", "CPU_ATTN 2x4x256", "bfloat16", "none")

# Each field alone, otherwise. (A file's tokens are another number of blocks then, a block's bytes another page.)
OTHERWISE = [
    (dataclasses.replace(FACTS, model="m/Other"), GROUP), (dataclasses.replace(FACTS, revision="s"), GROUP),
    (dataclasses.replace(FACTS, weights_epoch=1), GROUP), (dataclasses.replace(FACTS, config={"rope": 2}), GROUP),
    (dataclasses.replace(FACTS, model_dtype="float16"), GROUP), (dataclasses.replace(FACTS, quantisation="fp8"), GROUP),
    (dataclasses.replace(FACTS, tp=2), GROUP), (dataclasses.replace(FACTS, pp=2), GROUP),
    (dataclasses.replace(FACTS, cp=2), GROUP), (dataclasses.replace(FACTS, file_tokens=8), GROUP),
    (FACTS, dataclasses.replace(GROUP, kind="group 1, FullAttentionSpec")),
    (FACTS, dataclasses.replace(GROUP, layout="CPU_ATTN 4x2x256")),
    (FACTS, dataclasses.replace(GROUP, cache_dtype="float8")),
    (FACTS, dataclasses.replace(GROUP, scale_format="fp8_tensor")),
    *((FACTS, dataclasses.replace(GROUP, group=dataclasses.replace(FULL, **change))) for change in (
        {"layers": ("a", "z")}, {"block_tokens": 2}, {"block_bytes": (2048, 1024)}, {"block_bytes": (4096, 4096)},
        {"window": 7}))]


class Identities(unittest.TestCase):
    def test_every_field_counts(self):
        varied = {f.name for f in dataclasses.fields(FACTS)} | {f.name for f in dataclasses.fields(GROUP)}
        seen = {identity.pool_name(identity.identity(FACTS, GROUP))}
        for facts, group in OTHERWISE:
            varied -= {n for n in varied if getattr(facts, n, None) != getattr(FACTS, n, None)
                       or getattr(group, n, None) != getattr(GROUP, n, None)}
            name = identity.pool_name(identity.identity(facts, group))
            self.assertNotIn(name, seen)
            seen.add(name)
        self.assertEqual(varied, set())

    def test_unknown_is_refused(self):
        for facts, group in (
                *((dataclasses.replace(FACTS, **{name: value}), GROUP) for name in ("model", "revision", "model_dtype",
                  "quantisation") for value in ("", "auto", "unknown", " ")),
                *((FACTS, dataclasses.replace(GROUP, **{name: value})) for name in ("layout", "kind", "cache_dtype",
                  "scale_format") for value in ("", "auto", "unknown")),
                *((dataclasses.replace(FACTS, **{name: 0}), GROUP) for name in ("tp", "pp", "cp", "file_tokens")),
                (dataclasses.replace(FACTS, config={}), GROUP)):
            with self.assertRaises(tuttifs.IdentityError):
                identity.identity(facts, group)

    def test_groups(self):
        class FullAttentionSpec(SimpleNamespace):
            pass

        class SlidingWindowSpec(SimpleNamespace):
            pass

        class MambaSpec(SimpleNamespace):
            pass
        full = FullAttentionSpec(block_size=16, unpadded_page_size_bytes=4096, sliding_window=5)
        group, kind = identity.group_of(2, ["x", "y"], full)
        self.assertEqual((group, kind), (Group(2, ("x", "y"), 16, (4096, 4096)), "group 2, FullAttentionSpec"))
        sliding = SlidingWindowSpec(block_size=16, unpadded_page_size_bytes=4096, sliding_window=100)
        self.assertEqual(identity.group_of(0, ["x"], sliding)[0].window, 100)
        for spec in (MambaSpec(block_size=16, unpadded_page_size_bytes=1),
                     FullAttentionSpec(block_size=16, unpadded_page_size_bytes=1, prefix_replay_tokens=3)):
            with self.assertRaises(tuttifs.IdentityError):
                identity.group_of(0, ["x"], spec)
        self.assertEqual(identity.scale_format(SimpleNamespace(kv_quant_mode=SimpleNamespace(name="NONE"))), "none")
        self.assertEqual(identity.scale_format(SimpleNamespace()), "unknown")

    def config(self, **changes):
        """A VllmConfig, as far as it counts, with some of its fields otherwise: "model.dtype" and so on."""
        own = {"rope": 1, "_name_or_path": "x", **changes.pop("own", {})}
        parts = {
            "model": SimpleNamespace(
                model="m", hf_config=SimpleNamespace(to_dict=lambda: own, _commit_hash=changes.pop("commit", "abc")),
                dtype="torch.bfloat16", quantization=None, model_class_overrides={}, model_impl="auto",
                disable_sliding_window=False, quantization_config=None, multimodal_config=None, code_revision=None,
                model_weights="", seed=0, max_model_len=100),
            "parallel": SimpleNamespace(
                tensor_parallel_size=2, pipeline_parallel_size=1, decode_context_parallel_size=1,
                prefill_context_parallel_size=1, data_parallel_size=1, data_parallel_rank=0),
            "cache": SimpleNamespace(cache_dtype="auto", kv_cache_dtype_skip_layers=[], kv_sharing_fast_prefill=False),
            "load": SimpleNamespace(load_format="auto"),
            "attention": SimpleNamespace(
                use_non_causal=False, use_prefill_query_quantization=False, disable_flashinfer_q_quantization=False,
                indexer_kv_dtype="auto")}
        whole = {"speculative_config": changes.pop("speculative", None), "lora_config": changes.pop("lora", None)}
        for name, value in changes.items():
            part, field = name.split(".")
            self.assertTrue(hasattr(parts[part], field), name)
            setattr(parts[part], field, value)
        return SimpleNamespace(**{name + "_config": part for name, part in parts.items()}, **whole)

    def pool_of(self, config, **more):
        o = options.Options.parse({"path": "/", **more})
        return identity.pool_name(identity.identity(identity.facts_of(config, o, 4), GROUP))

    def test_each_setting_alone_is_another_pool(self):
        def lora(**changes):
            return SimpleNamespace(**{"lora_dtype": "bfloat16", "target_modules": None,
                                      "enable_tower_connector_lora": False, **changes})

        def media(**changes):
            return SimpleNamespace(**{"mm_processor_kwargs": None, "video_pruning_rate": None, **changes})
        draft = SimpleNamespace(method="eagle", model="d", revision="1", quantization=None, draft_model_config=None)
        long = {"own": {"rope_parameters": {"rope_type": "longrope"}}}
        changes = [
            {"commit": "abd"}, {"own": {"rope": 2}}, {"own": {"more": 1}}, {"model.model": "n"},
            {"model.dtype": "torch.float16"}, {"model.quantization": "fp8"},
            {"model.model_class_overrides": {"a": "b"}}, {"model.model_impl": "transformers"},
            {"model.disable_sliding_window": True},
            {"model.quantization_config": {"a": 1}}, {"model.code_revision": "c"}, {"model.model_weights": "w"},
            {"model.multimodal_config": media()}, {"model.multimodal_config": media(mm_processor_kwargs={"a": 1})},
            {"model.multimodal_config": media(video_pruning_rate=0.5)}, {"load.load_format": "dummy"},
            {"load.load_format": "dummy", "model.seed": 1}, {"cache.cache_dtype": "fp8_e5m2"},
            {"cache.kv_cache_dtype_skip_layers": ["0"]}, {"cache.kv_sharing_fast_prefill": True},
            {"parallel.tensor_parallel_size": 4}, {"attention.use_non_causal": True},
            {"attention.use_prefill_query_quantization": True}, {"attention.disable_flashinfer_q_quantization": True},
            {"attention.indexer_kv_dtype": "fp8"}, {"speculative": draft},
            {"speculative": SimpleNamespace(**{**vars(draft), "revision": "2"})},
            {"speculative": SimpleNamespace(**{**vars(draft), "quantization": "fp8"})},
            {"lora": lora(target_modules=["q_proj"])}, {"lora": lora(enable_tower_connector_lora=True)},
            {"lora": lora(lora_dtype="float32")}, long, {**long, "model.max_model_len": 200}]
        seen = {self.pool_of(self.config())}
        for change in changes:
            name = self.pool_of(self.config(**change))
            self.assertNotIn(name, seen, change)
            seen.add(name)
        for more in ({"revision": "mine"}, {"weights_epoch": 1}):
            name = self.pool_of(self.config(), **more)
            self.assertNotIn(name, seen, more)
            seen.add(name)

    def test_what_changes_nothing_shares(self):
        """Data-parallel replicas above all."""
        here = self.pool_of(self.config())
        for change in ({"parallel.data_parallel_size": 4, "parallel.data_parallel_rank": 3},
                       {"model.max_model_len": 200}, {"own": {"_name_or_path": "y", "transformers_version": "5"}},
                       {"model.seed": 7},
                       {"load.load_format": "safetensors"},
                       {"lora": SimpleNamespace(lora_dtype="auto", target_modules=None,
                                                enable_tower_connector_lora=False)}):
            self.assertEqual(self.pool_of(self.config(**change)), here, change)

    def test_a_configuration_that_is_not_known_is_refused(self):
        for change in ({"commit": None},  # a local directory, and nobody said which weights are in it
                       {"parallel.pipeline_parallel_size": 2}, {"parallel.decode_context_parallel_size": 2},
                       {"parallel.prefill_context_parallel_size": 2}, {"model.model": ""}, {"model.dtype": "auto"}):
            with self.subTest(change), self.assertRaises(tuttifs.IdentityError):
                self.pool_of(self.config(**change))
        self.assertIn("m", self.pool_of(self.config(commit=None), revision="mine"))

    def test_adapters(self):
        with tempfile.TemporaryDirectory() as d:
            self.assertIsNone(scheduler.digest_of_files(d))
            with open(os.path.join(d, "weights"), "wb") as f:
                f.write(b"1")
            one = scheduler.digest_of_files(d)
            with open(os.path.join(d, "weights"), "wb") as f:
                f.write(b"2")
            self.assertNotIn(scheduler.digest_of_files(d), (one, None))
        self.assertIsNone(scheduler.digest_of_files(d))


def spec(facts=FACTS, group=GROUP):
    fields = identity.identity(facts, group)
    return PoolSpec(group.group, identity.pool_name(fields), fields, "",
                    tuple(identity.objects(group.group, facts.file_tokens, facts.tp)))


def request(name, tokens, **more):
    return SimpleNamespace(**{"request_id": name, "all_token_ids": tokens, "num_computed_tokens": 0,
                              "num_prompt_tokens": len(tokens),
                              "lora_request": None,
                              "cache_salt": None, "mm_features": [], "kv_transfer_params": None, **more})


def lora(path, **more):
    return SimpleNamespace(**{"lora_name": "l", "lora_path": path, "lora_int_id": 1, "load_inplace": False, **more})


TABLE = [[11, 12, 13, 14, 15, 16]]
PROMPT = list(range(100, 117))  # 4 files and a tail


class Schedule(Mounted):
    """The scheduler's side on a mount. The workers are this test."""

    def setUp(self):
        super().setUp()
        self.options = options.Options.parse({"path": self.volume.path, "retry_seconds": 0.05})
        # Every test has a pool of its own.
        self.spec = spec(dataclasses.replace(FACTS, revision=self.id()))
        self.scheduling = scheduler.Scheduling(self.options, 4, [self.spec])
        self.addCleanup(self.scheduling.close)

    def put(self, keys, tenant=0, pool_spec=None):
        """Stores files as a worker would. Each layer of a file is 2,048 bytes."""
        pool = scheduler.open_pool(self.session, pool_spec or self.spec, self.options)
        memory = bytearray(len(keys) * 2 * 2048)
        flat = self.session.register_flat(View(memory, (len(memory),)))
        with pool.reserve(keys, tenant=tenant) as reservation, pool.store(reservation) as layers:
            for layer in range(2):
                layers.begin_at(layer, flat, [(2 * i + layer) * 2048 for i in range(len(keys))])
            layers.wait()
            layers.finish()
            reservation.commit()
        flat.close()
        pool.close()

    def test_identities_share_nothing(self):
        keys = tuttifs.keys(PROMPT, 4)
        self.put(keys, pool_spec=spec())
        with scheduler.open_pool(self.session, spec(), self.options) as pool:
            self.assertEqual(pool.peek(keys), 4)
        for facts, group in OTHERWISE:
            with scheduler.open_pool(self.session, spec(facts, group), self.options) as pool:
                self.assertEqual(pool.peek(keys), 0, (facts, group))

    def test_the_mount_holds_to_identities(self):
        """Each field otherwise: another pool, in which nothing is found, and never one of this name. Each field left
        out, unknown, or of another name is refused."""
        keys, fields = tuttifs.keys(PROMPT, 4), dict(self.spec.identity)
        self.put(keys)

        def open_pool(name, **changed):
            whole = {n: v for n, v in {**fields, **changed}.items() if v is not None}
            objects = [tuttifs.Object(layer, rank, (size,)) for layer, rank, size in self.spec.objects]
            return self.session.pool(name, whole, objects)
        with open_pool(self.spec.name) as pool:
            self.assertEqual(pool.peek(keys), 4)
        for n, (name, value) in enumerate(fields.items()):
            other = f"{value}1" if isinstance(value, str) else value // 2 if name == "block_tokens" else value * 2 or 1
            with self.subTest(name):
                with open_pool(f"{self.spec.name}-{n}", **{name: other}) as pool:
                    self.assertEqual(pool.peek(keys), 0)
                with self.assertRaises(tuttifs.ExistsError):
                    open_pool(self.spec.name, **{name: other})
                for nothing in [None] + ([0] if value and isinstance(value, int) else []) + (
                        ["", "auto", "unknown"] if isinstance(value, str) else []):
                    with self.assertRaises(tuttifs.IdentityError):
                        open_pool(f"{self.spec.name}-unknown", **{name: nothing})
        with self.assertRaises(tuttifs.IdentityError):
            open_pool(f"{self.spec.name}-unknown", sampling="greedy")

    def test_a_request(self):
        s, r = self.scheduling, request("one", PROMPT)
        self.assertEqual(s.matched(r, 0), 0)
        step = s.step({"one": 17}, lambda name: TABLE)
        (store,), (part,) = step.stores, step.stores[0].parts
        self.assertEqual((part.first, part.keys, part.blocks), (0, tuttifs.keys(PROMPT, 4), [[11], [12], [13], [14]]))
        self.put(part.keys)
        s.heard(Report(step.number, stores={store.number: {0: [0, 1, 2, 3]}}), ())
        self.assertEqual([e.tokens for e in s.take_events()], [PROMPT[i:i + 4] for i in (0, 4, 8, 12)])
        r.num_computed_tokens, r.all_token_ids = 17, PROMPT + [1, 2, 3]
        self.assertEqual([p.first for p in s.step({"one": 3}, lambda name: [TABLE[0]]).stores[0].parts], [4])
        s.finished("one")
        self.assertEqual(s.step({"one": 1}, lambda name: TABLE).stores, [])

    def test_stores_without_lookups(self):
        s = self.scheduling
        s.track(request("p", PROMPT))
        (part,) = s.step({"p": 17}, lambda name: TABLE).stores[0].parts
        self.assertEqual((part.first, len(part.blocks)), (0, 4))

    def test_a_hit(self):
        self.put(tuttifs.keys(PROMPT, 4)[:3])
        s, r = self.scheduling, request("two", PROMPT)
        self.assertEqual(s.matched(r, 4), 8)
        self.assertEqual(s.step({}, lambda name: None).loads, [])  # nothing was promised yet
        s.allocated(r, TABLE, 8)
        s.allocated(r, TABLE, 0)  # the second call, when the load is over
        step = s.step({}, lambda name: None)
        (load,), (part,) = step.loads, step.loads[0].parts
        self.assertEqual((part.first, part.pinned, part.blocks, load.wait), (1, 2, [[12], [13]], False))
        pool = scheduler.open_pool(self.session, self.spec, self.options)
        with self.store_joined(step) as joined, scheduler.open_pool(joined, self.spec, self.options) as mine:
            with mine.pin(part.keys, part.pin) as leases:
                self.assertEqual(len(leases), 2)
        s.heard(Report(step.number), ["two"])
        self.assertEqual(pool.peek(part.keys), 2)
        r.num_computed_tokens = 12
        self.assertEqual([p.first for p in s.step({"two": 5}, lambda name: TABLE).stores[0].parts], [3])

    def store_joined(self, step):
        return self.store.join(step.token, lanes=1, depth=64, dma_bytes=2 << 20, bounce_bytes=1 << 20)

    def test_the_last_token_is_computed(self):
        self.put(tuttifs.keys(PROMPT, 4))
        self.assertEqual(self.scheduling.matched(request("a", PROMPT[:16]), 0), 12)
        self.assertEqual(self.scheduling.matched(request("b", PROMPT[:17]), 0), 16)

    def test_what_keeps_requests_apart(self):
        self.put(tuttifs.keys(PROMPT, 4))
        for i, more in enumerate((
                {"cache_salt": "x"}, {"kv_transfer_params": {"tuttifs_tenant": 1}}, {"prompt_embeds": object()},
                {"lora_request": lora("/nonexistent")},
                {"kv_transfer_params": {"tuttifs_tenant": -1}},
                {"mm_features": [SimpleNamespace(identifier="i", mm_position=SimpleNamespace(offset=1, length=2))]})):
            self.assertEqual(self.scheduling.matched(request(f"r{i}", PROMPT, **more), 0), 0, more)
        self.assertEqual(self.scheduling.matched(request("same", PROMPT), 0), 16)

    def test_adapters_weights_are_known_or_not_cached(self):
        with tempfile.TemporaryDirectory() as d:
            def write(text):
                with open(os.path.join(d, "weights"), "w") as f:
                    f.write(text)

            def key(name, **more):
                t = self.scheduling.track(request(name, PROMPT, lora_request=lora(d, **more)))
                return t.chain and t.chain.upto(PROMPT, 1)
            write("1")
            first = key("a")
            self.assertNotEqual(first, tuttifs.keys(PROMPT, 4)[:1])
            self.assertEqual((key("b"), key("c", lora_name="m")), (first, first))  # a name is nothing
            self.assertIsNone(key("d", lora_name="m", load_inplace=True))
            self.assertIsNone(key("e", lora_name="m"))
            write("two")
            self.assertIsNone(key("f"))  # loaded before, or after?
            second = key("g", lora_int_id=2)  # after
            self.assertNotIn(second, (first, None))
            write("1")
            self.assertIsNone(key("h"))
            self.assertEqual(key("i", lora_int_id=3), first)
            kept = os.stat(os.path.join(d, "weights"))
            time.sleep(0.02)  # more than a tick of the clock of files
            write("3")
            os.utime(os.path.join(d, "weights"), ns=(kept.st_atime_ns, kept.st_mtime_ns))  # as a copy may have it
            self.assertIsNone(key("j", lora_int_id=3))

    def test_a_failed_load(self):
        self.put(tuttifs.keys(PROMPT, 4))
        s, r = self.scheduling, request("f", PROMPT)
        self.assertEqual(s.matched(r, 0), 16)
        s.allocated(r, TABLE, 16)
        step = s.step({}, lambda name: None)
        s.heard(Report(step.number, failed={"f": 2}), ["f"])
        self.assertEqual(s.matched(r, 0), 0)  # computed, not tried again
        r.num_computed_tokens = 8
        self.assertEqual([p.first for p in s.step({"f": 9}, lambda name: TABLE).stores[0].parts], [2])

    def test_evicted_is_told(self):
        s, r = self.scheduling, request("e", PROMPT)
        s.matched(r, 0)
        step = s.step({"e": 17}, lambda name: TABLE)
        # Said to be stored, and gone by the next lookup.
        s.heard(Report(step.number, stores={step.stores[0].number: {0: [0, 1]}}), ())
        s.take_events()
        self.assertEqual(s.matched(request("e2", PROMPT), 0), 0)
        (event,) = s.take_events()
        self.assertIsInstance(event, scheduler.Removed)
        self.assertEqual(event.keys, tuttifs.keys(PROMPT, 4)[:1])

    def test_removed_by_others_is_told(self):
        """Without a lookup, and not of what was never announced."""
        s, r = self.scheduling, request("e", PROMPT)
        s.matched(r, 0)
        step = s.step({"e": 17}, lambda name: TABLE)
        keys = tuttifs.keys(PROMPT, 4)
        self.put(keys)
        s.heard(Report(step.number, stores={step.stores[0].number: {0: [0, 1]}}), ())
        self.assertEqual([e.keys for e in s.take_events()], [[keys[0]], [keys[1]]])
        self.volume.run("evict", self.volume.path, self.spec.name, "--prefix", keys[3].hex())
        removed = self.poll(s)
        self.assertEqual({k for e in removed for k in e.keys}, set(keys[:2]))
        self.assertTrue(all(isinstance(e, scheduler.Removed) for e in removed))

    def poll(self, s):
        s._poll_at = 0
        return s.take_events()

    def test_gone_before_it_was_announced(self):
        s, r = self.scheduling, request("e", PROMPT)
        s.matched(r, 0)
        step = s.step({"e": 17}, lambda name: TABLE)
        keys = tuttifs.keys(PROMPT, 4)
        self.put(keys)
        self.volume.run("evict", self.volume.path, self.spec.name, "--prefix", keys[3].hex())
        self.assertEqual(self.poll(s), [])
        self.put(keys[:2])
        s.heard(Report(step.number, stores={step.stores[0].number: {0: [0, 1, 2, 3]}}), ())
        self.assertEqual([e.keys for e in self.poll(s)], [keys[:1], keys[1:2]])  # and not what is gone

    def test_nobody_wants_events(self):
        s = scheduler.Scheduling(self.options, 4, [self.spec], telling=False)
        self.addCleanup(s.close)
        r = request("e", PROMPT)
        s.matched(r, 0)
        step = s.step({"e": 17}, lambda name: TABLE)
        s.heard(Report(step.number, stores={step.stores[0].number: {0: [0]}}), ())
        self.assertEqual((s.take_events(), len(s._announced)), ([], 0))

    def test_weighed(self):
        """Where the ranks know what loads take they are asked, and what they say is done."""
        self.put(tuttifs.keys(PROMPT, 4))
        o = dataclasses.replace(self.options, slack_table="table")
        s = scheduler.Scheduling(o, 4, [self.spec])
        self.addCleanup(s.close)
        for worth, wanted in ((True, 12), (False, 0)):
            r = request(f"w{worth}", PROMPT)
            self.assertIsNone(s.matched(r, 4))
            step = s.step({}, lambda name: None)
            self.assertEqual(step.weigh, [Weighed(r.request_id, 12, 1)])
            self.assertIsNone(s.matched(r, 4))
            self.assertEqual(s.step({}, lambda name: None).weigh, [])  # once
            s.heard(Report(step.number, worth={r.request_id: True}).merge(
                Report(step.number, worth={r.request_id: worth})), ())
            self.assertEqual(s.matched(r, 4), wanted)
        # What was not loaded is computed, and not stored once more.
        self.assertEqual(s.counts.take(), {"refused_tokens": 12})
        self.assertEqual(s.step({r.request_id: 17}, lambda name: TABLE).stores, [])
        off = scheduler.Scheduling(dataclasses.replace(o, scheduler=False), 4, [self.spec])
        self.addCleanup(off.close)
        self.assertEqual(off.matched(request("off", PROMPT), 0), 16)

    def test_what_a_step_computes(self):
        s, a, b = self.scheduling, request("a", PROMPT), request("b", PROMPT[:9])
        s.track(a), s.track(b)
        a.num_computed_tokens, b.num_computed_tokens = 4, 9
        self.assertIsNone(s.step({}, lambda name: None).computes)
        self.assertEqual(s.step({"a": 13, "b": 1}, lambda name: None).computes, Pass(14, 13, False))
        a.num_computed_tokens = 17
        self.assertEqual(s.step({"a": 3, "b": 1}, lambda name: None).computes, Pass(4, 26, True))  # 2 are guessed

    def test_fixed_weights(self):
        self.put(tuttifs.keys(PROMPT, 4))
        s = scheduler.Scheduling(dataclasses.replace(self.options, fixed_weights=True), 4, [self.spec])
        self.addCleanup(s.close)
        s.reset()
        self.assertEqual(s.matched(request("a", PROMPT), 0), 16)

    def test_reset_ends_it(self):
        self.put(tuttifs.keys(PROMPT, 4))
        self.assertEqual(self.scheduling.matched(request("a", PROMPT), 0), 16)
        self.scheduling.reset()
        self.assertEqual(self.scheduling.matched(request("b", PROMPT), 0), 0)
        self.assertEqual(self.scheduling.step({"b": 17}, lambda name: TABLE).stores, [])


if __name__ == "__main__":
    unittest.main()
