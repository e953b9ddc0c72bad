// Kernels of the ring. params.go documents what each does and holds their parameters; docs/checksum.md defines the
// sums; cudatest has every kernel again in Go, and its tests run both on the same inputs.
//
// Host memory is far: a load from it takes a microsecond or two. So a block reads what it needs to know about many
// objects at once, one object a thread, keeps that in shared memory and then moves bytes by whole warps.

typedef unsigned char u8;
typedef unsigned short u16;
typedef short i16;
typedef unsigned int u32;
typedef unsigned long long u64;

// What a block can have; every kernel takes any multiple of 32 threads up to this, those that move up to MOVETHREADS.
#define THREADS 1024
#define MOVETHREADS 256
#define WARPS (THREADS / 32)
#define ALL 0xffffffffu

// ---- Parameters, as in params.go ----

struct __align__(16) Ioctx {
	u64 desc;
	u32 slot;
	u16 object, flags;
};

struct __align__(16) Object {
	u32 offset, bytes;
	u16 units, position;
	u32 zero;
};

struct __align__(16) Region {
	u64 base, limit, io, tableIO, prpIO;
	u32 listBytes;
	u8 kind, generation, direct, padded;
};

struct __align__(16) Run {
	u64 address;
	u32 bytes;
	u32 type;
};

struct Tables {
	const Object *objects;
	const u64 *entries;
	const i16 *drives;
	const Region *regions;
	u64 slotUnits, entryCount;
	u32 objectCount, driveCount, width, slotsPerRow;
};

struct Cells {
	const u32 *offsets;
	u32 stride, group;
};

struct Chunk {
	u64 cells;
	u32 first, count, lane, zero;
};

struct Queue {
	u64 sq, cq, sqTail, cqHead;
	u32 mask, tail, head, phase, firstID, lbaShift, nsid, zero;
};

struct Count {
	u32 commands, units;
};

struct BuildParams {
	Tables tables;
	Cells cells;
	const Ioctx *ioctxs;
	const Chunk *chunks;
	const Queue *queues;
	Count *counts;
	u8 *outcomes;
	u32 *done, *blocks;
	u64 prpBase, prpDMA;
	u32 chunkCount, lanes, drives, cellBytes;
	u8 write, sgl, zero[6];
};

struct Sums {
	const u64 *seeds;
	u64 *sums;
	const u32 *active;
	const u16 *ordinals;
	u32 perSlot, rankObjects, rank, zero;
};

struct MoveParams {
	Tables tables;
	Cells cells;
	Sums sums;
	const Ioctx *ioctxs;
	const Chunk *chunks;
	u8 *outcomes;
	u32 *done, *blocks;
	u32 chunkCount, zero;
};

struct Strided {
	u64 base, stride;
	u32 bytes, zero;
};

struct RegisterParams {
	const Strided *strided;
	Run *table;
	u8 *lists;
	u64 io, blocks;
	u32 classes, runs, listBytes, zero;
};

struct PollParams {
	Tables tables;
	Sums sums;
	const Ioctx *ioctxs;
	Queue *queues;
	const u64 *cells, *cellsIO;
	u8 *outcomes;
	u16 *statuses;
	u32 *done, *blocks;
	const u32 *stop;
	u64 prpBase, prpDMA, deadline;
	u32 count, lanes, drives, cellBytes, cellStride, depth;
	u8 write, sgl, zero[6];
};

// SIZE and PLACE are compared with params.go by a test of cudatest, which reads these lines.
#define SIZE(type, bytes) static_assert(sizeof(type) == bytes, "params.go");
#define PLACE(type, field, offset) static_assert(__builtin_offsetof(type, field) == offset, "params.go");

SIZE(Ioctx, 16)
SIZE(Object, 16)
SIZE(Region, 48)
SIZE(Run, 16)
SIZE(Tables, 64)
SIZE(Cells, 16)
SIZE(Chunk, 24)
SIZE(Queue, 64)
SIZE(Count, 8)
SIZE(BuildParams, 176)
SIZE(Sums, 48)
SIZE(MoveParams, 176)
SIZE(Strided, 24)
SIZE(RegisterParams, 56)
SIZE(PollParams, 240)
PLACE(Ioctx, slot, 8)
PLACE(Ioctx, flags, 14)
PLACE(Object, units, 8)
PLACE(Object, position, 10)
PLACE(Region, tableIO, 24)
PLACE(Region, prpIO, 32)
PLACE(Region, listBytes, 40)
PLACE(Region, kind, 44)
PLACE(Region, generation, 45)
PLACE(Region, direct, 46)
PLACE(Region, padded, 47)
PLACE(Run, bytes, 8)
PLACE(Tables, regions, 24)
PLACE(Tables, slotUnits, 32)
PLACE(Tables, entryCount, 40)
PLACE(Tables, objectCount, 48)
PLACE(Tables, slotsPerRow, 60)
PLACE(Cells, stride, 8)
PLACE(Cells, group, 12)
PLACE(Chunk, first, 8)
PLACE(Chunk, lane, 16)
PLACE(Queue, sqTail, 16)
PLACE(Queue, mask, 32)
PLACE(Queue, phase, 44)
PLACE(Queue, lbaShift, 52)
PLACE(Queue, nsid, 56)
PLACE(Count, units, 4)
PLACE(BuildParams, ioctxs, 80)
PLACE(BuildParams, outcomes, 112)
PLACE(BuildParams, done, 120)
PLACE(BuildParams, prpDMA, 144)
PLACE(BuildParams, chunkCount, 152)
PLACE(BuildParams, cellBytes, 164)
PLACE(BuildParams, sgl, 169)
PLACE(Sums, ordinals, 24)
PLACE(Sums, rank, 40)
PLACE(MoveParams, sums, 80)
PLACE(MoveParams, ioctxs, 128)
PLACE(MoveParams, done, 152)
PLACE(MoveParams, chunkCount, 168)
PLACE(Strided, bytes, 16)
PLACE(RegisterParams, lists, 16)
PLACE(RegisterParams, classes, 40)
PLACE(RegisterParams, listBytes, 48)
PLACE(PollParams, sums, 64)
PLACE(PollParams, ioctxs, 112)
PLACE(PollParams, cells, 128)
PLACE(PollParams, outcomes, 144)
PLACE(PollParams, statuses, 152)
PLACE(PollParams, done, 160)
PLACE(PollParams, stop, 176)
PLACE(PollParams, prpBase, 184)
PLACE(PollParams, prpDMA, 192)
PLACE(PollParams, count, 208)
PLACE(PollParams, depth, 228)
PLACE(PollParams, sgl, 233)

enum { RegionNone, RegionFlat, RegionTable };

enum Outcome : u8 {
	OutcomeOK, OutcomeUnmapped, OutcomeMemory, OutcomeInvalid, OutcomeFailed, OutcomeChecksum, OutcomeTimeout,
	OutcomeProtocol, OutcomePending
};

const u32 PhaseBad = 2;

const u16 FlagFlush = 1;
const u32 UnitBytes = 4096, PageBytes = 4096, PageShift = 12;
const u64 OffsetMask = (1ull << 44) - 1;
const u64 UnitMask = (1ull << 48) - 1;
const u64 NoEntry = ~0ull;

// ---- Words shared with the host ----

#ifndef TUTTIFS_EMULATED
static __device__ __forceinline__ u32 loadAcquire(const u32 *p) {
	u32 v;
	asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
	return v;
}

static __device__ __forceinline__ void storeRelease(u32 *p, u32 v) {
	asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

static __device__ __forceinline__ u64 nanoseconds() {
	u64 t;
	asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)::"memory");
	return t;
}
#endif

// finish counts the block off, and the last one tells the host. What a block did is visible to the GPU when it counts;
// the one fence of the last block makes all of it visible to the host (causality is transitive over scopes, PTX ISA, memory
// consistency model). A fence of the system's scope by every warp would take longer than the kernel's work.
static __device__ void finish(u32 *done, u32 *blocks) {
	__syncthreads();
	if (threadIdx.x != 0) return;
	__threadfence();
	if (atomicAdd(blocks, 1u) == gridDim.x - 1) {
		*blocks = 0;
		__threadfence_system();
		atomicAdd_system(done, gridDim.x);
	}
}

// ---- Where objects lie ----

// Extent is an object's place on the drives. queue is the drive's place in a lane, negative where nothing is mapped.
struct Extent {
	int queue;
	u64 unit;
	u32 bytes, payload;
};

static __device__ Extent locate(const Tables &t, const Ioctx &ctx) {
	Extent e = {-1, 0, 0, 0};
	if (ctx.object >= t.objectCount) return e;
	const Object o = t.objects[ctx.object];
	e.bytes = o.units * UnitBytes;
	e.payload = o.bytes;
	u32 row = ctx.slot / t.slotsPerRow, index = ctx.slot % t.slotsPerRow;
	u32 set = index / t.width, entry = index % t.width + o.position;
	if (entry >= t.width) entry -= t.width;
	u64 i = u64(row) * t.width + entry;
	if (i >= t.entryCount) return e;
	u64 packed = t.entries[i];
	u32 drive = u32(packed >> 48);
	if (packed == NoEntry || drive >= t.driveCount) return e;
	e.queue = t.drives[drive];
	e.unit = (packed & UnitMask) + set * t.slotUnits + o.offset;
	return e;
}

// Memory is what a descriptor names: runs for at least the payload.
struct Memory {
	Region region;
	u64 index;      // table: of the first entry; flat: byte offset
	u64 first;      // GPU address of the first run
	u64 total;      // bytes of the runs
	const Run *runs; // entries; 0 for flat memory
	u32 count;
	u32 firstBytes;
	u32 bits; // or-ed: where runs begin and, but for the last one, end
};

// lookup finds a descriptor's memory. It is false if that is not registered or shorter than the payload.
static __device__ bool lookup(const Tables &t, u64 desc, u32 payload, Memory &m) {
	m.region = t.regions[desc >> 44 & 0xfff];
	const Region &r = m.region;
	if (r.kind == RegionNone || r.generation != u8(desc >> 56)) return false;
	m.index = desc & OffsetMask;
	if (r.kind == RegionFlat) {
		if (m.index > r.limit || r.limit - m.index < payload) return false;
		m.first = r.base + m.index;
		m.total = r.limit - m.index;
		m.runs = 0;
		m.count = 1;
		m.firstBytes = m.total > ALL ? ALL : u32(m.total);
		m.bits = u32(m.first);
		return true;
	}
	m.runs = reinterpret_cast<const Run *>(r.base) + m.index;
	m.first = m.total = 0;
	m.count = m.firstBytes = m.bits = 0;
	u32 end = 0; // of the run before
	for (; m.total < payload; m.count++) {
		if (m.index + m.count >= r.limit) return false;
		const Run run = m.runs[m.count];
		if (run.bytes == 0) return false;
		u64 address = run.address - r.io;
		if (m.count == 0) {
			m.first = address;
			m.firstBytes = run.bytes;
		}
		m.bits |= u32(address) | end;
		end = run.bytes;
		m.total += run.bytes;
	}
	return true;
}

// ---- Commands ----

// Pointer is a command's data pointer.
struct Pointer {
	u64 a, b;
};

// Wire is how controllers are told about memory.
struct Wire {
	u64 prpBase, prpDMA;
	bool write, sgl;
};

static __device__ __forceinline__ u32 pagesOf(u64 address, u32 n) {
	return ((u32(address) & (PageBytes - 1)) + n + PageBytes - 1) >> PageShift;
}

// windowList is the address in the windows over the DMA memory (gio's prpTable) of a list of n entries, the first of
// which names the given page.
static __device__ u64 windowList(const Wire &w, u32 page, u32 n) {
	const u32 window = PageBytes / 8 - 1, half = window / 2;
	u32 j = 2 * (page / window + 1), at = page % window;
	if (at >= half) {
		j++;
		at -= half;
	}
	if (at + n == PageBytes / 8) { // the chain stands where data would be needed
		j--;
		at += half + (j & 1);
	}
	return w.prpBase + u64(j - 1) * PageBytes + u64(at) * 8;
}

static __device__ Pointer block(u64 address, u32 n, u32 type) {
	return Pointer{address, u64(n) | u64(type) << 60};
}

// contiguous points at n bytes of cells or flat memory.
static __device__ Pointer contiguous(const Wire &w, u64 address, u32 n) {
	if (w.sgl) return block(address, n, 0);
	u32 pages = pagesOf(address, n);
	if (pages <= 1) return Pointer{address, 0};
	if (pages == 2) return Pointer{address, (address & ~u64(PageBytes - 1)) + PageBytes};
	return Pointer{address, windowList(w, u32((address - w.prpDMA) >> PageShift) + 1, pages - 1)};
}

// packed points at runs by the region's PRP lists, if the runs are shaped like pages and their lists touch: a list ends
// with the first page of the run that follows.
static __device__ bool packed(const Memory &m, u32 n, Pointer &p) {
	const Region &r = m.region;
	u32 pages = 0, left = n;
	u64 second = 0;
	for (u32 i = 0; i < m.count; i++) {
		const Run run = m.runs[i];
		u32 k = min(run.bytes, left), of = pagesOf(run.address, k);
		if (i > 0 && run.address % PageBytes != 0) return false;
		if (i + 1 < m.count && ((run.address + run.bytes) % PageBytes != 0 || of * 8 != r.listBytes)) return false;
		if (i == 1 && pages == 1) second = run.address;
		pages += of;
		left -= k;
	}
	p.a = m.first + r.io;
	p.b = 0;
	if (pages <= 1) return true;
	if (pages == 2) {
		p.b = second ? second : (p.a & ~u64(PageBytes - 1)) + PageBytes;
		return true;
	}
	u64 bytes = u64(pages - 1) * 8;
	p.b = r.prpIO + m.index * r.listBytes;
	return r.prpIO != 0 && p.b % 8 == 0 && bytes <= u64(m.count) * r.listBytes && p.b % PageBytes + bytes <= PageBytes;
}

// direct points at the memory itself. It is false if controllers cannot reach it as it is.
static __device__ bool direct(const Wire &w, const Memory &m, u32 n, u32 payload, Pointer &p) {
	const Region &r = m.region;
	if (!r.direct || (payload != n && !r.padded) || m.total < n || m.bits % 4 != 0) return false;
	if (r.kind == RegionFlat || (w.sgl && m.count == 1)) {
		p = contiguous(w, m.first + r.io, n);
		return true;
	}
	if (!w.sgl) return packed(m, n, p);
	p = block(r.tableIO + m.index * sizeof(Run), m.count * sizeof(Run), 3); // the entries, as they are: a last segment
	return m.total == n;
}

// check says whether an IOCTX can be a command, and points at its memory where that is direct. room is that of a cell.
static __device__ Outcome check(const Tables &t, const Wire &w, const Ioctx &ctx, const Extent &e, bool bounced,
	u64 room, Pointer &p) {

	p.a = p.b = 0;
	if (ctx.flags == FlagFlush && w.write) return OutcomeOK;
	if (ctx.flags != 0) return OutcomeInvalid;
	Memory m;
	if (!lookup(t, ctx.desc, e.payload, m)) return OutcomeMemory;
	if (bounced ? e.bytes > room : !direct(w, m, e.bytes, e.payload, p)) return OutcomeMemory;
	return OutcomeOK;
}

// put writes a command into the submission queue.
static __device__ void put(const Queue &q, u32 place, const Wire &w, const Ioctx &ctx, const Extent &e, u16 cid,
	const Pointer &p) {

	u64 lba = e.unit << q.lbaShift;
	u32 last = ((e.bytes / UnitBytes << q.lbaShift) - 1) & 0xffff;
	u32 head = (w.write ? 1 : 2) | (w.sgl ? 0x40 << 8 : 0) | u32(cid) << 16;
	if (ctx.flags) {
		head = u32(cid) << 16; // Flush
		lba = 0;
		last = 0;
	}
	uint4 *sqe = reinterpret_cast<uint4 *>(q.sq) + u64(place & q.mask) * 4;
	sqe[0] = make_uint4(head, q.nsid, 0, 0);
	sqe[1] = make_uint4(0, 0, u32(p.a), u32(p.a >> 32));
	sqe[2] = make_uint4(u32(p.b), u32(p.b >> 32), u32(lba), u32(lba >> 32));
	sqe[3] = make_uint4(last, 0, 0, 0);
}

// ---- Blocks and warps ----

static __device__ __forceinline__ u32 laneOf() { return threadIdx.x & 31; }
static __device__ __forceinline__ u32 warpOf() { return threadIdx.x >> 5; }

static __device__ __forceinline__ u32 warpSum(u32 v) {
	for (u32 d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(ALL, v, d);
	return v;
}

// Ranks numbers the threads of a block that have something. Two sets of counts in turn take one barrier a use.
struct Ranks {
	u32 counts[2][WARPS];
};

// rank is the number of such threads before this one, and total that of all. All threads of the block call it.
static __device__ u32 rank(Ranks &r, u32 &turn, bool has, u32 &total) {
	u32 ballot = __ballot_sync(ALL, has);
	if (laneOf() == 0) r.counts[turn][warpOf()] = __popc(ballot);
	__syncthreads();
	u32 n = laneOf() < blockDim.x / 32 ? r.counts[turn][laneOf()] : 0;
	u32 before = warpSum(laneOf() < warpOf() ? n : 0);
	total = warpSum(n);
	turn ^= 1;
	return before + __popc(ballot & ((1u << laneOf()) - 1));
}

// CHUNKS are read at a time.
#define CHUNKS 64

// cellOffset is where the cell of IOCTX k of a chunk begins.
static __device__ u64 cellOffset(const Cells &c, u32 k) { return u64(k / c.group) * c.stride + c.offsets[k % c.group]; }

// ---- Build ----

struct BuildShared {
	Chunk chunks[CHUNKS];
	u32 units[CHUNKS]; // that the chunks' commands move
	Ranks ranks;
};

// buildChunk writes the commands of one chunk that lie on the block's drive, from the one numbered made on, and returns
// how many they are. The last barrier comes after all has been added to units.
static __device__ u32 buildChunk(const BuildParams &p, BuildShared &s, u32 &turn, const Chunk &chunk, const Queue &q,
	u32 drive, u32 made, u32 &units) {

	const Wire w = {p.prpBase, p.prpDMA, p.write != 0, p.sgl != 0};
	const bool bounced = chunk.cells != 0;
	u32 before = made;
	for (u32 k0 = 0; k0 < chunk.count; k0 += blockDim.x) {
		u32 k = k0 + threadIdx.x;
		bool mine = false;
		Ioctx ctx = {};
		Extent e = {};
		Pointer at = {};
		if (k < chunk.count) {
			u64 i = u64(chunk.first) + k;
			ctx = p.ioctxs[i];
			e = locate(p.tables, ctx);
			if (e.queue < 0 && drive == 0) p.outcomes[i] = OutcomeUnmapped;
			if (e.queue == int(drive)) {
				u64 offset = bounced ? cellOffset(p.cells, k) : 0;
				u64 room = offset < p.cellBytes ? p.cellBytes - offset : 0;
				Outcome o = check(p.tables, w, ctx, e, bounced, room, at);
				mine = o == OutcomeOK;
				if (!mine) p.outcomes[i] = o;
				if (mine && bounced && !ctx.flags) at = contiguous(w, chunk.cells + offset, e.bytes);
			}
		}
		u32 moved = warpSum(mine && !ctx.flags ? e.bytes / UnitBytes : 0);
		if (laneOf() == 0 && moved) atomicAdd(&units, moved);
		u32 total, r = rank(s.ranks, turn, mine, total);
		if (mine) put(q, q.tail + made + r, w, ctx, e, u16(q.firstID + made + r), at);
		made += total;
	}
	return made - before;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) tuttifs_build(const __grid_constant__ BuildParams p) {
	__shared__ BuildShared s;
	const u32 lane = blockIdx.x / p.drives, drive = blockIdx.x % p.drives;
	if (lane < p.lanes) {
		const Queue q = p.queues[blockIdx.x];
		u32 made = 0, turn = 0;
		for (u32 c0 = 0; c0 < p.chunkCount; c0 += CHUNKS) {
			u32 n = min(p.chunkCount - c0, u32(CHUNKS));
			__syncthreads();
			for (u32 c = threadIdx.x; c < n; c += blockDim.x) {
				s.chunks[c] = p.chunks[c0 + c];
				s.units[c] = 0;
			}
			__syncthreads();
			for (u32 c = 0; c < n; c++) {
				if (s.chunks[c].lane != lane) continue;
				u32 count = buildChunk(p, s, turn, s.chunks[c], q, drive, made, s.units[c]);
				made += count;
				if (threadIdx.x == 0) p.counts[u64(c0 + c) * p.drives + drive] = Count{count, s.units[c]};
			}
		}
	}
	finish(p.done, p.blocks);
}

// ---- Checksums ----

const u64 Golden = 0x9e3779b97f4a7c15ull, MulA = 0xbf58476d1ce4e5b9ull, MulB = 0x94d049bb133111ebull;
const u64 KeysState = 0x3173666974747574ull; // "tuttifs1"
const u32 BlockBytes = 1024;                 // of the checksum

static __device__ __forceinline__ u64 mix(u64 z) {
	z = (z ^ z >> 30) * MulA;
	z = (z ^ z >> 27) * MulB;
	return z ^ z >> 31;
}

static __device__ __forceinline__ u64 key(u32 i) { return mix(KeysState + (i + 1) * Golden); }

static __device__ __forceinline__ u64 product(u64 x) { return u64(u32(x)) * (x >> 32); }

// add accumulates two words of a block into the thread's share of two lanes.
static __device__ __forceinline__ void add(u64 &even, u64 &odd, const uint4 &v, u64 k0, u64 k1) {
	u64 w0 = u64(v.y) << 32 | v.x, w1 = u64(v.w) << 32 | v.z;
	even += product(w0 ^ k0) + w1;
	odd += product(w1 ^ k1) + w0;
}

// A warp moves a step at a time: VECTORS times 16 bytes a thread. PER threads share a block, and each has the same
// places in it every time, so that its key words stay in registers: thread q of them has words 2q and 2q+1 of every
// 16 PER bytes, all of which belong to lanes 2(q mod 4) and 2(q mod 4)+1 of the sum.
//
// Units are what a warp takes at a time. It folds a unit's blocks at once, a block a thread. AHEAD says that a step is
// read while the one before is summed.
template <u32 V, u32 UNIT, bool A, bool H> struct Shape {
	static const u32 VECTORS = V, PER = BlockBytes / 16 / V, STEP = 512 * V;
	static const u32 UNITBLOCKS = UNIT, UNITBYTES = UNIT * BlockBytes;
	static const bool AHEAD = A, HOST = H; // cells are in host memory
};

// Moves between staging and runs have 128 registers a thread, those of the polling kernel 64. FOLDS blocks are waiting
// to be folded in both: 16 warps of 16, and 32 of 8.
#define FOLDS 256
typedef Shape<8, 16, true, false> Staged;
typedef Shape<4, 8, false, true> Polled;

// FOLD is the room of a block's lanes, odd so that threads that fold do not meet in the memory's banks.
#define FOLD 9

// reduce adds up the shares of the threads that have a block, and stores the lanes.
template <class S> static __device__ __forceinline__ void reduce(u64 even, u64 odd, u64 *lanes) {
	const u32 q = laneOf() % S::PER;
	u64 v = (q & 4 ? odd : even) + __shfl_xor_sync(ALL, q & 4 ? even : odd, 4);
#pragma unroll
	for (u32 d = 8; d < S::PER; d *= 2) v += __shfl_xor_sync(ALL, v, d);
	if (q < 8) lanes[laneOf() / S::PER * FOLD + 2 * (q & 3) + (q >> 2)] = v;
}

// foldUnit hashes n blocks, the first of which has number block, and adds their values to total (in shared memory).
template <class S>
static __device__ __forceinline__ void foldUnit(const u64 *lanes, u32 n, u32 number, u64 s0, u64 s1, u64 *total) {
	u64 v = 0;
	__syncwarp();
	if (laneOf() < n) {
		u64 h = s0 + u64(number + laneOf() + 1) * Golden;
#pragma unroll
		for (u32 l = 0; l < 8; l++) {
			h = (h ^ lanes[laneOf() * FOLD + l]) * MulA;
			h ^= h >> 32;
		}
		v = mix(h ^ s1);
	}
#pragma unroll
	for (u32 d = S::UNITBLOCKS / 2; d > 0; d /= 2) v += __shfl_xor_sync(ALL, v, d);
	if (laneOf() == 0) atomicAdd(total, v);
	__syncwarp();
}

// ---- Moves ----

enum State : u8 { Skip, Move, Zero };

// Work is what a block knows of an object.
struct Work {
	u64 cell;        // address of the payload's copy, 0 where it is used in place
	u64 first;       // address of the first run
	const Run *runs; // 0 for flat memory
	u64 io;          // in the entries' addresses
	u64 s0, s1;
	u64 total; // of the blocks' values
	u64 want;
	u64 *place; // of the sum
	u32 firstBytes, payload;
	u32 bytes; // to be moved: the payload, or whole units
	u32 index; // of the IOCTX
	u32 bits;  // of the runs' places
	State state;
};

// TILE objects are known at a time.
#define TILE 128

struct MoveShared {
	Work work[TILE];
	u32 before[TILE + 1]; // units of the objects before
	__align__(16) u64 keys[128];
	u64 lanes[FOLDS * FOLD];
};

// setKeys makes the key words, which moveTile needs; the block meets before that.
static __device__ __forceinline__ void setKeys(MoveShared &s) {
	for (u32 i = threadIdx.x; i < 128; i += blockDim.x) s.keys[i] = key(i);
}

// Cursor is a place in an object's runs: the payload's bytes below limit lie at delta + their offset.
struct Cursor {
	u64 delta;
	u32 limit, next;
};

static __device__ __forceinline__ Cursor cursorOf(const Work &w) { return Cursor{w.first, w.firstBytes, 1}; }

// seek goes on to the run that has the byte at offset o.
static __device__ __forceinline__ void seek(const Work &w, Cursor &c, u32 o) {
	while (o >= c.limit) {
		const Run run = w.runs[c.next++];
		c.delta = run.address - w.io - c.limit;
		c.limit = run.bytes > ALL - c.limit ? ALL : c.limit + run.bytes;
	}
}

template <class T> static __device__ __forceinline__ T *at(u64 address) { return reinterpret_cast<T *>(address); }

// Vector is 16 bytes as they lie in memory.
union Vector {
	uint4 v;
	u32 w[4];
	u8 b[16];
};

// loadRuns is the 16 bytes of the payload at offset o, by the widest loads that the runs' places allow. What is behind
// the payload is zero.
static __device__ uint4 loadRuns(const Work &w, Cursor &c, u32 o) {
	Vector x;
	x.v = make_uint4(0, 0, 0, 0);
	if (w.bits % 16 == 0 && o + 16 <= w.payload) {
		seek(w, c, o);
		return __ldcs(at<uint4>(c.delta + o));
	}
#pragma unroll
	for (u32 i = 0; i < 4; i++, o += 4) {
		if (w.bits % 4 == 0 && o + 4 <= w.payload) {
			seek(w, c, o);
			x.w[i] = __ldcs(at<u32>(c.delta + o));
			continue;
		}
		u32 word = 0;
		for (u32 b = 0; b < 4 && o + b < w.payload; b++) {
			seek(w, c, o + b);
			word |= u32(__ldcs(at<u8>(c.delta + o + b))) << 8 * b;
		}
		x.w[i] = word;
	}
	return x.v;
}

// storeRuns is the way back.
static __device__ void storeRuns(const Work &w, Cursor &c, u32 o, const uint4 &v) {
	if (w.bits % 16 == 0 && o + 16 <= w.payload) {
		seek(w, c, o);
		__stcs(at<uint4>(c.delta + o), v);
		return;
	}
	const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
	for (u32 i = 0; i < 4; i++, o += 4) {
		if (w.bits % 4 == 0 && o + 4 <= w.payload) {
			seek(w, c, o);
			__stcs(at<u32>(c.delta + o), words[i]);
			continue;
		}
		for (u32 b = 0; b < 4 && o + b < w.payload; b++) {
			seek(w, c, o + b);
			__stcs(at<u8>(c.delta + o + b), u8(words[i] >> 8 * b));
		}
	}
}

// clip zeroes what lies behind the payload in the 16 bytes at offset o.
static __device__ __forceinline__ uint4 clip(uint4 v, u32 o, u32 payload) {
	u32 *words[4] = {&v.x, &v.y, &v.z, &v.w};
#pragma unroll
	for (u32 i = 0; i < 4; i++, o += 4) {
		if (o >= payload) *words[i] = 0;
		else if (payload - o < 4) *words[i] &= (1u << 8 * (payload - o)) - 1;
	}
	return v;
}

// loadCell reads 16 bytes of a cell. A cell in host memory is used again while the kernel runs, so that no cache may
// answer.
template <bool HOST> static __device__ __forceinline__ uint4 loadCell(u64 address) {
	return HOST ? __ldcv(at<uint4>(address)) : __ldcs(at<uint4>(address));
}

// Shares are a thread's of two lanes of a block.
struct Shares {
	u64 even, odd;
};

// moveSlowly moves a thread's part of a step where runs have any shape or the payload ends, o being its first byte.
template <bool GATHER, bool SUMS, class S>
static __device__ __noinline__ Shares moveSlowly(const Work &w, const u64 *keys, u32 o) {
	Shares sum = {0, 0};
	Cursor c = cursorOf(w);
	const u64 *k = keys + laneOf() % S::PER * 2;
#pragma unroll 1
	for (u32 i = 0; i < S::VECTORS; i++, o += 16 * S::PER, k += 2 * S::PER) {
		uint4 v = make_uint4(0, 0, 0, 0);
		if (GATHER || w.cell == 0) {
			if (o < w.payload) v = loadRuns(w, c, o);
			if (w.cell != 0 && o < w.bytes) __stcs(at<uint4>(w.cell + o), v);
		} else if (o < w.payload) {
			v = clip(loadCell<S::HOST>(w.cell + o), o, w.payload);
			storeRuns(w, c, o, v);
		}
		if (SUMS) add(sum.even, sum.odd, v, k[0], k[1]);
	}
	return sum;
}

// Walk is where a warp is among the units of a tile, and the thread among the object's runs.
struct Walk {
	u32 unit, object;
	u32 o, end; // of the step and the unit, in the object
	Cursor c;
};

// enter begins a unit. It is false if there is none.
template <class S> static __device__ __forceinline__ bool enter(const MoveShared &s, Walk &k) {
	if (k.unit >= s.before[TILE]) return false;
	u32 j = 0; // the last object that begins at the unit or before
#pragma unroll
	for (u32 d = TILE / 2; d > 0; d >>= 1) {
		if (s.before[j + d] <= k.unit) j += d;
	}
	const Work &w = s.work[j];
	k.object = j;
	k.o = (k.unit - s.before[j]) * S::UNITBYTES;
	k.end = min(w.bytes, k.o + S::UNITBYTES);
	k.c = cursorOf(w);
	return true;
}

template <class S> static __device__ __forceinline__ bool advance(const MoveShared &s, Walk &k) {
	k.o += S::STEP;
	if (k.o < k.end) return true;
	k.unit += blockDim.x / 32;
	return enter<S>(s, k);
}

// Step is a thread's part of what a warp has in hand: VECTORS times 16 bytes of a block.
template <class S> struct Step {
	uint4 v[S::VECTORS];
	u64 to;  // where they go, 0 to stay
	u32 object, o;
	bool whole; // the block lies in one run, on multiples of 16, and before the payload's end: else v is not read
	bool last;  // of the unit
};

// read begins a step.
template <bool GATHER, class S>
static __device__ __forceinline__ void read(const MoveShared &s, Walk &k, Step<S> &t) {
	const Work &w = s.work[k.object];
	const u32 block = k.o + laneOf() / S::PER * BlockBytes;
	t.to = 0;
	t.object = k.object;
	t.o = block + laneOf() % S::PER * 16;
	t.last = k.o + S::STEP >= k.end;
	t.whole = w.bits % 16 == 0 && block + BlockBytes <= w.payload;
	if (t.whole) {
		seek(w, k.c, block);
		t.whole = block + BlockBytes <= k.c.limit;
	}
	if (!t.whole) return;
	const u64 run = k.c.delta + t.o, cell = w.cell ? w.cell + t.o : 0, from = GATHER || cell == 0 ? run : cell;
	t.to = GATHER ? cell : cell ? run : 0;
	if (S::HOST && !GATHER && cell) {
#pragma unroll
		for (u32 i = 0; i < S::VECTORS; i++) t.v[i] = loadCell<S::HOST>(from + i * 16 * S::PER);
	} else {
#pragma unroll
		for (u32 i = 0; i < S::VECTORS; i++) t.v[i] = __ldcs(at<uint4>(from + i * 16 * S::PER));
	}
}

// write ends a step: stores and sums what was read. keys are the thread's first, and lanes the warp's.
template <bool GATHER, bool SUMS, class S>
static __device__ __forceinline__ void write(MoveShared &s, const Step<S> &t, const ulonglong2 *keys, u64 *lanes) {
	Work &w = s.work[t.object];
	Shares sum = {0, 0};
	if (t.whole) {
		if (t.to) {
#pragma unroll
			for (u32 i = 0; i < S::VECTORS; i++) __stcs(at<uint4>(t.to + i * 16 * S::PER), t.v[i]);
		}
		if (SUMS) {
#pragma unroll
			for (u32 i = 0; i < S::VECTORS; i++) {
				const ulonglong2 k = keys[i * S::PER];
				add(sum.even, sum.odd, t.v[i], k.x, k.y);
			}
		}
	} else {
		sum = moveSlowly<GATHER, SUMS, S>(w, s.keys, t.o);
	}
	if (!SUMS) return;
	const u32 first = t.o - laneOf() / S::PER * BlockBytes - laneOf() % S::PER * 16; // of the step
	const u32 start = first & ~(S::UNITBYTES - 1);
	reduce<S>(sum.even, sum.odd, lanes + (first - start) / BlockBytes * FOLD);
	if (!t.last || start >= w.payload) return;
	u32 n = (min(w.payload - start, S::UNITBYTES) + BlockBytes - 1) / BlockBytes;
	foldUnit<S>(lanes, n, start / BlockBytes, w.s0, w.s1, &w.total);
}

// moveUnits moves the warp's units of a tile.
template <bool GATHER, bool SUMS, class S> static __device__ __forceinline__ void moveUnits(MoveShared &s) {
	u64 *lanes = s.lanes + warpOf() * S::UNITBLOCKS * FOLD;
	const ulonglong2 *keys = reinterpret_cast<const ulonglong2 *>(s.keys) + laneOf() % S::PER; // in registers they would crowd out the data
	Walk k = {};
	k.unit = warpOf();
	bool more = enter<S>(s, k);
	Step<S> a, b;
	if (!S::AHEAD) {
		for (; more; more = advance<S>(s, k)) {
			read<GATHER, S>(s, k, a);
			write<GATHER, SUMS, S>(s, a, keys, lanes);
		}
		return;
	}
	if (more) read<GATHER, S>(s, k, a);
	while (more) {
		more = advance<S>(s, k);
		if (more) read<GATHER, S>(s, k, b);
		write<GATHER, SUMS, S>(s, a, keys, lanes);
		if (!more) break;
		more = advance<S>(s, k);
		if (more) read<GATHER, S>(s, k, a);
		write<GATHER, SUMS, S>(s, b, keys, lanes);
	}
}

// Seed is what the sum of an object begins with, and where it stands.
struct Seed {
	u64 a, b, want;
	u64 *place;
};

// seedOf reads the seed of IOCTX i.
static __device__ __forceinline__ Seed seedOf(const Sums &s, u32 i, bool expected) {
	u32 slot = i / s.perSlot;
	u32 ordinal = s.ordinals[i % s.perSlot];
	if (s.active) slot = s.active[slot];
	Seed d;
	d.place = s.sums + u64(slot) * s.rankObjects + ordinal;
	d.a = s.seeds[2 * u64(slot)];
	d.b = s.seeds[2 * u64(slot) + 1];
	d.want = expected ? *d.place : 0;
	return d;
}

// sumOf prepares the sum of an object.
static __device__ __forceinline__ void sumOf(const Seed &d, u32 rank, u32 object, Work &w) {
	u64 id = mix((u64(rank) | u64(object) << 16) + Golden);
	w.place = d.place;
	w.want = d.want;
	w.s0 = mix(mix(d.a ^ id) + w.payload);
	w.s1 = mix(mix(d.b ^ w.s0) + Golden);
}

// resolve fills in the work for IOCTX i, whose outcome so far is given.
template <bool GATHER, bool SUMS>
static __device__ void resolve(const Tables &t, const Sums &sums, const Ioctx &ctx, u32 i, u64 cell, Outcome outcome,
	u8 *outcomes, Work &w) {

	w.state = Skip;
	w.bytes = 0;
	if (GATHER && (outcome != OutcomeOK || ctx.flags)) return;
	Seed seed = {};
	if (SUMS && outcome == OutcomeOK) seed = seedOf(sums, i, !GATHER); // before the registered memory: reads overlap
	u32 payload = 0, bytes = 0;
	if (ctx.object < t.objectCount) {
		const Object o = t.objects[ctx.object];
		payload = o.bytes;
		bytes = o.units * UnitBytes;
	}
	Memory m;
	if (!lookup(t, ctx.desc, payload, m) || (GATHER && bytes == 0)) {
		if (outcome == OutcomeOK) outcomes[i] = OutcomeMemory;
		return;
	}
	w.cell = cell;
	w.first = m.first;
	w.runs = m.runs;
	w.io = m.region.io;
	w.firstBytes = m.firstBytes;
	w.payload = payload;
	w.index = i;
	w.bits = m.bits;
	w.total = 0;
	if (outcome != OutcomeOK) {
		w.state = Zero;
		return;
	}
	if (cell == 0 && !SUMS) return; // in place, and nothing to verify
	w.state = Move;
	w.bytes = GATHER && cell ? bytes : payload;
	if (SUMS) sumOf(seed, sums.rank, ctx.object, w);
}

// scanUnits sets before, by one warp.
template <class S> static __device__ void scanUnits(MoveShared &s, u32 n) {
	const u32 each = TILE / 32;
	u32 lane = laneOf(), mine = 0;
	for (u32 k = 0; k < each; k++) {
		u32 j = lane * each + k;
		if (j < n) mine += (s.work[j].bytes + S::UNITBYTES - 1) / S::UNITBYTES;
	}
	u32 sum = mine;
	for (u32 d = 1; d < 32; d <<= 1) {
		u32 below = __shfl_up_sync(ALL, sum, d);
		if (lane >= d) sum += below;
	}
	u32 at = sum - mine;
	for (u32 k = 0; k < each; k++) {
		u32 j = lane * each + k;
		s.before[j] = at;
		if (j < n) at += (s.work[j].bytes + S::UNITBYTES - 1) / S::UNITBYTES;
	}
	if (lane == 31) s.before[TILE] = at;
}

// zero clears an object's runs, by the whole block.
static __device__ __noinline__ void zero(const Work &w) {
	Cursor c = cursorOf(w);
	for (u32 o = threadIdx.x * 16; o < w.payload; o += blockDim.x * 16) storeRuns(w, c, o, make_uint4(0, 0, 0, 0));
}

// moveTile does the first n works, by the whole block: moves, sums, and zeroes what failed. Every work was filled in by
// thread (its number) mod blockDim; afterwards they may be filled in again.
template <bool GATHER, bool SUMS, class S>
static __device__ __forceinline__ void moveTile(MoveShared &s, u32 n, u8 *outcomes) {
	__syncthreads();
	if (warpOf() == 0) scanUnits<S>(s, n);
	__syncthreads();
	moveUnits<GATHER, SUMS, S>(s);
	__syncthreads();
	bool failed = false;
	for (u32 j = threadIdx.x; j < n; j += blockDim.x) {
		Work &w = s.work[j];
		if (SUMS && w.state == Move) {
			u64 sum = mix(w.total ^ w.s0);
			if (GATHER) {
				*w.place = sum;
			} else if (sum != w.want) {
				outcomes[w.index] = OutcomeChecksum;
				w.state = Zero;
			}
		}
		failed |= w.state == Zero;
	}
	if (!__syncthreads_or(failed)) return;
	for (u32 j = 0; j < n; j++) {
		if (s.work[j].state == Zero) zero(s.work[j]);
	}
	__syncthreads();
}

struct ChunkShared {
	MoveShared move;
	Chunk chunks[CHUNKS];
	u32 before[CHUNKS + 1]; // IOCTXs of the chunks before
};

// moveChunks does the block's share of all chunks: IOCTXs in a row, so that a warp reads what the host has of them in few
// pieces. One by one those reads would take longer than the bytes.
template <bool GATHER, bool SUMS, class S> static __device__ void moveChunks(const MoveParams &p, ChunkShared &s) {
	if (SUMS) setKeys(s.move);
	for (u32 c0 = 0; c0 < p.chunkCount; c0 += CHUNKS) {
		u32 n = min(p.chunkCount - c0, u32(CHUNKS));
		__syncthreads();
		for (u32 c = threadIdx.x; c < n; c += blockDim.x) s.chunks[c] = p.chunks[c0 + c];
		__syncthreads();
		if (threadIdx.x == 0) {
			u32 sum = 0;
			for (u32 c = 0; c < n; c++) {
				s.before[c] = sum;
				sum += s.chunks[c].count;
			}
			s.before[n] = sum;
		}
		__syncthreads();
		const u32 all = s.before[n], share = (all + gridDim.x - 1) / gridDim.x;
		const u32 begin = min(all, blockIdx.x * share), end = min(all, begin + share);
		for (u32 first = begin; first < end; first += TILE) {
			u32 works = min(end - first, u32(TILE));
			for (u32 j = threadIdx.x; j < works; j += blockDim.x) {
				u32 o = first + j, c = 0;
				while (o >= s.before[c + 1]) c++;
				const Chunk &chunk = s.chunks[c];
				u32 k = o - s.before[c], i = chunk.first + k;
				u64 cell = chunk.cells ? chunk.cells + cellOffset(p.cells, k) : 0;
				resolve<GATHER, SUMS>(p.tables, p.sums, p.ioctxs[i], i, cell, Outcome(p.outcomes[i]), p.outcomes,
					s.move.work[j]);
			}
			moveTile<GATHER, SUMS, S>(s.move, works, p.outcomes);
		}
	}
	finish(p.done, p.blocks);
}

extern "C" __global__ void __launch_bounds__(MOVETHREADS, 2) tuttifs_harvest(const __grid_constant__ MoveParams p) {
	__shared__ ChunkShared s;
	if (p.sums.seeds) moveChunks<false, true, Staged>(p, s);
	else moveChunks<false, false, Staged>(p, s);
}

extern "C" __global__ void __launch_bounds__(MOVETHREADS, 2) tuttifs_gather(const __grid_constant__ MoveParams p) {
	__shared__ ChunkShared s;
	if (p.sums.seeds) moveChunks<true, true, Staged>(p, s);
	else moveChunks<true, false, Staged>(p, s);
}

// ---- Polling ----

// A queue has at most WINDOW commands in flight. Commands count on; the one numbered c has slot c mod the window, which
// is its cell, so that the oldest that is outstanding bounds how far the queue may go on. PENDING is the room for
// IOCTXs that were found and not issued, and more than a search adds.
#define WINDOW 1024
#define PENDING 2048

enum Slot : u32 { SlotFree, SlotOutstanding, SlotSeen };

struct PollShared {
	MoveShared move;
	Ranks ranks;
	u32 pending[PENDING];
	u32 index[WINDOW]; // the IOCTX of the command in a slot
	u32 slots[WINDOW];
	u32 least;
	u32 over;
};

// pollTile is moveTile with registers of its own.
template <bool GATHER, bool SUMS> static __device__ __noinline__ void pollTile(PollShared &s, u32 n, u8 *outcomes) {
	moveTile<GATHER, SUMS, Polled>(s.move, n, outcomes);
}

// first is the first thread of the first n that has something, n if none has. All threads of the block call it.
static __device__ u32 first(u32 *least, bool has, u32 n) {
	__syncthreads();
	if (threadIdx.x == 0) *least = n;
	__syncthreads();
	u32 ballot = __ballot_sync(ALL, has);
	if (laneOf() == 0 && ballot) atomicMin(least, threadIdx.x + u32(__ffs(int(ballot))) - 1);
	__syncthreads();
	return *least;
}

// Poller is the state of a block and its queue: the same in all threads.
struct Poller {
	u32 drive, all;              // IOCTXs of the lane
	u32 scanned, found, taken;   // of them: searched, found to be the block's, issued or refused
	u32 issued, oldest, inflight; // commands: all, the first that is not done, those that are not
	u32 window, room, turn;
	bool bounced;
	u64 cells, cellsIO;
	Wire wire;
	Queue q;
};

static __device__ Poller pollerOf(const PollParams &p) {
	Poller b = {};
	const u32 lane = blockIdx.x / p.drives;
	b.drive = blockIdx.x % p.drives;
	b.all = p.count > lane ? (p.count - lane + p.lanes - 1) / p.lanes : 0;
	b.q = p.queues[blockIdx.x];
	b.wire = Wire{p.prpBase, p.prpDMA, p.write != 0, p.sgl != 0};
	b.bounced = p.cells != 0;
	u32 fit = WINDOW;
	if (b.bounced) {
		u32 share = p.cellBytes / p.drives & ~(UnitBytes - 1);
		fit = share / p.cellStride;
		b.cells = p.cells[lane] + u64(b.drive) * share;
		b.cellsIO = p.cellsIO[lane] + u64(b.drive) * share;
		b.room = fit > 0 ? p.cellStride : 0;
	}
	b.window = min(min(fit, p.depth), min(b.q.mask, u32(WINDOW)));
	if (b.window == 0) b.window = 1;
	return b;
}

// ours says whether the block answers for an IOCTX; drive 0's does for those that lie nowhere.
static __device__ __forceinline__ bool ours(const Poller &b, const Extent &e) {
	return e.queue == int(b.drive) || (e.queue < 0 && b.drive == 0);
}

// laneIOCTX is the batch's number of the lane's m-th IOCTX.
static __device__ __forceinline__ u32 laneIOCTX(const PollParams &p, u32 m) {
	return blockIdx.x / p.drives + m * p.lanes;
}

// find searches until a tile is pending or all has been searched.
static __device__ void find(const PollParams &p, PollShared &s, Poller &b) {
	while (b.found - b.taken < TILE && b.scanned < b.all) {
		u32 m = b.scanned + threadIdx.x, i = laneIOCTX(p, m);
		bool has = m < b.all && ours(b, locate(p.tables, p.ioctxs[i]));
		u32 total, r = rank(s.ranks, b.turn, has, total);
		if (has) s.pending[(b.found + r) % PENDING] = i;
		b.found += total;
		b.scanned = min(b.all, b.scanned + blockDim.x);
	}
	__syncthreads();
}

// issue makes commands of what is pending, as far as slots are free, and rings. Targets of refused reads are zeroed.
template <bool WRITE, bool SUMS>
static __device__ void issue(const PollParams &p, PollShared &s, Poller &b) {
	const u32 n = min(min(b.found - b.taken, b.window - (b.issued - b.oldest)), min(u32(TILE), blockDim.x));
	if (n == 0) return;
	const bool mine = threadIdx.x < n;
	Outcome outcome = OutcomeOK;
	u32 i = 0;
	Ioctx ctx = {};
	Extent e = {};
	Pointer at = {};
	if (mine) {
		i = s.pending[(b.taken + threadIdx.x) % PENDING];
		ctx = p.ioctxs[i];
		e = locate(p.tables, ctx);
		outcome = e.queue < 0 ? OutcomeUnmapped : check(p.tables, b.wire, ctx, e, b.bounced, b.room, at);
		if (outcome != OutcomeOK) {
			p.outcomes[i] = outcome;
			p.statuses[i] = 0;
		}
	}
	const bool command = mine && outcome == OutcomeOK;
	u32 total, r = rank(s.ranks, b.turn, command, total);
	const u32 slot = (b.issued + r) % b.window;
	const u64 offset = u64(slot) * p.cellStride;
	if (mine) {
		Work &work = s.move.work[threadIdx.x];
		work.state = Skip;
		work.bytes = 0;
		if (command == WRITE) {
			resolve<WRITE, SUMS>(p.tables, p.sums, ctx, i, b.bounced ? b.cells + offset : 0, outcome, p.outcomes, work);
		}
	}
	if (__syncthreads_or(mine && command == WRITE)) pollTile<WRITE, SUMS>(s, n, p.outcomes);
	if (command) {
		if (b.bounced && !ctx.flags) at = contiguous(b.wire, b.cellsIO + offset, e.bytes);
		put(b.q, b.q.tail + r, b.wire, ctx, e, u16(b.q.firstID + b.issued + r), at);
		s.index[slot] = i;
		s.slots[slot] = SlotOutstanding;
	}
	b.taken += n;
	b.issued += total;
	b.inflight += total;
	b.q.tail = (b.q.tail + total) & b.q.mask;
	__threadfence_system();
	__syncthreads();
	if (total > 0 && threadIdx.x == 0) storeRelease(reinterpret_cast<u32 *>(b.q.sqTail), b.q.tail);
}

// complete takes the completions that are in. It is false after one that nobody waits for.
template <bool WRITE, bool SUMS>
static __device__ bool complete(const PollParams &p, PollShared &s, Poller &b) {
	const u32 n = min(min(b.inflight, u32(TILE)), blockDim.x);
	u32 word = 0;
	bool ready = false;
	if (threadIdx.x < n) {
		u32 place = b.q.head + threadIdx.x, phase = b.q.phase ^ u32(place > b.q.mask);
		word = loadAcquire(reinterpret_cast<const u32 *>(b.q.cq + u64(place & b.q.mask) * 16 + 12));
		ready = (word >> 16 & 1) == phase;
	}
	const u32 arrived = first(&s.least, threadIdx.x < n && !ready, n);
	const bool mine = threadIdx.x < arrived;
	u32 slot = 0;
	bool bad = false;
	if (mine) {
		u32 since = u16(word - (b.q.firstID + b.oldest)); // the oldest
		slot = (b.oldest + since) % b.window;
		bad = since >= b.issued - b.oldest ||
			atomicCAS(&s.slots[slot], u32(SlotOutstanding), u32(SlotSeen)) != SlotOutstanding;
	}
	if (__syncthreads_or(bad)) return false;
	if (arrived == 0) return true;
	b.q.head += arrived;
	if (b.q.head > b.q.mask) {
		b.q.head &= b.q.mask;
		b.q.phase ^= 1;
	}
	if (threadIdx.x == 0) storeRelease(reinterpret_cast<u32 *>(b.q.cqHead), b.q.head);
	if (mine) {
		u32 i = s.index[slot], status = word >> 17;
		Outcome outcome = status ? OutcomeFailed : OutcomeOK;
		p.outcomes[i] = outcome;
		p.statuses[i] = u16(status);
		u64 cell = b.bounced ? b.cells + u64(slot) * p.cellStride : 0;
		if (!WRITE) {
			resolve<false, SUMS>(p.tables, p.sums, p.ioctxs[i], i, cell, outcome, p.outcomes, s.move.work[threadIdx.x]);
		}
	}
	if (!WRITE) pollTile<false, SUMS>(s, arrived, p.outcomes);
	if (mine) s.slots[slot] = SlotFree;
	b.inflight -= arrived;
	for (u32 k = 1, done = k; done == k && b.oldest != b.issued; b.oldest += done) {
		k = min(b.issued - b.oldest, blockDim.x);
		bool busy = false;
		__syncthreads();
		if (threadIdx.x < k) busy = s.slots[(b.oldest + threadIdx.x) % b.window] != SlotFree;
		done = first(&s.least, busy, k);
	}
	return true;
}

// leave gives what is outstanding one outcome, and what was never issued another.
static __device__ void leave(const PollParams &p, PollShared &s, const Poller &b, Outcome outstanding, Outcome rest) {
	__syncthreads();
	for (u32 k = threadIdx.x; k < b.issued - b.oldest; k += blockDim.x) {
		u32 slot = (b.oldest + k) % b.window;
		if (s.slots[slot] == SlotFree) continue;
		p.outcomes[s.index[slot]] = outstanding;
		p.statuses[s.index[slot]] = 0;
	}
	for (u32 k = b.taken + threadIdx.x; k < b.found; k += blockDim.x) {
		p.outcomes[s.pending[k % PENDING]] = rest;
		p.statuses[s.pending[k % PENDING]] = 0;
	}
	for (u32 m = b.scanned + threadIdx.x; m < b.all; m += blockDim.x) {
		u32 i = laneIOCTX(p, m);
		if (!ours(b, locate(p.tables, p.ioctxs[i]))) continue;
		p.outcomes[i] = rest;
		p.statuses[i] = 0;
	}
}

// STOPS is how many looks at the queue go by between two at the host's word.
#define STOPS 16

template <bool WRITE, bool SUMS> static __device__ void poll(const PollParams &p, PollShared &s) {
	Poller b = pollerOf(p);
	if (SUMS) setKeys(s.move);
	const u64 begin = nanoseconds();
	for (u32 i = threadIdx.x; i < WINDOW; i += blockDim.x) s.slots[i] = SlotFree;
	if (threadIdx.x == 0) s.over = 0;
	__syncthreads();
	bool bad = false, over = false;
	for (u32 round = 0; b.inflight > 0 || b.taken < b.found || b.scanned < b.all; round++) {
		if (threadIdx.x == 0) {
			bool stop = p.stop && round % STOPS == 0 && loadAcquire(p.stop) != 0;
			if (stop || nanoseconds() - begin > p.deadline) s.over = 1;
		}
		find(p, s, b);
		over = s.over;
		if (over) break;
		issue<WRITE, SUMS>(p, s, b);
		bad = !complete<WRITE, SUMS>(p, s, b);
		if (bad) break;
	}
	if (bad) leave(p, s, b, OutcomeProtocol, OutcomePending);
	else if (over) leave(p, s, b, OutcomeTimeout, OutcomeTimeout);
	if (threadIdx.x == 0) {
		const u32 *next = reinterpret_cast<const u32 *>(b.q.cq + u64(b.q.head) * 16 + 12);
		if (bad || b.inflight > 0 || (loadAcquire(next) >> 16 & 1) == b.q.phase) b.q.phase = PhaseBad;
		Queue &q = p.queues[blockIdx.x];
		q.tail = b.q.tail;
		q.head = b.q.head;
		q.phase = b.q.phase;
		q.firstID = (b.q.firstID + b.issued) & 0xffff;
	}
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) tuttifs_poll(const __grid_constant__ PollParams p) {
	__shared__ PollShared s;
	if (blockIdx.x < p.lanes * p.drives) {
		if (p.write && p.sums.seeds) poll<true, true>(p, s);
		else if (p.write) poll<true, false>(p, s);
		else if (p.sums.seeds) poll<false, true>(p, s);
		else poll<false, false>(p, s);
	}
	finish(p.done, p.blocks);
}

// ---- Registration ----

extern "C" __global__ void __launch_bounds__(THREADS, 1) tuttifs_register(const __grid_constant__ RegisterParams p) {
	const u64 n = u64(p.classes) * p.blocks * p.runs;
	for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += u64(gridDim.x) * blockDim.x) {
		u64 object = i / p.runs;
		u32 run = u32(i % p.runs);
		u64 block = object % p.blocks, class_ = object / p.blocks;
		const Strided s = p.strided[class_ * p.runs + run];
		u64 address = s.base + block * s.stride + p.io;
		p.table[i] = Run{address, s.bytes, 0};
		if (!p.lists) continue;
		u64 next = 0; // the first page of the run that follows, so that the lists of an object's runs make one list
		if (run + 1 < p.runs) {
			const Strided f = p.strided[class_ * p.runs + run + 1];
			next = f.base + block * f.stride + p.io;
		}
		u64 *list = reinterpret_cast<u64 *>(p.lists + i * p.listBytes);
		u32 own = pagesOf(address, s.bytes) - 1;
		u64 page = address & ~u64(PageBytes - 1);
		for (u32 j = 0; j < p.listBytes / 8; j++) list[j] = j < own ? page + u64(j + 1) * PageBytes : j == own ? next : 0;
	}
}
