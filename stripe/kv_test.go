package stripe

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// runBytes sums a layer's and rank's runs by kind, and counts its objects.
func runBytes(g Geometry, layer, rank uint16) (map[RunKind]int, int) {
	sums, objects := make(map[RunKind]int), 0
	for _, o := range g.Objects {
		if o.Layer == layer && o.Rank == rank {
			objects++
			for _, r := range o.Runs {
				sums[r.Kind] += int(r.Bytes)
			}
		}
	}
	return sums, objects
}

func TestKV(t *testing.T) {
	llama := KV{Layers: 32, KVHeads: 8, HeadDim: 128, DTypeBytes: 2, Tokens: 64, Ranks: 1}
	with := func(change func(k *KV)) KV {
		k := llama
		change(&k)
		return k
	}
	for name, c := range map[string]struct {
		kv      KV
		objects int // of a layer and rank
		runs    map[RunKind]int
	}{
		"together": {llama, 1, map[RunKind]int{RunK: 128 << 10, RunV: 128 << 10}},
		"apart":    {with(func(k *KV) { k.Split = true }), 2, map[RunKind]int{RunK: 128 << 10, RunV: 128 << 10}},
		"four ranks": {
			with(func(k *KV) { k.Ranks = 4 }), 1, map[RunKind]int{RunK: 32 << 10, RunV: 32 << 10},
		},
		"more ranks than heads": {
			with(func(k *KV) { k.Ranks = 16 }), 1, map[RunKind]int{RunK: 16 << 10, RunV: 16 << 10},
		},
		"scales": {
			with(func(k *KV) { k.DTypeBytes, k.ScaleRow = 1, 32 }), 1,
			map[RunKind]int{RunK: 64 << 10, RunV: 64 << 10, RunScale: 2 << 10},
		},
		"scales apart": {
			with(func(k *KV) { k.Split, k.ScaleRow = true, 4 }), 3,
			map[RunKind]int{RunK: 128 << 10, RunV: 128 << 10, RunScale: 256},
		},
		"latents": {
			KV{Layers: 61, Tokens: 64, Ranks: 2, LatentRow: 656, IndexerRow: 132}, 1,
			map[RunKind]int{RunLatent: 656 * 64, RunIndexer: 132 * 64},
		},
		"over one command": {
			with(func(k *KV) { k.Tokens = 1024 }), 2, map[RunKind]int{RunK: 2 << 20, RunV: 2 << 20},
		},
		"over one command and odd": {
			with(func(k *KV) { k.Tokens, k.ScaleRow = 1000, 7 }), 2,
			map[RunKind]int{RunK: 2048000, RunV: 2048000, RunScale: 7000},
		},
		"over one command, apart": {
			with(func(k *KV) { k.Tokens, k.Split = 1536, true }), 4, map[RunKind]int{RunK: 3 << 20, RunV: 3 << 20},
		},
	} {
		t.Run(name, func(t *testing.T) {
			g, err := c.kv.Geometry()
			require.NoError(t, err)
			total := 0
			for _, n := range c.runs {
				total += n
			}
			for layer := range c.kv.Layers {
				for rank := range c.kv.Ranks {
					runs, objects := runBytes(g, uint16(layer), uint16(rank))
					require.Equal(t, c.objects, objects)
					require.Equal(t, c.runs, runs)
				}
			}
			require.EqualValues(t, total*c.kv.Layers*c.kv.Ranks, g.FileBytes())
			require.Len(t, g.Objects, (c.objects*c.kv.Layers+1)*c.kv.Ranks)
		})
	}
}

// TestCutKeepsOrder: the objects of a cut group, one after another, are its tensors; all but the last are whole
// units and of one size.
func TestCutKeepsOrder(t *testing.T) {
	for _, tensors := range [][]tensor{
		{{RunK, 5 << 20}, {RunV, 5 << 20}, {RunScale, 12345}},
		{{RunLatent, 2<<20 + 1}},
		{{RunK, 1}, {RunV, 2 << 20}},
	} {
		objects, err := cutGroup(tensors)
		require.NoError(t, err)
		var joined []tensor
		for i, runs := range objects {
			o := Object{Runs: runs}
			require.LessOrEqual(t, o.Bytes(), uint32(MaxObjectBytes))
			if i+1 < len(objects) {
				require.Zero(t, o.Bytes()%UnitBytes)
				require.Equal(t, (&Object{Runs: objects[0]}).Bytes(), o.Bytes())
			}
			for _, r := range runs {
				if n := len(joined); n > 0 && joined[n-1].kind == r.Kind {
					joined[n-1].bytes += uint64(r.Bytes)
				} else {
					joined = append(joined, tensor{r.Kind, uint64(r.Bytes)})
				}
			}
		}
		require.Equal(t, tensors, joined)
	}
}

func TestKVRefuses(t *testing.T) {
	for want, k := range map[string]KV{
		"layers is 0":        {KVHeads: 1, HeadDim: 1, DTypeBytes: 1, Tokens: 1, Ranks: 1},
		"tokens is -1":       {Layers: 1, KVHeads: 1, HeadDim: 1, DTypeBytes: 1, Tokens: -1, Ranks: 1},
		"KV heads is 0":      {Layers: 1, HeadDim: 1, DTypeBytes: 1, Tokens: 1, Ranks: 1},
		"cannot be divided":  {Layers: 1, KVHeads: 6, HeadDim: 1, DTypeBytes: 1, Tokens: 1, Ranks: 4},
		"no K and V":         {Layers: 1, LatentRow: 576, Tokens: 1, Ranks: 1, Split: true},
		"objects, want":      {Layers: 65535, KVHeads: 1, HeadDim: 1, DTypeBytes: 1, Tokens: 1, Ranks: 2},
		"use fewer tokens":   {Layers: 1, KVHeads: 1 << 16, HeadDim: 1 << 16, DTypeBytes: 16, Tokens: 1 << 20, Ranks: 1},
		"indexer row is -12": {Layers: 1, LatentRow: 576, Tokens: 1, Ranks: 1, IndexerRow: -12},
		"element is 17":      {Layers: 1, KVHeads: 1, HeadDim: 1, DTypeBytes: 17, Tokens: 1, Ranks: 1},
	} {
		g, err := k.Geometry()
		require.ErrorIs(t, err, ErrGeometry)
		require.ErrorContains(t, err, want)
		require.Empty(t, g.Objects)
	}
}

func TestModels(t *testing.T) {
	for _, m := range Models {
		found, ok := FindModel(m.Name)
		require.True(t, ok)
		require.Equal(t, m, found)
		for _, ranks := range []int{1, 2} {
			g, err := m.KV(64, ranks).Geometry()
			require.NoError(t, err, m.Name)
			_, err = NewLayout(g, 4)
			require.NoError(t, err)
		}
	}
	_, ok := FindModel("llama3-9b")
	require.False(t, ok)

	m, _ := FindModel("llama3-8b")
	g, err := m.KV(64, 1).Geometry()
	require.NoError(t, err)
	require.EqualValues(t, 64*128<<10, g.FileBytes(), "128 KiB a token")
	m, _ = FindModel("deepseek-v3")
	g, err = m.KV(64, 1).Geometry()
	require.NoError(t, err)
	require.EqualValues(t, 64*61*1152, g.FileBytes())
	m, _ = FindModel("deepseek-v3.2")
	require.Equal(t, []int{656, 132}, []int{m.LatentRow, m.IndexerRow})
}
