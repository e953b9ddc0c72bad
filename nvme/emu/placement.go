package emu

import (
	"encoding/binary"

	"tuttifs/nvme"
)

// getPlacement answers Get Features of Flexible Data Placement for the endurance group in CDW11: enabled, by the first
// configuration, and nothing that can be changed.
func (a *admin) getPlacement(c *command) nvme.Status {
	if a.c.flash == nil || c.sqe.CDW11&0xffff != fdpGroup {
		return nvme.InvalidField | dnr
	}
	switch c.sqe.CDW10 >> 8 & nvme.FeatureSelectMask {
	case nvme.FeatureSelectCurrent, nvme.FeatureSelectDefault, nvme.FeatureSelectSaved:
		c.result = 1
	case nvme.FeatureSelectSupported:
	default:
		return nvme.InvalidField | dnr
	}
	return nvme.Success
}

// Kinds of reclaim unit handles (Base 2.1 figure 281).
const (
	handleIsolatedFirst  = 1 // what the controller moves may mix
	handleIsolatedAlways = 2
)

// log is a page of Get Log Page: the configurations, of which there is one, or the statistics.
func (f *flash) log(page uint8) []byte {
	if page == nvme.LogFDPStats {
		s := f.stats()
		b, _ := s.AppendBinary(nil)
		return b
	}
	c := nvme.FDPConfig{Valid: true, Groups: 1, Handles: uint16(f.cfg.Handles), PlacementIDs: uint32(f.cfg.Handles),
		Namespaces: 1, UnitBytes: uint64(f.cfg.UnitBytes)}
	kind := uint8(handleIsolatedFirst)
	if f.cfg.Isolated {
		kind = handleIsolatedAlways
	}
	for range f.cfg.Handles {
		c.HandleTypes = append(c.HandleTypes, kind)
	}
	return nvme.AppendFDPConfigs(nil, []nvme.FDPConfig{c})
}

// count models what a command that succeeded did to the flash.
func (f *flash) count(c *command) {
	switch c.kind {
	case doWrite:
		kind, id := c.sqe.Directive()
		if kind != nvme.DirectivePlacement {
			id = 0
		}
		f.write(id, c.off, c.n)
	case doDiscard:
		for _, r := range c.ranges {
			f.deallocate(r)
		}
	}
}

// manage does I/O Management Receive and Send, whose data are small.
func (c *command) manage() nvme.Status {
	e, ct := &c.sqe, c.queue.controller
	send := e.Opcode == nvme.IOManageSend
	operation, n := uint32(nvme.ManageHandleStatus), (uint64(e.CDW11)+1)*4
	if send {
		operation, n = nvme.ManageHandleUpdate, 2*(uint64(e.CDW10>>16)+1)
	}
	if e.CDW10&0xff != operation || n > uint64(ct.dataMax) {
		return nvme.InvalidField | dnr
	}
	if st := c.data.parse(c.queue.dma, e, uint32(n), ct.cfg.SGL, !send); !st.OK() {
		return st
	}
	if send {
		b := make([]byte, n)
		c.gather(b)
		var ids []uint16
		for ; len(b) > 0; b = b[2:] {
			ids = append(ids, binary.LittleEndian.Uint16(b))
		}
		return ct.flash.update(ids)
	}
	list := ct.flash.handles(ct.shift())
	b := make([]byte, nvme.FDPHandlesBytes, n+nvme.FDPHandleBytes)
	binary.LittleEndian.PutUint16(b[14:], uint16(len(list)))
	for i := range list {
		b, _ = list[i].AppendBinary(b)
	}
	out := make([]byte, n) // what lies beyond the list reads as zero
	copy(out, b)
	c.scatter(out)
	return nvme.Success
}
