package emu

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"tuttifs/nvme"
)

// The comparison that Auto makes: reads of one size at one depth, spread over the drive, both ways in turns.
const (
	measureReads  = 64
	measureBytes  = 64 << 10
	measureDepth  = 16 // commands in flight; the queue has twice the entries
	measureRounds = 2
	measureLimit  = 300 * time.Millisecond // per way and round
)

// Choose is the way to the drive for a poller that wants one, and why. With Auto, the first call measures both ways on
// the drive (milliseconds; a second on a slow one): call it ahead of the first Poller.Add where that must not wait.
func (c *Controller) Choose(want Backend) (Backend, string) {
	switch {
	case c.bytes != nil && c.fd < 0:
		return Inline, "a memory drive"
	case c.bytes != nil && want == Auto:
		return Inline, "a file in memory, mapped"
	case c.fd < 0:
		return Pread, "the drive has no descriptor"
	case want != Auto:
		return want, "configured"
	}
	c.measure.Do(func() { c.measured, c.measuredWhy = c.compare() })
	return c.measured, c.measuredWhy
}

// errUnfinished: a drive had not done all reads in time.
var errUnfinished = errors.New("emu: too slow to measure")

// compare measures both ways on the drive itself. It only reads. A drive that does not answer does not hold it up.
func (c *Controller) compare() (Backend, string) {
	if c.drive.Size() < measureBytes {
		return Pread, "the drive is too small to measure"
	}
	var best [2]time.Duration
	for range measureRounds {
		for i, b := range [...]Backend{URing, Pread} {
			d, err := c.timeReads(b)
			switch {
			case errors.Is(err, errUnfinished):
				return URing, "not compared: " + err.Error()
			case err != nil && b == URing:
				return Pread, fmt.Sprintf("io_uring could not be measured: %v", err)
			case err != nil:
				return URing, fmt.Sprintf("pread could not be measured: %v", err)
			}
			if best[i] == 0 || d < best[i] {
				best[i] = d
			}
		}
	}
	why := fmt.Sprintf("measured: %d reads of %d KiB took %v by io_uring, %v by preadv",
		measureReads, measureBytes>>10, best[0].Round(time.Microsecond), best[1].Round(time.Microsecond))
	if best[0]*3 > best[1]*4 { // a busy machine measures badly, and io_uring needs far less CPU
		return Pread, why
	}
	return URing, why
}

// timeReads reads through a queue of its own. What the drive still has when it returns ends in the background.
func (c *Controller) timeReads(b Backend) (time.Duration, error) {
	queueBytes := nvme.QueueBytes(2 * measureDepth)
	mem, err := unix.Mmap(-1, 0, queueBytes+measureDepth*measureBytes,
		unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		return 0, err
	}
	p, err := NewPoller(PollerConfig{Backend: b})
	if err != nil {
		_ = unix.Munmap(mem)
		return 0, err
	}
	end := func() {
		p.Stop() // until then the drive may use the memory
		_ = unix.Munmap(mem)
	}
	d, inFlight, err := c.timeReadsIn(mem, p, queueBytes)
	if inFlight > 0 {
		go end()
		return d, err
	}
	end()
	return d, err
}

// timeReadsIn reads by the poller into memory, the first queueBytes of which are for the queue. It also returns how
// many reads have not ended.
func (c *Controller) timeReadsIn(mem []byte, p *Poller, queueBytes int) (time.Duration, int, error) {
	qm, err := nvme.MapQueue(mem, 2*measureDepth)
	if err != nil {
		return 0, 0, err
	}
	cfg := c.cfg
	cfg.Medium, cfg.SGL, cfg.InOrder, cfg.MDTS = nil, true, false, MDTSDefault
	private, err := New(cfg)
	if err != nil {
		return 0, 0, err
	}
	private.faults.Store(c.faults.Load())
	q, err := private.Attach(QueueConfig{Memory: qm, DMA: &Region{Bytes: mem[queueBytes:]}})
	if err != nil {
		return 0, 0, err
	}
	p.Add(q)
	return private.drain(p, qm)
}

// drain runs the reads of timeReads to their end, or to the limit.
func (c *Controller) drain(p *Poller, qm nvme.QueueMemory) (took time.Duration, inFlight int, err error) {
	blocks := uint32(measureBytes >> c.shift())
	places := uint64(c.drive.Size()) >> c.shift() / uint64(blocks)
	start := time.Now()
	sent, done, head, phase := 0, 0, uint32(0), uint16(1)
	free := make([]uint16, 0, measureDepth)
	for i := range uint16(measureDepth) {
		free = append(free, i)
	}
	n := uint32(len(qm.SQ))
	for done < measureReads {
		for ; len(free) > 0 && sent < measureReads; sent++ {
			cid := free[len(free)-1]
			free = free[:len(free)-1]
			e := &qm.SQ[uint32(sent)%n]
			lba := uint64(sent) * (places / measureReads) % places * uint64(blocks)
			nvme.BuildRW(e, false, cid, 1, lba, blocks)
			if err := e.SetSGL(uint64(cid)*measureBytes, measureBytes); err != nil {
				return 0, sent - done, err
			}
		}
		atomic.StoreUint32(qm.SQTail, uint32(sent)%n)
		p.Step()
		for {
			cid, st, ok := qm.CQ[head].Poll(phase)
			if !ok {
				break
			}
			done++
			if !st.OK() {
				return 0, sent - done, st
			}
			free = append(free, cid)
			if head++; head == n {
				head, phase = 0, phase^1
			}
		}
		atomic.StoreUint32(qm.CQHead, head)
		if done < measureReads && time.Since(start) > measureLimit {
			return 0, sent - done, fmt.Errorf("%w: %d of %d reads of %d KiB in %v", errUnfinished, done, measureReads,
				measureBytes>>10, measureLimit)
		}
	}
	return time.Since(start), 0, nil
}
