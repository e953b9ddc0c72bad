package cuda

import _ "embed"

// The kernels, compiled from ring.cu and bench.cu by `make ptx`. The driver compiles them on for its GPU.
var (
	//go:embed ring.ptx
	RingPTX []byte
	//go:embed bench.ptx
	BenchPTX []byte
)
