// What ring.cu needs of CUDA, for one block at a time on a CPU. Threads are fibers that take turns: a barrier, a warp's
// exchange and an atomic operation are where one stops and the next goes on, so that a missing barrier shows.
#pragma once

#include <atomic>
#include <csetjmp>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <sched.h>
#include <ucontext.h>

#define TUTTIFS_EMULATED
#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define __align__(n) alignas(n)

struct alignas(16) uint4 {
	unsigned x, y, z, w;
};

struct alignas(16) ulonglong2 {
	unsigned long long x, y;
};

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return uint4{x, y, z, w}; }

struct Dim {
	unsigned x;
};

// What the fiber that runs sees.
extern Dim threadIdx, blockIdx, blockDim, gridDim;

namespace emulate {

struct Fiber {
	ucontext_t context;
	jmp_buf place; // where it rests
	char *stack;
	bool begun, done;
	unsigned long long value[2];
	unsigned turn; // which of the values the next exchange uses
	unsigned exchanges;
};

extern Fiber *fibers;

// rest lets the other fibers run.
void rest();

// barrier returns when all fibers that are not done have called it, with the or of what they brought.
bool barrier(bool v);

// exchange brings a value and returns when the whole warp has: the fibers of the warp, and which of their values.
Fiber *exchange(unsigned long long v, unsigned &turn);

// run runs a grid of a kernel.
void run(unsigned grid, unsigned block, std::function<void()> f);

// misaligned ends the process: hardware would fault.
void misaligned(const void *p, size_t n);

} // namespace emulate

inline void __syncthreads() { emulate::barrier(false); }
inline bool __syncthreads_or(bool v) { return emulate::barrier(v); }

inline void __syncwarp() {
	unsigned turn;
	emulate::exchange(0, turn);
}

template <class T> T __shfl_xor_sync(unsigned, T v, unsigned mask) {
	unsigned turn;
	emulate::Fiber *warp = emulate::exchange(v, turn);
	return T(warp[(threadIdx.x & 31) ^ mask].value[turn]);
}

template <class T> T __shfl_up_sync(unsigned, T v, unsigned by) {
	unsigned turn, lane = threadIdx.x & 31;
	emulate::Fiber *warp = emulate::exchange(v, turn);
	return T(warp[lane >= by ? lane - by : lane].value[turn]);
}

inline unsigned __ballot_sync(unsigned, bool v) {
	unsigned turn, bits = 0;
	emulate::Fiber *warp = emulate::exchange(v, turn);
	for (unsigned i = 0; i < 32; i++) bits |= unsigned(warp[i].value[turn] != 0) << i;
	return bits;
}

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(unsigned v) { return __builtin_ffs(int(v)); }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }

inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

template <class T> T atomicAdd(T *p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
template <class T> T atomicAdd_system(T *p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
template <class T> T atomicMin(T *p, T v) {
	T old = *p;
	if (v < old) *p = v;
	return old;
}
template <class T> T atomicCAS(T *p, T old, T v) {
	__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
	return old;
}

template <class T> T __ldcs(const T *p) {
	emulate::misaligned(p, sizeof(T));
	return *p;
}
template <class T> T __ldcv(const T *p) { return __ldcs(p); }
template <class T> void __stcs(T *p, T v) {
	emulate::misaligned(p, sizeof(T));
	*p = v;
}

inline uint32_t loadAcquire(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void storeRelease(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }

inline unsigned long long nanoseconds() {
	sched_yield(); // whoever completes commands may share this core
	timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}
