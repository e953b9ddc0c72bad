package check_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/extentmap/check"
	"tuttifs/extentmap/ondisk"
	"tuttifs/stripe"
)

// BenchmarkRecords checks a sparse volume of many small files without their data.
func BenchmarkRecords(b *testing.B) {
	const files, batch = 1 << 18, 1 << 12
	var drives []drive.Drive
	for range 2 {
		d, err := drive.NewMemory("mem", 16<<30)
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, d.Close()) })
		drives = append(drives, d)
	}
	_, err := extentmap.Format(drives, extentmap.FormatOptions{})
	require.NoError(b, err)
	v, err := extentmap.OpenDrives(drives, extentmap.Options{})
	require.NoError(b, err)
	g := stripe.Geometry{Objects: []stripe.Object{{Runs: []stripe.Run{{Kind: stripe.RunKV, Bytes: 4096}}}}}.WithTrailers()
	p, ticket, err := v.CreatePool(extentmap.PoolSpec{Name: "p", Geometry: g, TokensPerFile: 16, ChecksumAlg: 1})
	require.NoError(b, err)
	require.NoError(b, ticket.Wait())
	for n := 0; n < files; n += batch {
		tx := v.Begin()
		for i := n; i < n+batch; i++ {
			slot, ok := p.Alloc(extentmap.NoSlot)
			for !ok {
				ticket, err := p.AddRow()
				require.NoError(b, err)
				require.NoError(b, ticket.Wait())
				slot, ok = p.Alloc(extentmap.NoSlot)
			}
			r := &ondisk.Record{Key: key(uint64(i)), Tokens: 16, Position: uint32(i % 64)}
			if i%64 != 0 {
				r.Parent = key(uint64(i - 1))
			}
			tx.Put(p, slot, r, 0)
		}
		ticket, err := tx.Submit(nil)
		require.NoError(b, err)
		require.NoError(b, ticket.Wait())
	}
	require.NoError(b, v.Close())
	for b.Loop() {
		result := requireClean(b, drives, check.Options{})
		require.EqualValues(b, files, result.Files)
	}
	b.ReportMetric(float64(files)*float64(b.N)/b.Elapsed().Seconds(), "files/s")
}
