package emu

import (
	"errors"

	"tuttifs/drive"
	"tuttifs/nvme"
)

// formats are the block sizes that the namespace can have, as powers of two, the best performing first.
func (c *Controller) formats() []uint8 {
	if c.cfg.Formats {
		return []uint8{12, 9}
	}
	return []uint8{c.shift()}
}

// format is Format NVM. What the namespace held is gone; commands in flight on it are the host's fault.
func (a *admin) format(e *nvme.SQE) nvme.Status {
	c := a.c
	index := int(e.CDW10&0xf | e.CDW10>>12&3<<4)
	switch formats := c.formats(); {
	case !c.cfg.Formats:
		return nvme.InvalidOpcode | dnr
	case e.NSID != 1 && e.NSID != nvme.NSIDBroadcast:
		return nvme.InvalidNamespace | dnr
	case c.cfg.ReadOnly:
		return nvme.WriteProtected | dnr
	case index >= len(formats) || e.CDW10&0x1f0 != 0: // metadata and protection, which no format has
		return nvme.FormatInvalid | dnr
	case e.CDW10>>9&7 != 0: // no secure erase
		return nvme.InvalidField | dnr
	default:
		size := c.drive.Size()
		if err := c.drive.Discard(0, size); err != nil && !errors.Is(err, drive.ErrNotSupported) {
			return nvme.InternalError
		}
		if c.flash != nil {
			c.flash.deallocate(byteRange{0, size})
		}
		c.lbaShift.Store(uint32(formats[index]))
		return nvme.Success
	}
}
