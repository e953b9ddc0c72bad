package nvmetest

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/nvme"
	"tuttifs/nvme/vfio"
)

// Rig is a controller under test. Everything that its namespace holds is overwritten.
type Rig struct {
	// Open starts the controller up. Tests close what they opened before they open it again.
	Open func(t *testing.T, o vfio.Options) *vfio.Controller
	// NSID is the namespace under test; 0 is the first.
	NSID uint32
	// Hold keeps I/O commands that come from then on from completing until release is called; nil where there is no way.
	Hold func() (release func())
	// Remove takes the controller away by surprise; nil where there is no way. Open is not called again after it.
	Remove func()
	// BadLBA is a block whose reads fail, and BadBlocks how many there are from there on; 0 are none.
	BadLBA, BadBlocks uint64
	// WornLBA is a block, behind those, whose writes fail; 0 is none.
	WornLBA uint64
}

// Run runs the suite.
func Run(t *testing.T, r Rig) {
	for _, c := range []struct {
		name string
		run  func(b *bench)
	}{
		{"StartUp", startUp}, {"Identify", identify}, {"Features", features}, {"Logs", logs},
		{"AdminStatus", adminStatus}, {"AsyncEvents", asyncEvents}, {"QueueStatus", queueStatus},
		{"QueueLimits", queueLimits}, {"Pairs", pairs}, {"PRP", prp}, {"PRPStatus", prpStatus}, {"SGL", sgl},
		{"SGLStatus", sglStatus}, {"TransferLimit", transferLimit}, {"IOStatus", ioStatus}, {"Flush", flush},
		{"WriteZeroes", writeZeroes}, {"Deallocate", deallocate}, {"Compare", compare}, {"Placement", placement},
		{"DoorbellBuffer", doorbellBuffer},
		{"Load", load}, {"MediaError", mediaError}, {"Drive", driveModel}, {"Abort", abort}, {"Reset", reset},
		{"ResetInFlight", resetInFlight},
		{"HeldReset", heldReset}, {"HeldTimeout", heldTimeout}, {"HeldClose", heldClose}, {"Format", format},
		{"Removal", removal},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(&bench{T: t, rig: r}) })
	}
}

// bench is one test's controller, queue and memory.
type bench struct {
	*testing.T
	rig Rig
	c   *vfio.Controller
	ns  *vfio.Namespace
	q   *vfio.Queue
	buf *vfio.Buffer
}

// Places in the test's memory: data, and what describes them.
const (
	benchBytes = 5 << 20
	listOffset = benchBytes - 64<<10
	queueDepth = 64
)

// open starts the controller, and makes a queue and memory.
func (b *bench) open(o vfio.Options) {
	b.Helper()
	b.openBare(o)
	var err error
	b.q, err = b.c.NewQueue(min(queueDepth, floorPower(b.c.Capabilities().Entries())))
	require.NoError(b, err)
	b.buf, err = b.c.Alloc(benchBytes)
	require.NoError(b, err)
}

func (b *bench) openBare(o vfio.Options) {
	b.Helper()
	b.c = b.rig.Open(b.T, o)
	c := b.c
	b.Cleanup(func() { _ = c.Close() }) // those who look at its error close it themselves
	ids, err := b.c.Namespaces()
	require.NoError(b, err)
	require.NotEmpty(b, ids)
	nsid := b.rig.NSID
	if nsid == 0 {
		nsid = ids[0]
	}
	require.Contains(b, ids, nsid)
	b.ns, err = b.c.Namespace(nsid)
	require.NoError(b, err)
	require.GreaterOrEqual(b, b.ns.Bytes(), int64(8<<20), "the suite needs a namespace of 8 MiB or more")
}

func floorPower(n uint32) int {
	p := 1
	for uint32(p*2) <= min(n, nvme.QueueEntriesMax) {
		p *= 2
	}
	return p
}

// rw is a Read or Write of bytes without a data pointer.
func (b *bench) rw(write bool, lba uint64, n int) (e nvme.SQE) {
	nvme.BuildRW(&e, write, 0, b.ns.ID, lba, uint32(n>>b.ns.LBAShift))
	return e
}

// list is memory for PRP lists and SGL segments.
func (b *bench) list() ([]uint64, uint64) {
	m := b.buf.Bytes[listOffset:]
	return unsafe.Slice((*uint64)(unsafe.Pointer(&m[0])), len(m)/8), b.buf.IOVA + listOffset
}

// byPRP points the command at the test's memory.
func (b *bench) byPRP(e nvme.SQE, off, n int) nvme.SQE {
	b.Helper()
	words, at := b.list()
	require.NoError(b, e.SetPRP(b.buf.IOVA+uint64(off), uint32(n), words, at))
	return e
}

func (b *bench) do(e nvme.SQE) {
	b.Helper()
	_, err := b.q.Do(e)
	require.NoError(b, err)
}

// write and read move bytes between the test's memory and the namespace, in commands of at most 4096 bytes.
func (b *bench) write(lba uint64, off, n int) { b.Helper(); b.move(true, lba, off, n) }
func (b *bench) read(lba uint64, off, n int)  { b.Helper(); b.move(false, lba, off, n) }

func (b *bench) move(write bool, lba uint64, off, n int) {
	b.Helper()
	for n > 0 {
		k := min(n, 4096)
		b.do(b.byPRP(b.rw(write, lba, k), off, k))
		lba, off, n = lba+uint64(k>>b.ns.LBAShift), off+k, n-k
	}
}

// fill makes bytes that say where they belong.
func fill(p []byte, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 9))
	for i := range p {
		p[i] = byte(r.Uint32())
	}
}

// refused runs a command that must fail with one of the given codes.
func (b *bench) refused(e nvme.SQE, want ...nvme.Status) {
	b.Helper()
	_, err := b.q.Do(e)
	requireStatus(b, err, want...)
}

func requireStatus(t testing.TB, err error, want ...nvme.Status) {
	t.Helper()
	var st nvme.Status
	require.ErrorAs(t, err, &st)
	require.Contains(t, want, st.Code(), "%v", err)
}

// block is a test's first block, away from those that are bad.
func (b *bench) block(k uint64) uint64 {
	lba := b.rig.BadLBA + b.rig.BadBlocks
	unit := uint64(8)
	return (lba+unit-1)/unit*unit + k
}

// qemu says that the controller is QEMU's (seen in 7.2 and 10.0), which differs from the specification where this is
// asked: it takes a chain of more than two SGL segments for another one, calls a queue or descriptor that is not there
// by another status, says that a command was not aborted that it does abort, and crashes when it is reset with commands
// in flight.
func (b *bench) qemu() bool {
	id := b.c.Identity()
	return strings.HasPrefix(nvme.Text(id.MN[:]), "QEMU NVMe")
}

// perhaps is the status that is right, and the one that QEMU has instead.
func (b *bench) perhaps(qemu, right nvme.Status) []nvme.Status {
	if b.qemu() {
		return []nvme.Status{qemu, right}
	}
	return []nvme.Status{right}
}

// same says whether two places of the test's memory hold the same.
func (b *bench) same(one, two, n int) bool {
	return bytes.Equal(b.buf.Bytes[one:][:n], b.buf.Bytes[two:][:n])
}
