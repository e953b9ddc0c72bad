package emu

import (
	"sync"
	"time"

	"tuttifs/nvme"
)

// errorLog keeps the last commands that failed, of all queues.
type errorLog struct {
	mu      sync.Mutex
	count   uint64
	media   uint64 // of those, media and data integrity errors
	entries [errorsMax]nvme.ErrorLogEntry
}

func (l *errorLog) add(sqid uint16, e *nvme.SQE, st nvme.Status) {
	l.mu.Lock()
	l.count++
	if st.SCT() == nvme.SCTMedia {
		l.media++
	}
	l.entries[l.count%errorsMax] = nvme.ErrorLogEntry{
		Count: l.count, SQID: sqid, CID: e.CID, Status: uint16(st) << 1, Location: 0xffff, LBA: e.LBA(), NSID: e.NSID,
	}
	l.mu.Unlock()
}

// appendTo appends all entries, the newest first.
func (l *errorLog) appendTo(b []byte) []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range uint64(errorsMax) {
		var e nvme.ErrorLogEntry
		if i < l.count {
			e = l.entries[(l.count-i)%errorsMax]
		}
		b, _ = e.AppendBinary(b)
	}
	return b
}

// smart is what the controller knows of itself, since it began: it has no memory of earlier ones. Of the media behind
// the drive it knows nothing, so percentage used and spare stay those of a new drive; a real drive's own log says
// more.
func (c *Controller) smart() nvme.SMARTLog {
	s := c.Stats()
	units := func(bytes uint64) [2]uint64 { return [2]uint64{(bytes + 512*1000 - 1) / (512 * 1000)} }
	l := nvme.SMARTLog{
		Temperature: [2]uint8{300 & 0xff, 300 >> 8}, Spare: 100, SpareThreshold: 10,
		DataUnitsRead: units(s.BytesRead), DataUnitsWritten: units(s.BytesWritten),
		HostReads: [2]uint64{s.Reads}, HostWrites: [2]uint64{s.Writes}, PowerCycles: [2]uint64{1},
		BusyMinutes:  [2]uint64{s.BusyNanoseconds / 60e9},
		PowerOnHours: [2]uint64{uint64(time.Since(c.begun) / time.Hour)},
	}
	c.log.mu.Lock()
	l.ErrorLogEntries, l.MediaErrors = [2]uint64{c.log.count}, [2]uint64{c.log.media}
	c.log.mu.Unlock()
	return l
}

// firmwareLogBytes is the size of the Firmware Slot Information log (Base 2.0 figure 208).
const firmwareLogBytes = 512

// getLog answers the error, SMART / health and firmware slot logs, and those of the placement of data.
func (a *admin) getLog(c *command) nvme.Status {
	e := &c.sqe
	length := 4 * ((uint64(e.CDW11&0xffff)<<16 | uint64(e.CDW10>>16)) + 1)
	if length > uint64(a.c.dataMax) {
		return nvme.InvalidField | dnr
	}
	var log []byte
	switch e.CDW10 & 0xff {
	case nvme.LogError:
		log = a.c.log.appendTo(make([]byte, 0, errorsMax*nvme.ErrorLogEntryBytes))
	case nvme.LogSMART:
		if e.NSID != 0 && e.NSID != 1 && e.NSID != nvme.NSIDBroadcast {
			return nvme.InvalidNamespace | dnr
		}
		l := a.c.smart()
		log, _ = l.AppendBinary(nil)
	case nvme.LogFirmware:
		log = make([]byte, firmwareLogBytes)
		log[0] = 1                    // slot 1 is active
		nvme.PadASCII(log[8:16], "1") // its revision
	case nvme.LogFDPConfig, nvme.LogFDPStats:
		if a.c.flash == nil {
			return nvme.LogPageInvalid | dnr
		}
		if e.CDW11>>16 != fdpGroup {
			return nvme.InvalidField | dnr
		}
		log = a.c.flash.log(uint8(e.CDW10))
	default:
		return nvme.LogPageInvalid | dnr
	}
	off := uint64(e.CDW13)<<32 | uint64(e.CDW12)
	if off%4 != 0 || off > uint64(len(log)) {
		return nvme.InvalidField | dnr
	}
	if e.CDW10&0xff == nvme.LogError && e.CDW10>>15&1 == 0 {
		a.masked = false // the event is acknowledged
	}
	out := make([]byte, length) // what lies beyond the log reads as zero
	copy(out, log[off:])
	return a.send(c, out)
}
