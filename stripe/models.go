package stripe

// Model is the cache of a public model as its configuration describes it, and the shape of what its layers compute.
type Model struct {
	Name       string
	Layers     int
	KVHeads    int
	HeadDim    int
	DTypeBytes int
	LatentRow  int // MLA: (latent rank + rotary dimension) x element, or the quantised row
	IndexerRow int
	Heads      int // of queries
	Hidden     int
	FFN        int // of a gated feed-forward network in every layer; 0 for mixtures of experts
}

// Models are the presets of the command line, by name.
var Models = []Model{
	{Name: "deepseek-v3", Layers: 61, DTypeBytes: 2, LatentRow: (512 + 64) * 2, Heads: 128, Hidden: 7168},
	// FP8 latents with their scales and BF16 rotary part; FP8 indexer keys with one scale.
	{Name: "deepseek-v3.2", Layers: 61, DTypeBytes: 1, LatentRow: 512 + 4*4 + 64*2, IndexerRow: 128 + 4, Heads: 128,
		Hidden: 7168},
	{Name: "glm-4-9b", Layers: 40, KVHeads: 2, HeadDim: 128, DTypeBytes: 2, Heads: 32, Hidden: 4096, FFN: 13696},
	{Name: "llama3-70b", Layers: 80, KVHeads: 8, HeadDim: 128, DTypeBytes: 2, Heads: 64, Hidden: 8192, FFN: 28672},
	{Name: "llama3-8b", Layers: 32, KVHeads: 8, HeadDim: 128, DTypeBytes: 2, Heads: 32, Hidden: 4096, FFN: 14336},
	{Name: "qwen2.5-32b", Layers: 64, KVHeads: 8, HeadDim: 128, DTypeBytes: 2, Heads: 40, Hidden: 5120, FFN: 27648},
	{Name: "qwen3-32b", Layers: 64, KVHeads: 8, HeadDim: 128, DTypeBytes: 2, Heads: 64, Hidden: 5120, FFN: 25600},
	// No model: small enough for demonstrations and tests, one object of 8 KiB a layer at 16 tokens.
	{Name: "tiny", Layers: 4, KVHeads: 2, HeadDim: 64, DTypeBytes: 2, Heads: 4, Hidden: 256, FFN: 1024},
}

// FindModel is the preset of that name.
func FindModel(name string) (Model, bool) {
	for _, m := range Models {
		if m.Name == name {
			return m, true
		}
	}
	return Model{}, false
}

// KV is the model's cache in files of so many tokens over so many ranks.
func (m Model) KV(tokens, ranks int) KV {
	return KV{
		Layers:     m.Layers,
		KVHeads:    m.KVHeads,
		HeadDim:    m.HeadDim,
		DTypeBytes: m.DTypeBytes,
		Tokens:     tokens,
		Ranks:      ranks,
		LatentRow:  m.LatentRow,
		IndexerRow: m.IndexerRow,
	}
}
