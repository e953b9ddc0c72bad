/*
 * prefix MOUNT: a prompt's KV cache is computed and stored the first time, and restored from then on.
 *
 *   make build lib
 *   cc -Iinclude -o /tmp/prefix examples/prefix.c -Lbuild/lib -ltuttifs -Wl,-rpath,$PWD/build/lib
 *   /tmp/prefix /mnt/kv
 *   /tmp/prefix /mnt/kv     # also after a restart
 *
 * The "engine" has a paged cache in host memory: for every layer a tensor [BLOCKS][BLOCK_BYTES], and 16 tokens a block.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "libtuttifs.h"

enum { LAYERS = 4, TOKENS_PER_BLOCK = 16, BLOCK_BYTES = 16384, BLOCKS = 64, PROMPT_TOKENS = 330 };
enum { FILES = PROMPT_TOKENS / TOKENS_PER_BLOCK }; /* whole ones: the last ten tokens are always computed */

static uint8_t cache[LAYERS][BLOCKS][BLOCK_BYTES];

/* Ends the program with the library's words if a call has failed. */
static void ok(int code, const char *what)
{
	if (code == 0)
		return;
	fprintf(stderr, "%s: %s (%d)\n", what, tuttifs_last_error(), code);
	exit(1);
}
#define OK(call) ok(call, #call)

/* What the model would compute. */
static uint8_t computed(int layer, int file, int i) { return (uint8_t)(layer * 31 + file * 7 + i * 13 + (i >> 8)); }

/* The pool: one object a layer. Its identity says what decides whether two blocks of equal keys are interchangeable. */
static tuttifs_pool_t open_pool(tuttifs_session_t session)
{
	static const char identity[] =
	    "{\"model\":\"example\",\"revision\":\"1\",\"weights_epoch\":1,\"dtype\":\"bf16\",\"quantisation\":\"none\","
	    "\"scale_format\":\"none\",\"layout\":\"NHD\",\"page_bytes\":16384,\"block_tokens\":16,\"file_tokens\":16,"
	    "\"tp\":1,\"pp\":1,\"cp\":1,\"group\":\"full\"}";
	struct tuttifs_run run = {BLOCK_BYTES, TUTTIFS_RUN_KV};
	struct tuttifs_object objects[LAYERS];
	for (int l = 0; l < LAYERS; l++)
		objects[l] = (struct tuttifs_object){.layer = (uint16_t)l, .rank = 0, .first_run = 0, .run_count = 1};
	struct tuttifs_pool_options options = {.size = sizeof options, .name = "example", .identity = identity,
	    .tokens_per_file = TOKENS_PER_BLOCK, .objects = objects, .object_count = LAYERS, .runs = &run, .run_count = 1};
	tuttifs_pool_t pool;
	OK(tuttifs_pool_open(session, &options, &pool));
	return pool;
}

/* The cache: for each layer, where block 0 is and how far it is to the next. */
static tuttifs_memory_t register_cache(tuttifs_session_t session)
{
	struct tuttifs_strided_run runs[LAYERS];
	for (int l = 0; l < LAYERS; l++)
		runs[l] = (struct tuttifs_strided_run){(uintptr_t)cache[l], BLOCK_BYTES, BLOCK_BYTES};
	struct tuttifs_paged paged = {.size = sizeof paged, .classes = LAYERS, .runs_per_class = 1, .blocks = BLOCKS,
	    .runs = runs};
	tuttifs_memory_t memory;
	OK(tuttifs_register_paged(session, &paged, &memory));
	return memory;
}

/* Computes everything and stores what nobody has stored. */
static void store(tuttifs_pool_t pool, tuttifs_memory_t memory, const uint8_t (*keys)[32], const uint64_t *blocks)
{
	struct tuttifs_item items[FILES] = {0};
	struct tuttifs_lease leases[FILES];
	uint64_t to[FILES], granted, n = 0;
	for (int f = 0; f < FILES; f++) {
		for (int i = 0; i < 32; i++) {
			items[f].key[i] = keys[f][i];
			items[f].parent[i] = f ? keys[f - 1][i] : 0;
		}
		items[f].tokens = TOKENS_PER_BLOCK;
		items[f].position = (uint32_t)f;
	}
	OK(tuttifs_reserve(pool, 0, 1, items, FILES, 0, leases, &granted));
	for (uint64_t f = 0; f < granted; f++) /* leave out what is stored already, is being stored, or is not wanted */
		if (leases[f].status == TUTTIFS_LEASE_NEW)
			leases[n] = leases[f], to[n++] = blocks[f];
	tuttifs_layers_t layers;
	tuttifs_transfer_t transfer[LAYERS];
	OK(tuttifs_layers_open(pool, 0, TUTTIFS_STORE, leases, n, memory, to, &layers));
	for (int l = 0; l < LAYERS; l++) {
		for (int f = 0; f < FILES; f++)
			for (int i = 0; i < BLOCK_BYTES; i++)
				cache[l][blocks[f]][i] = computed(l, f, i);
		OK(tuttifs_store_layer(layers, (uint16_t)l, NULL, &transfer[l]));
	}
	for (int l = 0; l < LAYERS; l++)
		OK(tuttifs_wait(transfer[l]));
	OK(tuttifs_finish(layers));
	OK(tuttifs_layers_close(layers));
	uint16_t rank = 0;
	OK(tuttifs_commit(pool, 1, &rank, 1)); /* from here on they are found, also after a crash */
	printf("computed %d tokens, stored %d files\n", PROMPT_TOKENS, (int)n);
}

/* Brings the files that are stored into the cache, and returns how many are right. */
static uint64_t restore(tuttifs_pool_t pool, tuttifs_memory_t memory, const uint8_t (*keys)[32], const uint64_t *blocks)
{
	struct tuttifs_lease leases[FILES];
	int32_t codes[FILES];
	uint64_t pinned, right = 0;
	OK(tuttifs_pin(pool, 0, 1, keys[0], FILES, leases, &pinned));
	if (pinned == 0)
		return 0;
	tuttifs_layers_t layers;
	tuttifs_transfer_t transfer[LAYERS];
	OK(tuttifs_layers_open(pool, 0, 0, leases, pinned, memory, blocks, &layers));
	for (int l = 0; l < LAYERS; l++) /* all ahead; layer l's attention may begin when transfer l is there */
		OK(tuttifs_retrieve_layer(layers, (uint16_t)l, NULL, &transfer[l]));
	for (int l = 0; l < LAYERS; l++)
		OK(tuttifs_wait(transfer[l]));
	OK(tuttifs_failed(layers, codes, pinned, NULL));
	while (right < pinned && codes[right] == 0) /* a damaged file is a miss, and what is behind it is of no use */
		right++;
	OK(tuttifs_layers_close(layers));
	OK(tuttifs_release(pool, 1));
	return right;
}

int main(int argc, char **argv)
{
	if (argc != 2) {
		fprintf(stderr, "usage: %s MOUNT\n", argv[0]);
		return 2;
	}
	tuttifs_mount_t mount;
	tuttifs_session_t session;
	OK(tuttifs_open(argv[1], &mount));
	OK(tuttifs_session_create(mount, NULL, &session));
	tuttifs_pool_t pool = open_pool(session);
	tuttifs_memory_t memory = register_cache(session);

	static uint32_t tokens[PROMPT_TOKENS];
	static uint8_t keys[FILES][32];
	uint64_t blocks[FILES], files;
	for (int t = 0; t < PROMPT_TOKENS; t++)
		tokens[t] = (uint32_t)(t * t % 1000);
	for (int f = 0; f < FILES; f++)
		blocks[f] = (uint64_t)(f * 37 % BLOCKS); /* wherever the engine's allocator put them */
	struct tuttifs_prompt prompt = {.size = sizeof prompt, .tokens_per_file = TOKENS_PER_BLOCK};
	OK(tuttifs_keys(&prompt, tokens, PROMPT_TOKENS, keys[0], &files));

	uint64_t restored = restore(pool, memory, keys, blocks);
	for (uint64_t f = 0; f < restored; f++)
		for (int l = 0; l < LAYERS; l++)
			for (int i = 0; i < BLOCK_BYTES; i++)
				if (cache[l][blocks[f]][i] != computed(l, (int)f, i)) {
					fprintf(stderr, "file %d is wrong\n", (int)f);
					return 1;
				}
	if (restored < files)
		store(pool, memory, keys, blocks);
	else
		printf("restored %d files, %d tokens left to compute\n", (int)restored,
		       PROMPT_TOKENS - (int)restored * TOKENS_PER_BLOCK);
	OK(tuttifs_session_close(session)); /* and all that was made from it */
	OK(tuttifs_close(mount));
	return 0;
}
