package nvmetest

import (
	"fmt"
	"sync"
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
	stop     chan struct{}
	finished chan struct{}

	mu     sync.Mutex // held from the look at a doorbell until the controller has it
	memory []byte     // nil when they are closed
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
	t.bells.Store(b)
	go b.run(t)
	return nil
}

func (b *doorbells) word(off int) *uint32 { return (*uint32)(unsafe.Pointer(&b.memory[off])) }

// run looks at them until they are closed.
func (b *doorbells) run(t *Emulated) {
	defer close(b.finished)
	tick := time.NewTicker(looksEvery)
	defer tick.Stop()
	for {
		select {
		case <-b.stop:
			return
		case <-tick.C:
			b.forward(t)
		}
	}
}

// forward rings at the controller what was rung in memory.
func (b *doorbells) forward(t *Emulated) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for off := 0; off < len(b.memory); off += 4 {
		if atomic.LoadUint32(b.word(off)) == silent {
			continue
		}
		if v := atomic.SwapUint32(b.word(off), silent); v != silent {
			t.store(uint32(nvme.RegDoorbells+off), v)
		}
	}
}

func (b *doorbells) close() {
	if b == nil {
		return
	}
	close(b.stop)
	<-b.finished
	b.mu.Lock()
	defer b.mu.Unlock()
	_ = unix.Munmap(b.memory) // whole, and ours
	b.memory = nil
	_ = unix.Close(b.fd)
}
