package gio

import (
	"bytes"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/checksum"
	"tuttifs/cuda"
	"tuttifs/cuda/cudatest"
	"tuttifs/nvme"
)

// stream makes a stream of the test's own, as an engine has them.
func (b *bench) stream() *cuda.Stream {
	var s *cuda.Stream
	b.onControl(func() (err error) {
		s, err = b.ctx.NewStream(0)
		return err
	})
	return s
}

// onControl runs f where the context is bound.
func (b *bench) onControl(f func() error) {
	b.t.Helper()
	require.NoError(b.t, b.g.control.do(f))
}

func smallBench(t *testing.T, config func(c *GPUConfig)) *bench {
	return newBench(t, benchShape{
		lanes: 2, drives: 1, depth: 64, bounce: 2 * 8 * pageBytes, units: []int{1}, config: config,
	})
}

// TestGPUStoreFromDMA: controllers read DMA memory themselves, so that a stream which waits for such a store waits
// until the drives have it, whether or not a kernel took sums of it before.
func TestGPUStoreFromDMA(t *testing.T) {
	b := smallBench(t, nil)
	const n = 8
	buf := b.g.DMA()[:n*pageBytes]
	m, err := b.g.Register(buf)
	require.NoError(t, err)
	require.True(t, m.Direct())
	fillRandom(buf, 1)
	want := bytes.Clone(buf)
	hold := make(chan struct{})
	b.setHook(func(*nvme.SQE, int) bool { <-hold; return true })
	var slots []SlotIO
	var desc []uint64
	for i := range n {
		slots = append(slots, SlotIO{Slot: uint32(i), Seed: checksum.Seed{1}})
		desc = append(desc, m.Desc(i*pageBytes))
	}
	l, err := b.g.CreateLayers(b.m, 0, slots)
	require.NoError(t, err)
	defer l.Close()
	ticket, err := l.(GPULayers).StoreLayerAfter(0, desc, nil)
	require.NoError(t, err)
	stream := b.stream()
	used := make(chan error, 1)
	go func() {
		err := ticket.WaitOn(stream)
		if err == nil {
			err = b.g.control.do(stream.Synchronize)
		}
		clear(buf) // what a stream that waited may do
		used <- err
	}()
	time.Sleep(50 * time.Millisecond) // for one that does not wait
	close(hold)
	require.NoError(t, ticket.Wait())
	require.NoError(t, <-used)
	for i := range n {
		_, unit, _, ok := b.m.Locate(uint32(i), 0)
		require.True(t, ok)
		stored := b.drives[0][unit*pageBytes:][:pageBytes]
		require.True(t, bytes.Equal(want[i*pageBytes:][:pageBytes], stored), "slot %d", i)
	}
	b.onControl(stream.Close)
}

// TestGPUWaitOnIsBounded: a stream's wait for a batch whose event never comes ends as Wait does, and the targets are
// still their last reader's.
func TestGPUWaitOnIsBounded(t *testing.T) {
	b := smallBench(t, func(c *GPUConfig) { c.Deadline = 200 * time.Millisecond })
	buf, ctxs := b.target(8, 0)
	fillRandom(buf, 7)
	before := bytes.Clone(buf)
	stream := b.stream()
	var event *cuda.Event
	var word *cuda.HostMemory
	b.onControl(func() (err error) {
		if word, err = b.ctx.AllocHost(4, false); err != nil {
			return err
		}
		clear(word.Bytes)
		if event, err = b.ctx.NewEvent(false); err != nil {
			return err
		}
		return errors.Join(stream.WaitValue32(word.GPU, 1, false), event.Record(stream))
	})
	ticket, err := b.g.IssueAfter(false, b.m, ctxs, event)
	require.NoError(t, err)
	waited := make(chan error, 1)
	other := b.stream()
	go func() { waited <- ticket.WaitOn(other) }()
	select {
	case err := <-waited:
		require.NoError(t, err)
	case <-time.After(20 * time.Second):
		t.Error("WaitOn did not return")
	}
	results, err := b.g.Wait(ticket)
	require.NoError(t, err)
	require.Len(t, results, len(ctxs))
	require.ErrorIs(t, results[0].Err, ErrTimeout)
	require.Equal(t, before, buf)
	b.onControl(func() error {
		word.Bytes[0] = 1
		return errors.Join(stream.Synchronize(), stream.Close(), other.Close(), event.Close(), b.ctx.FreeHost(word))
	})
}

// TestGPUBadEvent: an event that the engine closed too early fails the batch that waits for it and no other.
func TestGPUBadEvent(t *testing.T) {
	b := smallBench(t, nil)
	buf, ctxs := b.target(8, 0)
	b.turnOver(buf, ctxs, 1)
	var event *cuda.Event
	b.onControl(func() (err error) {
		event, err = b.ctx.NewEvent(false)
		return err
	})
	for _, write := range []bool{false, true} {
		fillRandom(buf, 2)
		before := bytes.Clone(buf)
		b.fake.Fail("EventQuery", 1, cuda.ErrInvalidHandle)
		ticket, err := b.g.IssueAfter(write, b.m, ctxs, event)
		require.NoError(t, err)
		results, err := b.g.Wait(ticket)
		require.NoError(t, err)
		require.Len(t, results, len(ctxs))
		require.ErrorIs(t, results[0].Err, ErrInvalid)
		require.Equal(t, before, buf)
	}
	b.turnOver(buf, ctxs, 3)
	b.onControl(event.Close)
}

// TestGPUAfterClose: what comes after Close is refused, also where it needs the control thread.
func TestGPUAfterClose(t *testing.T) {
	b := smallBench(t, nil)
	buf, ctxs := b.target(8, 0)
	b.turnOver(buf, ctxs, 1)
	m := b.g.regions.lookup(ctxs[0].Desc)
	slots := []SlotIO{{Slot: 1}}
	l, err := b.g.CreateLayers(b.m, 0, slots)
	require.NoError(t, err)
	stored, err := l.StoreLayer(0, []uint64{ctxs[1].Desc})
	require.NoError(t, err)
	require.NoError(t, stored.Wait())
	require.NoError(t, b.g.Close())
	require.ErrorIs(t, l.Finish(), ErrClosed)
	l.Close()
	for _, zeroing := range []bool{false, true} {
		_, err := b.g.issue(false, b.m, ctxs, batchOptions{zeroing: zeroing})
		require.ErrorIs(t, err, ErrClosed)
	}
	_, err = b.g.OpenLayers(b.m, 0, slots)
	require.ErrorIs(t, err, ErrClosed)
	_, err = b.g.Register(buf)
	require.ErrorIs(t, err, ErrClosed)
	require.NoError(t, b.g.Unregister(m))
	require.ErrorIs(t, b.g.Unregister(m), ErrMemory)
	require.ErrorIs(t, b.g.control.do(func() error { return nil }), ErrClosed)
}

// TestGPUCloseBeside: Close beside calls of every kind, which end, and fail with nothing else than ErrClosed.
func TestGPUCloseBeside(t *testing.T) {
	for round := range 12 {
		b := smallBench(t, nil)
		buf, ctxs := b.target(8, 0)
		b.turnOver(buf, ctxs, 1)
		first := b.m
		var workers sync.WaitGroup
		beside := func(f func() error) {
			workers.Go(func() {
				for {
					if err := f(); err != nil {
						if !errors.Is(err, ErrClosed) {
							t.Error(err)
						}
						return
					}
				}
			})
		}
		for range 2 {
			beside(func() error {
				ticket, err := b.g.Issue(false, first, ctxs)
				if err != nil {
					return err
				}
				_, err = b.g.Wait(ticket)
				return err
			})
		}
		beside(func() error {
			m := *first // a map that is not on the device yet
			ticket, err := b.g.issue(false, &m, ctxs, batchOptions{zeroing: true})
			if err != nil {
				return err
			}
			_, err = b.g.wait(ticket)
			return err
		})
		beside(func() error {
			l, err := b.g.OpenLayers(first, 0, []SlotIO{{Slot: 1}})
			if err != nil {
				return err
			}
			l.Close()
			return nil
		})
		beside(func() error {
			m, err := b.g.Register(b.g.DMA()[:pageBytes])
			if err != nil {
				return err
			}
			return b.g.Unregister(m)
		})
		time.Sleep(time.Duration(round) * 200 * time.Microsecond)
		require.NoError(t, b.g.Close())
		workers.Wait()
	}
}

// TestGPUDriverHangsAtClose: Close ends though a call that gives something back never returns.
func TestGPUDriverHangsAtClose(t *testing.T) {
	hold, hanging := make(chan struct{}), atomic.Bool{}
	b := newBench(t, benchShape{
		lanes: 1, drives: 1, depth: 16, bounce: 1 << 20, units: []int{1},
		config: func(c *GPUConfig) { c.Deadline, c.grace = 200*time.Millisecond, 300*time.Millisecond },
		api: func(a *cuda.API) {
			free := a.MemFree
			a.MemFree = func(p cuda.Pointer) cuda.Result {
				if hanging.Load() {
					<-hold
				}
				return free(p)
			}
		},
	})
	buf, ctxs := b.target(8, 0)
	b.turnOver(buf, ctxs, 1)
	hanging.Store(true)
	require.ErrorIs(t, b.g.Close(), ErrStuck)
	require.ErrorIs(t, b.g.Close(), ErrStuck)
	close(hold)
	for b.fake.Live() != (cudatest.Counts{Contexts: 1}) {
		time.Sleep(time.Millisecond)
	}
}

// TestGPUWaitsBehindCopies: a stream can be told to wait for a read while the copy engine is at its last piece. The
// stream waits for the bytes all the same, and a copy that fails then ends the read as any other does.
func TestGPUWaitsBehindCopies(t *testing.T) {
	for _, last := range []cuda.Result{cuda.Success, cuda.ErrLaunchFailed} {
		b := smallBench(t, nil)
		buf, ctxs := b.target(4, 0) // a chunk for each lane
		b.turnOver(buf, ctxs, 3)
		want := bytes.Clone(buf)
		clear(buf)
		stream := b.stream()
		hold := make(chan struct{})
		b.fake.Before(func(_ uintptr, op string) cuda.Result {
			if op != "MemcpyHtoDAsync" {
				return cuda.Success
			}
			<-hold
			return last
		})
		ticket, err := b.g.Issue(false, b.m, ctxs)
		require.NoError(t, err)
		require.NoError(t, ticket.(GPUTicket).WaitOn(stream))
		require.False(t, ticket.(*gpuTicket).Done())
		require.NotEqual(t, want, buf)
		close(hold)
		results, err := b.g.Wait(ticket)
		if last != cuda.Success {
			require.ErrorIs(t, err, ErrDead)
			require.Len(t, results, len(ctxs))
			require.Equal(t, make([]byte, len(buf)), buf)
			continue
		}
		require.NoError(t, err)
		require.Empty(t, results)
		require.Equal(t, want, buf)
		b.onControl(stream.Close)
		require.NoError(t, b.g.onThread(func() error {
			if len(b.g.staging.free) != b.g.staging.slots || b.g.in.count != 0 {
				return errors.New("slots are lost")
			}
			return nil
		}))
	}
}
