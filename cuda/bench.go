package cuda

// Parameters of the bench's kernels (bench.cu), which has the same structs.

// BenchFillParams of tuttifs_bench_fill: word i of Dst becomes BenchWord(Salt, i, Keep, Set). Any grid.
type BenchFillParams struct {
	Dst   uint64
	Words uint64 // of 8 bytes
	Salt  uint64
	Keep  uint64
	Set   uint64
}

// BenchWord is word i of a pattern. No two words of one pattern are equal where all bits are kept.
func BenchWord(salt, i, keep, set uint64) uint64 {
	z := salt + i
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return (z^z>>31)&keep | set
}

// Keep and Set of BenchFillParams that give four bf16 numbers a word, their absolute values in [0.5, 1).
const (
	BenchKeepBF16 = 0x807f807f807f807f
	BenchSetBF16  = 0x3f003f003f003f00
)

// BenchStepWidth is the columns of a step's matrix.
const BenchStepWidth = 4096

// BenchStepParams of tuttifs_bench_step: Y = Weights X. Blocks of whole warps, a warp for each row; any grid.
type BenchStepParams struct {
	Weights uint64 // bf16[Rows][BenchStepWidth]
	X       uint64 // f32[BenchStepWidth]
	Y       uint64 // f32[Rows]
	Rows    uint32
	_       uint32
}

// Shapes of attention.
const (
	BenchHead         = 128  // dimensions of a head
	BenchQueries      = 128  // queries of a block
	BenchKeys         = 64   // keys of a tile
	BenchPlainContext = 1024 // of tuttifs_bench_attention_plain
)

// BenchAttentionParams of tuttifs_bench_attention (grid: Tokens/BenchQueries*Heads, blocks of 256) and of
// tuttifs_bench_attention_plain (grid: Tokens*Heads, blocks of BenchHead): a prefill of Tokens new tokens, which are
// the last of Context. Tokens is a multiple of BenchQueries, Context and Context-Tokens are of BenchKeys.
type BenchAttentionParams struct {
	Q       uint64 // bf16[Tokens][Heads][BenchHead]
	K       uint64 // bf16[Context][KVHeads][BenchHead]
	V       uint64
	Out     uint64 // as Q
	Tokens  uint32
	Context uint32
	Heads   uint32
	KVHeads uint32
	Scale   float32
	_       uint32
}
