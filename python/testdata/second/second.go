// Command second is a library with a Go runtime of its own, for the tests to load beside libtuttifs.
package main

// #include <stdint.h>
import "C"

import (
	"runtime"
	"sync"
)

// Churn keeps the collector, the scheduler and its preemption busy, and returns the sum of 0 to rounds - 1.
//
//export Churn
func Churn(rounds C.uint64_t) C.uint64_t { return C.uint64_t(churn(uint64(rounds))) }

func churn(rounds uint64) uint64 {
	sums := make([]uint64, 4)
	var done sync.WaitGroup
	for i := range sums {
		done.Go(func() {
			for r := range rounds {
				garbage := make([][]byte, 64)
				for j := range garbage {
					garbage[j] = make([]byte, 1024)
				}
				spin(20_000) // without a call, so that only a signal interrupts it
				sums[i] += r + uint64(len(garbage[0])) - 1024
			}
		})
	}
	done.Wait()
	runtime.GC()
	return sums[0]
}

func spin(n int) (x uint64) {
	for i := range n {
		x = x*6364136223846793005 + uint64(i)
	}
	return x
}

// Fault recovers from a fault in Go: 1 if it was seen.
//
//export Fault
func Fault() (seen C.int) {
	defer func() {
		if recover() != nil {
			seen = 1
		}
	}()
	var p *uint64
	return C.int(*p)
}

func main() {}
