//go:build !amd64

package checksum

// bestMethod is the fastest method of this processor.
func bestMethod() method { return generic }

// accumulate fills the lanes of whole blocks, at most batchBlocks of them: len(p) is their bytes.
func (m method) accumulate(acc *[batchLanesLen]uint64, p []byte) { accumulateGeneric(acc, p) }
