package emu

import (
	"fmt"
	"sync"

	"tuttifs/nvme"
)

// Placement gives a controller's namespace Flexible Data Placement and the flash below it: what is written, what the
// controller writes itself to make room, and what is erased is modelled page by page, and told by the FDP statistics.
// Bytes lie on the drive, whatever the model does.
type Placement struct {
	Handles   int   // placement handles of the namespace: 1 to HandlesMax
	UnitBytes int64 // a reclaim unit: whole pages, at least two
	Spare     int   // reclaim units beyond the namespace's size; 0 means the least that works, and at least an eighth
	Isolated  bool  // persistently: what is moved stays apart by handle too; else all of it goes to one place
}

// Bounds of Placement.
const (
	HandlesMax = 128
	// flashPagesMax bounds the model's memory, to 1 GiB.
	flashPagesMax = 1 << 27
)

// fdpGroup is the endurance group of the namespace.
const fdpGroup = 1

// flash is the medium below a namespace. A page of the namespace is on one page of the medium, or on none. Units are
// written from their beginning to their end and erased as a whole.
type flash struct {
	cfg       Placement
	unitPages uint32

	mu     sync.Mutex
	places []uint32 // by page of the namespace: its page of the medium + 1, or 0
	owners []uint32 // by page of the medium: the page that lies there + 1, or 0
	units  []flashUnit
	free   []uint32
	open   []uint32 // by placement handle: the unit that it writes to
	moving []uint32 // by where moved pages go: the unit, or noUnit

	host, media, erased uint64 // bytes
}

type flashUnit struct {
	valid, written uint32 // pages
	inUse          bool   // by a handle, or by what is moved
}

const noUnit = ^uint32(0)

// destinations is how many units what is moved goes to at a time.
func (p *Placement) destinations() int {
	if p.Isolated {
		return p.Handles
	}
	return 1
}

// least is how many spare units there must be: with as many open and free as there may be, the others are more than
// the namespace fills, so that one of them has pages that are not valid.
func (p *Placement) least() int { return p.Handles + 2*p.destinations() + 1 }

func newFlash(p Placement, size int64) (*flash, error) {
	switch {
	case p.Handles < 1 || p.Handles > HandlesMax:
		return nil, fmt.Errorf("%w: %d placement handles, want 1 to %d", ErrConfig, p.Handles, HandlesMax)
	case p.UnitBytes < 2*PageBytes || p.UnitBytes%PageBytes != 0:
		return nil, fmt.Errorf("%w: reclaim units of %d bytes, want whole pages of %d, two or more", ErrConfig, p.UnitBytes,
			PageBytes)
	case p.Spare != 0 && p.Spare < p.least():
		return nil, fmt.Errorf("%w: %d spare reclaim units, %d are the least", ErrConfig, p.Spare, p.least())
	}
	count := (size + p.UnitBytes - 1) / p.UnitBytes
	if p.Spare == 0 {
		p.Spare = max(p.least(), int(count/8))
	}
	count += int64(p.Spare)
	if pages := count * (p.UnitBytes / PageBytes); pages > flashPagesMax {
		return nil, fmt.Errorf("%w: a flash of %d pages, %d are the most", ErrConfig, pages, flashPagesMax)
	}
	f := &flash{cfg: p, unitPages: uint32(p.UnitBytes / PageBytes), places: make([]uint32, size/PageBytes),
		units: make([]flashUnit, count), moving: make([]uint32, p.destinations())}
	f.owners = make([]uint32, len(f.units)*int(f.unitPages))
	for u := len(f.units) - 1; u >= 0; u-- {
		f.free = append(f.free, uint32(u))
	}
	for range p.Handles {
		f.open = append(f.open, f.take())
	}
	for i := range f.moving {
		f.moving[i] = noUnit
	}
	return f, nil
}

// take opens a free unit.
func (f *flash) take() uint32 {
	u := f.free[len(f.free)-1]
	f.free = f.free[:len(f.free)-1]
	f.units[u] = flashUnit{inUse: true}
	return u
}

// write is a Write of n bytes with a placement identifier. One that is none is the first handle's (Base 2.1 section
// 8.1.10.2).
func (f *flash) write(handle uint16, off int64, n uint32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if int(handle) >= len(f.open) {
		handle = 0
	}
	f.host += uint64(n)
	for page := off / PageBytes; page < (off+int64(n)+PageBytes-1)/PageBytes; page++ {
		f.forget(uint32(page))
		f.put(&f.open[handle], uint32(page))
		if u := f.open[handle]; f.units[u].written == f.unitPages {
			f.renew(handle)
		}
	}
}

// put writes a page to a unit that has room.
func (f *flash) put(unit *uint32, page uint32) {
	u := &f.units[*unit]
	at := *unit*f.unitPages + u.written
	f.owners[at], f.places[page] = page+1, at+1
	u.written++
	u.valid++
	f.media += PageBytes
}

// forget says that what lies on a page is not needed any more.
func (f *flash) forget(page uint32) {
	at := f.places[page]
	if at == 0 {
		return
	}
	f.places[page], f.owners[at-1] = 0, 0
	f.units[(at-1)/f.unitPages].valid--
}

// renew gives a handle a new unit.
func (f *flash) renew(handle uint16) {
	f.units[f.open[handle]].inUse = false
	f.collect(int(handle))
	f.open[handle] = f.take()
}

// collect makes room while there is too little: the pages of the unit that has the fewest are moved, and it is erased.
func (f *flash) collect(handle int) {
	to := &f.moving[handle%len(f.moving)]
	for len(f.free) <= len(f.moving) {
		victim := noUnit
		for u := range f.units {
			x := &f.units[u]
			if !x.inUse && x.written > 0 && (victim == noUnit || x.valid < f.units[victim].valid) {
				victim = uint32(u)
			}
		}
		for _, owner := range f.owners[victim*f.unitPages:][:f.unitPages] {
			if owner == 0 {
				continue
			}
			f.forget(owner - 1)
			if *to == noUnit {
				*to = f.take()
			}
			f.put(to, owner-1)
			if f.units[*to].written == f.unitPages {
				f.units[*to].inUse = false
				*to = noUnit
			}
		}
		f.units[victim] = flashUnit{}
		f.free = append(f.free, victim)
		f.erased += uint64(f.unitPages) * PageBytes
	}
}

// deallocate forgets the whole pages of a range.
func (f *flash) deallocate(r byteRange) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for page := (r.off + PageBytes - 1) / PageBytes; page < (r.off+r.n)/PageBytes; page++ {
		f.forget(uint32(page))
	}
}

// update has handles begin new units, unless theirs are empty.
func (f *flash) update(handles []uint16) nvme.Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, h := range handles {
		if int(h) >= len(f.open) {
			return nvme.InvalidField | dnr
		}
	}
	for _, h := range handles {
		if f.units[f.open[h]].written > 0 {
			f.renew(h)
		}
	}
	return nvme.Success
}

func (f *flash) stats() nvme.FDPStats {
	f.mu.Lock()
	defer f.mu.Unlock()
	return nvme.FDPStats{HostWritten: [2]uint64{f.host}, MediaWritten: [2]uint64{f.media},
		MediaErased: [2]uint64{f.erased}}
}

// handles describes what the handles write to.
func (f *flash) handles(lbaShift uint8) []nvme.FDPHandle {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := make([]nvme.FDPHandle, len(f.open))
	for h, u := range f.open {
		left := uint64(f.unitPages-f.units[u].written) * PageBytes
		out[h] = nvme.FDPHandle{PlacementID: uint16(h), Handle: uint16(h), BlocksLeft: left >> lbaShift}
	}
	return out
}
