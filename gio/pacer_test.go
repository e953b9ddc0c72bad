package gio

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestReadsFirst: the pacer without a scheduler writes when nothing is to be read, and never allocates.
func TestReadsFirst(t *testing.T) {
	var p pacer = readsFirst{}
	p.start(func() {})
	piece := ioSize{objects: 128, bytes: 8 << 20}
	for _, c := range []struct {
		reads   ioSize
		reading ioSize
		allowed bool
	}{
		{ioSize{}, ioSize{}, true},
		{ioSize{objects: 1, bytes: 4096}, ioSize{}, false},
		{ioSize{objects: 2, bytes: 8192}, ioSize{objects: 1, bytes: 4096}, false},
	} {
		l := load{next: piece, deferred: piece, reads: c.reads, reading: c.reading, size: 1 << 30}
		g := p.writes(1, &l)
		require.Equal(t, c.allowed, g.allows(piece))
		require.Equal(t, c.allowed, g.allows(ioSize{objects: 1, bytes: 1}))
		require.Greater(t, p.readAhead(1), uint64(1<<60))
		require.Zero(t, p.harvestBlocks(1))
	}
	require.Zero(t, testing.AllocsPerRun(100, func() {
		l := load{next: piece, deferred: piece}
		g := p.writes(1, &l)
		p.note(ioEvent{kind: writeIssued, layer: noLayer, ioSize: piece, took: int64(g.again)})
	}))
}
