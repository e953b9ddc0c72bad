package stripe

import (
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestDocument: the examples of docs/geometry.md are what this package computes.
func TestDocument(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "docs", "geometry.md"))
	require.NoError(t, err)
	page := string(text)
	g, err := KV{Layers: 3, KVHeads: 2, HeadDim: 64, DTypeBytes: 2, Tokens: 16, Ranks: 1}.Geometry()
	require.NoError(t, err)

	_, dump, _ := strings.Cut(page, "(56 bytes of trailer, 64 in all):\n\n```\n")
	dump, _, found := strings.Cut(dump, "```")
	require.True(t, found)
	digits := regexp.MustCompile(`(?m)^((?:[0-9a-f]{2} ? ?)+).*$`).ReplaceAllString(dump, "$1")
	said, err := hex.DecodeString(strings.Join(strings.Fields(digits), ""))
	require.NoError(t, err)
	b, err := g.MarshalBinary()
	require.NoError(t, err)
	require.Equal(t, b, said)

	l, err := NewLayout(g, 2)
	require.NoError(t, err)
	for slot := range uint32(3) {
		line := fmt.Sprintf("| %d |", slot)
		for _, object := range []uint16{3, 0, 1, 2} {
			entry, unit := l.Locate(slot, object)
			line += fmt.Sprintf(" entry %d, unit %d |", entry, unit)
		}
		require.Contains(t, page, line)
	}
}
