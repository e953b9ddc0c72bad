package giotest

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/gio"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
)

// testRegistration: memory is given back when no batch uses it, stale descriptors lead nowhere, places are used again.
func testRegistration(t *testing.T, s *Subject) {
	r := NewRig(t, s, Shape{Deadline: short})
	_, err := r.Ring.Register(make([]byte, 4096))
	require.ErrorIs(t, err, gio.ErrMemory, "no bounce cells")
	_, err = r.Ring.Register(nil)
	require.ErrorIs(t, err, gio.ErrInvalid)
	_, err = r.Ring.RegisterPadded(make([]byte, 4096))
	require.ErrorIs(t, err, gio.ErrInvalid)

	buf := r.Ring.DMA()[:8192]
	places := gio.RegionsMax + 5
	if s.Rounds > 0 {
		places = 100
	}
	for range places {
		m, err := r.Ring.Register(buf)
		require.NoError(t, err)
		require.NoError(t, r.Ring.Unregister(m))
		require.Error(t, r.Ring.Unregister(m))
	}
	m, err := r.Ring.Register(buf)
	require.NoError(t, err)
	checkBusy(t, r, m, m.Desc(0))

	r = NewRig(t, s, Shape{})
	odd, err := r.Ring.Register(r.Ring.DMA()[:16384])
	require.NoError(t, err)
	results := r.Run(false, []gio.IOCTX{
		{Desc: odd.Desc(0), Slot: r.Slots[0], Object: 1}, // would overwrite what follows
		{Desc: odd.Desc(2), Slot: r.Slots[0], Object: 0}, // no PRP can say that
		{Desc: odd.Desc(4), Slot: r.Slots[0], Object: 0},
	})
	require.Len(t, results, 2)
	require.ErrorIs(t, results[0].Err, gio.ErrMemory)
	require.ErrorIs(t, results[1].Err, gio.ErrMemory)
}

// checkBusy: memory stays registered while a batch is in flight that names it, until its Wait.
func checkBusy(t *testing.T, r *Rig, m *gio.Memory, desc uint64) {
	t.Helper()
	ctxs := []gio.IOCTX{{Desc: desc, Slot: r.Slots[0]}}
	r.SetFaults(func(*nvme.SQE) *emu.Fault { return &emu.Fault{Drop: true} })
	ticket, err := r.Ring.Issue(false, r.Map, ctxs)
	require.NoError(t, err)
	require.ErrorIs(t, r.Ring.Unregister(m), gio.ErrBusy)
	failed, err := r.Ring.Wait(ticket)
	require.NoError(t, err)
	require.Len(t, failed, 1)
	require.ErrorIs(t, failed[0].Err, gio.ErrTimeout)
	require.NoError(t, r.Ring.Unregister(m))
	r.SetFaults(nil)
	failed = r.Run(false, ctxs)
	require.Len(t, failed, 1)
	require.ErrorIs(t, failed[0].Err, gio.ErrMemory)
}

// testDeviceRegistration is the same for device memory, flat and paged: nothing of it is left on the device, and what
// makes no sense is refused.
func testDeviceRegistration(t *testing.T, s *Subject) {
	if s.Device == nil {
		t.Skip("no device")
	}
	r := NewRig(t, s, Shape{Deadline: short, BounceBytes: 1 << 20})
	d := r.device()
	const bytes = 1 << 20
	p, err := d.Alloc(bytes)
	require.NoError(t, err)
	r.frees = append(r.frees, func() error { return d.Free(p) })
	before := s.held().live

	for range 20 {
		flat, err := d.Register(p, bytes)
		require.NoError(t, err)
		pool, err := d.RegisterPaged(64, [][]StridedRun{
			{{Base: p, Stride: 8192, Bytes: 4096}, {Base: p + 4096, Stride: 8192, Bytes: 4096}},
			{{Base: p + 524288, Stride: 4096, Bytes: 2048}, {Base: p + 524288 + 2048, Stride: 4096, Bytes: 2048}},
		})
		require.NoError(t, err)
		require.NotEqual(t, pool.Block(0, 1), pool.Block(1, 0))
		require.NoError(t, r.Ring.Unregister(flat))
		require.NoError(t, r.Ring.Unregister(pool))
		require.Error(t, r.Ring.Unregister(pool))
	}
	require.Equal(t, before, s.held().live)

	flat, err := d.Register(p, bytes)
	require.NoError(t, err)
	checkBusy(t, r, flat, flat.Desc(0))
	before = s.held().live // a batch leaves memory with the executor for the next ones
	pool, err := d.RegisterPaged(16, [][]StridedRun{{{Base: p, Stride: 8192, Bytes: 8192}}})
	require.NoError(t, err)
	checkBusy(t, r, pool, pool.Block(0, 3))
	require.Equal(t, before, s.held().live)

	for name, register := range map[string]func() (*gio.Memory, error){
		"nothing":     func() (*gio.Memory, error) { return d.Register(p, 0) },
		"no blocks":   func() (*gio.Memory, error) { return d.RegisterPaged(0, [][]StridedRun{{{p, 4096, 4096}}}) },
		"no classes":  func() (*gio.Memory, error) { return d.RegisterPaged(4, nil) },
		"no runs":     func() (*gio.Memory, error) { return d.RegisterPaged(4, [][]StridedRun{{}}) },
		"empty runs":  func() (*gio.Memory, error) { return d.RegisterPaged(4, [][]StridedRun{{{p, 4096, 0}}}) },
		"uneven runs": func() (*gio.Memory, error) { return d.RegisterPaged(4, [][]StridedRun{{{p, 64, 64}}, {}}) },
		"no address":  func() (*gio.Memory, error) { return d.RegisterPaged(4, [][]StridedRun{{{0, 4096, 4096}}}) },
	} {
		_, err := register()
		require.ErrorIs(t, err, gio.ErrInvalid, name)
	}
}
