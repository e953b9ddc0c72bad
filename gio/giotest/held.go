package giotest

import (
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/gio"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
)

// valve holds writes back on all drives while it is shut.
type valve struct {
	reads bool // and reads
	shut  atomic.Bool
	held  atomic.Int32 // commands that came while it was
}

func (v *valve) hook(e *nvme.SQE) *emu.Fault {
	if e.Opcode == nvme.IORead && !v.reads || !v.shut.Load() {
		return nil
	}
	v.held.Add(1)
	return &emu.Fault{Hold: func() bool { return !v.shut.Load() }}
}

// testHeldWrites: drives that hold writes back, however many, delay no read.
func testHeldWrites(t *testing.T, subject *Subject) {
	eachWay(t, subject, func(t *testing.T, w way) {
		for _, lanes := range []int{2, 5} {
			s := w.shape()
			s.Lanes, s.Rows, s.ChunkCommands = lanes, 4, 8
			r := NewRig(t, subject, s)
			ctxs := all(r)
			store(r, ctxs, 1)
			half := len(ctxs) / 2
			writes, reads := w.memory(r, ctxs[:half]), w.memory(r, ctxs[half:])
			writes.fill(2)
			var v valve
			v.shut.Store(true)
			r.SetFaults(v.hook)
			var tickets []gio.Ticket
			for first := 0; first < half; first += half/3 + 1 {
				ticket, err := r.Ring.Issue(true, r.Map, writes.ctxs[first:min(half, first+half/3+1)])
				require.NoError(t, err)
				tickets = append(tickets, ticket)
			}
			for range 10 {
				reads.set(0)
				require.Empty(t, r.Run(false, reads.ctxs))
				reads.check(1, nil)
			}
			for _, ticket := range tickets {
				require.False(t, ticket.Done())
			}
			require.Positive(t, v.held.Load(), "writes were on their way")
			v.shut.Store(false)
			for _, ticket := range tickets {
				failed, err := r.Ring.Wait(ticket)
				require.NoError(t, err)
				require.Empty(t, failed)
			}
			writes.onMedium(2)
			reads.onMedium(1)
		}
	})
}

// testHeldTrailers: trailers that are held back on their way to the drives delay none that are read.
func testHeldTrailers(t *testing.T, subject *Subject) {
	eachWay(t, subject, func(t *testing.T, w way) {
		if w.stepped {
			t.Skip("one thread only")
		}
		r := newLayerRig(t, subject, w, w.shape(), 0)
		r.store(1)
		whole, half := r.slots, len(r.slots)/2
		var v valve
		r.SetFaults(v.hook)
		writer, err := r.Ring.CreateLayers(r.Map, r.rank, whole[:half])
		require.NoError(t, err)
		defer writer.Close()
		for layer := range r.first {
			desc := r.desc(layer)
			ticket, err := writer.StoreLayer(uint16(layer), desc[:len(desc)/len(whole)*half])
			require.NoError(t, err)
			require.NoError(t, ticket.Wait())
		}
		v.shut.Store(true)
		finished := make(chan error, 1)
		go func() { finished <- writer.Finish() }()
		for v.held.Load() == 0 {
			select {
			case err := <-finished:
				t.Fatalf("finished with trailers held back: %v", err)
			default:
			}
		}
		reader, err := r.Ring.OpenLayers(r.Map, r.rank, whole[half:])
		require.NoError(t, err)
		defer reader.Close()
		for layer := range r.first {
			desc := r.desc(layer)
			ticket, err := reader.RetrieveLayer(uint16(layer), desc[len(desc)/len(whole)*half:])
			require.NoError(t, err)
			require.NoError(t, ticket.Wait())
		}
		require.Equal(t, make([]error, len(whole)-half), reader.Failed())
		require.Empty(t, finished)
		v.shut.Store(false)
		require.NoError(t, <-finished)
		r.a.check(1, nil)
		require.Equal(t, make([]error, len(whole)), r.retrieve())
	})
}
