/* roundtrip MOUNT: stores, restores and compares through libtuttifs, and tries what must be refused. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "libtuttifs.h"
#include "tuttifs.h" /* both headers may be used together */

#define CHECK(what)                                                                                     \
	do {                                                                                            \
		if (!(what)) {                                                                          \
			fprintf(stderr, "line %d: %s: %s\n", __LINE__, #what, tuttifs_last_error());    \
			exit(1);                                                                        \
		}                                                                                       \
	} while (0)
#define OK(call) CHECK((call) == 0)
/* A call that must fail so, and say why. */
#define REFUSED(code, call)                                                                                 \
	do {                                                                                                \
		int result_ = (call);                                                                       \
		if (result_ != -(code) || !tuttifs_last_error()[0]) {                                       \
			fprintf(stderr, "line %d: %s is %d, not %d: %s\n", __LINE__, #call, result_, -(code), \
			        tuttifs_last_error());                                                      \
			exit(1);                                                                            \
		}                                                                                           \
	} while (0)

enum { LAYERS = 3, RANKS = 2, OBJECTS = 2, FILES = 40, BLOCKS = 64, CLASSES = LAYERS * OBJECTS };

/* The lengths of a layer's two objects: whole units, and an odd one. */
static const uint32_t lengths[OBJECTS] = {16384, 656 * 16};

static const char identity[] =
    "{\"model\":\"m\",\"revision\":\"r\",\"weights_epoch\":1,\"dtype\":\"bf16\",\"quantisation\":\"none\","
    "\"scale_format\":\"none\",\"layout\":\"NHD\",\"page_bytes\":4096,\"block_tokens\":16,\"file_tokens\":16,\"tp\":2,"
    "\"pp\":1,\"cp\":1,\"group\":\"full\"}";

/* A member of the session: one rank, with a paged pool of its own. */
struct rank {
	uint16_t number;
	tuttifs_mount_t mount;
	tuttifs_session_t session;
	tuttifs_pool_t pool;
	tuttifs_memory_t memory;
	uint8_t *bytes; /* BLOCKS blocks, each of all classes: blocks-first, so that classes interleave */
	uint64_t block_bytes;
};

static uint8_t *at(struct rank *r, int class, uint64_t block)
{
	uint64_t offset = 0;
	for (int c = 0; c < class; c++)
		offset += lengths[c % OBJECTS];
	return r->bytes + block * r->block_bytes + offset;
}

/* What file number f has in an object. */
static uint8_t content(int f, int rank, int class, uint32_t i)
{
	return (uint8_t)((i * 2654435761u >> 13) + (uint32_t)(f * 7 + rank * 31 + class * 113));
}

static void open_pool(struct rank *r, const char *name)
{
	struct tuttifs_run runs[OBJECTS] = {{lengths[0], TUTTIFS_RUN_KV}, {lengths[1], TUTTIFS_RUN_KV}};
	struct tuttifs_object objects[LAYERS * RANKS * OBJECTS];
	int n = 0;
	for (uint16_t layer = 0; layer < LAYERS; layer++)
		for (uint16_t rank = 0; rank < RANKS; rank++)
			for (uint32_t o = 0; o < OBJECTS; o++)
				objects[n++] = (struct tuttifs_object){layer, rank, o, 1};
	struct tuttifs_pool_options options = {.size = sizeof options, .tokens_per_file = 16, .name = name,
	    .identity = identity, .objects = objects, .runs = runs, .object_count = (uint32_t)n, .run_count = OBJECTS};
	OK(tuttifs_pool_open(r->session, &options, &r->pool));
	options.reserved[2] = 1;
	tuttifs_pool_t none = NULL;
	REFUSED(TUTTIFS_EINVAL, tuttifs_pool_open(r->session, &options, &none));
	options.reserved[2] = 0;
	objects[0].run_count = 9;
	REFUSED(TUTTIFS_EINVAL, tuttifs_pool_open(r->session, &options, &none));
	objects[0].run_count = 1;
	options.object_count = 4;
	REFUSED(TUTTIFS_EEXIST, tuttifs_pool_open(r->session, &options, &none));
	options.identity = "{}";
	REFUSED(TUTTIFS_EBADMSG, tuttifs_pool_open(r->session, &options, &none));
	options.identity = NULL;
	REFUSED(TUTTIFS_EINVAL, tuttifs_pool_open(r->session, &options, &none));
	options.size = 8;
	REFUSED(TUTTIFS_EINVAL, tuttifs_pool_open(r->session, &options, &none));
	REFUSED(TUTTIFS_EINVAL, tuttifs_pool_open(r->session, NULL, &none));
	CHECK(none == NULL);
}

static void register_blocks(struct rank *r)
{
	struct tuttifs_strided_run runs[CLASSES];
	for (int c = 0; c < CLASSES; c++)
		r->block_bytes += lengths[c % OBJECTS];
	r->bytes = malloc(BLOCKS * r->block_bytes);
	CHECK(r->bytes != NULL);
	for (int c = 0; c < CLASSES; c++)
		runs[c] = (struct tuttifs_strided_run){(uintptr_t)at(r, c, 0), r->block_bytes, lengths[c % OBJECTS]};
	struct tuttifs_paged paged = {.size = sizeof paged, .classes = CLASSES, .runs_per_class = 1, .blocks = BLOCKS,
	    .runs = runs};
	OK(tuttifs_register_paged(r->session, &paged, &r->memory));
	uint64_t cost = 1;
	OK(tuttifs_memory_cost(r->memory, &cost));
	CHECK(cost == 0);
	tuttifs_memory_t none = NULL;
	paged.runs_per_class = 2, paged.classes = CLASSES / 2;
	REFUSED(TUTTIFS_ENOTSUP, tuttifs_register_paged(r->session, &paged, &none));
	paged.classes = 0;
	REFUSED(TUTTIFS_EINVAL, tuttifs_register_paged(r->session, &paged, &none));
	runs[1].stride = UINT64_MAX, paged.classes = CLASSES, paged.runs_per_class = 1;
	REFUSED(TUTTIFS_EINVAL, tuttifs_register_paged(r->session, &paged, &none));
	REFUSED(TUTTIFS_ENOTSUP, tuttifs_register_device(r->session, 4096, 4096, &none));
	REFUSED(TUTTIFS_EINVAL, tuttifs_register_host(r->session, r->bytes, 0, 0, &none));
	REFUSED(TUTTIFS_EINVAL, tuttifs_register_host(r->session, r->bytes, 4096, 8, &none));
	REFUSED(TUTTIFS_EINVAL, tuttifs_register_host(r->session, NULL, 4096, 0, &none));
	CHECK(none == NULL);
}

static uint32_t flags; /* of all sessions */

static void join(struct rank *r, uint16_t number, const char *path, const uint8_t *token)
{
	struct tuttifs_session_options options = {.size = sizeof options, .flags = flags, .lanes = 2, .depth = 64,
	    .dma_bytes = 8 << 20, .bounce_bytes = 1 << 20, .deadline_ms = 20000};
	*r = (struct rank){.number = number};
	OK(tuttifs_open(path, &r->mount));
	if (number == 1) /* one rank stores by way of a store buffer */
		options.store_bytes = 16 << 20, options.dma_bytes += 16 << 20;
	if (token)
		OK(tuttifs_session_join(r->mount, token, &options, &r->session));
	else
		OK(tuttifs_session_create(r->mount, &options, &r->session));
	char about[512];
	OK(tuttifs_session_describe(r->session, about, sizeof about));
	CHECK(!!strstr(about, "real queue pairs of all drives") == (flags == TUTTIFS_REAL));
	open_pool(r, "pool");
	register_blocks(r);
}

static void chain(uint8_t first, int n, uint8_t (*keys)[32], struct tuttifs_item *items)
{
	memset(keys, 0, 32 * (size_t)n);
	memset(items, 0, sizeof *items * (size_t)n);
	for (int i = 0; i < n; i++) {
		keys[i][0] = first, keys[i][1] = (uint8_t)(i + 1);
		memcpy(items[i].key, keys[i], 32);
		if (i > 0)
			memcpy(items[i].parent, keys[i - 1], 32);
		items[i].tokens = 16, items[i].position = (uint32_t)i;
	}
}

/* The block of a file: all of them scattered, and elsewhere for a restore. */
static uint64_t block_of(int f, int restore) { return (uint64_t)((f * 37 + (restore ? 11 : 3)) % BLOCKS); }

static void store(struct rank *r, const struct tuttifs_lease *leases, int n)
{
	uint64_t blocks[FILES];
	for (int f = 0; f < n; f++) {
		blocks[f] = block_of(f, 0);
		for (int c = 0; c < CLASSES; c++)
			for (uint32_t i = 0; i < lengths[c % OBJECTS]; i++)
				at(r, c, blocks[f])[i] = content(f, r->number, c, i);
	}
	tuttifs_layers_t layers;
	tuttifs_transfer_t transfers[LAYERS], none = NULL;
	OK(tuttifs_layers_open(r->pool, r->number, TUTTIFS_STORE, leases, (uint64_t)n, r->memory, blocks, &layers));
	REFUSED(TUTTIFS_ENODATA, tuttifs_finish(layers));
	REFUSED(TUTTIFS_EINVAL, tuttifs_retrieve_layer(layers, 0, NULL, &none));
	REFUSED(TUTTIFS_EINVAL, tuttifs_store_layer(layers, LAYERS, NULL, &none));
	REFUSED(TUTTIFS_ENOTSUP, tuttifs_store_layer(layers, 0, r, &none));
	for (uint16_t layer = 0; layer < LAYERS; layer++)
		OK(tuttifs_store_layer(layers, layer, NULL, &transfers[layer]));
	for (int layer = 0; layer < LAYERS; layer++)
		OK(tuttifs_wait(transfers[layer]));
	REFUSED(TUTTIFS_EBADF, tuttifs_wait(transfers[0]));
	OK(tuttifs_finish(layers));
	OK(tuttifs_layers_close(layers));
	REFUSED(TUTTIFS_EBADF, tuttifs_layers_close(layers));
	struct tuttifs_store_stats stats = {.size = sizeof stats};
	OK(tuttifs_store_stats(r->session, &stats));
	CHECK(stats.bytes == (r->number == 1 ? 16 << 20 : 0) && stats.refuse == 0 && stats.fill == 0 && stats.objects == 0);
	CHECK((stats.stored_objects >= (uint64_t)n * CLASSES) == (r->number == 1));
	stats.size--;
	REFUSED(TUTTIFS_EINVAL, tuttifs_store_stats(r->session, &stats));
}

static void compare(struct rank *r, int n)
{
	for (int f = 0; f < n; f++)
		for (int c = 0; c < CLASSES; c++)
			for (uint32_t i = 0; i < lengths[c % OBJECTS]; i++)
				CHECK(at(r, c, block_of(f, 1))[i] == content(f, r->number, c, i));
}

static void restore(struct rank *r, struct tuttifs_lease *leases, int n)
{
	uint64_t blocks[FILES];
	tuttifs_layers_t layers;
	tuttifs_transfer_t transfers[LAYERS];
	memset(r->bytes, 0xee, BLOCKS * r->block_bytes);
	for (int f = 0; f < n; f++)
		blocks[f] = block_of(f, 1);
	blocks[1] = BLOCKS;
	REFUSED(TUTTIFS_EINVAL, tuttifs_layers_open(r->pool, r->number, 0, leases, (uint64_t)n, r->memory, blocks, &layers));
	blocks[1] = block_of(1, 1);
	REFUSED(TUTTIFS_EINVAL, tuttifs_layers_open(r->pool, RANKS, 0, leases, (uint64_t)n, r->memory, blocks, &layers));
	REFUSED(TUTTIFS_EINVAL,
	        tuttifs_layers_open(r->pool, 0, TUTTIFS_STORE, leases, (uint64_t)n, r->memory, blocks, &layers));
	REFUSED(TUTTIFS_EINVAL, tuttifs_layers_open(r->pool, 0, 2, leases, (uint64_t)n, r->memory, blocks, &layers));
	REFUSED(TUTTIFS_EINVAL, tuttifs_layers_open(r->pool, 0, 0, leases, (uint64_t)n, NULL, blocks, &layers));
	OK(tuttifs_layers_open(r->pool, r->number, 0, leases, (uint64_t)n, r->memory, blocks, &layers));
	for (uint16_t layer = 0; layer < LAYERS; layer++) /* all ahead of their use */
		OK(tuttifs_retrieve_layer(layers, layer, NULL, &transfers[layer]));
	for (int layer = 0; layer < LAYERS; layer++) {
		OK(tuttifs_wait_on(transfers[layer], NULL));
		OK(tuttifs_wait(transfers[layer]));
	}
	int32_t codes[FILES];
	uint64_t failed = 99;
	OK(tuttifs_failed(layers, codes, (uint64_t)n, &failed));
	CHECK(failed == 0 && codes[0] == 0 && codes[n - 1] == 0);
	REFUSED(TUTTIFS_EINVAL, tuttifs_failed(layers, codes, (uint64_t)n - 1, NULL));
	compare(r, n);

	/* One transfer is left for the close to wait for. */
	OK(tuttifs_retrieve_layer(layers, 0, NULL, &transfers[0]));
	OK(tuttifs_layers_close(layers));
	REFUSED(TUTTIFS_EBADF, tuttifs_wait(transfers[0]));

	/* A file with another seed is a miss, alone, and holds zeros. */
	leases[2].seed[5] ^= 1;
	OK(tuttifs_layers_open(r->pool, r->number, 0, leases, (uint64_t)n, r->memory, blocks, &layers));
	for (uint16_t layer = 0; layer < LAYERS; layer++) {
		OK(tuttifs_retrieve_layer(layers, layer, NULL, &transfers[layer]));
		OK(tuttifs_wait(transfers[layer]));
	}
	OK(tuttifs_failed(layers, codes, (uint64_t)n, &failed));
	CHECK(strstr(tuttifs_last_error(), "checksum"));
	CHECK(failed == 1 && codes[1] == 0 && codes[2] == -TUTTIFS_EILSEQ && codes[3] == 0);
	for (int c = 0; c < CLASSES; c++)
		for (uint32_t i = 0; i < lengths[c % OBJECTS]; i++)
			CHECK(at(r, c, block_of(2, 1))[i] == 0);
	leases[2].seed[5] ^= 1;
	OK(tuttifs_layers_close(layers));
}

/* One layer at offsets of flat memory, from both kinds of host memory. */
static void restore_flat(struct rank *r, const struct tuttifs_lease *leases, int n)
{
	uint64_t dma_bytes, offsets[FILES * OBJECTS], slot_bytes = 16384 + 12288;
	void *dma;
	tuttifs_memory_t memory;
	tuttifs_layers_t layers;
	tuttifs_transfer_t transfer;
	OK(tuttifs_session_dma(r->session, &dma, &dma_bytes));
	CHECK(dma_bytes >= (uint64_t)n * slot_bytes);
	for (int f = 0; f < n; f++) {
		offsets[f * OBJECTS] = (uint64_t)f * slot_bytes;
		offsets[f * OBJECTS + 1] = (uint64_t)f * slot_bytes + 16384;
	}
	for (int padded = 0; padded < 2; padded++) {
		OK(tuttifs_register_host(r->session, dma, dma_bytes, padded ? TUTTIFS_PADDED : 0, &memory));
		OK(tuttifs_layers_open(r->pool, r->number, 0, leases, (uint64_t)n, NULL, NULL, &layers));
		REFUSED(TUTTIFS_EINVAL, tuttifs_retrieve_layer(layers, 1, NULL, &transfer));
		uint64_t count = (uint64_t)n * OBJECTS;
		REFUSED(TUTTIFS_EINVAL, tuttifs_retrieve_layer_at(layers, 1, memory, offsets, count - 1, NULL, &transfer));
		REFUSED(TUTTIFS_EINVAL, tuttifs_retrieve_layer_at(layers, 1, r->memory, offsets, count, NULL, &transfer));
		REFUSED(TUTTIFS_EBADF, tuttifs_retrieve_layer_at(layers, 1, NULL, offsets, count, NULL, &transfer));
		offsets[0] = dma_bytes - 1;
		REFUSED(TUTTIFS_EINVAL, tuttifs_retrieve_layer_at(layers, 1, memory, offsets, count, NULL, &transfer));
		offsets[0] = 0;
		memset(dma, 0xee, (uint64_t)n * slot_bytes);
		OK(tuttifs_retrieve_layer_at(layers, 1, memory, offsets, count, NULL, &transfer));
		OK(tuttifs_wait(transfer));
		for (int f = 0; f < n; f++)
			for (int o = 0; o < OBJECTS; o++)
				for (uint32_t i = 0; i < lengths[o]; i++)
					CHECK(((uint8_t *)dma)[offsets[f * OBJECTS + o] + i] ==
					      content(f, r->number, OBJECTS + o, i));
		OK(tuttifs_layers_close(layers));
		OK(tuttifs_unregister(memory));
		REFUSED(TUTTIFS_EBADF, tuttifs_unregister(memory));
	}
}

struct commit {
	struct rank *rank;
	uint64_t reserve;
	int result;
};

static void *commit(void *p)
{
	struct commit *c = p;
	c->result = tuttifs_commit(c->rank->pool, c->reserve, &c->rank->number, 1);
	return NULL;
}

/* What another member has stored is told, file by file. */
static void events(struct rank *r, uint64_t *since, const uint8_t (*keys)[32], int n)
{
	struct tuttifs_kv_event told[7];
	uint64_t some, lost;
	int all = 0;
	do {
		OK(tuttifs_events(r->pool, since, told, 7, &some, &lost));
		CHECK(some <= 7 && lost == 0);
		for (uint64_t i = 0; i < some; i++, all++)
			CHECK(all < n && told[i].kind == TUTTIFS_KV_STORED && told[i].tenant == 0 &&
			      memcmp(told[i].key, keys[all], 32) == 0);
	} while (some);
	CHECK(all == n);
	REFUSED(TUTTIFS_EINVAL, tuttifs_events(r->pool, since, NULL, 7, &some, &lost));
	REFUSED(TUTTIFS_EINVAL, tuttifs_events(r->pool, since, told, 0, &some, &lost));
	REFUSED(TUTTIFS_EINVAL, tuttifs_events(r->pool, NULL, told, 7, &some, &lost));
	REFUSED(TUTTIFS_EBADF, tuttifs_events(NULL, since, told, 7, &some, &lost));
	uint64_t never = *since + 1;
	REFUSED(TUTTIFS_EINVAL, tuttifs_events(r->pool, &never, told, 7, &some, &lost));
	CHECK(never == *since + 1);
}

/* Both ranks store; the files appear when the second has committed. */
static void round_trip(struct rank *ranks)
{
	static uint8_t keys[FILES + 1][32];
	static struct tuttifs_item items[FILES + 1];
	struct tuttifs_lease leases[FILES + 1];
	uint64_t n = 99, since = 0;
	chain(1, FILES + 1, keys, items);
	events(&ranks[0], &since, NULL, 0);
	OK(tuttifs_peek(ranks[0].pool, 0, keys[0], FILES, &n));
	CHECK(n == 0);
	OK(tuttifs_pin(ranks[0].pool, 0, 1, keys[0], FILES, leases, &n));
	CHECK(n == 0);
	for (int k = 0; k < RANKS; k++) {
		OK(tuttifs_reserve(ranks[k].pool, 0, 5, items, FILES, 0, leases, &n));
		CHECK(n == FILES && leases[0].status == (k ? TUTTIFS_LEASE_JOINED : TUTTIFS_LEASE_NEW));
		store(&ranks[k], leases, FILES);
		if (k == 0) {
			/* What this rank has written is not there for anybody yet. */
			OK(tuttifs_peek(ranks[1].pool, 0, keys[0], FILES, &n));
			CHECK(n == 0);
		}
	}
	struct commit first = {.rank = &ranks[0], .reserve = 5};
	pthread_t thread;
	CHECK(pthread_create(&thread, NULL, commit, &first) == 0);
	OK(tuttifs_commit(ranks[1].pool, 5, &ranks[1].number, 1));
	CHECK(pthread_join(thread, NULL) == 0 && first.result == 0);
	OK(tuttifs_peek(ranks[0].pool, 0, keys[0], FILES + 1, &n));
	CHECK(n == FILES);
	uint8_t present[FILES + 1];
	memset(present, 9, sizeof present);
	OK(tuttifs_present(ranks[0].pool, 0, keys[1], FILES, present));
	CHECK(present[0] == 1 && present[FILES - 2] == 1 && present[FILES - 1] == 0 && present[FILES] == 9);
	OK(tuttifs_present(ranks[0].pool, 1, keys[1], 1, present));
	CHECK(present[0] == 0); /* another tenant's */
	REFUSED(TUTTIFS_EINVAL, tuttifs_present(ranks[0].pool, 0, keys[1], 1, NULL));
	events(&ranks[0], &since, (const uint8_t (*)[32])keys, FILES);
	for (int k = 0; k < RANKS; k++) {
		uint64_t request = 10 + (uint64_t)k;
		OK(tuttifs_pin(ranks[k].pool, 0, request, keys[0], FILES + 1, leases, &n));
		CHECK(n == FILES && leases[0].status == TUTTIFS_LEASE_PINNED && leases[FILES - 1].tokens == 16);
		restore(&ranks[k], leases, FILES);
		restore_flat(&ranks[k], leases, FILES);
		OK(tuttifs_report_bad(ranks[k].pool, leases[0].slot, leases[0].generation)); /* it is whole, and stays */
		OK(tuttifs_release(ranks[k].pool, request));
		REFUSED(TUTTIFS_ENOENT, tuttifs_release(ranks[k].pool, request));
	}
	OK(tuttifs_reserve(ranks[0].pool, 0, 6, items, 2, 0, leases, &n));
	CHECK(n == 2 && leases[1].status == TUTTIFS_LEASE_EXISTS);
	OK(tuttifs_abort(ranks[0].pool, 6));
	struct tuttifs_pool_stats stats = {.size = sizeof stats};
	OK(tuttifs_pool_stats(ranks[0].pool, &stats));
	CHECK(stats.files == FILES && stats.hits >= 2 * FILES && stats.misses > 0);
}

/* What is computed from a load is committed if the load is whole, and given up for all ranks if it is not. */
static void commit_from(struct rank *ranks)
{
	static uint8_t keys[FILES + 2][32];
	static struct tuttifs_item items[FILES + 2];
	struct tuttifs_lease leases[FILES], made;
	struct rank *r = &ranks[0];
	uint64_t blocks[FILES], n;
	tuttifs_layers_t loads[2];
	tuttifs_transfer_t transfer;
	chain(1, FILES + 2, keys, items);
	OK(tuttifs_pin(r->pool, 0, 30, keys[0], FILES, leases, &n));
	CHECK(n == FILES);
	for (int f = 0; f < FILES; f++)
		blocks[f] = block_of(f, 1);
	for (int bad = 1; bad >= 0; bad--) {
		uint64_t reserve = 40 + (uint64_t)bad;
		int code;
		for (int k = 0; k < RANKS; k++) {
			OK(tuttifs_reserve(ranks[k].pool, 0, reserve, &items[FILES], 1, 0, &made, &n));
			store(&ranks[k], &made, 1);
		}
		for (int i = 0; i < 2; i++) {
			leases[1].seed[0] ^= (uint8_t)(bad && i);
			OK(tuttifs_layers_open(r->pool, 0, 0, leases, FILES, r->memory, blocks, &loads[i]));
			leases[1].seed[0] ^= (uint8_t)(bad && i);
			OK(tuttifs_retrieve_layer(loads[i], 0, NULL, &transfer)); /* in flight until the commit waits for it */
		}
		REFUSED(TUTTIFS_EBADF, tuttifs_commit_from(r->pool, reserve, &r->number, 1, (tuttifs_layers_t[]){NULL}, 1));
		REFUSED(TUTTIFS_EINVAL, tuttifs_commit_from(r->pool, reserve, &r->number, 1, NULL, 1));
		REFUSED(TUTTIFS_EINVAL, tuttifs_commit_from(r->pool, reserve, &r->number, 0, loads, 2));
		struct commit other = {.rank = &ranks[1], .reserve = reserve};
		pthread_t thread;
		CHECK(pthread_create(&thread, NULL, commit, &other) == 0);
		code = tuttifs_commit_from(r->pool, reserve, &r->number, 1, loads, 2);
		CHECK(code == (bad ? -TUTTIFS_EILSEQ : 0));
		CHECK(pthread_join(thread, NULL) == 0 && other.result == (bad ? -TUTTIFS_ENOENT : 0));
		OK(tuttifs_peek(r->pool, 0, keys[0], FILES + 1, &n));
		CHECK(n == (bad ? FILES : FILES + 1));
		for (int i = 0; i < 2; i++)
			OK(tuttifs_layers_close(loads[i]));
	}
	REFUSED(TUTTIFS_EBADF, tuttifs_commit_from(r->pool, 41, &r->number, 1, loads, 1));
	OK(tuttifs_reserve(r->pool, 0, 42, &items[FILES + 1], 1, 0, &made, &n));
	OK(tuttifs_layers_open(r->pool, 0, TUTTIFS_STORE, &made, 1, NULL, NULL, &loads[0]));
	REFUSED(TUTTIFS_EINVAL, tuttifs_commit_from(r->pool, 42, &r->number, 1, loads, 1)); /* a store is no load */
	OK(tuttifs_layers_close(loads[0]));
	OK(tuttifs_abort(r->pool, 42));
	OK(tuttifs_release(r->pool, 30));
}

static void refusals(struct rank *r)
{
	uint8_t key[32] = {9};
	struct tuttifs_item item = {.key = {9}, .tokens = 16};
	struct tuttifs_lease lease;
	uint64_t n;
	uint16_t ranks[] = {0, 1};
	REFUSED(TUTTIFS_EINVAL, tuttifs_peek(r->pool, 0, NULL, 1, &n));
	REFUSED(TUTTIFS_EINVAL, tuttifs_peek(r->pool, 0, key, 1, NULL));
	REFUSED(TUTTIFS_EINVAL, tuttifs_peek(r->pool, 0, key, UINT64_MAX, &n));
	REFUSED(TUTTIFS_EINVAL, tuttifs_peek(r->pool, 0, key, UINT32_MAX, &n));
	REFUSED(TUTTIFS_EBADF, tuttifs_peek(NULL, 0, key, 1, &n));
	REFUSED(TUTTIFS_EBADF, tuttifs_peek((tuttifs_pool_t)(void *)r->session, 0, key, 1, &n));
	REFUSED(TUTTIFS_EINVAL, tuttifs_pin(r->pool, 0, 1, key, 1, NULL, &n));
	REFUSED(TUTTIFS_EINVAL, tuttifs_reserve(r->pool, 0, 70, &item, 1, 4, &lease, &n));
	REFUSED(TUTTIFS_EINVAL, tuttifs_commit(r->pool, 70, ranks, 0));
	REFUSED(TUTTIFS_ENOENT, tuttifs_commit(r->pool, 70, ranks, 2));
	OK(tuttifs_reserve(r->pool, 0, 70, &item, 1, TUTTIFS_PARTIAL, &lease, &n));
	CHECK(n == 1 && lease.status == TUTTIFS_LEASE_NEW);
	if (!flags) /* else nobody knows */
		REFUSED(TUTTIFS_ENODATA, tuttifs_commit(r->pool, 70, ranks, 2)); /* nothing was written */
	OK(tuttifs_abort(r->pool, 70)); /* rank 1 was not asked */
	REFUSED(TUTTIFS_ENOENT, tuttifs_abort(r->pool, 70));
	REFUSED(TUTTIFS_EINVAL, tuttifs_layers_open(r->pool, 0, 0, &lease, 1, NULL, NULL, NULL));
}

static void scheduler(tuttifs_session_t session)
{
	struct tuttifs_scheduler_stats before = {.size = sizeof before}, after = {.size = sizeof after};
	struct tuttifs_offer offer = {.size = sizeof offer};
	struct tuttifs_session_stats stats = {.size = sizeof stats};
	uint64_t bubbles[5] = {1, 1, 1, 1, 1};
	OK(tuttifs_scheduler_stats(session, &before));
	OK(tuttifs_offer(session, 64, 128, 4, &offer));
	CHECK(offer.load == 1 && !offer.known); /* nothing is known yet */
	OK(tuttifs_prefill(session, 64, 128, 4));
	for (uint32_t l = 0; l < 3; l++)
		OK(tuttifs_layer_done(session, l, NULL));
	OK(tuttifs_decode_step(session, 192));
	OK(tuttifs_end_pass(session));
	OK(tuttifs_scheduler_stats(session, &after));
	CHECK(after.passes == before.passes + 1 && after.decode_steps == before.decode_steps + 1);
	CHECK(after.layers == before.layers + 3);
	CHECK(after.window_factor == 1); /* without a table */
	OK(tuttifs_layer_bubbles(session, bubbles, 5));
	CHECK(bubbles[4] == 0);
	REFUSED(TUTTIFS_EINVAL, tuttifs_prefill(session, 0, 128, 4));
	REFUSED(TUTTIFS_EINVAL, tuttifs_prefill(session, UINT32_MAX, 128, 4));
	REFUSED(TUTTIFS_EINVAL, tuttifs_prefill(session, 64, 128, UINT32_MAX));
	REFUSED(TUTTIFS_EINVAL, tuttifs_decode_step(session, 0));
	REFUSED(TUTTIFS_EINVAL, tuttifs_offer(session, 64, 128, 4, NULL));
	REFUSED(TUTTIFS_EINVAL, tuttifs_layer_bubbles(session, NULL, 5));
	REFUSED(TUTTIFS_EBADF, tuttifs_end_pass(NULL));
	OK(tuttifs_session_stats(session, &stats));
	if (!stats.gpu)
		REFUSED(TUTTIFS_ENOTSUP, tuttifs_layer_done(session, 0, (tuttifs_event_t)&stats));
	after.size = 8;
	REFUSED(TUTTIFS_EINVAL, tuttifs_scheduler_stats(session, &after));
}

static void options(tuttifs_mount_t mount)
{
	tuttifs_session_t none = NULL;
	struct tuttifs_session_options o = {.size = sizeof o, .flags = 1u << 30};
	uint8_t token[16] = {1};
	REFUSED(TUTTIFS_EINVAL, tuttifs_session_create(mount, &o, &none));
	o.flags = TUTTIFS_POLLING;
	REFUSED(TUTTIFS_EINVAL, tuttifs_session_create(mount, &o, &none));
	o.flags = 0, o.size = sizeof o - 8;
	REFUSED(TUTTIFS_EINVAL, tuttifs_session_create(mount, &o, &none));
	o.size = sizeof o, o.bounce_bytes = UINT64_MAX;
	REFUSED(TUTTIFS_EINVAL, tuttifs_session_create(mount, &o, &none));
	o = (struct tuttifs_session_options){.size = sizeof o, .store_bytes = 4096};
	REFUSED(TUTTIFS_EINVAL, tuttifs_session_create(mount, &o, &none));
	o.store_bytes = 1ull << 36; /* more than a mount gives */
	REFUSED(TUTTIFS_EINVAL, tuttifs_session_create(mount, &o, &none));
	CHECK(strstr(tuttifs_last_error(), "the mount gives a process at most"));
	o.store_bytes = 0, o.flags = TUTTIFS_STORE_REFUSE;
	REFUSED(TUTTIFS_EINVAL, tuttifs_session_create(mount, &o, &none));
	o.flags = TUTTIFS_REAL;
	if (!flags) {
		REFUSED(TUTTIFS_EINVAL, tuttifs_session_create(mount, &o, &none));
		CHECK(strstr(tuttifs_last_error(), "mount -o real="));
	}
	o.flags = 0, o.slack_table = "/proc/no such table";
	REFUSED(TUTTIFS_EINVAL, tuttifs_session_create(mount, &o, &none));
	o.slack_table = "/proc/version"; /* a file, and no table */
	REFUSED(TUTTIFS_EINVAL, tuttifs_session_create(mount, &o, &none));
	o.slack_table = NULL, o.flags = TUTTIFS_ANY_SLACK_TABLE; /* of none */
	REFUSED(TUTTIFS_EINVAL, tuttifs_session_create(mount, &o, &none));
	o.flags = 0;
	REFUSED(TUTTIFS_ESTALE, tuttifs_session_join(mount, token, NULL, &none));
	REFUSED(TUTTIFS_EINVAL, tuttifs_session_join(mount, NULL, NULL, &none));
	REFUSED(TUTTIFS_EINVAL, tuttifs_session_create(mount, NULL, NULL));
	struct { struct tuttifs_session_options known; uint64_t later; } longer = {{.size = sizeof longer}, 1};
	REFUSED(TUTTIFS_EINVAL, tuttifs_session_create(mount, &longer.known, &none));
	CHECK(none == NULL);
	o = (struct tuttifs_session_options){.size = sizeof o, .flags = TUTTIFS_GPU | TUTTIFS_GPU_AUTO | TUTTIFS_NO_SCHEDULER, .device = "0"};
	OK(tuttifs_session_create(mount, &o, &none));
	char about[200], little[5];
	struct tuttifs_session_stats stats = {.size = sizeof stats};
	OK(tuttifs_session_describe(none, about, sizeof about));
	CHECK(strstr(about, "bounce 64 MiB") && strstr(about, "scheduler off"));
	OK(tuttifs_session_describe(none, little, sizeof little));
	CHECK(strlen(little) == 4 && !strncmp(little, about, 4));
	OK(tuttifs_session_stats(none, &stats));
	CHECK(stats.lanes > 0);
	OK(tuttifs_session_close(none));
	if (!stats.gpu) {
		o.flags = TUTTIFS_GPU;
		REFUSED(TUTTIFS_ENODEV, tuttifs_session_create(mount, &o, &none));
	}
}

/* In a child every function refuses, and nothing of the parent's is touched. */
static void in_child(struct rank *r, const char *path)
{
	tuttifs_mount_t mount = NULL;
	uint64_t n;
	uint8_t key[32] = {1};
	REFUSED(TUTTIFS_ECHILD, tuttifs_open(path, &mount));
	REFUSED(TUTTIFS_ECHILD, tuttifs_peek(r->pool, 0, key, 1, &n));
	REFUSED(TUTTIFS_ECHILD, tuttifs_session_close(r->session));
	CHECK(strstr(tuttifs_last_error(), "fork"));
	CHECK(tuttifs_version() >> 16 == TUTTIFS_LIB_MAJOR);
	_exit(0);
}

static void forks(struct rank *r, const char *path)
{
	for (int raw = 0; raw < 2; raw++) {
		/* The second way runs no handlers of fork. */
		pid_t child = raw ? (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) : fork();
		if (child == 0)
			in_child(r, path);
		int status = 1;
		CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
	}
}

int main(int argc, char **argv)
{
	if (argc != 2 && (argc != 3 || strcmp(argv[2], "real")))
		return 2;
	flags = argc == 3 ? TUTTIFS_REAL : 0;
	CHECK(tuttifs_version() >> 16 == TUTTIFS_LIB_MAJOR);
	CHECK(tuttifs_last_error()[0] == 0);
	tuttifs_mount_t mount = NULL;
	REFUSED(TUTTIFS_EINVAL, tuttifs_open(NULL, &mount));
	REFUSED(TUTTIFS_EINVAL, tuttifs_open(argv[1], NULL));
	REFUSED(TUTTIFS_ENOTMOUNT, tuttifs_open("/", &mount));
	REFUSED(TUTTIFS_EBADF, tuttifs_close(NULL));
	REFUSED(TUTTIFS_EBADF, tuttifs_session_close((tuttifs_session_t)&mount));
	OK(tuttifs_open(argv[1], &mount));
	CHECK(tuttifs_last_error()[0] == 0);
	options(mount);
	OK(tuttifs_close(mount));
	REFUSED(TUTTIFS_EBADF, tuttifs_close(mount));

	struct rank ranks[RANKS];
	uint8_t token[16];
	join(&ranks[0], 0, argv[1], NULL);
	OK(tuttifs_session_token(ranks[0].session, token));
	join(&ranks[1], 1, argv[1], token);
	round_trip(ranks);
	commit_from(ranks);
	refusals(&ranks[0]);
	scheduler(ranks[0].session);
	forks(&ranks[0], argv[1]);

	OK(tuttifs_pool_close(ranks[0].pool));
	REFUSED(TUTTIFS_EBADF, tuttifs_pool_close(ranks[0].pool));
	for (int k = 0; k < RANKS; k++) {
		/* What was made from the session is closed with it. */
		OK(tuttifs_session_close(ranks[k].session));
		REFUSED(TUTTIFS_EBADF, tuttifs_session_close(ranks[k].session));
		REFUSED(TUTTIFS_EBADF, tuttifs_pool_close(ranks[k].pool));
		REFUSED(TUTTIFS_EBADF, tuttifs_unregister(ranks[k].memory));
		OK(tuttifs_close(ranks[k].mount));
		free(ranks[k].bytes);
	}
	return 0;
}
