/* threads MOUNT: many threads on one session, one pool and, where that is allowed, one handle. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "libtuttifs.h"

#define CHECK(what)                                                                                     \
	do {                                                                                            \
		if (!(what)) {                                                                          \
			fprintf(stderr, "line %d: %s: %s\n", __LINE__, #what, tuttifs_last_error());    \
			exit(1);                                                                        \
		}                                                                                       \
	} while (0)
#define OK(call) CHECK((call) == 0)

enum { THREADS = 8, ROUNDS = 6, LAYERS = 3, FILES = 6, BLOCK = 4096, TOKENS = 4 };

static const char identity[] =
    "{\"model\":\"m\",\"revision\":\"r\",\"weights_epoch\":1,\"dtype\":\"bf16\",\"quantisation\":\"none\","
    "\"scale_format\":\"none\",\"layout\":\"NHD\",\"page_bytes\":4096,\"block_tokens\":4,\"file_tokens\":4,\"tp\":1,"
    "\"pp\":1,\"cp\":1,\"group\":\"full\"}";

static tuttifs_session_t session;
static tuttifs_pool_t pool;
static pthread_barrier_t together;

/* A thread's own cache: [LAYERS][2 * FILES][BLOCK]; blocks from FILES on are restored to. */
struct user {
	pthread_t thread;
	int number;
	tuttifs_memory_t memory;
	uint8_t (*cache)[2 * FILES][BLOCK];
};

static uint8_t content(int user, int round, int layer, int file, int i)
{
	return (uint8_t)(user * 59 + round * 23 + layer * 31 + file * 7 + i * 13 + (i >> 8));
}

static void open_pool(void)
{
	struct tuttifs_run run = {BLOCK, TUTTIFS_RUN_KV};
	struct tuttifs_object objects[LAYERS];
	for (uint16_t l = 0; l < LAYERS; l++)
		objects[l] = (struct tuttifs_object){l, 0, 0, 1};
	struct tuttifs_pool_options options = {.size = sizeof options, .tokens_per_file = TOKENS, .name = "threads",
	    .identity = identity, .objects = objects, .runs = &run, .object_count = LAYERS, .run_count = 1};
	OK(tuttifs_pool_open(session, &options, &pool));
}

static void register_cache(struct user *u)
{
	struct tuttifs_strided_run runs[LAYERS];
	u->cache = malloc(LAYERS * sizeof *u->cache);
	CHECK(u->cache != NULL);
	for (int l = 0; l < LAYERS; l++)
		runs[l] = (struct tuttifs_strided_run){(uintptr_t)u->cache[l], BLOCK, BLOCK};
	struct tuttifs_paged paged = {.size = sizeof paged, .classes = LAYERS, .runs_per_class = 1, .blocks = 2 * FILES,
	    .runs = runs};
	OK(tuttifs_register_paged(session, &paged, &u->memory));
}

/* A thread's text is its own, whatever others do meanwhile. */
static void own_text(int number)
{
	char wanted[32];
	uint64_t n, count = (1 << 24) + 1 + (uint64_t)number;
	uint8_t key[32] = {1};
	snprintf(wanted, sizeof wanted, "%llu keys", (unsigned long long)count);
	CHECK(tuttifs_peek(pool, 0, key, count, &n) == -TUTTIFS_EINVAL);
	CHECK(strstr(tuttifs_last_error(), wanted));
}

static void round_trip(struct user *u, int round)
{
	uint32_t tokens[FILES * TOKENS];
	uint8_t keys[FILES][32];
	struct tuttifs_item items[FILES] = {0};
	struct tuttifs_lease leases[FILES];
	tuttifs_layers_t layers;
	tuttifs_transfer_t transfers[LAYERS];
	uint64_t n, blocks[FILES], request = (uint64_t)(u->number * 1000 + round);
	uint16_t rank = 0;
	for (int t = 0; t < FILES * TOKENS; t++)
		tokens[t] = (uint32_t)(u->number << 16 | round << 8 | t);
	struct tuttifs_prompt prompt = {.size = sizeof prompt, .tokens_per_file = TOKENS};
	OK(tuttifs_keys(&prompt, tokens, FILES * TOKENS, keys[0], &n));
	for (int f = 0; f < FILES; f++) {
		memcpy(items[f].key, keys[f], 32);
		if (f)
			memcpy(items[f].parent, keys[f - 1], 32);
		items[f].tokens = TOKENS, items[f].position = (uint32_t)f, blocks[f] = (uint64_t)f;
		for (int l = 0; l < LAYERS; l++)
			for (int i = 0; i < BLOCK; i++)
				u->cache[l][f][i] = content(u->number, round, l, f, i);
	}
	own_text(u->number);
	OK(tuttifs_reserve(pool, 0, request, items, FILES, 0, leases, &n));
	OK(tuttifs_layers_open(pool, 0, TUTTIFS_STORE, leases, FILES, u->memory, blocks, &layers));
	for (uint16_t l = 0; l < LAYERS; l++)
		OK(tuttifs_store_layer(layers, l, NULL, &transfers[l]));
	for (int l = 0; l < LAYERS; l++)
		OK(tuttifs_wait(transfers[l]));
	OK(tuttifs_finish(layers));
	OK(tuttifs_layers_close(layers));
	OK(tuttifs_commit(pool, request, &rank, 1));
	own_text(u->number);
	OK(tuttifs_pin(pool, 0, request, keys[0], FILES, leases, &n));
	CHECK(n == FILES);
	for (int f = 0; f < FILES; f++)
		blocks[f] = (uint64_t)(2 * FILES - 1 - f);
	OK(tuttifs_layers_open(pool, 0, 0, leases, FILES, u->memory, blocks, &layers));
	for (uint16_t l = 0; l < LAYERS; l++)
		OK(tuttifs_retrieve_layer(layers, l, NULL, &transfers[l]));
	if (round % 2)
		for (int l = 0; l < LAYERS; l++)
			OK(tuttifs_wait_on(transfers[l], NULL));
	OK(tuttifs_layers_close(layers)); /* which waits for what was not waited for */
	OK(tuttifs_release(pool, request));
	for (int f = 0; f < FILES; f++)
		for (int l = 0; l < LAYERS; l++)
			for (int i = 0; i < BLOCK; i++)
				CHECK(u->cache[l][2 * FILES - 1 - f][i] == content(u->number, round, l, f, i));
	struct tuttifs_pool_stats stats = {.size = sizeof stats};
	OK(tuttifs_pool_stats(pool, &stats));
}

static void *work(void *p)
{
	struct user *u = p;
	register_cache(u);
	for (int round = 0; round < ROUNDS; round++)
		round_trip(u, round);
	OK(tuttifs_unregister(u->memory));
	return NULL;
}

/* Everybody waits for one transfer and closes one handle: one of them has it. */
static tuttifs_transfer_t shared_transfer;
static tuttifs_memory_t shared_memory;
static tuttifs_mount_t shared_mount;
static atomic_int waited, given_back, closed;

static void *contend(void *p)
{
	(void)p;
	pthread_barrier_wait(&together);
	int result = tuttifs_wait_on(shared_transfer, NULL);
	CHECK(result == 0 || result == -TUTTIFS_EBADF);
	result = tuttifs_wait(shared_transfer);
	CHECK(result == 0 || result == -TUTTIFS_EBADF);
	atomic_fetch_add(&waited, result == 0);
	pthread_barrier_wait(&together);
	pthread_barrier_wait(&together); /* meanwhile the layers are closed */
	result = tuttifs_unregister(shared_memory);
	CHECK(result == 0 || result == -TUTTIFS_EBADF);
	atomic_fetch_add(&given_back, result == 0);
	result = tuttifs_close(shared_mount);
	CHECK(result == 0 || result == -TUTTIFS_EBADF);
	atomic_fetch_add(&closed, result == 0);
	return NULL;
}

static void contention(const char *path)
{
	struct user u = {.number = THREADS};
	struct tuttifs_item item = {.key = {9}, .tokens = TOKENS};
	struct tuttifs_lease lease;
	tuttifs_layers_t layers;
	pthread_t threads[THREADS];
	uint64_t n, block = 0;
	register_cache(&u);
	OK(tuttifs_open(path, &shared_mount));
	shared_memory = u.memory;
	OK(tuttifs_reserve(pool, 0, 1, &item, 1, 0, &lease, &n));
	OK(tuttifs_layers_open(pool, 0, TUTTIFS_STORE, &lease, 1, u.memory, &block, &layers));
	OK(tuttifs_store_layer(layers, 0, NULL, &shared_transfer));
	for (int t = 0; t < THREADS; t++)
		CHECK(pthread_create(&threads[t], NULL, contend, NULL) == 0);
	pthread_barrier_wait(&together);
	pthread_barrier_wait(&together);
	OK(tuttifs_layers_close(layers));
	OK(tuttifs_abort(pool, 1));
	pthread_barrier_wait(&together);
	for (int t = 0; t < THREADS; t++)
		CHECK(pthread_join(threads[t], NULL) == 0);
	CHECK(waited == 1 && given_back == 1 && closed == 1);
	free(u.cache);
}

/* Calls go on while the session is closed under them. */
static atomic_int calls;

static void *until_closed(void *p)
{
	const uint8_t key[32] = {9};
	uint64_t n;
	char text[100];
	int number = (int)(intptr_t)p, result = 0;
	while (result == 0) {
		struct tuttifs_session_stats stats = {.size = sizeof stats};
		struct tuttifs_lease lease;
		switch (number % 4) {
		case 0: result = tuttifs_peek(pool, 0, key, 1, &n); break;
		case 1: result = tuttifs_session_stats(session, &stats); break;
		case 2: result = tuttifs_pin(pool, 0, (uint64_t)number, key, 1, &lease, &n); break;
		default: result = tuttifs_session_describe(session, text, sizeof text); break;
		}
		atomic_fetch_add(&calls, 1);
	}
	CHECK(result == -TUTTIFS_EBADF);
	return NULL;
}

int main(int argc, char **argv)
{
	if (argc != 2)
		return 2;
	tuttifs_mount_t mount;
	struct user users[THREADS];
	pthread_t threads[THREADS];
	struct tuttifs_session_options options = {.size = sizeof options, .lanes = 3, .depth = 64, .dma_bytes = 16 << 20,
	    .bounce_bytes = 8 << 20, .deadline_ms = 60000};
	OK(tuttifs_open(argv[1], &mount));
	OK(tuttifs_session_create(mount, &options, &session));
	open_pool();
	CHECK(pthread_barrier_init(&together, NULL, THREADS + 1) == 0);
	for (int t = 0; t < THREADS; t++) {
		users[t] = (struct user){.number = t};
		CHECK(pthread_create(&users[t].thread, NULL, work, &users[t]) == 0);
	}
	for (int t = 0; t < THREADS; t++) {
		CHECK(pthread_join(users[t].thread, NULL) == 0);
		free(users[t].cache);
	}
	contention(argv[1]);
	for (intptr_t t = 0; t < THREADS; t++)
		CHECK(pthread_create(&threads[t], NULL, until_closed, (void *)t) == 0);
	while (atomic_load(&calls) < 200) {
	}
	OK(tuttifs_session_close(session));
	for (int t = 0; t < THREADS; t++)
		CHECK(pthread_join(threads[t], NULL) == 0);
	OK(tuttifs_close(mount));
	return 0;
}
