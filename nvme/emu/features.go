package emu

import "tuttifs/nvme"

// features are the values of Set and Get Features. None is saveable.
type features struct {
	current, preset [16]uint32
	queues          uint16 // I/O queue pairs that the host may create
	created         bool   // an I/O queue was created: the number of queues is fixed
}

// featuresKnown are the identifiers that both commands accept.
const featuresKnown = 1<<nvme.FeatureArbitration | 1<<nvme.FeaturePowerManagement | 1<<nvme.FeatureTemperature |
	1<<nvme.FeatureErrorRecovery | 1<<nvme.FeatureVolatileCache | 1<<nvme.FeatureQueues |
	1<<nvme.FeatureCoalescing | 1<<nvme.FeatureInterruptVector | 1<<nvme.FeatureWriteAtomicity |
	1<<nvme.FeatureAsyncEvent

func (f *features) reset(c *Controller) {
	f.queues = c.cfg.Queues
	f.preset[nvme.FeatureTemperature] = 343
	f.preset[nvme.FeatureVolatileCache] = 1
	f.preset[nvme.FeatureQueues] = uint32(c.cfg.Queues-1) | uint32(c.cfg.Queues-1)<<16
	f.current = f.preset
}

func (a *admin) setFeatures(c *command) nvme.Status {
	e, f := &c.sqe, &a.features
	id := e.CDW10 & 0xff
	if id >= 16 || featuresKnown>>id&1 == 0 || e.CDW10&0x7fffff00 != 0 {
		return nvme.InvalidField | dnr
	}
	if e.CDW10>>31 != 0 {
		return nvme.FeatureNotSaveable | dnr
	}
	v := e.CDW11
	switch id {
	case nvme.FeatureQueues:
		return a.setQueues(c)
	case nvme.FeaturePowerManagement:
		if v&0x1f != 0 { // one power state
			return nvme.InvalidField | dnr
		}
	case nvme.FeatureVolatileCache:
		if v&^1 != 0 {
			return nvme.InvalidField | dnr
		}
		if v == 0 && f.current[id] != 0 && a.c.drive.Flush() != nil {
			return nvme.InternalError
		}
		a.c.writeThrough.Store(v == 0)
	}
	f.current[id] = v
	return nvme.Success
}

// setQueues grants at most what the controller has. Both numbers are zero-based; queues come in pairs.
func (a *admin) setQueues(c *command) nvme.Status {
	f := &a.features
	sq, cq := c.sqe.CDW11&0xffff, c.sqe.CDW11>>16
	if sq == 0xffff || cq == 0xffff {
		return nvme.InvalidField | dnr
	}
	if f.created {
		return nvme.SequenceError | dnr
	}
	f.queues = uint16(min(max(sq, cq)+1, uint32(a.c.cfg.Queues)))
	n := uint32(f.queues - 1)
	f.current[nvme.FeatureQueues] = n | n<<16
	c.result = uint64(n | n<<16)
	return nvme.Success
}

func (a *admin) getFeatures(c *command) nvme.Status {
	e, f := &c.sqe, &a.features
	id := e.CDW10 & 0xff
	if id == nvme.FeatureFDP {
		return a.getPlacement(c)
	}
	if id >= 16 || featuresKnown>>id&1 == 0 {
		return nvme.InvalidField | dnr
	}
	switch e.CDW10 >> 8 & nvme.FeatureSelectMask {
	case nvme.FeatureSelectCurrent:
		c.result = uint64(f.current[id])
	case nvme.FeatureSelectDefault, nvme.FeatureSelectSaved: // nothing is saved: the default
		c.result = uint64(f.preset[id])
	case nvme.FeatureSelectSupported:
		c.result = nvme.FeatureSupportChangable
	default:
		return nvme.InvalidField | dnr
	}
	return nvme.Success
}
