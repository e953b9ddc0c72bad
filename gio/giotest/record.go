package giotest

import (
	"cmp"
	"slices"
	"sync"

	"tuttifs/gio"
	"tuttifs/nvme"
)

// sent is a command as a controller saw it.
type sent struct {
	opcode uint8
	drive  uint16
	lba    uint64
	blocks uint32
}

// recorder keeps the commands that controllers see.
type recorder struct {
	mu   sync.Mutex
	on   bool
	seen []sent
}

// see checks what every command has in common, and keeps it if that was asked for.
func (x *recorder) see(r *Rig, d uint16, e *nvme.SQE) {
	bad := func(what string) { r.t.Errorf("drive %d: a command with %s: %+v", d, what, *e) }
	c := sent{opcode: e.Opcode, drive: d}
	if e.NSID != 1 {
		bad("another namespace")
	}
	if e.MPTR != 0 || e.CDW2 != 0 || e.CDW3 != 0 || e.CDW13 != 0 || e.CDW14 != 0 || e.CDW15 != 0 {
		bad("words that are to be zero")
	}
	switch e.Opcode {
	case nvme.IORead, nvme.IOWrite:
		c.lba, c.blocks = e.LBA(), e.Blocks()
		if e.CDW12 != c.blocks-1 {
			bad("flags")
		}
		if want := r.Shape.SGL; e.Flags != 0 && !want || e.Flags != nvme.FlagPSDTSGL && want {
			bad("the wrong kind of data pointer")
		}
	case nvme.IOFlush:
		if e.Flags != 0 || e.DPTR != [2]uint64{} || e.CDW10 != 0 || e.CDW11 != 0 || e.CDW12 != 0 {
			bad("more than a Flush has")
		}
	default:
		bad("an opcode that nobody asked for")
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.on {
		x.seen = append(x.seen, c)
	}
}

func (x *recorder) start() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.on, x.seen = true, nil
}

func (x *recorder) stop() []sent {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.on = false
	return x.seen
}

// expected is the commands that a batch of good IOCTXs must come to.
func (r *Rig) expected(write bool, ctxs []gio.IOCTX) []sent {
	var all []sent
	for i := range ctxs {
		d, unit, units := r.extent(ctxs[i].Slot, ctxs[i].Object)
		perUnit := uint64(4096 / r.Shape.LBABytes)
		c := sent{nvme.IORead, d, unit * perUnit, uint32(units * perUnit)}
		if write {
			c.opcode = nvme.IOWrite
		}
		if ctxs[i].Flags == gio.FlagFlush {
			c = sent{opcode: nvme.IOFlush, drive: d}
		}
		all = append(all, c)
	}
	return all
}

// runExactly runs a batch that succeeds and compares the commands that controllers saw with those that the layout says,
// each once.
func (r *Rig) runExactly(write bool, ctxs []gio.IOCTX) {
	r.t.Helper()
	r.recorder.start()
	failed := r.Run(write, ctxs)
	seen := r.recorder.stop()
	if len(failed) > 0 {
		r.t.Fatalf("%d of %d failed, index %d: %v (%+v)", len(failed), len(ctxs), failed[0].Index, failed[0].Err, r.Shape)
	}
	want := r.expected(write, ctxs)
	order := func(a, b sent) int {
		return cmp.Or(cmp.Compare(a.drive, b.drive), cmp.Compare(a.lba, b.lba),
			cmp.Compare(a.blocks, b.blocks), cmp.Compare(a.opcode, b.opcode))
	}
	slices.SortFunc(seen, order)
	slices.SortFunc(want, order)
	if !slices.Equal(want, seen) {
		r.t.Fatalf("controllers saw %d commands that are not the %d of the batch:\n%v\n%v",
			len(seen), len(want), seen, want)
	}
}
