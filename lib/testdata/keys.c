/* Compares tuttifs_keys with the vectors of contentkey/testdata/keys.json, which the test makes vectors.h of. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "libtuttifs.h"

struct vector {
	const char *name;
	struct tuttifs_prompt prompt;
	const uint32_t *tokens;
	uint64_t count;
	int refused;
	const uint8_t *keys;
	uint64_t files;
};

#include "vectors.h"

#define CHECK(what)                                                                                          \
	do {                                                                                                 \
		if (!(what)) {                                                                               \
			fprintf(stderr, "%s: line %d: %s: %s\n", v->name, __LINE__, #what, tuttifs_last_error()); \
			exit(1);                                                                             \
		}                                                                                            \
	} while (0)

static void compare(const struct vector *v)
{
	struct tuttifs_prompt prompt = v->prompt;
	uint8_t keys[200][32];
	uint64_t files = 99;
	int result = tuttifs_keys(&prompt, v->tokens, v->count, keys[0], &files);
	if (v->refused) {
		CHECK(result == -TUTTIFS_EINVAL && tuttifs_last_error()[0] && files == 99);
		return;
	}
	CHECK(result == 0 && files == v->files);
	CHECK(memcmp(keys, v->keys, 32 * files) == 0);
	for (uint64_t f = 1; f <= files; f++) { /* continued from every key */
		uint64_t more = 99, behind = f * prompt.tokens_per_file;
		prompt.last = v->keys + 32 * (f - 1), prompt.files = f;
		CHECK(tuttifs_keys(&prompt, v->tokens + behind, v->count - behind, keys[f], &more) == 0 && more == files - f);
		CHECK(memcmp(keys, v->keys, 32 * files) == 0);
	}
}

static void refusals(const struct vector *v)
{
	struct tuttifs_prompt prompt = v->prompt;
	uint8_t keys[200][32];
	uint64_t files;
#define REFUSED(call) CHECK((call) == -TUTTIFS_EINVAL && tuttifs_last_error()[0])
	REFUSED(tuttifs_keys(NULL, v->tokens, v->count, keys[0], &files));
	REFUSED(tuttifs_keys(&prompt, NULL, v->count, keys[0], &files));
	REFUSED(tuttifs_keys(&prompt, v->tokens, v->count, NULL, &files));
	REFUSED(tuttifs_keys(&prompt, v->tokens, v->count, keys[0], NULL));
	REFUSED(tuttifs_keys(&prompt, v->tokens, UINT64_MAX, keys[0], &files));
	prompt.size -= 8;
	REFUSED(tuttifs_keys(&prompt, v->tokens, v->count, keys[0], &files));
	prompt = v->prompt, prompt.files = 1;
	REFUSED(tuttifs_keys(&prompt, v->tokens, v->count, keys[0], &files));
	prompt.last = v->keys, prompt.files = 0;
	REFUSED(tuttifs_keys(&prompt, v->tokens, v->count, keys[0], &files));
	prompt = v->prompt, prompt.reserved[3] = 1;
	REFUSED(tuttifs_keys(&prompt, v->tokens, v->count, keys[0], &files));
	prompt = v->prompt, prompt.salt_bytes = 1;
	REFUSED(tuttifs_keys(&prompt, v->tokens, v->count, keys[0], &files));
	prompt = v->prompt, prompt.media_count = 1;
	REFUSED(tuttifs_keys(&prompt, v->tokens, v->count, keys[0], &files));
}

int main(void)
{
	for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++)
		compare(&vectors[i]);
	refusals(&vectors[1]);
	printf("%zu\n", sizeof vectors / sizeof *vectors);
	return 0;
}
