package vfio

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/nvme"
)

// nobody is a transport to nothing.
type nobody struct{ Transport }

func (nobody) Name() string                  { return "nobody" }
func (nobody) Load32(uint32) uint32          { return nvme.CSTSReady }
func (nobody) Store32(uint32, uint32)        {}
func (nobody) Map([]byte) (uint64, error)    { return 1 << 30, nil }
func (nobody) Unmap([]byte, uint64) error    { return nil }
func (nobody) Gone() bool                    { return false }
func (nobody) RegisterBytes() uint32         { return 1 << 14 }
func (nobody) Doorbells() (int, int64, bool) { return -1, 0, false }

// FuzzCompletions reaps whatever a controller may write into a completion queue: every command ends once at most, and
// slots are neither lost nor doubled.
func FuzzCompletions(f *testing.F) {
	var e nvme.CQE
	e.Publish(7, 1, 1, 1<<4, nvme.Success, 1)
	f.Add(uint8(3), append([]byte(nil), unsafe.Slice((*byte)(unsafe.Pointer(&e)), nvme.CQEBytes)...))
	f.Add(uint8(15), make([]byte, 500))
	const depth = 16
	c := &Controller{t: nobody{}, cap: nvme.MakeCAP(4096, true, 0, nvme.CSSNVM)}
	p, err := c.newPair(1, depth, nil)
	require.NoError(f, err)
	f.Cleanup(func() { _ = p.Memory.Free() })
	f.Fuzz(func(t *testing.T, n uint8, entries []byte) {
		clear(p.Memory.Bytes)
		q := newQueue(c, p, 0)
		flying := map[Ticket]bool{}
		for range int(n) % depth {
			ticket, err := q.trySubmit(nvme.SQE{}, 0)
			if err != nil {
				t.Fatal(err)
			}
			flying[ticket] = true
		}
		submitted := len(flying)
		for len(entries) >= nvme.CQEBytes {
			k := copy(unsafe.Slice((*byte)(unsafe.Pointer(&p.CQ[0])), depth*nvme.CQEBytes), entries)
			entries = entries[k:]
			q.mu.Lock()
			q.reap(true)
			q.mu.Unlock()
			for ticket := range flying {
				if _, _, done := q.take(ticket); done {
					delete(flying, ticket)
					if _, err, _ := q.take(ticket); err == nil {
						t.Fatal("twice")
					}
				}
			}
		}
		if len(q.free) != len(q.slots)-len(flying) || len(flying) > submitted {
			t.Fatalf("%d free of %d, %d in flight", len(q.free), len(q.slots), len(flying))
		}
		q.end(ErrAborted, false)
		for ticket := range flying {
			if _, err, done := q.take(ticket); !done || err == nil {
				t.Fatal("not accounted for")
			}
		}
		seen := map[uint16]bool{}
		for _, i := range q.free {
			seen[i] = true
		}
		if len(seen) != len(q.slots) {
			t.Fatal("a slot is free twice")
		}
	})
}

// TestIDsOfOneSlotDiffer: a late completion finds another id in its slot.
func TestIDsOfOneSlotDiffer(t *testing.T) {
	c := &Controller{t: nobody{}, cap: nvme.MakeCAP(4096, true, 0, nvme.CSSNVM)}
	for _, depth := range []int{2, 64, 4096} {
		p, err := c.newPair(1, depth, nil)
		require.NoError(t, err)
		q := newQueue(c, p, 0)
		require.Equal(t, depth-1, q.Depth())
		ids := map[uint16]bool{}
		for range 8 {
			ticket, err := q.trySubmit(nvme.SQE{}, 0)
			require.NoError(t, err)
			require.False(t, ids[ticket.cid])
			ids[ticket.cid] = true
			q.end(ErrAborted, false)
			_, err, done := q.take(ticket)
			require.True(t, done)
			require.ErrorIs(t, err, ErrAborted)
		}
		require.NoError(t, p.Memory.Free())
	}
}
