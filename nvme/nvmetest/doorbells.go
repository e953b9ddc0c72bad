package nvmetest

import (
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"tuttifs/nvme"
)

const (
	doorbellBytes = registerBytes - nvme.RegDoorbells
	// silent is what no doorbell is rung with: no queue has so many entries.
	silent = 0xffffffff
	// looksEvery is how soon the controller sees a doorbell.
	looksEvery = 20 * time.Microsecond
)

// doorbells are a page of memory that others map instead of the registers, and that is looked at again and again.
type doorbells struct {
	fd       int
	memory   []byte
	stop     chan struct{}
	finished chan struct{}
}

// ShareDoorbells lets the doorbells be mapped, by other processes too.
func (t *Emulated) ShareDoorbells() error {
	fd, err := unix.MemfdCreate("doorbells", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("emulated: doorbells: %w", err)
	}
	b := &doorbells{fd: fd, stop: make(chan struct{}), finished: make(chan struct{})}
	if err = unix.Ftruncate(fd, doorbellBytes); err == nil {
		b.memory, err = unix.Mmap(fd, 0, doorbellBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		_ = unix.Close(fd)
		return fmt.Errorf("emulated: doorbells: %w", err)
	}
	for off := 0; off < doorbellBytes; off += 4 {
		atomic.StoreUint32(b.word(off), silent)
	}
	t.mu.Lock()
	t.bells = b
	t.mu.Unlock()
	go b.forward(t)
	return nil
}

func (b *doorbells) word(off int) *uint32 { return (*uint32)(unsafe.Pointer(&b.memory[off])) }

// forward rings at the controller what was rung in memory.
func (b *doorbells) forward(t *Emulated) {
	defer close(b.finished)
	tick := time.NewTicker(looksEvery)
	defer tick.Stop()
	for {
		select {
		case <-b.stop:
			return
		case <-tick.C:
		}
		for off := 0; off < doorbellBytes; off += 4 {
			if atomic.LoadUint32(b.word(off)) == silent {
				continue
			}
			if v := atomic.SwapUint32(b.word(off), silent); v != silent {
				t.Store32(uint32(nvme.RegDoorbells+off), v)
			}
		}
	}
}

func (b *doorbells) close() {
	if b == nil {
		return
	}
	close(b.stop)
	<-b.finished
	_ = unix.Munmap(b.memory) // whole, and ours
	_ = unix.Close(b.fd)
}
