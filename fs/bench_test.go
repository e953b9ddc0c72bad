package fs

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
)

func ptr[T any](p *T) uintptr { return uintptr(unsafe.Pointer(p)) }

// rss is the resident memory of the server, in MB.
func (v *server) rss(t testing.TB) float64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", v.cmd.Process.Pid))
	require.NoError(t, err)
	var kb float64
	for _, line := range strings.Split(string(text), "\n") {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			fmt.Sscan(rest, &kb)
		}
	}
	require.NotZero(t, kb)
	return kb / 1000
}

// BenchmarkListMillion lists a million files by ls: the tips of one directory, and the same files in the 256
// directories of blocks; names alone, and with -l under noxattr. Bars: 500,000 and 40,000 entries a second, and less
// than 50 MB of growth.
func BenchmarkListMillion(b *testing.B) {
	const files = 1_000_000
	v := startServer(b, scene{Files: files, NoXattr: true, Real: true})
	for _, c := range []struct {
		name string
		args []string
	}{
		{"ls-U/prefixes", []string{"-U", v.path("many", "prefixes")}},
		{"ls-U/blocks", []string{"-UR", v.path("many", "blocks")}},
		{"ls-lU/prefixes", []string{"-lU", v.path("many", "prefixes")}},
		{"ls-lU/blocks", []string{"-lUR", v.path("many", "blocks")}},
	} {
		b.Run(c.name, func(b *testing.B) {
			before, start := v.rss(b), time.Now()
			for range b.N {
				cmd := exec.Command("ls", c.args...)
				cmd.Env = append(os.Environ(), "LC_ALL=C")
				var n lineCounter
				cmd.Stdout = &n
				require.NoError(b, cmd.Run())
				require.GreaterOrEqual(b, int(n), files)
			}
			b.ReportMetric(float64(files*b.N)/time.Since(start).Seconds(), "entries/s")
			b.ReportMetric(v.rss(b)-before, "MB-growth")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// lineCounter counts the lines that a tool prints.
type lineCounter int

func (n *lineCounter) Write(p []byte) (int, error) {
	for _, c := range p {
		if c == '\n' {
			*n++
		}
	}
	return len(p), nil
}

// BenchmarkReadVsBaseline reads a 32-MiB file whole, in turns with the same bytes served by the least that FUSE can do.
// Bar: 70 % of it.
func BenchmarkReadVsBaseline(b *testing.B) {
	v := startServer(b, scene{Big: true, Baseline: "yes", Real: true})
	k := testKey(0, 0)
	ours := v.path("big", "blocks", "00", keyName(&k))
	for _, size := range []int{128 << 10, 1 << 20, 4 << 20} {
		b.Run(fmt.Sprintf("reads=%dKiB", size>>10), func(b *testing.B) {
			buf := make([]byte, size)
			read := func(path string) (seconds float64, bytes int64) {
				f, err := os.Open(path)
				require.NoError(b, err)
				defer f.Close()
				start := time.Now()
				bytes, err = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{f}, buf)
				require.NoError(b, err)
				return time.Since(start).Seconds(), bytes
			}
			var oursS, baseS float64
			var total int64
			for range b.N {
				for range 10 {
					s, n := read(ours)
					oursS, total = oursS+s, total+n
					s, m := read(filepath.Join(v.baseline, BaselineName))
					baseS += s
					require.Equal(b, n, m)
				}
			}
			b.ReportMetric(float64(total)/oursS/1e6, "MB/s")
			b.ReportMetric(float64(total)/baseS/1e6, "baseline-MB/s")
			b.ReportMetric(baseS/oursS, "of-baseline")
			b.ReportMetric(0, "ns/op")
		})
	}
}
