// Kernels of the benches: work for the SMs beside which transfers are measured.

// tuttifs_spin keeps one SM a block busy for a time by the GPU's clock.
extern "C" __global__ void tuttifs_spin(unsigned long long nanoseconds) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}
