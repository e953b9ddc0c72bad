package emu

import "unsafe"

const (
	streamMin   = 4096 // shorter pieces are copied as usual
	streamLine  = 64   // bytes of a cache line
	streamBlock = 128  // bytes of one round of streamBlocks
)

// stream is copy for a drive's memory, which is larger than any cache and seldom read soon: it stores past the caches,
// so that no line is first read only to be overwritten. The two must not overlap. When it returns, its stores are
// ordered before later ones, as those of copy are.
func stream(dst, src []byte) {
	src = src[:min(len(dst), len(src))]
	if len(src) < streamMin {
		copy(dst, src)
		return
	}
	head := int(-uintptr(unsafe.Pointer(unsafe.SliceData(dst))) % streamLine)
	n := (len(src) - head) / streamBlock * streamBlock
	copy(dst, src[:head])
	streamBlocks(&dst[head], &src[head], n)
	copy(dst[head+n:], src[head+n:])
}

// streamBlocks copies n > 0 bytes, a multiple of streamBlock, to dst, a multiple of 16, by non-temporal stores.
//
//go:noescape
func streamBlocks(dst, src *byte, n int)
