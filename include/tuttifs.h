/* Code generated from the Go sources of package ioctl; DO NOT EDIT. */
/* ABI v1 of a tuttifs mount. docs/abi.md is its prose. Integers are little-endian. */
#ifndef TUTTIFS_H
#define TUTTIFS_H

#include <stdint.h>
#include <sys/ioctl.h>

#ifdef __cplusplus
#define TUTTIFS_SIZE(s, n) static_assert(sizeof(struct s) == (n), "size of struct " #s)
extern "C" {
#else
#define TUTTIFS_SIZE(s, n) _Static_assert(sizeof(struct s) == (n), "size of struct " #s)
#endif

/* Limits of version 1. */
#define TUTTIFS_VERSION 1 /* ABI version, in every Header */
#define TUTTIFS_STRUCT_BYTES 16376 /* the largest struct FUSE carries, rounded down to 8 */
#define TUTTIFS_NAME_BYTES 64 /* pool and family names, NUL-padded; the last byte may be used */
#define TUTTIFS_TOKEN_BYTES 16 /* session tokens */
#define TUTTIFS_SOCKET_PATH_BYTES 108 /* sun_path */
#define TUTTIFS_BATCH_MAX 65536 /* keys, items or grants named by one verb */
#define TUTTIFS_ARENA_BYTES_MAX 67108864
#define TUTTIFS_ARENA_BYTES_MIN 4096
#define TUTTIFS_IDENTITY_BYTES 16384 /* canonical JSON of a pool's identity */
#define TUTTIFS_GEOMETRY_BYTES 8388608
#define TUTTIFS_DRIVES_MAX 64
#define TUTTIFS_UNIT_BYTES 4096 /* addresses on drives count these, whatever the LBA size */
#define TUTTIFS_NO_SLOT 0xffffffffu
#define TUTTIFS_DRIVE_PAGE 64 /* drives in one DRIVES answer */
#define TUTTIFS_EVENT_PAGE 64 /* pools in one EVENTS answer */
#define TUTTIFS_CHANGES_KEPT 65536 /* of a pool: who is further behind loses some */

/* struct tuttifs_header begins every struct. */
struct tuttifs_header {
	uint32_t size; /* of the whole struct */
	uint16_t version; /* TUTTIFS_VERSION */
	uint16_t flags; /* of the verb; unknown bits are refused */
};
TUTTIFS_SIZE(tuttifs_header, 8);

/* Target kinds. */
#define TUTTIFS_TARGET_POOL 1
#define TUTTIFS_TARGET_FAMILY 2 /* all pools of a family: they hit and commit together */

/* struct tuttifs_target is what a verb acts on. */
struct tuttifs_target {
	uint16_t kind; /* TUTTIFS_TARGET_POOL or TUTTIFS_TARGET_FAMILY */
	uint16_t id; /* of the pool or the family */
	uint32_t reserved;
};
TUTTIFS_SIZE(tuttifs_target, 8);

/* struct tuttifs_span names bytes of the calling process's arena. The daemon copies an input span
 * before it looks at it, and writes results into an output span; a span outside the arena is
 * EFAULT. */
struct tuttifs_span {
	uint64_t offset; /* from the arena's start, a multiple of 8 */
	uint64_t bytes;
};
TUTTIFS_SIZE(tuttifs_span, 16);

/* Hello flags in tuttifs_hello.state. */
#define TUTTIFS_STATE_READ_ONLY 1 /* the volume is mounted read-only */

/* struct tuttifs_hello describes mount and volume. It needs no session. */
struct tuttifs_hello {
	struct tuttifs_header header;
	uint8_t uuid[16]; /* out */
	uint8_t label[64]; /* out */
	uint64_t nonce; /* out: of this mount: changes with every daemon */
	uint64_t epoch; /* out: of the volume */
	uint64_t segment_bytes; /* out */
	uint64_t total_bytes; /* out: what files could occupy */
	uint64_t used_bytes; /* out */
	uint64_t free_bytes; /* out */
	uint64_t arena_max; /* out: largest arena */
	uint64_t dma_max; /* out: most DMA memory of one process */
	uint32_t width; /* out: entries of a row */
	uint32_t drives; /* out */
	uint32_t pools; /* out */
	uint32_t state; /* out: State* bits */
	uint32_t lanes_max; /* out */
	uint32_t depth_max; /* out */
	uint32_t tickets; /* out: tickets of one process that may be outstanding */
	uint32_t command_bytes; /* out: largest transfer of one command */
	uint64_t reserved[4];
};
TUTTIFS_SIZE(tuttifs_hello, 216);

/* Drive kinds. */
#define TUTTIFS_DRIVE_FILE 0
#define TUTTIFS_DRIVE_BLOCK 1
#define TUTTIFS_DRIVE_MEMORY 2

/* Drive flags. */
#define TUTTIFS_DRIVE_DIRECT 1 /* I/O bypasses the page cache */
#define TUTTIFS_DRIVE_METADATA 2 /* holds a copy of journal and catalog */

/* struct tuttifs_drive_entry describes one member drive. */
struct tuttifs_drive_entry {
	uint8_t uuid[16];
	uint8_t name[64]; /* tail of the path, NUL-padded */
	uint64_t bytes;
	uint64_t read_errors;
	uint64_t write_errors;
	uint32_t segments;
	uint32_t free_segments;
	uint32_t lba_bytes;
	uint16_t index;
	uint8_t kind; /* Drive* kinds */
	uint8_t flags; /* Drive* flags */
};
TUTTIFS_SIZE(tuttifs_drive_entry, 120);

/* struct tuttifs_drives lists member drives from the First-th on. */
struct tuttifs_drives {
	struct tuttifs_header header;
	uint32_t first;
	uint32_t reserved;
	uint32_t count; /* out: entries filled */
	uint32_t total; /* out */
	struct tuttifs_drive_entry entries[TUTTIFS_DRIVE_PAGE]; /* out */
};
TUTTIFS_SIZE(tuttifs_drives, 7704);

/* struct tuttifs_session is SESSION_CREATE and SESSION_JOIN: it makes the calling process a member
 * of a new session, or of the one whose token it has. The membership belongs to this open file and
 * to the process, and ends with either. */
struct tuttifs_session {
	struct tuttifs_header header;
	uint8_t token[TUTTIFS_TOKEN_BYTES]; /* in for JOIN, out for CREATE */
	uint64_t arena_bytes; /* wanted; 0 for 1 MiB. Out: what attaching will give */
	uint32_t id; /* out */
	uint32_t member; /* out: names this process in the attach request */
	uint8_t socket_path[TUTTIFS_SOCKET_PATH_BYTES]; /* out: where to attach, NUL-terminated */
	uint32_t pad; /* out: zero */
	uint64_t reserved[2];
};
TUTTIFS_SIZE(tuttifs_session, 168);

/* struct tuttifs_arena tells which arena this open file's batches lie in. ENXIO before the process
 * has attached. */
struct tuttifs_arena {
	struct tuttifs_header header;
	uint64_t bytes; /* out */
	uint64_t inode; /* out: st_ino of the arena's memfd: check that the mapping is the right one */
	uint32_t session; /* out */
	uint32_t member; /* out */
	uint8_t name[64]; /* out: of the memfd, as /proc/PID/maps shows it */
};
TUTTIFS_SIZE(tuttifs_arena, 96);

/* struct tuttifs_pool_open opens or creates a pool. Equal name, identity and geometry open the
 * existing one; anything else is EEXIST. */
struct tuttifs_pool_open {
	struct tuttifs_header header;
	struct tuttifs_span identity; /* canonical or plain JSON, at most TUTTIFS_IDENTITY_BYTES */
	struct tuttifs_span geometry; /* as stripe.Geometry encodes it, trailers included */
	uint64_t min_bytes;
	uint64_t max_bytes; /* 0: no limit but the volume's */
	uint32_t tokens_per_file;
	uint32_t trailing_hit; /* hit rule in its family: 0 ALL, n TRAILING n */
	uint32_t max_slots; /* 0: no limit */
	uint32_t checksum_alg; /* 1 */
	uint8_t name[TUTTIFS_NAME_BYTES];
	uint8_t family[TUTTIFS_NAME_BYTES]; /* empty for none */
	uint64_t ticket; /* out: done when the pool is durable */
	struct tuttifs_target target; /* out: the pool */
	struct tuttifs_target family_target; /* out: kind 0 for none */
	uint64_t reserved[4];
};
TUTTIFS_SIZE(tuttifs_pool_open, 256);

/* Selectors of struct tuttifs_pool_info, in tuttifs_header.flags: at most one. Without them Target
 * selects. */
#define TUTTIFS_POOL_BY_NAME 1
#define TUTTIFS_POOL_BY_INDEX 2 /* the Index-th pool, for listing; ENOENT behind the last */

/* struct tuttifs_pool_info describes a pool. */
struct tuttifs_pool_info {
	struct tuttifs_header header;
	uint8_t name[TUTTIFS_NAME_BYTES]; /* in with TUTTIFS_POOL_BY_NAME */
	struct tuttifs_target target; /* in without flags */
	uint32_t index; /* in with TUTTIFS_POOL_BY_INDEX */
	uint32_t reserved;
	uint8_t family[TUTTIFS_NAME_BYTES]; /* out */
	uint8_t digest[32]; /* out: of the identity */
	uint64_t slot_bytes; /* out: occupied by one file */
	uint64_t min_bytes; /* out */
	uint64_t max_bytes; /* out */
	uint64_t map_generation; /* out */
	uint32_t tokens_per_file; /* out */
	uint32_t trailing_hit; /* out */
	uint32_t max_slots; /* out */
	uint32_t checksum_alg; /* out */
	uint32_t objects; /* out: of one file, trailers included */
	uint32_t ranks; /* out */
	struct tuttifs_target family_target; /* out: kind 0 for none */
};
TUTTIFS_SIZE(tuttifs_pool_info, 248);

/* struct tuttifs_layout fetches what turns (slot, object) into an address, except the rows. */
struct tuttifs_layout {
	struct tuttifs_header header;
	struct tuttifs_target target; /* a pool */
	struct tuttifs_span geometry; /* out span; EOVERFLOW if it is too small, 0 bytes ask for TUTTIFS_GEOMETRY_BYTES alone */
	uint64_t geometry_bytes; /* out */
	uint64_t entry_units; /* out */
	uint64_t slot_units; /* out */
	uint64_t map_generation; /* out */
	uint32_t slots_per_row; /* out */
	uint32_t slots; /* out: one more than the highest slot that a row backs */
	uint32_t width; /* out */
	uint32_t checksum_alg; /* out */
};
TUTTIFS_SIZE(tuttifs_layout, 80);

/* struct tuttifs_row_entry is one of the W entries of a row. */
struct tuttifs_row_entry {
	uint64_t unit; /* first unit of the entry */
	uint16_t drive;
	uint16_t reserved[3];
};
TUTTIFS_SIZE(tuttifs_row_entry, 16);

/* struct tuttifs_row_head begins a row in the arena; Width struct tuttifs_row_entry follow. */
struct tuttifs_row_head {
	uint32_t number; /* slot = Number x slots per row + index */
	uint32_t width;
};
TUTTIFS_SIZE(tuttifs_row_head, 8);

/* struct tuttifs_rows fetches rows numbered First or more, in order. Pages that show different map
 * generations do not fit together: begin again. */
struct tuttifs_rows {
	struct tuttifs_header header;
	struct tuttifs_target target; /* a pool */
	struct tuttifs_span rows; /* out span: Count rows of RowBytes */
	uint32_t first;
	uint32_t reserved;
	uint64_t map_generation; /* out */
	uint32_t row_bytes; /* out: sizeof(struct tuttifs_row_head) + Width x sizeof(struct tuttifs_row_entry) */
	uint32_t count; /* out */
	uint32_t total; /* out: rows of the pool */
	uint32_t next; /* out: First of the next page; 0 behind the last row */
};
TUTTIFS_SIZE(tuttifs_rows, 64);

/* struct tuttifs_map_ack says that this process uses map generation MapGeneration or a later one. */
struct tuttifs_map_ack {
	struct tuttifs_header header;
	struct tuttifs_target target; /* a pool */
	uint64_t map_generation;
	uint64_t current; /* out: the pool's generation now */
};
TUTTIFS_SIZE(tuttifs_map_ack, 32);

/* struct tuttifs_peek is the length of the longest prefix of keys that is present. It has no side
 * effects. */
struct tuttifs_peek {
	struct tuttifs_header header;
	struct tuttifs_target target;
	struct tuttifs_span keys; /* TUTTIFS_KEY_BYTES each */
	uint32_t tenant;
	uint32_t reserved;
	uint32_t count; /* out: leading keys present */
	uint32_t pad; /* out: zero */
};
TUTTIFS_SIZE(tuttifs_peek, 48);

/* TUTTIFS_KEY_BYTES is the size of one key in the arena. */
#define TUTTIFS_KEY_BYTES 32

/* Grant states. */
#define TUTTIFS_GRANT_NONE 0
#define TUTTIFS_GRANT_PINNED 1 /* readable */
#define TUTTIFS_GRANT_NEW 2 /* reserved: write it */
#define TUTTIFS_GRANT_JOINED 3 /* reserved by another rank of this session under the same reserve id: write this rank's objects */
#define TUTTIFS_GRANT_EXISTS 4 /* committed already; nothing to write */
#define TUTTIFS_GRANT_PENDING 5 /* another engine is storing it */
#define TUTTIFS_GRANT_DECLINED 6 /* TUTTIFS_GRANT_DECLINED: the admission policy does not want it on the drives; the reservation goes on without it */

/* struct tuttifs_grant is one slot leased to the session. For a family, grants lie [key][pool],
 * pools in the family's order. */
struct tuttifs_grant {
	uint32_t slot; /* TUTTIFS_NO_SLOT where Status says none */
	uint32_t tokens;
	uint64_t generation;
	uint8_t seed[16]; /* of the slot's checksums */
	uint8_t status; /* Grant* */
	uint8_t lifetime; /* Lifetime*, of what is to be written */
	uint8_t reserved[6];
};
TUTTIFS_SIZE(tuttifs_grant, 40);

/* TUTTIFS_LIFETIMES: how long what is written will probably stay, compared with what is written at
 * the same time. Whoever writes by an SSD's own queue pairs looks the directive up in DriveTerms. */
#define TUTTIFS_LIFETIME_NORMAL 0
#define TUTTIFS_LIFETIME_METADATA 1 /* the daemon's own; no grant has it */
#define TUTTIFS_LIFETIME_SHORT 2
#define TUTTIFS_LIFETIME_LONG 3
#define TUTTIFS_LIFETIMES 4

/* struct tuttifs_pin leases the longest present prefix of keys for reading. A second PIN with one
 * request id answers the same, for all processes of the session, until it is released. One that
 * finds nothing keeps nothing: the next may find something. */
struct tuttifs_pin {
	struct tuttifs_header header;
	struct tuttifs_target target;
	struct tuttifs_span keys; /* TUTTIFS_KEY_BYTES each */
	struct tuttifs_span grants; /* out span with room for keys x pools grants */
	uint64_t request; /* chosen by the caller, unique in its session while pinned */
	uint32_t tenant;
	uint32_t reserved;
	uint64_t map_generation; /* out: sum over the target's pools: refresh the maps when it moved */
	uint32_t count; /* out: leading keys pinned */
	uint32_t pools; /* out: grants a key */
};
TUTTIFS_SIZE(tuttifs_pin, 80);

/* struct tuttifs_release ends the pins of a request. Releasing twice, or what has expired, is
 * ENOENT. */
struct tuttifs_release {
	struct tuttifs_header header;
	struct tuttifs_target target;
	uint64_t request;
};
TUTTIFS_SIZE(tuttifs_release, 24);

/* struct tuttifs_reserve_item is one file to be stored. */
struct tuttifs_reserve_item {
	uint8_t key[TUTTIFS_KEY_BYTES];
	uint8_t parent[TUTTIFS_KEY_BYTES]; /* zero for a root */
	uint32_t tokens;
	uint32_t position; /* blocks before it in its chain */
};
TUTTIFS_SIZE(tuttifs_reserve_item, 72);

/* TUTTIFS_RESERVE_PARTIAL, in tuttifs_header.flags, grants a leading run where not all fit. */
#define TUTTIFS_RESERVE_PARTIAL 1

/* struct tuttifs_reserve leases slots for writing: all or nothing unless TUTTIFS_RESERVE_PARTIAL.
 * Other ranks join by the same reserve id. */
struct tuttifs_reserve {
	struct tuttifs_header header;
	struct tuttifs_target target;
	struct tuttifs_span items; /* struct tuttifs_reserve_item each */
	struct tuttifs_span grants; /* out span with room for items x pools grants */
	uint64_t reserve;
	uint32_t tenant;
	uint32_t reserved;
	uint64_t map_generation; /* out: as in Pin */
	uint32_t count; /* out: leading items granted */
	uint32_t pools; /* out */
};
TUTTIFS_SIZE(tuttifs_reserve, 80);

/* struct tuttifs_commit says that this process has written all objects of Rank for every slot of
 * the reservation. */
struct tuttifs_commit {
	struct tuttifs_header header;
	struct tuttifs_target target;
	uint64_t reserve;
	uint16_t rank;
	uint16_t reserved[3];
	uint64_t ticket; /* out: done when the last rank's commit is durable */
};
TUTTIFS_SIZE(tuttifs_commit, 40);

/* struct tuttifs_abort gives a reservation's uncommitted slots back. */
struct tuttifs_abort {
	struct tuttifs_header header;
	struct tuttifs_target target;
	uint64_t reserve;
};
TUTTIFS_SIZE(tuttifs_abort, 24);

/* struct tuttifs_report_bad says that a reader found damage. The daemon rereads the slot, and
 * evicts the file if it agrees. */
struct tuttifs_report_bad {
	struct tuttifs_header header;
	struct tuttifs_target target; /* a pool */
	uint32_t slot;
	uint32_t reserved;
	uint64_t generation;
	uint64_t ticket; /* out */
};
TUTTIFS_SIZE(tuttifs_report_bad, 40);

/* Evict flags: exactly one. */
#define TUTTIFS_EVICT_COUNT 1 /* up to Count files, by the policy's choice */
#define TUTTIFS_EVICT_KEYS 2 /* the named files */
#define TUTTIFS_EVICT_PREFIX 4 /* the named files and their ancestors up to the first that another chain shares */

/* struct tuttifs_evict frees files of a pool. The ticket's Value is how many. Pinned files are
 * doomed or left, never torn away. */
struct tuttifs_evict {
	struct tuttifs_header header;
	struct tuttifs_target target; /* a pool */
	struct tuttifs_span keys; /* TUTTIFS_KEY_BYTES each, for TUTTIFS_EVICT_KEYS and TUTTIFS_EVICT_PREFIX */
	uint32_t count; /* for TUTTIFS_EVICT_COUNT */
	uint32_t reserved;
	uint64_t ticket; /* out */
};
TUTTIFS_SIZE(tuttifs_evict, 48);

/* struct tuttifs_unlink dooms files: a miss at once, the slot free at the last unpin. */
struct tuttifs_unlink {
	struct tuttifs_header header;
	struct tuttifs_target target; /* a pool */
	struct tuttifs_span keys; /* TUTTIFS_KEY_BYTES each */
	uint32_t count; /* out: files that were there */
	uint32_t pad; /* out: zero */
	uint64_t reserved;
};
TUTTIFS_SIZE(tuttifs_unlink, 48);

/* struct tuttifs_extent is where one object lies. */
struct tuttifs_extent {
	uint64_t unit;
	uint32_t units;
	uint16_t drive;
	uint16_t object;
};
TUTTIFS_SIZE(tuttifs_extent, 16);

/* struct tuttifs_extents locates a slot's objects from First on. */
struct tuttifs_extents {
	struct tuttifs_header header;
	struct tuttifs_target target; /* a pool */
	struct tuttifs_span extents; /* out span */
	uint64_t generation; /* of the file; 0 for whatever the slot holds */
	uint32_t slot;
	uint32_t first;
	uint32_t count; /* out */
	uint32_t total; /* out */
};
TUTTIFS_SIZE(tuttifs_extents, 56);

/* struct tuttifs_stats are a pool's counters, monotonic since the mount, and gauges. */
struct tuttifs_stats {
	struct tuttifs_header header;
	struct tuttifs_target target; /* a pool */
	uint64_t lookups; /* out: blocks asked of PIN: hits + misses */
	uint64_t hits; /* out */
	uint64_t misses; /* out */
	uint64_t reserved;
	uint64_t reserves; /* out */
	uint64_t commits; /* out */
	uint64_t aborts; /* out */
	uint64_t evicted; /* out */
	uint64_t doomed; /* out */
	uint64_t bad; /* out */
	uint64_t files; /* out: gauge, as all that follow */
	uint64_t files_pinned; /* out */
	uint64_t files_reserved; /* out */
	uint64_t slots_free; /* out */
	uint64_t slots_freeing; /* out */
	uint64_t slots_used; /* out */
	uint64_t bytes_used; /* out */
	uint64_t bytes_capacity; /* out */
};
TUTTIFS_SIZE(tuttifs_stats, 160);

/* struct tuttifs_event is what has happened to one pool since the mount. */
struct tuttifs_event {
	struct tuttifs_target target;
	uint64_t map_generation;
	uint64_t committed;
	uint64_t evicted;
	uint64_t doomed;
	uint64_t bad;
};
TUTTIFS_SIZE(tuttifs_event, 48);

/* struct tuttifs_events polls all pools at once; compare with the last answer. */
struct tuttifs_events {
	struct tuttifs_header header;
	uint32_t first; /* index of the first pool wanted */
	uint32_t reserved;
	uint32_t count; /* out */
	uint32_t total; /* out */
	struct tuttifs_event events[TUTTIFS_EVENT_PAGE]; /* out */
};
TUTTIFS_SIZE(tuttifs_events, 3096);

/* Kinds of changes. */
#define TUTTIFS_CHANGE_STORED 1 /* found from now on */
#define TUTTIFS_CHANGE_REMOVED 2 /* a miss from now on: evicted, unlinked, damaged or on a lost drive */

/* struct tuttifs_change is what happened to one file. */
struct tuttifs_change {
	uint8_t key[TUTTIFS_KEY_BYTES];
	uint32_t tenant;
	uint8_t kind; /* Change* kinds */
	uint8_t reserved[3];
};
TUTTIFS_SIZE(tuttifs_change, 40);

/* struct tuttifs_changes tells what happened to a pool's files since it was asked last, in order. A
 * pool keeps its last TUTTIFS_CHANGES_KEPT changes, from when it is first asked for them. */
struct tuttifs_changes {
	struct tuttifs_header header;
	struct tuttifs_target target; /* a pool */
	struct tuttifs_span changes; /* out span: Change each */
	uint64_t since; /* Next of the last answer; 0: from now on */
	uint64_t next; /* out */
	uint64_t lost; /* out: changes before these that are no longer kept */
	uint32_t count; /* out */
	uint32_t pad; /* out: zero */
};
TUTTIFS_SIZE(tuttifs_changes, 64);

/* struct tuttifs_present says of each key whether its file is there, whatever is before it. It has
 * no side effects. */
struct tuttifs_present {
	struct tuttifs_header header;
	struct tuttifs_target target; /* a pool */
	struct tuttifs_span keys; /* TUTTIFS_KEY_BYTES each */
	struct tuttifs_span present; /* out span: a byte for each key, 1 or 0 */
	uint32_t tenant;
	uint32_t reserved;
	uint32_t count; /* out: keys that are there */
	uint32_t pad; /* out: zero */
};
TUTTIFS_SIZE(tuttifs_present, 64);

/* Ticket states. */
#define TUTTIFS_TICKET_PENDING 0
#define TUTTIFS_TICKET_DONE 1
#define TUTTIFS_TICKET_FAILED 2 /* Errno says why */

/* struct tuttifs_ticket asks for the state of what a verb started. A finished ticket is forgotten
 * when as many newer ones exist as may be outstanding (tuttifs_hello.tickets). */
struct tuttifs_ticket {
	struct tuttifs_header header;
	uint64_t id;
	uint32_t state; /* out: Ticket* */
	int32_t error; /* out: positive, with TUTTIFS_TICKET_FAILED */
	uint64_t value; /* out: EVICT: files evicted. POOL_OPEN, COMMIT, REPORT_BAD: zero */
	uint64_t reserved;
};
TUTTIFS_SIZE(tuttifs_ticket, 40);

/* The attach protocol gives a member its shared memory. It runs over a SOCK_SEQPACKET unix socket
 * whose path SESSION_CREATE and SESSION_JOIN answer. The engine sends one struct
 * tuttifs_attach_request and gets one struct tuttifs_attach_reply with up to three descriptors
 * (SCM_RIGHTS): arena, queues, DMA memory; and one more for each drive whose own queue pairs it
 * gets. The connection stays open: its end means that the process is gone. Later messages on it are
 * struct tuttifs_attach_request and struct tuttifs_attach_reply too, without descriptors. */
#define TUTTIFS_ATTACH_MAGIC 1096045908 /* "TUTA" */
#define TUTTIFS_MESSAGE_ATTACH 1 /* first message: make the memory */
#define TUTTIFS_MESSAGE_QUIESCE 2 /* stop lane Lane: when the reply says 0 nothing of it touches memory or drives any more */
#define TUTTIFS_MESSAGE_REATTACH 3 /* begin lane Lane again with zeroed queues */
#define TUTTIFS_MESSAGE_PING 4 /* answers 0 */
#define TUTTIFS_MESSAGE_REACH 5 /* one descriptor comes along, a dma-buf or memfd: SSDs reach its memory at the reply's TUTTIFS_DMA_BASE */
#define TUTTIFS_MESSAGE_RELEASE 6 /* ends the mapping at MemoryAddress: nothing of the process names it any more */
#define TUTTIFS_MODE_MEDIATED 0 /* the daemon's virtual controllers serve all queues */
#define TUTTIFS_MODE_REAL 1 /* SSDs that the daemon drives serve theirs, the rest is mediated; EPERM without -o real */
#define TUTTIFS_LANES_MAX 64
#define TUTTIFS_DEPTH_MAX 4096
#define TUTTIFS_DMA_BASE 0x10000000000ull /* TUTTIFS_DMA_BASE is the I/O address of the DMA memory's first byte. */

/* struct tuttifs_attach_request is what the engine sends. */
struct tuttifs_attach_request {
	uint32_t magic; /* TUTTIFS_ATTACH_MAGIC */
	uint16_t version; /* TUTTIFS_VERSION */
	uint16_t kind; /* Message* */
	uint32_t size; /* of this struct */
	uint32_t session;
	uint32_t member;
	uint32_t lanes; /* 0 for an arena alone, at most TUTTIFS_LANES_MAX */
	uint32_t depth; /* entries of each queue: a power of two, 2..TUTTIFS_DEPTH_MAX; 0 without lanes */
	uint32_t lane; /* for TUTTIFS_MESSAGE_QUIESCE and TUTTIFS_MESSAGE_REATTACH */
	uint64_t dma_bytes; /* 0 without lanes */
	uint8_t token[TUTTIFS_TOKEN_BYTES];
	uint32_t mode; /* Mode* */
	uint32_t pad;
	uint64_t memory_bytes; /* for TUTTIFS_MESSAGE_REACH: whole pages */
	uint64_t memory_address; /* for TUTTIFS_MESSAGE_RELEASE */
	uint64_t reserved[5];
};
TUTTIFS_SIZE(tuttifs_attach_request, 120);

/* struct tuttifs_attach_reply is what the daemon answers. */
struct tuttifs_attach_reply {
	uint32_t magic;
	uint16_t version;
	uint16_t kind; /* of the request */
	uint32_t size; /* of this struct */
	int32_t error; /* 0, or a positive errno; then the rest is zero */
	uint32_t descriptors; /* sent along: arena, queues, DMA memory if DMABytes is not zero, drives with struct tuttifs_drive_bells */
	uint32_t lanes;
	uint32_t depth;
	uint32_t drives;
	uint64_t arena_bytes;
	uint64_t queues_bytes; /* of the queue memory: TUTTIFS_SESSION_PAGE_BYTES, Lanes x Drives x QueueBlockBytes, DriveShares */
	uint64_t queue_block_bytes; /* one queue pair; nvme.QueueBytes(Depth) */
	uint64_t dma_bytes;
	uint64_t dma_base;
	uint64_t nonce; /* of the mount, as in Hello */
	uint32_t sgl; /* 1 if the controllers take SGL data blocks */
	uint32_t command_bytes; /* largest transfer of one command */
	uint32_t pollers; /* threads that may sleep on TUTTIFS_WAKE_WORD: wake them all */
	uint32_t mode; /* TUTTIFS_MODE_REAL if a drive's own queue pairs were given */
	uint16_t drive_index[TUTTIFS_DRIVES_MAX]; /* of the d-th drive */
	uint16_t lba_bytes[TUTTIFS_DRIVES_MAX]; /* of the d-th drive */
	uint64_t reserved2[4]; /* zero */
};
TUTTIFS_SIZE(tuttifs_attach_reply, 384);

/* The queue memory begins with the session page; then, for lane l and the d-th drive, the block at
 * TUTTIFS_SESSION_PAGE_BYTES + (l x Drives + d) x QueueBlockBytes holds a queue pair as
 * nvme.MapQueue lays it out. Words of the session page, each in cache lines of its own; byte
 * offsets: */
#define TUTTIFS_SESSION_PAGE_BYTES 4096
#define TUTTIFS_ARMED_WORD 0 /* u32: raised by the engine before it rings a doorbell, lowered when its work is done */
#define TUTTIFS_WAKE_WORD 64 /* u32: pollers store a number and sleep; the engine raises armed, swaps in 0, wakes if not 0 */
#define TUTTIFS_HEARTBEAT_WORD 128 /* u64: counted up by the daemon every TUTTIFS_HEARTBEAT_MILLISECONDS */
#define TUTTIFS_NONCE_WORD 136 /* u64: of the mount */
#define TUTTIFS_STATE_WORD 144 /* u32: TUTTIFS_SESSION_LIVE, TUTTIFS_SESSION_CLOSED */
#define TUTTIFS_MAP_GENERATION_WORD 192 /* u64: counted up when any pool's rows have changed */
#define TUTTIFS_TICKET_WORD 256 /* u32: counted up, and woken as a futex, when a ticket of this process finishes */
#define TUTTIFS_COUNTERS_OFFSET 1024 /* struct tuttifs_engine_counters, written by the engine */
#define TUTTIFS_BELLS_OFFSET 2048 /* struct tuttifs_drive_bells of each drive, written by the daemon before the reply */
#define TUTTIFS_TERMS_OFFSET 3072 /* DriveTerms of each drive, written by the daemon before the reply */
#define TUTTIFS_HEARTBEAT_MILLISECONDS 100
#define TUTTIFS_SESSION_LIVE 1
#define TUTTIFS_SESSION_CLOSED 2

/* struct tuttifs_drive_bells lie at TUTTIFS_BELLS_OFFSET of the session page, for one drive after
 * the other: where the doorbells of queue pairs of the drive's own can be mapped from. Zero: its
 * queues are the daemon's virtual controller's. */
struct tuttifs_drive_bells {
	uint64_t offset; /* to map the drive's descriptor at */
	uint32_t bytes; /* to map: whole pages */
	uint32_t nsid; /* namespace that commands are for */
};
TUTTIFS_SIZE(tuttifs_drive_bells, 16);

/* TUTTIFS_DOORBELL_BUFFER_BYTES are two pages of 4096 bytes. */
#define TUTTIFS_DOORBELL_BUFFER_BYTES 8192

/* struct tuttifs_pair_bells lie at TUTTIFS_PAIR_OFFSET of the queue block of a drive with struct
 * tuttifs_drive_bells: offsets of the pair's doorbells in what was mapped, written by the daemon
 * whenever the lane begins. The doorbells of nvme.MapQueue are not used then. */
struct tuttifs_pair_bells {
	uint32_t sq_tail;
	uint32_t cq_head;
	uint32_t tail_shadow;
	uint32_t head_shadow;
};
TUTTIFS_SIZE(tuttifs_pair_bells, 16);

/* TUTTIFS_PAIR_OFFSET is of a queue block, in its page of doorbells. */
#define TUTTIFS_PAIR_OFFSET 256

/* struct tuttifs_drive_share says how an engine shares a drive whose own queue pairs it has, since
 * those pass the daemon by. Those of the drives lie one after the other behind the last queue block
 * of a real attachment. Arrays are by direction: reads, writes. Chunks are what a lane has on the
 * drive at a time. An engine whose chunk may begin, as it finds Grant, raises Flight and then looks
 * at Grant again; if that is 0 now it lowers Flight and has begun nothing. One that may not begin
 * raises Wanted until it has. The daemon sets Grant to 0 and then looks at Flight: so one of the
 * two sees the other. It gives and takes Grant as its drive's phase says, and believes nothing but
 * counts: who keeps others waiting is passed by. */
struct tuttifs_drive_share {
	uint32_t wanted[2]; /* by the engine: chunks that wait to begin */
	uint32_t flight[2]; /* by the engine: chunks that have begun and not ended */
	uint64_t write_bytes; /* by the engine: of the writes among them */
	uint64_t commands[2]; /* by the engine: that have ended since it attached */
	uint64_t bytes[2]; /* by the engine: that they moved */
	uint64_t failed[2]; /* by the engine: of the commands, those with a bad status */
	uint64_t reserved[7]; /* zero */
	uint32_t grant[2];
	uint64_t reserved2[15]; /* zero */
};
TUTTIFS_SIZE(tuttifs_drive_share, 256);

/* TUTTIFS_GRANT_ALWAYS is the Grant of a drive that knows no phases. */
#define TUTTIFS_GRANT_ALWAYS 0xffffffffu

/* struct tuttifs_engine_counters lie at TUTTIFS_COUNTERS_OFFSET of the session page: what a
 * process's scheduler and store buffer have counted since it attached. The process stores each
 * field at once, some times a second, TUTTIFS_VERSION last. The daemon shows them with the
 * session's and believes nothing of them. Later versions of the same number only add fields. */
struct tuttifs_engine_counters {
	uint32_t version; /* TUTTIFS_ENGINE_COUNTERS_VERSION; 0: nothing was written */
	uint32_t reserved; /* zero */
	uint64_t passes; /* prefills begun */
	uint64_t layers; /* of them that were computed */
	uint64_t decode_steps;
	uint64_t bubbles; /* layers before which compute stood */
	uint64_t bubble_nanos; /* time that compute stood for reads */
	uint64_t first_bubble_nanos; /* of it before first layers */
	uint64_t read_hidden_nanos; /* reads were in flight, and compute did not stand */
	uint64_t read_exposed_nanos; /* reads were in flight, and compute stood */
	uint64_t write_nanos; /* deferred writes were in flight */
	uint64_t deferred_objects; /* stored by way of the store buffer */
	uint64_t deferred_bytes;
	uint64_t issued_off_bytes; /* of them that went to the drives because nothing held them back */
	uint64_t issued_age_bytes; /* because they were too old to wait */
	uint64_t issued_high_bytes; /* because the store buffer was nearly full */
	uint64_t issued_window_bytes; /* in windows of layers */
	uint64_t issued_decode_bytes; /* in decode steps */
	uint64_t issued_idle_bytes; /* while nothing computed */
	uint64_t backlog_bytes; /* that wait now */
	uint64_t backlog_age_nanos; /* of the oldest of them */
	uint64_t oldest_age_nanos; /* that any has reached */
	uint64_t overruns; /* windows at whose end their writes were in flight */
	uint64_t beside; /* pieces of writes that were issued beside reads of this process */
	uint64_t offers; /* prefixes that were asked about */
	uint64_t offers_refused; /* of them that were not worth restoring */
	uint64_t estimates; /* passes whose time was estimated before */
	uint64_t estimated_nanos; /* sum of the estimates */
	uint64_t took_nanos; /* sum of what those passes took */
	uint64_t error_nanos; /* sum of the differences */
	uint64_t store_bytes; /* of the store buffer */
	uint64_t store_filled_bytes; /* of it in use now */
	uint64_t store_refused; /* layers that it had no room for */
	uint64_t store_blocked_nanos; /* time that stores waited for room */
	uint64_t declined_blocks; /* that the mount's admission policy did not want, where the process keeps such */
	uint64_t kept_blocks; /* of them committed into the process's memory */
	uint64_t kept_hits; /* that were pinned there */
	uint64_t kept_written; /* of them brought to the drives then */
	uint64_t kept_evicted; /* that had to go for others */
	uint64_t spared_bytes; /* of those declined that were not brought to the drives */
	uint64_t doorbell_writes; /* of SSDs' own doorbell registers */
	uint64_t doorbells_saved; /* that doorbell buffers made unnecessary */
	uint64_t kept_failed; /* of KeptHits, those that could not be brought to the drives */
	uint64_t kept_bad; /* whose bytes were not right any more */
};
TUTTIFS_SIZE(tuttifs_engine_counters, 344);

/* TUTTIFS_ENGINE_COUNTERS_VERSION is what this version writes. */
#define TUTTIFS_ENGINE_COUNTERS_VERSION 1

/* The verbs. */
#define TUTTIFS_IOC_HELLO          _IOWR('T', 1, struct tuttifs_hello)
#define TUTTIFS_IOC_DRIVES         _IOWR('T', 2, struct tuttifs_drives)
#define TUTTIFS_IOC_SESSION_CREATE _IOWR('T', 3, struct tuttifs_session)
#define TUTTIFS_IOC_SESSION_JOIN   _IOWR('T', 4, struct tuttifs_session)
#define TUTTIFS_IOC_ARENA          _IOWR('T', 5, struct tuttifs_arena)
#define TUTTIFS_IOC_POOL_OPEN      _IOWR('T', 6, struct tuttifs_pool_open)
#define TUTTIFS_IOC_POOL_INFO      _IOWR('T', 7, struct tuttifs_pool_info)
#define TUTTIFS_IOC_LAYOUT         _IOWR('T', 8, struct tuttifs_layout)
#define TUTTIFS_IOC_ROWS           _IOWR('T', 9, struct tuttifs_rows)
#define TUTTIFS_IOC_MAP_ACK        _IOWR('T', 10, struct tuttifs_map_ack)
#define TUTTIFS_IOC_PEEK           _IOWR('T', 11, struct tuttifs_peek)
#define TUTTIFS_IOC_PIN            _IOWR('T', 12, struct tuttifs_pin)
#define TUTTIFS_IOC_RELEASE        _IOWR('T', 13, struct tuttifs_release)
#define TUTTIFS_IOC_RESERVE        _IOWR('T', 14, struct tuttifs_reserve)
#define TUTTIFS_IOC_COMMIT         _IOWR('T', 15, struct tuttifs_commit)
#define TUTTIFS_IOC_ABORT          _IOWR('T', 16, struct tuttifs_abort)
#define TUTTIFS_IOC_REPORT_BAD     _IOWR('T', 17, struct tuttifs_report_bad)
#define TUTTIFS_IOC_EVICT          _IOWR('T', 18, struct tuttifs_evict)
#define TUTTIFS_IOC_UNLINK         _IOWR('T', 19, struct tuttifs_unlink)
#define TUTTIFS_IOC_EXTENTS        _IOWR('T', 20, struct tuttifs_extents)
#define TUTTIFS_IOC_STATS          _IOWR('T', 21, struct tuttifs_stats)
#define TUTTIFS_IOC_EVENTS         _IOWR('T', 22, struct tuttifs_events)
#define TUTTIFS_IOC_TICKET         _IOWR('T', 23, struct tuttifs_ticket)
#define TUTTIFS_IOC_CHANGES        _IOWR('T', 24, struct tuttifs_changes)
#define TUTTIFS_IOC_PRESENT        _IOWR('T', 25, struct tuttifs_present)

#ifdef __cplusplus
}
#endif
#undef TUTTIFS_SIZE
#endif /* TUTTIFS_H */
