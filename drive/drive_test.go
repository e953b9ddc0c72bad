package drive

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

const testBytes = 4 << 20

// medium is one way to get a drive of testBytes.
type medium struct {
	name string
	open func(t *testing.T) Drive
}

func newFile(t *testing.T, dir string) string {
	t.Helper()
	path := filepath.Join(dir, "drive")
	require.NoError(t, Create(path, testBytes))
	return path
}

func tmpfsDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "tuttifs-drive-")
	if err != nil {
		t.Skipf("no tmpfs at /dev/shm: %v", err)
	}
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir
}

func ramfsDir(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting ramfs needs root")
	}
	dir := t.TempDir()
	if err := unix.Mount("tuttifs-test", dir, "ramfs", 0, ""); err != nil {
		t.Skipf("no ramfs can be mounted here: %v", err)
	}
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	return dir
}

func open(t *testing.T, path string, o Options) Drive {
	t.Helper()
	d, err := Open(path, o)
	require.NoError(t, err)
	t.Cleanup(func() { _ = d.Close() }) // some tests close it themselves
	return d
}

// forceAlign makes a file drive behave as if its direct I/O took only align-byte blocks, which the medium below
// allows.
func forceAlign(t *testing.T, d Drive, align int) Drive {
	t.Helper()
	f := d.(*file)
	if !f.direct {
		t.Skip("no direct I/O in the temporary directory")
	}
	f.offsetAlign, f.memoryAlign = align, align
	return d
}

var media = []medium{
	{"memory", func(t *testing.T) Drive {
		d, err := NewMemory("ram0", testBytes)
		require.NoError(t, err)
		t.Cleanup(func() { _ = d.Close() })
		return d
	}},
	{"file", func(t *testing.T) Drive { return open(t, newFile(t, t.TempDir()), Options{}) }},
	{"file 4096", func(t *testing.T) Drive { return open(t, newFile(t, t.TempDir()), Options{LBABytes: 4096}) }},
	{"file in blocks of 4096", func(t *testing.T) Drive {
		return forceAlign(t, open(t, newFile(t, t.TempDir()), Options{}), 4096)
	}},
	{"buffered file", func(t *testing.T) Drive { return open(t, newFile(t, t.TempDir()), Options{Buffered: true}) }},
	{"tmpfs", func(t *testing.T) Drive { return open(t, newFile(t, tmpfsDir(t)), Options{}) }},
	{"ramfs", func(t *testing.T) Drive { return open(t, newFile(t, ramfsDir(t)), Options{}) }},
	{"loop 512", func(t *testing.T) Drive { return open(t, loopDevice(t, testBytes, 512), Options{}) }},
	{"loop 4096", func(t *testing.T) Drive { return open(t, loopDevice(t, testBytes, 4096), Options{}) }},
	{"buffered loop 512", func(t *testing.T) Drive {
		return open(t, loopDevice(t, testBytes, 512), Options{Buffered: true})
	}},
}

func onAllMedia(t *testing.T, f func(t *testing.T, d Drive)) {
	for _, m := range media {
		t.Run(m.name, func(t *testing.T) { f(t, m.open(t)) })
	}
}

func randomBytes(r *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// TestModel runs random requests of every alignment against a plain slice that does the same.
func TestModel(t *testing.T) {
	onAllMedia(t, func(t *testing.T, d Drive) {
		r := rand.New(rand.NewPCG(1, 2))
		model := make([]byte, testBytes)
		steps := []int64{1, 512, 4096}
		pick := func() (off, n int64) {
			step := steps[r.IntN(len(steps))]
			n = r.Int64N(700<<10/step) * step
			if r.IntN(2) == 0 {
				n = r.Int64N(3) * step
			}
			return r.Int64N((testBytes-n)/step+1) * step, n
		}
		for range 250 {
			off, n := pick()
			switch r.IntN(5) {
			case 0, 1:
				p := randomBytes(r, int(n)+1)[r.IntN(2):][:n] // odd addresses too
				require.NoError(t, d.WriteAt(p, off))
				copy(model[off:], p)
			case 2:
				require.NoError(t, d.WriteZeroes(off, n))
				clear(model[off : off+n])
			case 3:
				require.NoError(t, d.Flush())
			default:
				p := randomBytes(r, int(n)+1)[r.IntN(2):][:n]
				require.NoError(t, d.ReadAt(p, off))
				require.True(t, bytes.Equal(model[off:off+n], p), "read of %d at %d", n, off)
			}
		}
		whole := AlignedBuffer(testBytes)
		defer FreeBuffer(whole)
		require.NoError(t, d.ReadAt(whole, 0))
		require.True(t, bytes.Equal(model, whole))
	})
}

func TestDiscardKeepsTheRest(t *testing.T) {
	onAllMedia(t, func(t *testing.T, d Drive) {
		p := bytes.Repeat([]byte{0xa5}, 64<<10)
		require.NoError(t, d.WriteAt(p, 0))
		err := d.Discard(4096+100, 16<<10)
		if errors.Is(err, ErrNotSupported) {
			t.Skip("no discard here")
		}
		require.NoError(t, err)
		require.NoError(t, d.Discard(1, 510), "less than a block: nothing to do")
		got := make([]byte, len(p))
		require.NoError(t, d.ReadAt(got, 0))
		require.Equal(t, p[:4196], got[:4196])
		require.Equal(t, p[4196+16<<10:], got[4196+16<<10:])
	})
}

func TestRange(t *testing.T) {
	onAllMedia(t, func(t *testing.T, d Drive) {
		b := make([]byte, 8)
		for _, off := range []int64{-1, testBytes - 7, testBytes + 1, 1<<63 - 1} {
			require.ErrorIs(t, d.ReadAt(b, off), ErrRange)
			require.ErrorIs(t, d.WriteAt(b, off), ErrRange)
			require.ErrorIs(t, d.Discard(off, 8), ErrRange)
			require.ErrorIs(t, d.WriteZeroes(off, 8), ErrRange)
		}
		require.ErrorIs(t, d.Discard(0, -1), ErrRange)
		require.ErrorContains(t, d.ReadAt(b, -1), d.Name())
		require.NoError(t, d.ReadAt(nil, testBytes))
		require.NoError(t, d.WriteAt(nil, testBytes))
	})
}

func TestClosed(t *testing.T) {
	onAllMedia(t, func(t *testing.T, d Drive) {
		require.NoError(t, d.Close())
		b := make([]byte, 4096)
		require.ErrorIs(t, d.ReadAt(b, 0), os.ErrClosed)
		require.ErrorIs(t, d.WriteAt(b, 0), os.ErrClosed)
		require.ErrorIs(t, d.Flush(), os.ErrClosed)
		require.ErrorIs(t, d.Discard(0, 4096), os.ErrClosed)
		require.ErrorIs(t, d.WriteZeroes(0, 4096), os.ErrClosed)
		require.ErrorIs(t, d.Close(), os.ErrClosed)
		require.Nil(t, d.Bytes())
	})
}

// TestNeighbours writes adjacent pieces of one block from many goroutines: none may undo another.
func TestNeighbours(t *testing.T) {
	onAllMedia(t, func(t *testing.T, d Drive) {
		const piece, writers, rounds = 256 + 13, 31, 20
		var group sync.WaitGroup
		for w := range writers {
			group.Go(func() {
				for round := range rounds {
					if err := d.WriteAt(bytes.Repeat([]byte{byte(w ^ round)}, piece), int64(w*piece)); err != nil {
						t.Error(err)
					}
				}
			})
		}
		group.Go(func() { // whole blocks beside them
			for range rounds {
				if err := d.WriteAt(AlignedBuffer(4096), 12<<10); err != nil {
					t.Error(err)
				}
			}
		})
		group.Wait()
		got := make([]byte, writers*piece)
		require.NoError(t, d.ReadAt(got, 0))
		for w := range writers {
			require.Equal(t, bytes.Repeat([]byte{byte(w ^ (rounds - 1))}, piece), got[w*piece:(w+1)*piece])
		}
	})
}

func TestFacts(t *testing.T) {
	onAllMedia(t, func(t *testing.T, d Drive) {
		require.EqualValues(t, testBytes, d.Size())
		require.Contains(t, []int{512, 4096}, d.LBABytes())
		offset, memory := DirectAlign(d)
		if d.Kind() == Memory {
			require.Len(t, d.Bytes(), testBytes)
			require.Equal(t, -1, d.Fd())
			return
		}
		if d.Kind() == File && inPageCacheOnly(d.Fd()) {
			require.Len(t, d.Bytes(), testBytes)
		} else {
			require.Empty(t, d.Bytes())
		}
		require.GreaterOrEqual(t, d.Fd(), 0)
		flags, err := unix.FcntlInt(uintptr(d.Fd()), unix.F_GETFL, 0)
		require.NoError(t, err)
		require.Equal(t, d.Direct(), flags&unix.O_DIRECT != 0)
		if d.Direct() {
			p := AlignedBuffer(offset + memory)[memory:][:offset]
			n, err := unix.Pread(d.Fd(), p, int64(offset))
			require.NoError(t, err, "what DirectAlign promises must work on the bare descriptor")
			require.Equal(t, offset, n)
		}
	})
}

func TestProbes(t *testing.T) {
	require.False(t, open(t, newFile(t, tmpfsDir(t)), Options{}).Direct(), "tmpfs accepts O_DIRECT and ignores it")
	require.False(t, open(t, newFile(t, t.TempDir()), Options{Buffered: true}).Direct())
	require.Equal(t, 4096, open(t, newFile(t, t.TempDir()), Options{LBABytes: 4096}).LBABytes())
}

// TestDirectLeavesNoPages: what goes by direct I/O, in blocks or not, leaves nothing in the page cache.
func TestDirectLeavesNoPages(t *testing.T) {
	path := newFile(t, t.TempDir())
	d := open(t, path, Options{})
	if !d.Direct() {
		t.Skip("no direct I/O in the temporary directory")
	}
	r := rand.New(rand.NewPCG(5, 6))
	for range 200 {
		p := randomBytes(r, 1+r.IntN(20_000))
		off := r.Int64N(testBytes - int64(len(p)))
		require.NoError(t, d.WriteAt(p, off))
		require.NoError(t, d.ReadAt(p, off))
		whole := AlignedBuffer(64 << 10)
		require.NoError(t, d.WriteAt(whole, int64(r.IntN(32))<<16))
		require.NoError(t, d.ReadAt(whole, int64(r.IntN(32))<<16))
	}
	require.Zero(t, cachedPages(t, path))
	kept, err := os.ReadFile(path) // as everybody else reads
	require.NoError(t, err)
	require.Len(t, kept, testBytes)
	require.Positive(t, cachedPages(t, path), "pages in the cache are seen")
}

// cachedPages counts the pages of a file in the page cache.
func cachedPages(t *testing.T, path string) (n int) {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	m, err := unix.Mmap(int(f.Fd()), 0, testBytes, unix.PROT_READ, unix.MAP_SHARED)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Munmap(m)) }()
	resident := make([]byte, testBytes/os.Getpagesize())
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&m[0])), uintptr(len(m)),
		uintptr(unsafe.Pointer(&resident[0])))
	require.Zero(t, errno)
	for _, page := range resident {
		n += int(page & 1)
	}
	return n
}

// TestBytesAreTheFile: what is addressed and what system calls reach is the same.
func TestBytesAreTheFile(t *testing.T) {
	path := newFile(t, tmpfsDir(t))
	d := open(t, path, Options{})
	want := randomBytes(rand.New(rand.NewPCG(3, 4)), 64<<10)
	require.NoError(t, d.WriteAt(want, 12345))
	require.True(t, bytes.Equal(want, d.Bytes()[12345:][:len(want)]))
	copy(d.Bytes()[2<<20:], want)
	got := make([]byte, len(want))
	require.NoError(t, d.ReadAt(got, 2<<20))
	require.True(t, bytes.Equal(want, got))
	require.NoError(t, d.WriteZeroes(2<<20, 64<<10))
	require.Equal(t, make([]byte, 64<<10), d.Bytes()[2<<20:][:64<<10])

	require.NoError(t, d.(interface{ Grow(int64) error }).Grow(2*testBytes))
	require.Len(t, d.Bytes(), 2*testBytes)
	require.True(t, bytes.Equal(want, d.Bytes()[12345:][:len(want)]))
	d.Bytes()[2*testBytes-1] = 1
	require.NoError(t, d.ReadAt(got, 2*testBytes-int64(len(got))))
	require.Equal(t, byte(1), got[len(got)-1])

	r := open(t, path, Options{ReadOnly: true, NoLock: true})
	require.True(t, bytes.Equal(want, r.Bytes()[12345:][:len(want)]))
}

func TestNextData(t *testing.T) {
	d := open(t, newFile(t, tmpfsDir(t)), Options{})
	_, _, ok := NextData(d, 0)
	require.False(t, ok)
	require.NoError(t, d.WriteAt([]byte{1}, 10000))
	require.NoError(t, d.WriteAt(make([]byte, 8192), 1<<20))
	var found [][2]int64
	for start, end, ok := NextData(d, 0); ok; start, end, ok = NextData(d, end) {
		found = append(found, [2]int64{start, end})
	}
	require.Equal(t, [][2]int64{{8192, 12288}, {1 << 20, 1<<20 + 8192}}, found)
	_, _, ok = NextData(d, testBytes)
	require.False(t, ok)
	_, _, ok = NextData(d, testBytes+1)
	require.False(t, ok)
	m, err := NewMemory("ram0", testBytes)
	require.NoError(t, err)
	_, _, ok = NextData(m, 0)
	require.False(t, ok, "memory does not know")
	require.NoError(t, m.Close())
	_, _, ok = NextData(open(t, newFile(t, ramfsDir(t)), Options{}), 0)
	require.False(t, ok, "ramfs does not know")
}

func TestLoopFacts(t *testing.T) {
	for _, sector := range []uint32{512, 4096} {
		path := loopDevice(t, testBytes, sector)
		d := open(t, path, Options{})
		require.Equal(t, Block, d.Kind())
		require.Equal(t, int(sector), d.LBABytes())
		require.True(t, d.Direct())
		_, err := Open(path, Options{})
		require.ErrorIs(t, err, ErrBusy)
		require.ErrorContains(t, err, path)
		require.NoError(t, d.Close())
		_, err = Open(path, Options{LBABytes: int(4096 + 512 - sector)})
		require.ErrorContains(t, err, "LBA size")
	}
}

// TestLoopShrinks: what the kernel answers for a block device that has no blocks any more, as one that was taken out.
func TestLoopShrinks(t *testing.T) {
	path := loopDevice(t, testBytes, 512)
	d := open(t, path, Options{})
	backing, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(path), "loop/backing_file"))
	require.NoError(t, err)
	require.NoError(t, os.Truncate(strings.TrimSpace(string(backing)), 0))
	require.NoError(t, unix.IoctlSetInt(d.(*file).Fd(), unix.LOOP_SET_CAPACITY, 0))
	p := make([]byte, UnitBytes)
	for name, err := range map[string]error{"read": d.ReadAt(p, UnitBytes), "write": d.WriteAt(p, UnitBytes)} {
		require.ErrorIs(t, err, ErrShrunk, name)
		require.ErrorContains(t, err, path)
	}
}

func TestLocks(t *testing.T) {
	path := newFile(t, t.TempDir())
	busy := func(o Options) {
		t.Helper()
		_, err := Open(path, o)
		require.ErrorIs(t, err, ErrBusy)
		require.ErrorContains(t, err, path)
	}
	writer := open(t, path, Options{})
	busy(Options{})
	busy(Options{ReadOnly: true})
	open(t, path, Options{ReadOnly: true, NoLock: true})
	require.NoError(t, writer.Close())

	first := open(t, path, Options{ReadOnly: true})
	second := open(t, path, Options{ReadOnly: true})
	busy(Options{})
	require.NoError(t, first.Close())
	busy(Options{})
	require.NoError(t, second.Close())
	open(t, path, Options{})
}

func TestReadOnly(t *testing.T) {
	path := newFile(t, t.TempDir())
	require.NoError(t, os.Chmod(path, 0o400))
	d := open(t, path, Options{ReadOnly: true})
	b := make([]byte, 4096)
	require.NoError(t, d.ReadAt(b, 0))
	require.ErrorIs(t, d.WriteAt(b, 0), ErrReadOnly)
	require.ErrorIs(t, d.Discard(0, 4096), ErrReadOnly)
	require.ErrorIs(t, d.WriteZeroes(0, 4096), ErrReadOnly)
	require.NoError(t, d.Flush())
}

// TestTruncated: a file that shrank under an open drive is an error, never short or stale bytes.
func TestTruncated(t *testing.T) {
	for _, o := range []Options{{}, {Buffered: true}} {
		path := newFile(t, t.TempDir())
		d := open(t, path, o)
		for _, left := range []int64{testBytes - 1, testBytes / 2, 4096 + 512, 4096 + 100, 1, 0} {
			require.NoError(t, os.Truncate(path, left))
			for _, p := range [][]byte{make([]byte, 4097), AlignedBuffer(8192)} {
				require.ErrorIs(t, d.ReadAt(p, testBytes-int64(len(p))), ErrShrunk)
				if left < int64(len(p)) {
					require.ErrorIs(t, d.ReadAt(p, 0), ErrShrunk)
				}
			}
		}
	}
}

func TestRefused(t *testing.T) {
	dir := t.TempDir()
	fifo, empty, small := filepath.Join(dir, "fifo"), filepath.Join(dir, "empty"), filepath.Join(dir, "small")
	require.NoError(t, unix.Mkfifo(fifo, 0o600))
	require.NoError(t, os.WriteFile(empty, nil, 0o600))
	require.NoError(t, os.WriteFile(small, make([]byte, 4095), 0o600))
	for _, path := range []string{dir, fifo, empty, small, "/dev/null", filepath.Join(dir, "missing")} {
		_, err := Open(path, Options{})
		require.ErrorContains(t, err, path)
	}
	_, err := Open(newFile(t, dir), Options{LBABytes: 520})
	require.ErrorContains(t, err, "520")
	for _, size := range []int64{-4096, 0, 1, 4097} {
		require.Error(t, Create(filepath.Join(dir, "new"), size))
		_, err := NewMemory("ram", size)
		require.Error(t, err)
	}
	require.ErrorIs(t, Create(empty, 4096), os.ErrExist)
	require.NoFileExists(t, filepath.Join(dir, "new"))
}

// TestOddSize: the last partial unit of a file does not exist for us.
func TestOddSize(t *testing.T) {
	path := filepath.Join(t.TempDir(), "odd")
	require.NoError(t, os.WriteFile(path, make([]byte, 8192+700), 0o600))
	d := open(t, path, Options{})
	require.EqualValues(t, 8192, d.Size())
	require.ErrorIs(t, d.ReadAt(make([]byte, 1), 8192), ErrRange)
}

// TestSparse: making zeroes and discarding give space back, and creating takes none.
func TestSparse(t *testing.T) {
	path := newFile(t, t.TempDir())
	d := open(t, path, Options{})
	allocated := func() int64 {
		require.NoError(t, d.Flush())
		var st unix.Stat_t
		require.NoError(t, unix.Stat(path, &st))
		return st.Blocks * 512
	}
	require.Zero(t, allocated())
	require.NoError(t, d.WriteAt(bytes.Repeat([]byte{1}, 1<<20), 0))
	full := allocated()
	require.GreaterOrEqual(t, full, int64(1<<20))
	require.NoError(t, d.WriteZeroes(0, 512<<10))
	half := allocated()
	require.Less(t, half, full)
	require.NoError(t, d.Discard(512<<10, 512<<10))
	require.Less(t, allocated(), half)
}

func TestMemoryIsSparse(t *testing.T) {
	d, err := NewMemory("huge", 1<<40)
	require.NoError(t, err)
	defer func() { require.NoError(t, d.Close()) }()
	p := []byte("far away")
	require.NoError(t, d.WriteAt(p, 1<<40-int64(len(p))))
	require.Equal(t, p, d.Bytes()[1<<40-len(p):])
	require.NoError(t, d.WriteZeroes(1, 1<<40-1))
	require.Equal(t, make([]byte, len(p)), d.Bytes()[1<<40-len(p):])
}

func TestAlignedBuffer(t *testing.T) {
	for _, n := range []int{0, 1, 4095, 4096, 1 << 20, 1<<20 + 1, 5 << 20} {
		b := AlignedBuffer(n)
		require.Len(t, b, n)
		require.True(t, addressAligned(b, 4096))
		require.Zero(t, bytes.Count(b, []byte{1}))
		for i := range b {
			b[i] = 1
		}
		FreeBuffer(b)
	}
	mapped.Lock()
	defer mapped.Unlock()
	require.Empty(t, mapped.bytes)
}

func BenchmarkRead128K(b *testing.B) {
	path := filepath.Join(b.TempDir(), "drive")
	require.NoError(b, Create(path, 64<<20))
	for _, odd := range []int{0, 1} {
		b.Run([]string{"aligned", "bounced"}[odd], func(b *testing.B) {
			d, err := Open(path, Options{})
			require.NoError(b, err)
			defer d.Close()
			p := AlignedBuffer(128<<10 + 1)[odd:][:128<<10]
			b.SetBytes(int64(len(p)))
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if err := d.ReadAt(p, int64(i%512)*int64(len(p))); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
