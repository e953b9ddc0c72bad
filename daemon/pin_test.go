package daemon

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/extentmap"
	"tuttifs/gpufile"
	"tuttifs/ioctl"
	"tuttifs/stripe"
)

const (
	benchFiles = 1 << 20
	benchBatch = 4096 // files of one chain
)

// benchKey is the n-th key: spread over the whole space, as hashes are.
func benchKey(n int) (k [32]byte) {
	x := uint64(n) + 1
	for i := 0; i < 32; i += 8 {
		x += 0x9e3779b97f4a7c15 // splitmix64
		z := x
		z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		z ^= z >> 31
		for j := range 8 {
			k[i+j] = byte(z >> (8 * j))
		}
	}
	return k
}

// helpServe mounts a pool of benchFiles files that nobody wrote, until its input ends.
func helpServe(t *testing.T, dir string) error {
	w := newWorldOf(t, 8<<30, gpufile.Options{NoIO: true, PinTimeout: time.Hour}, ControlOptions{})
	if err := fill(w.store); err != nil {
		return err
	}
	w.mount(t, dir)
	fmt.Println("serve: ready")
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

func fill(s *gpufile.Store) error {
	g, err := stripe.KV{Layers: 1, KVHeads: 1, HeadDim: 64, DTypeBytes: 2, Tokens: 16, Ranks: 1}.Geometry()
	if err != nil {
		return err
	}
	spec := extentmap.PoolSpec{Name: "p", Geometry: g, TokensPerFile: 16, ChecksumAlg: 1}
	p, done, err := s.OpenPool(testIdentity("full"), spec)
	if err != nil {
		return err
	}
	<-done.Done()
	m, err := s.NewSession(0)
	if err != nil {
		return err
	}
	defer m.Close()
	group := s.GroupOfPool(p.ID())
	items, grants := make([]gpufile.ReserveItem, benchBatch), make([]gpufile.Grant, benchBatch)
	for first := 0; first < benchFiles; first += benchBatch {
		for i := range items {
			items[i] = gpufile.ReserveItem{Key: benchKey(first + i), Tokens: 16, Position: uint32(i)}
			if i > 0 {
				items[i].Parent = items[i-1].Key
			}
		}
		id := uint64(first + 1)
		err := patiently(func() error {
			_, err := m.Reserve(group, 0, id, items, false, grants)
			return err
		})
		if err != nil {
			return err
		}
		var done *extentmap.Ticket
		if err := patiently(func() (err error) { done, err = m.Commit(group, id, 0); return err }); err != nil {
			return err
		}
		<-done.Done()
		if err := done.Err(); err != nil {
			return err
		}
	}
	return nil
}

// patiently repeats what wants to be tried again, at most 10 s long.
func patiently(f func() error) error {
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		if err := f(); !errors.Is(err, gpufile.ErrAgain) || time.Now().After(deadline) {
			return err
		}
	}
}

// BenchmarkPin4096 looks up and pins 4,096 keys of a pool of a million files, by one ioctl from another process.
func BenchmarkPin4096(b *testing.B) {
	needMount(b)
	dir := b.TempDir()
	cmd := exec.Command(os.Args[0], "-test.run=^TestHelper$", "-test.v")
	cmd.Env = append(os.Environ(), helperVariable+"=serve="+dir)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(b, err)
	lines := scanOutput(b, cmd)
	require.NoError(b, cmd.Start())
	b.Cleanup(func() { _ = in.Close(); _ = cmd.Wait() })
	say(b, lines, "serve: ready")

	e, err := newEngine(dir)
	require.NoError(b, err)
	defer e.close()
	info := ioctl.PoolInfo{}
	require.True(b, ioctl.PutName(info.Name[:], "p"))
	require.NoError(b, e.c.PoolInfo(&info, ioctl.PoolByName))
	span := ioctl.Span{Offset: 0, Bytes: benchBatch * ioctl.KeyBytes}
	grants := ioctl.Span{Offset: 256 << 10, Bytes: benchBatch * 40}
	keys := ioctl.View[[32]byte](e.a.Arena, span)

	var times []time.Duration
	for b.Loop() {
		chain := len(times) * 7 % (benchFiles / benchBatch)
		for i := range keys {
			keys[i] = benchKey(chain*benchBatch + i)
		}
		pin := ioctl.Pin{Target: info.Target, Keys: span, Grants: grants, Request: uint64(len(times) + 1)}
		start := time.Now()
		err := e.c.Pin(&pin)
		times = append(times, time.Since(start))
		require.NoError(b, err)
		require.Equal(b, uint32(benchBatch), pin.Count)
		require.NoError(b, e.c.Release(&ioctl.Release{Target: info.Target, Request: pin.Request}))
	}
	slices.Sort(times)
	b.ReportMetric(float64(times[len(times)/2])/1e6, "ms/pin-p50")
	b.ReportMetric(float64(times[len(times)*99/100])/1e6, "ms/pin-p99")
	b.ReportMetric(float64(times[0])/1e6, "ms/pin-min")
}
