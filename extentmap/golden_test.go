package extentmap_test

import (
	"bytes"
	"compress/gzip"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/extentmap"
	"tuttifs/extentmap/maptest"
)

var update = flag.Bool("update", false, "rewrite the golden images under testdata")

// counter is a source of bytes that are the same in every run.
type counter struct{ n byte }

func (c *counter) Read(p []byte) (int, error) {
	for i := range p {
		c.n += 17
		p[i] = c.n
	}
	return len(p), nil
}

// goldenVolume makes the same two drives in every run: pools of a family, a tenant, rows, files, freed slots, hits.
// With crash the last changes are in the journal only.
func goldenVolume(t *testing.T, crash bool) *maptest.Set {
	t.Helper()
	now := func() time.Time { return time.Unix(1_790_000_000, 123456789) }
	random := &counter{}
	set := maptest.NewSet(4*mib, 4*mib)
	format(t, set.Drives(), extentmap.FormatOptions{Label: "golden", Now: now, Random: random})
	v := open(t, set.Drives(), extentmap.Options{Now: now, Random: random, CheckpointSeconds: 1 << 20})
	s := spec("full", 3)
	s.Family, s.MinBytes = "hybrid", 1*mib
	full := createPool(t, v, s)
	s = spec("window", 7)
	s.Family, s.TrailingHit, s.MaxSlots = "hybrid", 2, 100
	window := createPool(t, v, s)
	ticket, err := v.SetTenant(extentmap.Tenant{ID: 9, Name: "lora", QuotaBytes: 1 << 20})
	require.NoError(t, err)
	require.NoError(t, ticket.Wait())
	addRow(t, full)
	addRow(t, window)
	commit := func(p *extentmap.Pool, from, to uint64) {
		parent := extentmap.NoSlot
		for n := from; n < to; n++ {
			slot, ok := p.Alloc(parent)
			require.True(t, ok)
			put(t, p, v, slot, n)
			parent = slot
		}
	}
	commit(full, 1, 6)
	commit(window, 1, 4)
	full.Touch(0, 1_790_000_500)
	require.NoError(t, v.Checkpoint())
	free(t, full, v, 1)
	commit(window, 4, 6)
	if crash {
		v.Abandon()
	} else {
		require.NoError(t, v.Close())
	}
	return set
}

// TestGoldenImages: what this version writes is byte for byte what is committed, and what is committed mounts to the
// state beside it. A difference is a change of the format: it needs a new version, docs/format.md and new images.
func TestGoldenImages(t *testing.T) {
	for _, name := range []string{"clean", "crashed"} {
		t.Run(name, func(t *testing.T) {
			images := goldenVolume(t, name == "crashed").Images()
			var stored [][]byte
			for i, b := range images {
				stored = append(stored, golden(t, fmt.Sprintf("%s-%d.img.gz", name, i), b))
				require.True(t, bytes.Equal(b, stored[i]), "drive %d differs from byte %d on", i,
					firstDifference(b, stored[i]))
			}
			ro, err := extentmap.OpenDrives(maptest.FromImages(stored).Drives(), extentmap.Options{ReadOnly: true})
			require.NoError(t, err)
			defer ro.Abandon()
			text := state(ro)
			require.Equal(t, string(golden(t, name+".txt", []byte(text))), text)
			rw := open(t, maptest.FromImages(stored).Drives(), extentmap.Options{})
			require.Equal(t, text, state(rw))
		})
	}
}

// golden is the content of a file under testdata, unpacked; with -update it becomes b.
func golden(t *testing.T, name string, b []byte) []byte {
	t.Helper()
	path := filepath.Join("testdata", name)
	packed := filepath.Ext(name) == ".gz"
	if *update {
		var out bytes.Buffer
		if packed {
			w, err := gzip.NewWriterLevel(&out, gzip.BestCompression)
			require.NoError(t, err)
			_, err = w.Write(b)
			require.NoError(t, err)
			require.NoError(t, w.Close())
		} else {
			out.Write(b)
		}
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, out.Bytes(), 0o644))
	}
	raw, err := os.ReadFile(path)
	require.NoError(t, err)
	if !packed {
		return raw
	}
	r, err := gzip.NewReader(bytes.NewReader(raw))
	require.NoError(t, err)
	out, err := io.ReadAll(r)
	require.NoError(t, err)
	return out
}

func firstDifference(a, b []byte) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}

// TestWorkedExample holds docs/format.md, section 12, to its numbers.
func TestWorkedExample(t *testing.T) {
	set := maptest.NewSet(64*mib, 64*mib, 64*mib, 64*mib)
	format(t, set.Drives(), extentmap.FormatOptions{})
	l := readLabel(t, set, 3)
	require.Equal(t, uint64(16384), l.Units)
	r := l.Region
	require.Equal(t, [7]uint64{3, 256, 259, 131, 576, 64, 246}, [7]uint64{r.JournalUnit, r.JournalBlocks, r.CatalogUnit,
		r.CatalogBlocks, r.SegmentUnit, uint64(r.SegmentUnits), uint64(r.Segments)})
	v := open(t, set.Drives(), extentmap.Options{})
	p := createPool(t, v, spec("p", 3))
	require.Equal(t, uint32(64), p.SlotsPerRow())
	addRow(t, p)
	require.Equal(t, []extentmap.Row{{Number: 0, Drives: []uint16{0, 1, 2, 3}, Units: []uint64{576, 576, 576, 576}}},
		p.Rows())
	i := v.Info()
	require.Equal(t, []uint32{244, 244, 245, 245}, []uint32{i.Drives[0].FreeSegments, i.Drives[1].FreeSegments,
		i.Drives[2].FreeSegments, i.Drives[3].FreeSegments})
	d, unit, units, ok := p.Extent(5, 2)
	require.True(t, ok)
	require.Equal(t, [3]uint64{3, 582, 1}, [3]uint64{uint64(d), unit, uint64(units)})
}
