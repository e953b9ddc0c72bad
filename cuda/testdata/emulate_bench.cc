// The kernels of bench.cu, as emulate.cc has those of ring.cu, and the instructions that they use: what lanes hold of a
// matrix is as the PTX ISA defines the fragments of mma.m16n8k16 and of ldmatrix.

#include "emulate.h"

#include <cmath>
#include <deque>
#include <vector>

struct float4 {
	float x, y, z, w;
};

static float __uint_as_float(unsigned u) {
	float f;
	memcpy(&f, &u, sizeof f);
	return f;
}

static unsigned bits(float f) {
	unsigned u;
	memcpy(&u, &f, sizeof u);
	return u;
}

static inline float __shfl_xor_sync(unsigned all, float v, unsigned mask) {
	return __uint_as_float(__shfl_xor_sync(all, bits(v), mask));
}

// The warp's words, one of each lane.
static std::vector<unsigned> gather(unsigned v) {
	unsigned turn;
	emulate::Fiber *warp = emulate::exchange(v, turn);
	std::vector<unsigned> all(32);
	for (unsigned i = 0; i < 32; i++) all[i] = unsigned(warp[i].value[turn]);
	return all;
}

static float half_of(unsigned pair, unsigned odd) { return __uint_as_float(odd ? pair & 0xffff0000u : pair << 16); }

static void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
	const std::vector<unsigned> as[4] = {gather(a[0]), gather(a[1]), gather(a[2]), gather(a[3])};
	const std::vector<unsigned> bs[2] = {gather(b0), gather(b1)};
	const unsigned lane = threadIdx.x & 31;
	for (unsigned i = 0; i < 4; i++) {
		const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
		for (unsigned k = 0; k < 16; k++) {
			const float x = half_of(as[row / 8 + k / 8 * 2][row % 8 * 4 + k % 8 / 2], k % 2);
			const float y = half_of(bs[k / 8][column * 4 + k % 8 / 2], k % 2);
			d[i] += x * y;
		}
	}
}

static unsigned char *shared;

static unsigned shared_address(const void *p) {
	shared = static_cast<unsigned char *>(const_cast<void *>(p));
	return 0;
}

static void load(unsigned (&r)[4], unsigned address, bool transposed) {
	emulate::misaligned(shared + address, 16);
	const std::vector<unsigned> rows = gather(address);
	const unsigned lane = threadIdx.x & 31;
	for (unsigned m = 0; m < 4; m++) {
		unsigned short pair[2];
		for (unsigned i = 0; i < 2; i++) {
			const unsigned row = transposed ? lane % 4 * 2 + i : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + i;
			memcpy(&pair[i], shared + rows[m * 8 + row] + column * 2, 2);
		}
		r[m] = pair[0] | unsigned(pair[1]) << 16;
	}
	__syncwarp(); // a fiber that goes on may overwrite what others have not read
}

static void load_matrices(unsigned (&r)[4], unsigned address) { load(r, address, false); }
static void load_transposed(unsigned (&r)[4], unsigned address) { load(r, address, true); }

// Copies land when they are waited for, and no sooner.
struct Copy {
	unsigned to;
	unsigned long long from;
};
static std::deque<std::vector<Copy>> groups[1024];
static std::vector<Copy> fresh[1024];

static void copy_async(unsigned to, unsigned long long from) {
	emulate::misaligned(reinterpret_cast<void *>(from), 16);
	fresh[threadIdx.x].push_back({to, from});
}

static void commit_copies() {
	groups[threadIdx.x].push_back(fresh[threadIdx.x]);
	fresh[threadIdx.x].clear();
}

static void await_copies() {
	auto &mine = groups[threadIdx.x];
	for (; mine.size() > 1; mine.pop_front()) {
		for (const Copy &c : mine.front()) memcpy(shared + c.to, reinterpret_cast<void *>(c.from), 16);
	}
}

static unsigned rounded(float f) { return (bits(f) + 0x7fff + (bits(f) >> 16 & 1)) >> 16; }
static unsigned pack_bf16(float low, float high) { return rounded(low) | rounded(high) << 16; }
static float exp2_fast(float x) { return exp2f(x); }

namespace { // names of ring.cu are other things

#include "../bench.cu"

} // namespace

#define EMULATE(name, type)                                                                                            \
	extern "C" void emulate_##name(unsigned grid, unsigned block, const type *p) {                                      \
		emulate::run(grid, block, [=] { tuttifs_##name(*p); });                                                          \
		for (auto &g : groups) g.clear();                                                                                \
	}

EMULATE(bench_fill, BenchFill)
EMULATE(bench_step, BenchStep)
EMULATE(bench_attention, BenchAttention)
EMULATE(bench_attention_plain, BenchAttention)
