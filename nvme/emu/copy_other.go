//go:build !amd64

package emu

// stream is copy for a drive's memory. Only amd64 has a faster way than copy itself.
func stream(dst, src []byte) { copy(dst, src) }
