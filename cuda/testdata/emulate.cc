// The kernels of ring.cu as functions of a shared library: name(grid, block, params) returns when the grid is done.

#include "emulate.h"

#include "../ring.cu"

#include <cstdio>

Dim threadIdx, blockIdx, blockDim, gridDim;

namespace emulate {

static const size_t stackBytes = 64 << 10;

Fiber *fibers;
static jmp_buf scheduler;
static unsigned running, waiting, alive;
static bool gathered, answer;
static unsigned long long round_; // of the block's barrier
static std::function<void()> body;

void rest() {
	if (_setjmp(fibers[running].place) == 0) _longjmp(scheduler, 1);
}

// resume goes on with a fiber until it rests or ends. Contexts only begin fibers: to switch them takes system calls.
static void resume(Fiber &f) {
	if (_setjmp(scheduler) != 0) return;
	if (f.begun) _longjmp(f.place, 1);
	f.begun = true;
	setcontext(&f.context);
}

static void release() {
	answer = gathered;
	gathered = false;
	waiting = 0;
	round_++;
}

bool barrier(bool v) {
	gathered |= v;
	unsigned long long mine = round_;
	if (++waiting == alive) release();
	while (round_ == mine) rest();
	return answer;
}

Fiber *exchange(unsigned long long v, unsigned &turn) {
	Fiber *warp = fibers + (running & ~31u);
	Fiber &f = fibers[running];
	turn = f.turn;
	f.turn ^= 1;
	f.value[turn] = v;
	unsigned mine = ++f.exchanges;
	// One that is an exchange ahead has not written over this one's value: it alternates between two.
	for (unsigned i = 0; i < 32; i++) {
		while (warp[i].exchanges < mine) rest();
	}
	return warp;
}

void misaligned(const void *p, size_t n) {
	if (reinterpret_cast<uintptr_t>(p) % n == 0) return;
	fprintf(stderr, "%zu bytes at %p: misaligned\n", n, p);
	abort();
}

static void start() {
	body();
	Fiber &f = fibers[running];
	f.done = true;
	if (--alive > 0 && waiting == alive) release();
	_longjmp(scheduler, 1);
}

// run runs a grid, a block after another. Fibers are taken in an order that changes from round to round.
void run(unsigned grid, unsigned block, std::function<void()> f) {
	body = f;
	fibers = new Fiber[block]();
	for (unsigned i = 0; i < block; i++) fibers[i].stack = static_cast<char *>(malloc(stackBytes));
	gridDim.x = grid;
	blockDim.x = block;
	for (unsigned b = 0; b < grid; b++) {
		blockIdx.x = b;
		alive = block;
		waiting = 0;
		for (unsigned i = 0; i < block; i++) {
			Fiber &f = fibers[i];
			f.done = f.begun = false;
			f.turn = f.exchanges = 0;
			getcontext(&f.context);
			f.context.uc_stack.ss_sp = f.stack;
			f.context.uc_stack.ss_size = stackBytes;
			f.context.uc_link = nullptr;
			makecontext(&f.context, start, 0);
		}
		for (unsigned sweep = 0; alive > 0; sweep++) {
			for (unsigned i = 0; i < block; i++) {
				running = sweep % 2 ? block - 1 - i : i;
				if (fibers[running].done) continue;
				threadIdx.x = running;
				resume(fibers[running]);
			}
		}
	}
	for (unsigned i = 0; i < block; i++) free(fibers[i].stack);
	delete[] fibers;
}

} // namespace emulate

#define KERNEL(name, type)                                                                                             \
	extern "C" void emulate_##name(unsigned grid, unsigned block, const type *p) {                                      \
		emulate::run(grid, block, [=] { tuttifs_##name(*p); });                                                          \
	}

KERNEL(build, BuildParams)
KERNEL(harvest, MoveParams)
KERNEL(gather, MoveParams)
KERNEL(register, RegisterParams)
KERNEL(poll, PollParams)
