package checksum

import "golang.org/x/sys/cpu"

// bestMethod is the fastest method of this processor.
func bestMethod() method {
	switch {
	case cpu.X86.HasAVX512F:
		return avx512
	case cpu.X86.HasAVX2:
		return avx2
	}
	return generic
}

// accumulate fills the lanes of whole blocks, at most batchBlocks of them: len(p) is their bytes.
func (m method) accumulate(acc *[batchLanesLen]uint64, p []byte) {
	blocks := len(p) / BlockBytes
	switch {
	case blocks == 0 || blocks > batchBlocks:
		panic("checksum: accumulate takes 1 to 16 whole blocks") // the assembly checks no bounds
	case m == avx512:
		lanesAVX512(&acc[0], &p[0], blocks, &keys[0])
	case m == avx2:
		lanesAVX2(&acc[0], &p[0], blocks, &keys[0])
	default:
		accumulateGeneric(acc, p)
	}
}

// lanesAVX2 writes the 8 lanes of each of blocks > 0 blocks at p to acc.
//
//go:noescape
func lanesAVX2(acc *uint64, p *byte, blocks int, keys *uint64)

// lanesAVX512 does the same with AVX-512F.
//
//go:noescape
func lanesAVX512(acc *uint64, p *byte, blocks int, keys *uint64)
