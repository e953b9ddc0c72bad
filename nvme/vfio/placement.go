package vfio

import (
	"errors"
	"fmt"
	"sync/atomic"

	"tuttifs/lifetime"
	"tuttifs/nvme"
)

// placement is what a drive knows of its namespace's placement of data.
type placement struct {
	ids   []uint16 // placement identifiers of the first reclaim group; less than two place nothing
	bytes [lifetime.Classes]atomic.Uint64
}

// id is the identifier that a class of bytes is written with.
func (p *placement) id(c lifetime.Class) (id uint16, ok bool) {
	if len(p.ids) < 2 {
		return 0, false
	}
	return p.ids[c.Handle(len(p.ids))], true
}

// findPlacement asks the controller whether the namespace places data, and by which identifiers. What it refuses to say
// is no error: its writes go without.
func (d *Drive) findPlacement() error {
	ids, err := d.placementIDs()
	var st nvme.Status
	switch {
	case errors.As(err, &st), errors.Is(err, nvme.ErrLog):
		return nil
	case err != nil:
		return fmt.Errorf("drive %s: placement of data: %w", d.name, err)
	}
	d.place.ids = ids
	return nil
}

func (d *Drive) placementIDs() ([]uint16, error) {
	if !d.c.HasFDP() || d.ns.Group == 0 {
		return nil, nil
	}
	v, err := d.c.FDPFeature(d.ns.Group)
	if err != nil || !v.Enabled {
		return nil, err
	}
	configs, err := d.c.FDPConfigs(d.ns.Group)
	if err != nil || int(v.Config) >= len(configs) {
		return nil, err
	}
	handles, err := d.handles()
	if err != nil {
		return nil, err
	}
	var ids []uint16
	for _, h := range handles {
		// The upper bits name the reclaim group. The first one is as good as another, and every handle is in each.
		if uint32(h.PlacementID)>>(16-configs[v.Config].GroupBits) == 0 {
			ids = append(ids, h.PlacementID)
		}
	}
	return ids, nil
}

// handles reads the status of the namespace's placement handles, as many as a page tells of.
func (d *Drive) handles() ([]nvme.FDPHandle, error) {
	c := <-d.cells
	defer func() { d.cells <- c }()
	var e nvme.SQE
	nvme.BuildHandleStatus(&e, 0, d.ns.ID, PageBytes)
	c.point(&e, PageBytes)
	if err := d.do(e); err != nil {
		return nil, err
	}
	return nvme.ParseFDPHandles(c.b[:PageBytes])
}

// WriteFor stores p as WriteAt does, and tells the drive for how long, where it wants to know.
func (d *Drive) WriteFor(c lifetime.Class, p []byte, off int64) error {
	if err := d.enter("write", off, int64(len(p)), true); err != nil {
		return err
	}
	defer d.life.RUnlock()
	if err := d.store(c, p, off); err != nil {
		return d.errorf("write", off, int64(len(p)), err)
	}
	return nil
}

// Directive is what writes of a class name, for whoever writes by queue pairs of its own; kind 0 is none.
func (d *Drive) Directive(c lifetime.Class) (kind uint8, specific uint16) {
	id, ok := d.place.id(c)
	if !ok {
		return 0, 0
	}
	return nvme.DirectivePlacement, id
}

// PlacementHandles is how many placement handles the namespace has; 0 where it does not place data.
func (d *Drive) PlacementHandles() int { return len(d.place.ids) }

// Placed counts the bytes that were written through the drive, by their class.
func (d *Drive) Placed() (bytes [lifetime.Classes]uint64) {
	for c := range bytes {
		bytes[c] = d.place.bytes[c].Load()
	}
	return bytes
}
