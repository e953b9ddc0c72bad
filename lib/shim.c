/*
 * The C side of the border: every function of libtuttifs.h refuses a forked child before it enters Go, whose runtime
 * has no threads there and would hang, and hands its Go counterpart the thread's place for error texts.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "shim.h"
#include "_cgo_export.h"

#define API __attribute__((visibility("default")))

/* A thread's text. Not _Thread_local: Go has the library's thread-local memory in the static block, where programs that
 * load it late, as Python does, have room for little. */
static pthread_key_t texts;

static char *text_of_thread(void)
{
	static char shared[TEXT_BYTES]; /* where there is no memory */
	char *text = pthread_getspecific(texts);
	if (text)
		return text;
	text = calloc(1, TEXT_BYTES);
	if (!text || pthread_setspecific(texts, text)) {
		free(text);
		return shared;
	}
	return text;
}

/* The process that loaded the library. */
static pid_t owner;
/* Set in children, also in those whose pid is the owner's in another namespace. */
static atomic_int forked;

static void in_child(void) { atomic_store(&forked, 1); }

__attribute__((constructor)) static void loaded(void)
{
	owner = getpid();
	pthread_key_create(&texts, free);
	pthread_atfork(NULL, NULL, in_child);
}

/* Says whether a call must not enter Go. Children of clone(2) run no handlers: their pid tells. */
static int refused(char *text)
{
	if (!atomic_load_explicit(&forked, memory_order_relaxed) && getpid() == owner) {
		text[0] = 0;
		return 0;
	}
	strcpy(text, "libtuttifs: used in a forked child: start workers by exec (Python: \"spawn\"), or open the mount after "
	             "forking");
	return 1;
}

/* One call of Go, with the thread's text as its last argument. */
#define GO(f, ...) (refused(text_of_thread()) ? -TUTTIFS_ECHILD : f(__VA_ARGS__, text_of_thread()))

/* Handles pass as numbers: Go must not see them as pointers. */
#define H(handle) ((uintptr_t)(handle))
#define OUT(p) ((uintptr_t *)(p))

API uint32_t tuttifs_version(void) { return TUTTIFS_LIB_MAJOR << 16 | TUTTIFS_LIB_MINOR; }

API const char *tuttifs_last_error(void) { return text_of_thread(); }

API int tuttifs_open(const char *path, tuttifs_mount_t *mount) { return GO(goOpen, (char *)path, OUT(mount)); }

API int tuttifs_close(tuttifs_mount_t mount) { return GO(goClose, H(mount)); }

API int tuttifs_session_create(tuttifs_mount_t mount, const struct tuttifs_session_options *options,
                               tuttifs_session_t *session)
{
	return GO(goSessionCreate, H(mount), (struct tuttifs_session_options *)options, OUT(session));
}

API int tuttifs_session_join(tuttifs_mount_t mount, const uint8_t token[16],
                             const struct tuttifs_session_options *options, tuttifs_session_t *session)
{
	return GO(goSessionJoin, H(mount), (uint8_t *)token, (struct tuttifs_session_options *)options, OUT(session));
}

API int tuttifs_session_token(tuttifs_session_t session, uint8_t token[16])
{
	return GO(goSessionToken, H(session), token);
}

API int tuttifs_session_describe(tuttifs_session_t session, char *about, uint64_t bytes)
{
	return GO(goSessionDescribe, H(session), about, bytes);
}

API int tuttifs_session_dma(tuttifs_session_t session, void **memory, uint64_t *bytes)
{
	return GO(goSessionDMA, H(session), OUT(memory), bytes);
}

API int tuttifs_session_stats(tuttifs_session_t session, struct tuttifs_session_stats *stats)
{
	return GO(goSessionStats, H(session), stats);
}

API int tuttifs_store_stats(tuttifs_session_t session, struct tuttifs_store_stats *stats)
{
	return GO(goStoreStats, H(session), stats);
}

API int tuttifs_session_close(tuttifs_session_t session) { return GO(goSessionClose, H(session)); }

API int tuttifs_prefill(tuttifs_session_t session, uint32_t input, uint32_t prefix, uint32_t layers)
{
	return GO(goPrefill, H(session), input, prefix, layers);
}

API int tuttifs_layer_done(tuttifs_session_t session, uint32_t layer, tuttifs_event_t after)
{
	return GO(goLayerDone, H(session), layer, H(after));
}

API int tuttifs_decode_step(tuttifs_session_t session, uint32_t length)
{
	return GO(goDecodeStep, H(session), length);
}

API int tuttifs_end_pass(tuttifs_session_t session) { return GO(goEndPass, H(session)); }

API int tuttifs_offer(tuttifs_session_t session, uint32_t input, uint32_t cached, uint32_t layers,
                      struct tuttifs_offer *offer)
{
	return GO(goOffer, H(session), input, cached, layers, offer);
}

API int tuttifs_scheduler_stats(tuttifs_session_t session, struct tuttifs_scheduler_stats *stats)
{
	return GO(goSchedulerStats, H(session), stats);
}

API int tuttifs_layer_bubbles(tuttifs_session_t session, uint64_t *nanoseconds, uint64_t count)
{
	return GO(goLayerBubbles, H(session), nanoseconds, count);
}

API int tuttifs_pool_open(tuttifs_session_t session, const struct tuttifs_pool_options *options, tuttifs_pool_t *pool)
{
	return GO(goPoolOpen, H(session), (struct tuttifs_pool_options *)options, OUT(pool));
}

API int tuttifs_pool_close(tuttifs_pool_t pool) { return GO(goPoolClose, H(pool)); }

API int tuttifs_pool_stats(tuttifs_pool_t pool, struct tuttifs_pool_stats *stats)
{
	return GO(goPoolStats, H(pool), stats);
}

API int tuttifs_keep_stats(tuttifs_pool_t pool, struct tuttifs_keep_stats *stats)
{
	return GO(goKeepStats, H(pool), stats);
}

API int tuttifs_register_host(tuttifs_session_t session, void *memory, uint64_t bytes, uint32_t flags,
                              tuttifs_memory_t *registered)
{
	return GO(goRegisterHost, H(session), memory, bytes, flags, OUT(registered));
}

API int tuttifs_register_device(tuttifs_session_t session, uint64_t pointer, uint64_t bytes,
                                tuttifs_memory_t *registered)
{
	return GO(goRegisterDevice, H(session), pointer, bytes, OUT(registered));
}

API int tuttifs_register_paged(tuttifs_session_t session, const struct tuttifs_paged *paged,
                               tuttifs_memory_t *registered)
{
	return GO(goRegisterPaged, H(session), (struct tuttifs_paged *)paged, OUT(registered));
}

API int tuttifs_memory_cost(tuttifs_memory_t registered, uint64_t *bytes)
{
	return GO(goMemoryCost, H(registered), bytes);
}

API int tuttifs_unregister(tuttifs_memory_t registered) { return GO(goUnregister, H(registered)); }

API int tuttifs_keys(const struct tuttifs_prompt *prompt, const uint32_t *tokens, uint64_t count, uint8_t *keys,
                     uint64_t *files)
{
	return GO(goKeys, (struct tuttifs_prompt *)prompt, (uint32_t *)tokens, count, keys, files);
}

API int tuttifs_peek(tuttifs_pool_t pool, uint32_t tenant, const uint8_t *keys, uint64_t count, uint64_t *found)
{
	return GO(goPeek, H(pool), tenant, (uint8_t *)keys, count, found);
}

API int tuttifs_present(tuttifs_pool_t pool, uint32_t tenant, const uint8_t *keys, uint64_t count, uint8_t *present)
{
	return GO(goPresent, H(pool), tenant, (uint8_t *)keys, count, present);
}

API int tuttifs_pin(tuttifs_pool_t pool, uint32_t tenant, uint64_t request, const uint8_t *keys, uint64_t count,
                    struct tuttifs_lease *leases, uint64_t *pinned)
{
	return GO(goPin, H(pool), tenant, request, (uint8_t *)keys, count, leases, pinned);
}

API int tuttifs_release(tuttifs_pool_t pool, uint64_t request) { return GO(goRelease, H(pool), request); }

API int tuttifs_reserve(tuttifs_pool_t pool, uint32_t tenant, uint64_t reserve, const struct tuttifs_item *items,
                        uint64_t count, uint32_t flags, struct tuttifs_lease *leases, uint64_t *granted)
{
	return GO(goReserve, H(pool), tenant, reserve, (struct tuttifs_item *)items, count, flags, leases, granted);
}

API int tuttifs_commit(tuttifs_pool_t pool, uint64_t reserve, const uint16_t *ranks, uint64_t count)
{
	return GO(goCommit, H(pool), reserve, (uint16_t *)ranks, count);
}

API int tuttifs_commit_from(tuttifs_pool_t pool, uint64_t reserve, const uint16_t *ranks, uint64_t count,
                            const tuttifs_layers_t *loads, uint64_t load_count)
{
	return GO(goCommitFrom, H(pool), reserve, (uint16_t *)ranks, count, (uintptr_t *)loads, load_count);
}

API int tuttifs_abort(tuttifs_pool_t pool, uint64_t reserve) { return GO(goAbort, H(pool), reserve); }

API int tuttifs_report_bad(tuttifs_pool_t pool, uint32_t slot, uint64_t generation)
{
	return GO(goReportBad, H(pool), slot, generation);
}

API int tuttifs_events(tuttifs_pool_t pool, uint64_t *since, struct tuttifs_kv_event *events, uint64_t count,
                       uint64_t *told, uint64_t *lost)
{
	return GO(goEvents, H(pool), since, events, count, told, lost);
}

API int tuttifs_layers_open(tuttifs_pool_t pool, uint16_t rank, uint32_t flags, const struct tuttifs_lease *leases,
                            uint64_t count, tuttifs_memory_t memory, const uint64_t *blocks, tuttifs_layers_t *layers)
{
	return GO(goLayersOpen, H(pool), rank, flags, (struct tuttifs_lease *)leases, count, H(memory), (uint64_t *)blocks,
	          OUT(layers));
}

API int tuttifs_retrieve_layer(tuttifs_layers_t layers, uint16_t layer, tuttifs_event_t after,
                               tuttifs_transfer_t *transfer)
{
	return GO(goMoveLayer, H(layers), 0, layer, H(after), OUT(transfer));
}

API int tuttifs_store_layer(tuttifs_layers_t layers, uint16_t layer, tuttifs_event_t after,
                            tuttifs_transfer_t *transfer)
{
	return GO(goMoveLayer, H(layers), TUTTIFS_STORE, layer, H(after), OUT(transfer));
}

API int tuttifs_retrieve_layer_at(tuttifs_layers_t layers, uint16_t layer, tuttifs_memory_t memory,
                                  const uint64_t *offsets, uint64_t count, tuttifs_event_t after,
                                  tuttifs_transfer_t *transfer)
{
	return GO(goMoveLayerAt, H(layers), 0, layer, H(memory), (uint64_t *)offsets, count, H(after), OUT(transfer));
}

API int tuttifs_store_layer_at(tuttifs_layers_t layers, uint16_t layer, tuttifs_memory_t memory,
                               const uint64_t *offsets, uint64_t count, tuttifs_event_t after,
                               tuttifs_transfer_t *transfer)
{
	return GO(goMoveLayerAt, H(layers), TUTTIFS_STORE, layer, H(memory), (uint64_t *)offsets, count, H(after),
	          OUT(transfer));
}

API int tuttifs_wait_on(tuttifs_transfer_t transfer, tuttifs_stream_t stream)
{
	return GO(goWaitOn, H(transfer), H(stream));
}

API int tuttifs_wait(tuttifs_transfer_t transfer) { return GO(goWait, H(transfer)); }

API int tuttifs_finish(tuttifs_layers_t layers) { return GO(goFinish, H(layers)); }

API int tuttifs_failed(tuttifs_layers_t layers, int32_t *codes, uint64_t count, uint64_t *failed)
{
	return GO(goFailed, H(layers), codes, count, failed);
}

API int tuttifs_layers_close(tuttifs_layers_t layers) { return GO(goLayersClose, H(layers)); }
