// Kernels of `tuttifs bench gpu`: what the ring is measured beside, and what fills memory for it. bench.ptx is made of
// this file by `make ptx`; bench.go has the same parameter structs, and every kernel takes one of them by value.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define KERNEL extern "C" __global__ void

// ---- Filling --------------------------------------------------------------------------------------------------------

struct BenchFill {
  u64 dst;    // aligned to 8 bytes
  u64 words;  // of 8 bytes
  u64 salt;
  u64 keep;  // bits taken from the pattern
  u64 set;   // bits set after that
};
static_assert(sizeof(BenchFill) == 40, "BenchFillParams in bench.go");

// The finaliser of splitmix64: word i of a pattern is mix(salt + i), so that no two aligned words of it are equal.
__device__ __forceinline__ u64 mix(u64 z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

KERNEL tuttifs_bench_fill(const BenchFill p) {
  u64* dst = reinterpret_cast<u64*>(p.dst);
  const u64 step = u64(gridDim.x) * blockDim.x;
  for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < p.words; i += step) {
    dst[i] = (mix(p.salt + i) & p.keep) | p.set;
  }
}

// ---- A decode-like step ---------------------------------------------------------------------------------------------

// One vector by one matrix: what a decode step mostly is. It is bound by HBM.
struct BenchStep {
  u64 weights;  // bf16[rows][STEP_WIDTH]
  u64 x;        // f32[STEP_WIDTH], 16 KiB
  u64 y;        // f32[rows]
  u32 rows;
  u32 reserved;
};
static_assert(sizeof(BenchStep) == 32, "BenchStepParams in bench.go");

constexpr u32 STEP_WIDTH = 4096;

__device__ __forceinline__ float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// One warp a row; blocks of whole warps.
KERNEL tuttifs_bench_step(const BenchStep p) {
  __align__(16) __shared__ float x[STEP_WIDTH];
  const float* from = reinterpret_cast<const float*>(p.x);
  for (u32 i = threadIdx.x; i < STEP_WIDTH; i += blockDim.x) x[i] = from[i];
  __syncthreads();
  const u32 lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  for (u32 row = blockIdx.x * warps + (threadIdx.x >> 5); row < p.rows; row += gridDim.x * warps) {
    const uint4* w = reinterpret_cast<const uint4*>(p.weights + u64(row) * STEP_WIDTH * 2);
    float sum = 0;
#pragma unroll 4
    for (u32 i = lane; i < STEP_WIDTH / 8; i += 32) {
      const uint4 v = w[i];
      const float4 a = reinterpret_cast<const float4*>(x)[i * 2], b = reinterpret_cast<const float4*>(x)[i * 2 + 1];
      sum += low_bf16(v.x) * a.x + high_bf16(v.x) * a.y + low_bf16(v.y) * a.z + high_bf16(v.y) * a.w;
      sum += low_bf16(v.z) * b.x + high_bf16(v.z) * b.y + low_bf16(v.w) * b.z + high_bf16(v.w) * b.w;
    }
    for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane == 0) reinterpret_cast<float*>(p.y)[row] = sum;
  }
}

// ---- Attention ------------------------------------------------------------------------------------------------------

// The attention of a prefill with a cached prefix: causal, grouped heads of 128 dimensions, bf16. Query i stands at
// position context - tokens + i and sees the keys up to itself.
struct BenchAttention {
  u64 q;    // bf16[tokens][heads][HEAD]
  u64 k;    // bf16[context][kvHeads][HEAD]
  u64 v;    // as k
  u64 out;  // as q
  u32 tokens;   // multiple of QUERIES
  u32 context;  // new tokens included; multiple of KEYS, and so is context - tokens
  u32 heads;    // multiple of kvHeads
  u32 kvHeads;
  float scale;  // of scores: 1/sqrt(HEAD)
  u32 reserved;
};
static_assert(sizeof(BenchAttention) == 56, "BenchAttentionParams in bench.go");

constexpr u32 HEAD = 128;
constexpr u32 QUERIES = 128;  // of a block: 8 warps of 16 rows
constexpr u32 KEYS = 64;      // of a tile
constexpr u32 TILE_BYTES = KEYS * HEAD * 2;
constexpr u32 CHUNKS = HEAD / 8;  // of 16 bytes in a row of a tile
constexpr float LOG2E = 1.4426950408889634f;

// Hardware's instructions, one function each. A test that runs the kernels on a CPU has its own.
#ifndef TUTTIFS_EMULATED
// D += A B of m16n8k16, bf16 with f32 sums.
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void copy_async(u32 shared, u64 global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the newest group of this thread's copies have landed.
__device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}
#endif

// Rows of a tile are 256 bytes, so that equal chunks of eight rows lie in the same banks; exchanging chunks by the row
// spreads them.
__device__ __forceinline__ u32 tile_offset(u32 row, u32 chunk) {
  return row * (HEAD * 2) + ((chunk ^ (row & 7)) << 4);
}

// Starts the copy of KEYS rows from global, `stride` bytes apart, by 256 threads.
__device__ __forceinline__ void load_tile(u32 shared, u64 global, u64 stride) {
#pragma unroll
  for (u32 i = 0; i < KEYS * CHUNKS / 256; i++) {
    const u32 id = threadIdx.x + i * 256, row = id / CHUNKS, chunk = id % CHUNKS;
    copy_async(shared + tile_offset(row, chunk), global + row * stride + chunk * 16);
  }
}

// Scores of a warp's 16 queries with a tile's keys: s[n] is the fragment of keys 8n to 8n+7.
__device__ __forceinline__ void scores(float (&s)[KEYS / 8][4], const u32 (&q)[HEAD / 16][4], u32 tile) {
  const u32 lane = threadIdx.x & 31;
#pragma unroll
  for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) s[n][i] = 0;
  }
#pragma unroll
  for (u32 step = 0; step < HEAD / 16; step++) {
#pragma unroll
    for (u32 n = 0; n < KEYS / 16; n++) {
      u32 b[4];
      load_matrices(b, tile + tile_offset(n * 16 + ((lane >> 4) << 3) + (lane & 7), step * 2 + ((lane >> 3) & 1)));
      mma(s[2 * n], q[step], b[0], b[1]);
      mma(s[2 * n + 1], q[step], b[2], b[3]);
    }
  }
}

// Hides the keys behind the queries: row is the position of the thread's first query, which is that of its fragments'
// elements 0 and 1; the other two belong to row + 8.
__device__ __forceinline__ void mask(float (&s)[KEYS / 8][4], u32 row, u32 key) {
  const u32 column = key + (threadIdx.x & 3) * 2;
#pragma unroll
  for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      if (column + n * 8 + (i & 1) > row + (i >> 1) * 8) s[n][i] = -1e30f;
    }
  }
}

// Turns scores into weights and scales what was summed before down to the new maximum. most and sum are of the thread's
// two rows; sum is of the thread's own columns until the end.
__device__ __forceinline__ void soften(float (&s)[KEYS / 8][4], float (&o)[HEAD / 8][4], float (&most)[2],
                                       float (&sum)[2], float scale) {
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    float m = most[half];
#pragma unroll
    for (u32 n = 0; n < KEYS / 8; n++) m = fmaxf(m, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
    const float shrink = exp2_fast((most[half] - m) * scale), base = m * scale;
    most[half] = m;
    float total = 0;
#pragma unroll
    for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
      for (u32 i = 2 * half; i < 2 * half + 2; i++) {
        s[n][i] = exp2_fast(s[n][i] * scale - base);
        total += s[n][i];
      }
    }
    sum[half] = sum[half] * shrink + total;
#pragma unroll
    for (u32 n = 0; n < HEAD / 8; n++) {
      o[n][2 * half] *= shrink;
      o[n][2 * half + 1] *= shrink;
    }
  }
}

// o += weights * values.
__device__ __forceinline__ void accumulate(float (&o)[HEAD / 8][4], const float (&s)[KEYS / 8][4], u32 tile) {
  const u32 lane = threadIdx.x & 31;
#pragma unroll
  for (u32 step = 0; step < KEYS / 16; step++) {
    const float(&low)[4] = s[2 * step];
    const float(&high)[4] = s[2 * step + 1];
    const u32 a[4] = {pack_bf16(low[0], low[1]), pack_bf16(low[2], low[3]), pack_bf16(high[0], high[1]),
                      pack_bf16(high[2], high[3])};
#pragma unroll
    for (u32 n = 0; n < HEAD / 16; n++) {
      u32 b[4];
      load_transposed(b, tile + tile_offset(step * 16 + (((lane >> 3) & 1) << 3) + (lane & 7), n * 2 + (lane >> 4)));
      mma(o[2 * n], a, b[0], b[1]);
      mma(o[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// Grid: tokens / QUERIES * heads, blocks of 256. Tiles of keys and values take turns in three places of shared memory:
// while one is worked on, the two that follow are on their way.
KERNEL __launch_bounds__(256, 1) tuttifs_bench_attention(const BenchAttention p) {
  __align__(128) __shared__ u8 tiles[3][TILE_BYTES];
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  // Blocks that run together have the queries of one head, which have its keys in the L2 cache; the last queries have
  // most keys and begin.
  const u32 parts = p.tokens / QUERIES;
  const u32 first = (parts - 1 - blockIdx.x % parts) * QUERIES, head = blockIdx.x / parts;
  const u64 kvHead = head / (p.heads / p.kvHeads), stride = u64(p.kvHeads) * HEAD * 2;
  const u64 keys = p.k + kvHead * HEAD * 2, values = p.v + kvHead * HEAD * 2;
  const u32 place = shared_address(tiles);
  const u32 position = p.context - p.tokens + first;  // of the block's first query
  const u32 count = 2 * ((position + QUERIES) / KEYS);

  load_tile(place, keys, stride);
  commit_copies();
  load_tile(place + TILE_BYTES, values, stride);
  commit_copies();

  const u32 row = warp * 16 + (lane >> 2);  // in the block; and row + 8
  const u64 qStride = u64(p.heads) * HEAD * 2, qOffset = u64(first + row) * qStride + head * HEAD * 2;
  u32 q[HEAD / 16][4];
#pragma unroll
  for (u32 step = 0; step < HEAD / 16; step++) {
    const u64 at = p.q + qOffset + step * 32 + (lane & 3) * 4;
    q[step][0] = *reinterpret_cast<const u32*>(at);
    q[step][1] = *reinterpret_cast<const u32*>(at + 8 * qStride);
    q[step][2] = *reinterpret_cast<const u32*>(at + 16);
    q[step][3] = *reinterpret_cast<const u32*>(at + 8 * qStride + 16);
  }

  float o[HEAD / 8][4], s[KEYS / 8][4], most[2] = {-1e30f, -1e30f}, sum[2] = {0, 0};
#pragma unroll
  for (u32 n = 0; n < HEAD / 8; n++) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) o[n][i] = 0;
  }
  const float scale = p.scale * LOG2E;
  for (u32 tile = 0; tile < count; tile++) {
    await_copies();
    // All threads' parts of this tile are there, and all are done with the one before it, whose place is the next's.
    __syncthreads();
    const u32 next = tile + 2;
    if (next < count) {
      load_tile(place + next % 3 * TILE_BYTES, (next & 1 ? values : keys) + u64(next / 2) * KEYS * stride, stride);
    }
    commit_copies();  // an empty group keeps the count
    const u32 at = place + tile % 3 * TILE_BYTES;
    if (tile & 1) {
      accumulate(o, s, at);
      continue;
    }
    scores(s, q, at);
    const u32 key = tile / 2 * KEYS;
    if (key + KEYS > position) mask(s, position + row, key);
    soften(s, o, most, sum, scale);
  }

#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    float total = sum[half];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    const float inverse = 1 / total;
    const u64 at = p.out + qOffset + half * 8 * qStride + (lane & 3) * 4;
#pragma unroll
    for (u32 n = 0; n < HEAD / 8; n++) {
      *reinterpret_cast<u32*>(at + n * 16) = pack_bf16(o[n][2 * half] * inverse, o[n][2 * half + 1] * inverse);
    }
  }
}

constexpr u32 PLAIN_CONTEXT = 1024;

// The same without any art, to compare with. Grid: tokens * heads, blocks of HEAD; context at most PLAIN_CONTEXT.
KERNEL tuttifs_bench_attention_plain(const BenchAttention p) {
  __shared__ float weights[PLAIN_CONTEXT];
  __shared__ float total;
  const u32 token = blockIdx.x / p.heads, head = blockIdx.x % p.heads, kvHead = head / (p.heads / p.kvHeads);
  const u32 seen = p.context - p.tokens + token + 1;
  const u16* q = reinterpret_cast<const u16*>(p.q) + (u64(token) * p.heads + head) * HEAD;
  const u16* k = reinterpret_cast<const u16*>(p.k) + u64(kvHead) * HEAD;
  const u16* v = reinterpret_cast<const u16*>(p.v) + u64(kvHead) * HEAD;
  for (u32 key = threadIdx.x; key < seen; key += HEAD) {
    float dot = 0;
    for (u32 d = 0; d < HEAD; d++) {
      dot += low_bf16(q[d]) * low_bf16(k[u64(key) * p.kvHeads * HEAD + d]);
    }
    weights[key] = dot * p.scale;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    float most = weights[0], sum = 0;
    for (u32 key = 1; key < seen; key++) most = fmaxf(most, weights[key]);
    for (u32 key = 0; key < seen; key++) sum += weights[key] = exp2f((weights[key] - most) * LOG2E);
    total = sum;
  }
  __syncthreads();
  float sum = 0;
  for (u32 key = 0; key < seen; key++) {
    sum += weights[key] * low_bf16(v[u64(key) * p.kvHeads * HEAD + threadIdx.x]);
  }
  u16* out = reinterpret_cast<u16*>(p.out) + (u64(token) * p.heads + head) * HEAD;
  out[threadIdx.x] = u16(pack_bf16(sum / total, 0));
}

// ---- Waiting --------------------------------------------------------------------------------------------------------

// Keeps one SM a block busy for a time by the GPU's clock.
KERNEL tuttifs_spin(const u64 time) {
  const u64 begin = nanoseconds();
  while (nanoseconds() - begin < time) {
  }
}
