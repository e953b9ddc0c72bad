/*
 * libtuttifs: a tuttifs mount for inference engines, in C.
 *
 * A KV block's way: tuttifs_pin gives leases on stored files, tuttifs_layers_open with tuttifs_retrieve_layer brings
 * their objects into registered memory layer by layer, tuttifs_release ends the leases. A store is tuttifs_reserve,
 * tuttifs_layers_open with TUTTIFS_STORE and tuttifs_store_layer, tuttifs_finish, tuttifs_commit.
 *
 * Errors. Functions return 0 or a negative TUTTIFS_E* code (Linux errno values). tuttifs_last_error is then the calling
 * thread's text: what failed and what to do. Output parameters are written on success only. Nothing aborts the process:
 * a defect of the library is TUTTIFS_EDEFECT.
 *
 * Handles are opaque numbers in a pointer's clothing, never dereferenced: NULL, a closed handle and one of another kind
 * are TUTTIFS_EBADF. Closing something ends the use of all that was made from it; those handles are then closed too.
 *
 * Threads. Every function may be called from any thread, also at the same time on one handle, except that
 * tuttifs_finish and tuttifs_layers_close are not called beside other calls on the same layers. Calls that wait (noted
 * with each) do so at most the session's deadline and the time of a quiesce. tuttifs_session_close waits for calls in
 * progress on the session.
 *
 * Fork. The library does not work in a child after fork: every function returns TUTTIFS_ECHILD there, before anything
 * is touched, and handles are of no use. Engines start their workers by exec (Python: "spawn"), or open mounts
 * after forking. Processes of one engine join one session by its token.
 *
 * Memory given to a function is the caller's again when the function returns, unless it says otherwise. Registered
 * memory stays the caller's to free, after tuttifs_unregister. Sizes are in bytes. All integers are the host's. Arrays
 * of more than 2^24 elements are TUTTIFS_EINVAL.
 *
 * Compatibility. Structures of options begin with their size, so that later versions can add fields at the end; set all
 * of a structure to zero, then .size = sizeof. Unknown flags and reserved fields that are not zero are TUTTIFS_EINVAL.
 */
#ifndef LIBTUTTIFS_H
#define LIBTUTTIFS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface: the major number changes when something that worked would no longer. */
#define TUTTIFS_LIB_MAJOR 1
#define TUTTIFS_LIB_MINOR 0

enum tuttifs_error {
	TUTTIFS_EPERM = 1,         /* not leased to this session, being committed, or another user's session */
	TUTTIFS_ENOENT = 2,        /* no such pool, request, reservation or lease; leases also expire */
	TUTTIFS_EIO = 5,           /* a drive or command failed */
	TUTTIFS_EBADF = 9,         /* not a handle, closed, or of another kind */
	TUTTIFS_ECHILD = 10,       /* used after fork */
	TUTTIFS_EAGAIN = 11,       /* still busy after the deadline; try again later */
	TUTTIFS_ENOMEM = 12,       /* memory: not registered, too small, or no more to be had */
	TUTTIFS_EDEFECT = 14,      /* a defect of the library; the text says where */
	TUTTIFS_EBUSY = 16,        /* in use by a transfer in flight: wait for its ticket first */
	TUTTIFS_EEXIST = 17,       /* the pool exists with another identity or geometry */
	TUTTIFS_ENODEV = 19,       /* no usable GPU or driver */
	TUTTIFS_EINVAL = 22,       /* an argument that can never be right */
	TUTTIFS_ENOSPC = 28,       /* more than the pool can hold, or everything else is pinned or reserved; the text says which */
	TUTTIFS_EROFS = 30,        /* the mount is read-only */
	TUTTIFS_ENODATA = 61,      /* not every object was written */
	TUTTIFS_EBADMSG = 74,      /* the pool's identity is incomplete or not understood */
	TUTTIFS_EILSEQ = 84,       /* checksum mismatch */
	TUTTIFS_ENOTSUP = 95,      /* not with this executor */
	TUTTIFS_ENOBUFS = 105,     /* the store buffer is full, and the session refuses then: store later, or not at all */
	TUTTIFS_ETIMEDOUT = 110,   /* the deadline passed */
	TUTTIFS_EINPROGRESS = 115, /* another engine is storing one of these keys */
	TUTTIFS_ESTALE = 116,      /* daemon or session is gone: close everything and open the mount again */
	TUTTIFS_EDQUOT = 122,      /* the tenant is over its quota */
	TUTTIFS_ENOTMOUNT = 2001   /* the path lies in no tuttifs mount */
};

typedef struct tuttifs_mount_handle *tuttifs_mount_t;
typedef struct tuttifs_session_handle *tuttifs_session_t;
typedef struct tuttifs_pool_handle *tuttifs_pool_t;
typedef struct tuttifs_memory_handle *tuttifs_memory_t;
typedef struct tuttifs_layers_handle *tuttifs_layers_t;
typedef struct tuttifs_transfer_handle *tuttifs_transfer_t;

/* CUstream and CUevent, or cudaStream_t and cudaEvent_t: of the primary context of the session's device. */
typedef void *tuttifs_stream_t;
typedef void *tuttifs_event_t;

/* The library's version: major << 16 | minor. Compare the major number with TUTTIFS_LIB_MAJOR. Never fails. */
uint32_t tuttifs_version(void);

/* The text of the calling thread's last call, empty if it succeeded. Valid until the thread's next call. */
const char *tuttifs_last_error(void);

/*
 * Mounts and sessions
 */

/* Opens the mount that path lies in. */
int tuttifs_open(const char *path, tuttifs_mount_t *mount);

/* Closes a mount. Its sessions go on. */
int tuttifs_close(tuttifs_mount_t mount);

/* Flags of sessions. */
#define TUTTIFS_GPU 1u      /* the GPU builds the commands; without it the CPU is the executor */
#define TUTTIFS_GPU_AUTO 2u /* with TUTTIFS_GPU: the CPU, where there is no driver or no GPU */
#define TUTTIFS_POLLING 4u  /* with TUTTIFS_GPU: polling kernels instead of the ring. A baseline, not for use */
#define TUTTIFS_STORE_REFUSE 8u /* with store_bytes: a full buffer is TUTTIFS_ENOBUFS; otherwise a store waits for room */
/* Of the scheduler, each switching one idea off, to see what it is worth. */
#define TUTTIFS_NO_SCHEDULER 16u    /* reads and deferred writes go whenever they like, and are counted */
#define TUTTIFS_NO_BUDGET 32u       /* as much of either is in flight as there is */
#define TUTTIFS_READS_NOT_FIRST 64u /* deferred writes do not wait for reads */
#define TUTTIFS_ANY_SLACK_TABLE 128u /* with slack_table: also one of another machine, or of a model with another cache */
/* Queue pairs of the SSDs themselves, where the mount gives this user any (-o real) and drives them by VFIO; the other
 * drives' stay mediated, and tuttifs_session_describe says which are. Without the mount's leave TUTTIFS_EINVAL. Nothing
 * checks the commands then: commit no block that was not written whole. Not with TUTTIFS_POLLING. */
#define TUTTIFS_REAL 256u

/* Zero fields take defaults: those of the CPU executor / of the GPU. */
struct tuttifs_session_options {
	uint32_t size;
	uint32_t flags;
	const char *device;      /* the GPU: ordinal, PCI bus address or UUID ("GPU-..."). NULL: "0" */
	uint32_t lanes;          /* sets of queue pairs, one chunk in flight each: 4 / 8 */
	uint32_t depth;          /* entries of a queue, a power of two: 256 / 1024 */
	uint64_t dma_bytes;      /* host memory that controllers reach: 256 MiB / 24 MiB more than bounce_bytes; and both
	                            more by store_bytes. Trailers have an eighth, 8 MiB at most / two thirds of what is
	                            neither bounce_bytes nor store_bytes, 16 MiB at most */
	uint64_t bounce_bytes;   /* of it, for memory that they do not reach: 64 MiB */
	uint64_t staging_bytes;  /* device memory that transfers pass through: - / 256 MiB */
	uint64_t arena_bytes;    /* of metadata batches: 1 MiB. Ranks that join each other's reservations use equal ones */
	uint32_t chunk_commands; /* most commands of a chunk, 0: the executor's choice */
	uint32_t deadline_ms;    /* of every wait: 30,000 */
	uint64_t store_bytes;    /* of dma_bytes, 16 MiB or more: the store buffer. 0: none */
	const char *slack_table; /* a file of "tuttifs profile model", of this machine and model: others are
	                            TUTTIFS_EINVAL, here or when a pool is opened. NULL: the scheduler learns */
	uint64_t keep_bytes;     /* host memory for blocks that the mount's admission policy declines, 1 MiB or more: they
	                            serve their first reuse from there. Only where no other process joins. 0: none */
	uint64_t reserved[1];
};

/* With a store buffer, what is stored leaves its blocks for it at once, and goes to the drives from there when they have
 * time: when nothing is to be read, and a layer or a decode step leaves room or nothing computes, as far as the session
 * is told; or regardless when the buffer is more than three quarters full. It has lanes of its own, beside lanes, so that
 * writes delay no read. A mount bounds a process's dma_bytes (8 GiB); TUTTIFS_EINVAL says so. Not with
 * TUTTIFS_POLLING. */

/* Makes a session, whose first member this process is. options may be NULL. Waits for the daemon. */
int tuttifs_session_create(tuttifs_mount_t mount, const struct tuttifs_session_options *options,
                           tuttifs_session_t *session);

/* Joins the session with that token: each rank's process does so, with a GPU and options of its own. */
int tuttifs_session_join(tuttifs_mount_t mount, const uint8_t token[16],
                         const struct tuttifs_session_options *options, tuttifs_session_t *session);

/* The token by which other processes of the same user join. Whoever has it has all the session's rights. */
int tuttifs_session_token(tuttifs_session_t session, uint8_t token[16]);

/* States executor, device, DMA mode, bounce and staging memory: at most bytes characters and a NUL, cut if need be. */
int tuttifs_session_describe(tuttifs_session_t session, char *text, uint64_t bytes);

/* Memory that controllers reach directly, for host buffers; the session's until it is closed. It is what of dma_bytes is
 * left of bounce memory, store buffer, trailers and, without SGLs, 16 bytes a page of it for PRP lists. */
int tuttifs_session_dma(tuttifs_session_t session, void **memory, uint64_t *bytes);

/* What a session's executor has done since it was made. With the CPU executor only gpu and lanes say anything. */
struct tuttifs_session_stats {
	uint32_t size;  /* in: sizeof */
	uint32_t gpu;   /* 1: the GPU is the executor */
	uint32_t lanes; /* that still work */
	uint32_t reserved;
	uint64_t commands;
	uint64_t bytes_read;    /* payload and padding */
	uint64_t bytes_written; /* the same */
	uint64_t chunks;
	uint64_t builds, harvests, gathers; /* kernels launched */
	uint64_t checksum_failures;         /* objects */
	uint64_t timeouts;                  /* objects */
	uint64_t io_thread_ns;              /* CPU time of the I/O thread */
	uint64_t device_bytes;              /* device memory in use, registrations included */
};
int tuttifs_session_stats(tuttifs_session_t session, struct tuttifs_session_stats *stats);

/* What a session's store buffer holds and has done; all 0 where there is none. */
struct tuttifs_store_stats {
	uint32_t size;   /* in: sizeof */
	uint32_t refuse; /* 1: TUTTIFS_STORE_REFUSE */
	uint64_t bytes;  /* of the buffer */
	uint64_t fill, peak;                   /* bytes taken, now and at most */
	uint64_t objects, object_bytes;        /* that the drives do not have yet */
	uint64_t oldest_ns;                    /* how long the oldest has been there */
	uint64_t stored_objects, stored_bytes; /* that came through it */
	uint64_t refused;                      /* layers */
	uint64_t blocked_ns;                   /* in which a store waited for room */
};
int tuttifs_store_stats(tuttifs_session_t session, struct tuttifs_store_stats *stats);

/* Ends what is in flight, leaves the session, and closes everything made from it. Registered memory is no longer used
 * afterwards; memory of tuttifs_session_dma is gone. */
int tuttifs_session_close(tuttifs_session_t session);

/*
 * Pools
 */

/* A contiguous piece of an object. */
#define TUTTIFS_RUN_KV 0u
struct tuttifs_run {
	uint32_t bytes;
	uint32_t kind; /* TUTTIFS_RUN_KV, or another kind of docs/geometry.md */
};

/* One layer's ordered runs for one rank: the unit of I/O, at most 2 MiB. Trailers are added by the library. */
struct tuttifs_object {
	uint16_t layer;
	uint16_t rank;
	uint32_t first_run; /* index into runs */
	uint32_t run_count; /* 1 or more; objects may share runs */
};

struct tuttifs_pool_options {
	uint32_t size;
	uint32_t tokens_per_file; /* B, a multiple of the engine's block */
	const char *name;         /* the pool's directory in the mount */
	const char *identity;     /* JSON with every field of the identity, see docs/pool.md */
	const char *family;       /* NULL for none */
	const struct tuttifs_object *objects; /* of one file, for all ranks */
	const struct tuttifs_run *runs;
	uint32_t object_count;
	uint32_t run_count;
	uint64_t min_bytes;    /* kept for the pool */
	uint64_t max_bytes;    /* 0: no limit but the volume's */
	uint32_t max_slots;    /* 0: no limit */
	uint32_t trailing_hit; /* hit rule in its family: 0 ALL, n TRAILING n */
	uint64_t keep_bytes;   /* of the session's; 0: all that no other pool has */
	uint64_t reserved[3];
};

/* Opens or creates a pool and waits until it is durable. Equal name, identity and geometry open the existing one. */
int tuttifs_pool_open(tuttifs_session_t session, const struct tuttifs_pool_options *options, tuttifs_pool_t *pool);

/* Closes a pool's handle, and the layers opened on it as tuttifs_layers_close does. Leases go on. */
int tuttifs_pool_close(tuttifs_pool_t pool);

struct tuttifs_pool_stats {
	uint32_t size; /* in: sizeof */
	uint32_t reserved;
	uint64_t hits, misses, commits, aborts, evicted, bad; /* since the mount */
	uint64_t files, slots_used, slots_free, bytes_used, bytes_capacity;
};
int tuttifs_pool_stats(tuttifs_pool_t pool, struct tuttifs_pool_stats *stats);

/* What a pool has of the session's keep_bytes, and what that has done; all 0 where there is none. Blocks that were
 * declined and have not been written yet, times slot_bytes, are what the drives were spared. */
struct tuttifs_keep_stats {
	uint32_t size; /* in: sizeof */
	uint32_t reserved;
	uint64_t slots, blocks, slot_bytes; /* room for so many; how many are there now */
	uint64_t declined; /* blocks that the mount did not want on its drives */
	uint64_t kept;     /* of them committed into the memory */
	uint64_t hits;     /* blocks that were pinned there */
	uint64_t written;  /* of them brought to the drives then */
	uint64_t refused;  /* and declined once more */
	uint64_t evicted;  /* that had to go for others */
	uint64_t bad;      /* whose bytes were not right any more */
	uint64_t failed;   /* that could not be brought to the drives when they were pinned */
};
int tuttifs_keep_stats(tuttifs_pool_t pool, struct tuttifs_keep_stats *stats);

/*
 * Memory
 */

/* Registers host memory. Outside tuttifs_session_dma it is reached through bounce cells. The caller keeps it mapped
 * until tuttifs_unregister. TUTTIFS_PADDED (memory of tuttifs_session_dma only): every object has room for whole 4-KiB
 * units, of which up to 4,095 bytes behind its payload are overwritten, so that odd lengths are reached directly. */
#define TUTTIFS_PADDED 1u
int tuttifs_register_host(tuttifs_session_t session, void *memory, uint64_t bytes, uint32_t flags,
                          tuttifs_memory_t *registered);

/* Registers device memory of the session's GPU. TUTTIFS_ENOTSUP with the CPU executor. */
int tuttifs_register_device(tuttifs_session_t session, uint64_t pointer, uint64_t bytes, tuttifs_memory_t *registered);

/* A run of every block, as allocators lay them out: block b's begins at base + b * stride. */
struct tuttifs_strided_run {
	uint64_t base;   /* device address; host address with the CPU executor */
	uint64_t stride; /* from block to block */
	uint64_t bytes;
};

/* A paged KV pool. Class c is the rank's c-th object in the order of tuttifs_pool_options.objects (with one object a
 * layer, the layer); its runs, runs[c * runs_per_class ...], one behind the other are the object. They need not be cut
 * as the object's own runs are. */
struct tuttifs_paged {
	uint32_t size;
	uint32_t classes;
	uint32_t runs_per_class;
	uint32_t reserved0;
	uint64_t blocks;
	const struct tuttifs_strided_run *runs; /* classes * runs_per_class */
	uint64_t reserved[4];
};

/* Registers a paged KV pool once, for all transfers from and to it. The CPU executor takes one run a class. */
int tuttifs_register_paged(tuttifs_session_t session, const struct tuttifs_paged *paged, tuttifs_memory_t *registered);

/* Device memory that a registration costs; 0 with the CPU executor. */
int tuttifs_memory_cost(tuttifs_memory_t registered, uint64_t *bytes);

/* Gives a registration back. TUTTIFS_EBUSY while a transfer uses it. */
int tuttifs_unregister(tuttifs_memory_t registered);

/*
 * Content keys
 */

/* What is computed in place of some of a prompt's tokens. id: a digest of its content, 1 to 65,536 bytes. */
struct tuttifs_media {
	uint64_t start;  /* position of its first token in the prompt */
	uint64_t tokens; /* that it takes the place of, 1 or more */
	const uint8_t *id;
	uint64_t id_bytes;
};

/* Everything about a prompt but its tokens. What is hashed, and each field's limits, are in docs/keys.md. */
struct tuttifs_prompt {
	uint32_t size;
	uint32_t tokens_per_file; /* B of the pool */
	uint32_t tenant;          /* as in tuttifs_peek and so on */
	uint32_t reserved0;
	const uint8_t *adapter;   /* NULL and 0 bytes for none */
	uint64_t adapter_bytes;
	const uint8_t *salt;      /* NULL and 0 bytes for none */
	uint64_t salt_bytes;
	const struct tuttifs_media *media; /* sorted by start, then tokens, then id */
	uint64_t media_count;
	const uint8_t *last;      /* to continue: the key of the last file before the tokens. NULL: they are the beginning */
	uint64_t files;           /* to continue: how many files are before the tokens */
	uint64_t reserved[4];
};

/* Computes the keys of a prompt's whole files, root first: keys has room for 32 bytes for each tokens_per_file tokens,
 * *files is how many were written. Tokens behind the last whole file have no key. Needs no mount. */
int tuttifs_keys(const struct tuttifs_prompt *prompt, const uint32_t *tokens, uint64_t count, uint8_t *keys,
                 uint64_t *files);

/*
 * Leases
 */

#define TUTTIFS_LEASE_PINNED 1u  /* readable */
#define TUTTIFS_LEASE_NEW 2u     /* reserved: to be written */
#define TUTTIFS_LEASE_JOINED 3u  /* reserved by another rank of this session: write this rank's objects */
#define TUTTIFS_LEASE_EXISTS 4u  /* stored already: nothing to write */
#define TUTTIFS_LEASE_PENDING 5u /* another engine is storing it */
#define TUTTIFS_LEASE_DECLINED 6u /* the mount's admission policy does not want it: nothing to write */

/* A file's slot, leased to the session. */
struct tuttifs_lease {
	uint32_t slot;
	uint32_t tokens;
	uint64_t generation;
	uint8_t seed[16]; /* of its checksums */
	uint32_t status;  /* TUTTIFS_LEASE_* */
	uint32_t reserved;
};

/* Keys are 32 bytes each, root first: those of tuttifs_keys, or an engine's own chained hashes. */

/* How many leading keys are stored. No side effects. */
int tuttifs_peek(tuttifs_pool_t pool, uint32_t tenant, const uint8_t *keys, uint64_t count, uint64_t *found);

/* Which keys are stored, whatever is before them: present[i] is 1 or 0. No side effects. */
int tuttifs_present(tuttifs_pool_t pool, uint32_t tenant, const uint8_t *keys, uint64_t count, uint8_t *present);

/* Leases the longest stored prefix for reading: leases[0 .. *pinned) are written. leases has room for count. request is
 * the caller's, unique in the session while pinned; the same call again, by whatever process of the session, answers the
 * same. One that finds nothing keeps nothing, and has nothing to be released: other ranks do not ask again then. */
int tuttifs_pin(tuttifs_pool_t pool, uint32_t tenant, uint64_t request, const uint8_t *keys, uint64_t count,
                struct tuttifs_lease *leases, uint64_t *pinned);

/* Ends the leases of a request, for every process of the session that has repeated it. */
int tuttifs_release(tuttifs_pool_t pool, uint64_t request);

/* A file to store. */
struct tuttifs_item {
	uint8_t key[32];
	uint8_t parent[32]; /* zero for a root */
	uint32_t tokens;
	uint32_t position; /* files before it in its chain */
};

/* Leases slots for writing: all or nothing, or with TUTTIFS_PARTIAL a leading run where not all fit. Other ranks of the
 * session join by the same id and items. Waits while space is being freed. Leases that EXIST, are
 * PENDING or are DECLINED are not written; treat statuses that this header does not know likewise. */
#define TUTTIFS_PARTIAL 1u
int tuttifs_reserve(tuttifs_pool_t pool, uint32_t tenant, uint64_t reserve, const struct tuttifs_item *items,
                    uint64_t count, uint32_t flags, struct tuttifs_lease *leases, uint64_t *granted);

/* Says that this process has written all objects of the ranks, and waits until the files are durable, which is when the
 * last rank of any process has committed. They are visible from then on, and not before. What was computed from a load
 * of which a slot failed is wrong, although its checksums are right: abort it instead (docs/libtuttifs.md). */
int tuttifs_commit(tuttifs_pool_t pool, uint64_t reserve, const uint16_t *ranks, uint64_t count);

/* tuttifs_commit of files that were computed from loads: layers that this process has opened for retrieving, and not
 * closed. Waits for what of them is on its way. Where a slot of one has failed it gives the reservation up in place of
 * committing it, as tuttifs_abort does, and returns that slot's code; the commits of other ranks are then
 * TUTTIFS_ENOENT. A rank that has loaded nothing gives no loads, and waits for those that have. */
int tuttifs_commit_from(tuttifs_pool_t pool, uint64_t reserve, const uint16_t *ranks, uint64_t count,
                        const tuttifs_layers_t *loads, uint64_t load_count);

/* Gives a reservation's slots back, for all ranks, as long as one of them has not committed: the commits of the others,
 * begun or to come, are then TUTTIFS_ENOENT. */
int tuttifs_abort(tuttifs_pool_t pool, uint64_t reserve);

/* Says that a pinned file's bytes are damaged; the daemon looks itself, and evicts it if so. Waits for that. */
int tuttifs_report_bad(tuttifs_pool_t pool, uint32_t slot, uint64_t generation);

/*
 * Events
 */

#define TUTTIFS_KV_STORED 1u  /* found from now on */
#define TUTTIFS_KV_REMOVED 2u /* a miss from now on: evicted, removed, damaged, or on a lost drive */

/* What happened to one file of a pool. */
struct tuttifs_kv_event {
	uint8_t key[32];
	uint32_t tenant;
	uint32_t kind; /* TUTTIFS_KV_*; pass over others */
};

/* Tells what happened to a pool's files, whoever did it, in order: *told of at most count events. *since is where the call
 * before has ended, and is moved on; begin with 0, which tells nothing yet, before looking for what is there. There may
 * be more while *told is not 0. The daemon keeps a pool's last 65,536 events: *lost is how many before these are gone,
 * and when it is not 0, what is held of the pool is to be looked up again. A new session begins with 0. What a session
 * keeps itself (keep_bytes) is not told before the drives have it. Does not wait. */
int tuttifs_events(tuttifs_pool_t pool, uint64_t *since, struct tuttifs_kv_event *events, uint64_t count,
                   uint64_t *told, uint64_t *lost);

/*
 * Layers
 */

/* Prepares the transfer of one rank's objects of some leased files: slot i of the batch is leases[i]. Retrieving
 * (flags 0) reads and verifies the files' trailers first, and waits for them. blocks[i] is the paged memory's block for
 * slot i; memory and blocks are NULL where layers are moved by the _at functions. Storing waits where the store buffer
 * still has writes to one of the slots, of a reservation that was given up. */
#define TUTTIFS_STORE 1u
int tuttifs_layers_open(tuttifs_pool_t pool, uint16_t rank, uint32_t flags, const struct tuttifs_lease *leases,
                        uint64_t count, tuttifs_memory_t memory, const uint64_t *blocks, tuttifs_layers_t *layers);

/* Begins to bring a layer of all slots into their blocks, and returns at once; layers may be begun ahead in any number.
 * after, where not NULL, was recorded behind the last work that uses the blocks' old contents; nothing is written to
 * them before. TUTTIFS_ENOTSUP for an event with the CPU executor. *transfer is given back by tuttifs_wait. */
int tuttifs_retrieve_layer(tuttifs_layers_t layers, uint16_t layer, tuttifs_event_t after,
                           tuttifs_transfer_t *transfer);

/* Begins to store a layer of all slots from their blocks. after, where not NULL, was recorded behind the work that
 * produces them. The blocks are left alone until tuttifs_wait, or on the device by what tuttifs_wait_on holds back. With a
 * store buffer that is until they have been copied into it: with the CPU executor before the function returns, which may
 * wait for room. TUTTIFS_ENOBUFS: there is none (TUTTIFS_STORE_REFUSE), and nothing of the layer was stored. */
int tuttifs_store_layer(tuttifs_layers_t layers, uint16_t layer, tuttifs_event_t after, tuttifs_transfer_t *transfer);

/* The same for flat memory: object j of slot i begins at offsets[i * n + j], n objects of the layer and rank. */
int tuttifs_retrieve_layer_at(tuttifs_layers_t layers, uint16_t layer, tuttifs_memory_t memory,
                              const uint64_t *offsets, uint64_t count, tuttifs_event_t after,
                              tuttifs_transfer_t *transfer);
int tuttifs_store_layer_at(tuttifs_layers_t layers, uint16_t layer, tuttifs_memory_t memory, const uint64_t *offsets,
                           uint64_t count, tuttifs_event_t after, tuttifs_transfer_t *transfer);

/* Makes a stream wait for a transfer: for a retrieved layer to be in place, for a stored one to be read out of its
 * blocks. Returns when the device's work for it is enqueued, which is when its bytes have arrived from the drives; the
 * device itself may still be at it. With the CPU executor it waits as tuttifs_wait does, and keeps the transfer;
 * stream is then not used. Slots that fail hold zeros; tuttifs_failed tells after tuttifs_wait. */
int tuttifs_wait_on(tuttifs_transfer_t transfer, tuttifs_stream_t stream);

/* Waits until a transfer is complete and verified (a store: on the drives, or in the store buffer) and gives it back,
 * whatever it returns. An error is for the whole: a slot that fails alone is for tuttifs_failed. */
int tuttifs_wait(tuttifs_transfer_t transfer);

/* Writes the trailers of a store, once every layer has been waited for. Commit may follow when it returns 0. With a store
 * buffer it waits first until the drives have the layers, and tells what of them failed; so it takes until they have time. */
int tuttifs_finish(tuttifs_layers_t layers);

/* One result a slot, 0 or a negative code: codes has room for count of them, the count of tuttifs_layers_open. The last
 * error's text is the first failed slot's, although the call succeeds. *failed is how many failed; it may be NULL. The
 * answer is complete when all transfers have been waited for (a store's with a store buffer: after tuttifs_finish): ask
 * then, before the layers are closed. */
int tuttifs_failed(tuttifs_layers_t layers, int32_t *codes, uint64_t count, uint64_t *failed);

/* Waits for what is in flight, in the store buffer too, and gives the layers back, and their transfers. */
int tuttifs_layers_close(tuttifs_layers_t layers);

/*
 * The scheduler
 *
 * What a session is told of compute decides how far reads run ahead, on how many SMs they are unpacked, and when the
 * store buffer is written (docs/scheduler.md). It may be told ahead of the device: what is told behind an event, and all
 * that is told after it, comes when that has come. A session that is told nothing takes it for idleness. None of these
 * functions waits.
 */

/* A pass begins, over input new tokens behind prefix cached ones, of layers whose numbers are below layers (a stage of a
 * pipeline has their pool's numbers, too); the one before has ended. Transfers that are begun from now on are for it. */
int tuttifs_prefill(tuttifs_session_t session, uint32_t input, uint32_t prefix, uint32_t layers);

/* A layer of the pass, and all before it, is computed; the last one's ends the pass. after, where not NULL, was recorded
 * behind it, and is neither destroyed nor recorded again before the second pass or decode step after this one has been
 * begun; TUTTIFS_ENOTSUP with the CPU executor. A pass may be told by its last layer alone. Transfers say nothing of
 * compute, whatever event they come behind: layers that are stored are told as well. */
int tuttifs_layer_done(tuttifs_session_t session, uint32_t layer, tuttifs_event_t after);

/* A decode step begins, over a context of so many tokens in all; what was under way has ended. */
int tuttifs_decode_step(tuttifs_session_t session, uint32_t length);

/* Nothing computes any more, once what was told before has come. */
int tuttifs_end_pass(tuttifs_session_t session);

/* Whether a prefix is worth restoring. */
struct tuttifs_offer {
	uint32_t size;         /* in: sizeof */
	uint32_t load;         /* 1: restore it; also where nothing is known */
	uint32_t known;        /* 1: windows and rates are, and the times below say something */
	uint32_t reserved;
	uint64_t restore_ns;   /* the pass over the new tokens, with the restore of the others */
	uint64_t recompute_ns; /* the pass over all of them */
};

/* Weighs a prefix of cached tokens before input new ones, in a pass of so many layers. What prefill refuses is an
 * invalid argument here too. */
int tuttifs_offer(tuttifs_session_t session, uint32_t input, uint32_t cached, uint32_t layers,
                  struct tuttifs_offer *offer);

/* What a session's scheduler has counted since it was made. Bytes of deferred writes are counted by why they went to the
 * drives when they did. */
struct tuttifs_scheduler_stats {
	uint32_t size; /* in: sizeof */
	uint32_t reserved;
	uint64_t passes, layers, decode_steps;
	uint64_t bubbles;         /* layers before which compute stood for reads */
	uint64_t bubble_ns;       /* that it stood */
	uint64_t first_bubble_ns; /* of it before first layers, which nothing can hide */
	uint64_t read_hidden_ns;  /* reads in flight while compute did not stand */
	uint64_t read_exposed_ns; /* and while it did */
	uint64_t write_ns;        /* deferred writes in flight */
	uint64_t deferred_objects, deferred_bytes;
	uint64_t issued_off_bytes;    /* nothing held them back */
	uint64_t issued_age_bytes;    /* they were too old to wait */
	uint64_t issued_high_bytes;   /* the store buffer was nearly full */
	uint64_t issued_window_bytes; /* a layer of a prefill left room */
	uint64_t issued_decode_bytes; /* a decode step did */
	uint64_t issued_idle_bytes;   /* nothing computed */
	uint64_t oldest_age_ns;       /* that a deferred write has reached */
	uint64_t overruns;            /* windows at whose end their writes were in flight */
	uint64_t beside;              /* pieces of writes that were issued beside reads */
	uint64_t offers, offers_refused;
	uint64_t estimates;           /* passes whose time was estimated before */
	uint64_t estimated_ns, took_ns, error_ns; /* sums of the estimates, of the truth, of the differences */
	uint64_t window_ns; /* of the layer or decode step that is under way, or was last; 0: not known */
	double window_factor, read_factor, write_factor; /* what was learned: the truth for one of the table */
};
int tuttifs_scheduler_stats(tuttifs_session_t session, struct tuttifs_scheduler_stats *stats);

/* The time that compute stood before each layer, in all passes so far: nanoseconds[l] for l < count, 0 for those behind
 * the last that it ever stood before. */
int tuttifs_layer_bubbles(tuttifs_session_t session, uint64_t *nanoseconds, uint64_t count);

#ifdef __cplusplus
}
#endif
#endif
