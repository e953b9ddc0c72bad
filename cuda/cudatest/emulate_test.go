//go:build !nogpu

package cudatest

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/require"

	"tuttifs/cuda"
)

// launcher runs a kernel to its end.
type launcher func(kernel string, grid, block uint32, params unsafe.Pointer)

// mirror launches the kernels of this package.
func mirror(kernel string, grid, block uint32, params unsafe.Pointer) {
	Kernels()[kernel](grid, block, params)
}

// emulator compiles ring.cu and bench.cu for this processor, once.
func emulator(t testing.TB) launcher {
	t.Helper()
	if _, err := exec.LookPath("g++"); err != nil {
		t.Skip("no g++ here to compile the kernels for this processor")
	}
	for _, source := range []string{
		"../ring.cu", "../bench.cu", "../testdata/emulate.cc", "../testdata/emulate_bench.cc", "../testdata/emulate.h",
	} {
		_, err := os.ReadFile(source) // go test runs anew what has read a file that changed
		require.NoError(t, err)
	}
	handle, err := emulated()
	require.NoError(t, err)
	return func(kernel string, grid, block uint32, params unsafe.Pointer) {
		var f func(grid, block uint32, params unsafe.Pointer)
		purego.RegisterLibFunc(&f, handle, "emulate"+kernel[len("tuttifs"):])
		f(grid, block, params)
	}
}

var emulated = sync.OnceValues(func() (uintptr, error) {
	folder, err := os.MkdirTemp("", "tuttifs-emulate-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(folder) // what is loaded stays
	library := filepath.Join(folder, "kernels.so")
	out, err := exec.Command("g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Werror", "-Wno-unused-function",
		"-Wno-unknown-pragmas", "-o", library, "../testdata/emulate.cc", "../testdata/emulate_bench.cc").CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("%w: %s", err, out)
	}
	return purego.Dlopen(library, purego.RTLD_NOW|purego.RTLD_LOCAL)
})

// same runs a kernel twice on one world, the mirror and the other, and compares all of it.
func same(t *testing.T, w *world, other launcher, kernel string, grid, block uint32, params unsafe.Pointer) {
	t.Helper()
	before := bytes.Clone(w.memory[:w.used])
	mirror(kernel, grid, block, params)
	want := bytes.Clone(w.memory[:w.used])
	copy(w.memory, before)
	other(kernel, grid, block, params)
	got := w.memory[:w.used]
	if bytes.Equal(want, got) {
		return
	}
	base := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(w.memory))))
	for i := range got {
		if got[i] != want[i] {
			t.Fatalf("byte %#x: got %#x, want %#x, was %#x\n%s", i, got[i], want[i], before[i], w.where(base+uint64(i)))
		}
	}
}

// where says what is at an address.
func (w *world) where(address uint64) string {
	name := func(of string, base, n uint64) string {
		if address-base < n {
			return fmt.Sprintf("%s+%#x ", of, address-base)
		}
		return ""
	}
	s := name("done", w.done, 4) + name("outcomes", w.outcomes, uint64(w.count)) +
		name("counts", w.counts, uint64(8*w.chunks*w.drives)) + name("sums", w.sums.Sums, uint64(w.count)*8+64)
	for i := range w.flat {
		s += name(fmt.Sprintf("flat[%d]", i), w.flat[i].base, w.flat[i].bytes)
	}
	for i := range w.lanes * w.drives {
		s += name(fmt.Sprintf("sq[%d]", i), at[cuda.KernelQueue](w.queues, uint64(i)).SQ, queueDepth*64)
	}
	for i := range w.chunks {
		chunk := at[cuda.KernelChunk](w.chunksAt, uint64(i))
		if chunk.Cells != 0 {
			s += name(fmt.Sprintf("cells[%d]", i), chunk.Cells, uint64(chunk.Count)*cellMax)
		}
	}
	return s
}

// compare runs random worlds through both.
func compare(t *testing.T, memory []byte, other launcher, rounds int, blocks []uint32) {
	pick := func(w *world) (grid, block uint32) {
		return 1 + w.random.Uint32N(5), blocks[w.random.IntN(len(blocks))]
	}
	t.Run("build", func(t *testing.T) {
		for seed := range rounds {
			w := newWorld(memory, uint64(seed), false)
			_, block := pick(w)
			same(t, w, other, "tuttifs_build", w.lanes*w.drives, block, unsafe.Pointer(w.buildParams()))
		}
	})
	t.Run("windows", func(t *testing.T) {
		for seed := range rounds {
			w := newWorld(memory, uint64(seed), false)
			w.largeObjects()
			p := w.buildParams()
			p.SGL = 0
			_, block := pick(w)
			same(t, w, other, "tuttifs_build", w.lanes*w.drives, block, unsafe.Pointer(p))
		}
	})
	t.Run("lists", func(t *testing.T) {
		for seed := range rounds {
			w := newWorld(memory, uint64(seed), false)
			w.listedObjects()
			p := w.buildParams()
			p.SGL = 0
			_, block := pick(w)
			same(t, w, other, "tuttifs_build", w.lanes*w.drives, block, unsafe.Pointer(p))
		}
	})
	for _, sums := range []bool{false, true} {
		t.Run(fmt.Sprintf("gather sums=%v", sums), func(t *testing.T) {
			for seed := range rounds {
				w := newWorld(memory, uint64(seed), sums)
				w.someFailed()
				grid, block := pick(w)
				same(t, w, other, "tuttifs_gather", grid, min(block, cuda.MoveThreads), unsafe.Pointer(w.moveParams()))
			}
		})
		t.Run(fmt.Sprintf("harvest sums=%v", sums), func(t *testing.T) {
			for seed := range rounds {
				w := newWorld(memory, uint64(seed), sums)
				w.someFailed()
				p := w.moveParams()
				if sums {
					w.expectSums(p)
				}
				grid, block := pick(w)
				same(t, w, other, "tuttifs_harvest", grid, min(block, cuda.MoveThreads), unsafe.Pointer(p))
			}
		})
	}
	t.Run("register", func(t *testing.T) {
		for seed := range rounds {
			w := newWorld(memory, uint64(seed), false)
			grid, block := pick(w)
			same(t, w, other, "tuttifs_register", grid, block, unsafe.Pointer(w.registerParams()))
		}
	})
}

// someFailed marks IOCTXs as a build or the host would have.
func (w *world) someFailed() {
	for i := range w.count {
		if w.chance(12) {
			*at[uint8](w.outcomes, uint64(i)) = cuda.OutcomeFailed
		}
	}
}

// largeObjects makes objects and flat memory for PRP lists of more than a window. The memory is not there.
func (w *world) largeObjects() {
	for i := range w.objects {
		o := at[cuda.KernelObject](w.tables.Objects, uint64(i))
		o.Units = uint16(250 + w.random.IntN(264))
		o.Bytes = uint32(o.Units) * unitBytes
	}
	const bytes = 1 << 34
	*at[cuda.KernelRegion](w.tables.Regions, 3) = cuda.KernelRegion{
		Base: 1 << 40, Limit: bytes, IO: w.prpDMA - 1<<40, Kind: cuda.RegionFlat, Generation: 1, Direct: 1,
	}
	for i := range w.count {
		at[cuda.KernelIOCTX](w.ioctxs, uint64(i)).Desc =
			1<<(offsetBits+regionBits) | 3<<offsetBits | w.random.Uint64N(bytes-1<<22)&^(pageBytes-1)
	}
}

// listedObjects makes every object one of the table's, whose runs are mostly of two pages and have PRP lists. Their
// memory is not there.
func (w *world) listedObjects() {
	for i := range w.objects {
		o := at[cuda.KernelObject](w.tables.Objects, uint64(i))
		o.Units = uint16(1 + w.random.IntN(12))
		o.Bytes = uint32(o.Units) * unitBytes
	}
	r := at[cuda.KernelRegion](w.tables.Regions, 4095)
	r.Direct, r.PRPIO, r.ListBytes = 1, r.IO, 16
	for i := range w.table.limit {
		e := cuda.KernelRun{Address: r.IO + w.random.Uint64()>>20&^(pageBytes-1), Bytes: 2 * pageBytes}
		switch w.random.IntN(30) {
		case 0:
			e.Address += 2048
		case 1:
			e.Bytes = pageBytes * (1 + w.random.Uint32N(4))
		}
		*at[cuda.KernelRun](w.table.entries, i) = e
	}
	const page = pageBytes / 16 // runs whose lists fill one
	for i := range w.count {
		index := w.random.Uint64N(w.table.limit)
		if w.chance(2) { // near the end of a page of lists
			index = index | (page - 1) - w.random.Uint64N(6)
		}
		at[cuda.KernelIOCTX](w.ioctxs, uint64(i)).Desc = w.table.id | index
	}
}

func (w *world) registerParams() *cuda.RegisterParams {
	classes, runs, blocks := 1+w.random.Uint32N(3), 1+w.random.Uint32N(3), 1+w.random.Uint64N(200)
	strided := make([]cuda.StridedRun, classes*runs)
	for i := range strided {
		strided[i] = cuda.StridedRun{
			Base: w.random.Uint64() &^ 511, Stride: w.random.Uint64() >> 30 &^ 511, Bytes: 512 * (1 + w.random.Uint32N(100)),
		}
	}
	n := uint64(classes*runs) * blocks
	p := &cuda.RegisterParams{
		Strided: put(w, strided), Table: w.alloc(n*16, 16), IO: w.random.Uint64() &^ 511, Blocks: blocks,
		Classes: classes, Runs: runs,
	}
	if w.chance(2) {
		p.ListBytes = 8 * w.random.Uint32N(20)
		p.Lists = w.alloc(n*uint64(p.ListBytes), 8)
	}
	return p
}

func TestEmulatedKernels(t *testing.T) {
	rounds := 8
	if testing.Short() {
		rounds = 3
	}
	compare(t, mapWorld(t), emulator(t), rounds, []uint32{32, 64, 96, 256})
}
