package giotest

import (
	"hash/fnv"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"tuttifs/gio"
)

// Subject is a kind of executor.
type Subject struct {
	// New makes one. With peer set, its controllers reach device memory at PeerBase and the device's address.
	New func(c gio.RingConfig, peer bool) (gio.Executor, error)
	// Steps says that waits call RingConfig.Step, and that objects cost no allocation of this process: a CPU executor.
	Steps bool
	// Store gives executors a store buffer, and two lanes for it beside the shape's.
	Store bool
	// Pacer is that of the executor that was made last; nil: none has one that a test can tell what to do.
	Pacer func() Pacer
	// Device is the memory of an executor's device; nil if it has none.
	Device func(e gio.Executor) Device
	// Reach gives the host's view of device memory, where there is one: virtual controllers can be peers then.
	Reach func(address uint64, n uint32) []byte
	// Live counts what executors hold of a driver. Nil: nothing.
	Live func() int
	// Seed decides everything that is random; Rounds is how many random shapes each test tries. 0 means a few, and that
	// nothing else is cut short either.
	Seed   uint64
	Rounds int
	// Only names the tests that run; nil: all.
	Only []string
}

// Device is the memory of a device that an executor knows. Transfers have ended when a method returns; methods are safe
// for concurrent use, and work beside transfers of the executor and after its end.
type Device interface {
	Alloc(n int) (address uint64, err error)
	Free(address uint64) error
	Upload(address uint64, b []byte) error
	Download(b []byte, address uint64) error
	// Register and RegisterPaged are the executor's own.
	Register(address uint64, n int) (*gio.Memory, error)
	RegisterPaged(blocks uint64, classes [][]StridedRun) (*gio.Memory, error)
}

// StridedRun is one run of every block: block b's begins at Base + b*Stride.
type StridedRun struct {
	Base, Stride uint64
	Bytes        uint32
}

// source is a source of numbers for one test and one number of it.
func (s *Subject) source(t testing.TB, n uint64) *rand.Rand {
	h := fnv.New64a()
	_, _ = h.Write([]byte(t.Name()))
	return rand.New(rand.NewPCG(s.Seed^h.Sum64(), n))
}

// rounds is how many random shapes a test tries.
func (s *Subject) rounds(few int) int {
	if s.Rounds > 0 {
		return s.Rounds
	}
	return few
}

// held is what an executor may leave behind: goroutines, and what its driver has given.
type held struct{ goroutines, live int }

func (s *Subject) held() held {
	h := held{goroutines: runtime.NumGoroutine()}
	if s.Live != nil {
		h.live = s.Live()
	}
	return h
}

// checkGivenBack fails the test unless what is held has come down to what was held before. Goroutines that were told to
// end get time for it.
func (s *Subject) checkGivenBack(t *testing.T, before held) {
	t.Helper()
	now := s.held()
	for end := time.Now().Add(10 * time.Second); now.goroutines > before.goroutines && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
		now = s.held()
	}
	if now.goroutines > before.goroutines {
		stacks := make([]byte, 1<<16)
		t.Errorf("%d goroutines are left:\n%s", now.goroutines-before.goroutines,
			stacks[:runtime.Stack(stacks, true)])
	}
	if now.live > before.live {
		t.Errorf("%d things of the driver are left", now.live-before.live)
	}
}
