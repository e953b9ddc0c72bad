package emu

import (
	"encoding/binary"
)

// Inline is the way to a memory drive: the poller copies.
const Inline Backend = "memory"

// inline says whether the poller serves the command itself: transfers of memory drives, and what asks for nothing.
// Ranges go to workers even there, since they may be as long as the namespace.
func (c *command) inline() bool {
	if c.kind == doZeroes || c.kind == doDiscard {
		return len(c.ranges) == 0
	}
	return c.queue.backend == Inline
}

// serveMemory moves a read or write between a memory drive and the executor. A flush has nothing to do.
func (c *command) serveMemory() {
	if c.kind != doRead && c.kind != doWrite {
		return
	}
	store := c.queue.controller.bytes[c.off : c.off+int64(c.n)]
	for i := range c.data.list {
		n := int(c.data.list[i].Len)
		if c.data.list[i].Base != nil {
			if c.kind == doRead {
				copy(c.data.bytesAt(i), store[:n])
			} else {
				stream(store[:n], c.data.bytesAt(i))
			}
		}
		store = store[n:]
	}
}

func le32(b []byte) uint32 { return binary.LittleEndian.Uint32(b) }
func le64(b []byte) uint64 { return binary.LittleEndian.Uint64(b) }
