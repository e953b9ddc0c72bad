package gio

import (
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// GPUStats counts since the start.
type GPUStats struct {
	Commands, ReadBytes, WrittenBytes uint64 // commands that were rung, and the bytes of cells or memory that they move
	Chunks, Moves                     uint64
	Builds, Harvests, Gathers         uint64 // launches
	Checksums, Timeouts               uint64 // IOCTXs
	CPUNanos                          uint64 // of the I/O thread
	// MovingNanos is the time in which harvests or gathers were under way, from the launch until the I/O thread saw the
	// end: waiting for SMs beside other kernels is in it.
	MovingNanos uint64
	DeviceBytes uint64 // device memory that the executor holds, registrations included
}

type gpuCounters struct {
	commands, read, written, chunks, moves, builds, harvests, gathers, checksums, timeouts, device atomic.Uint64
	moving                                                                                         atomic.Uint64
	thread                                                                                         atomic.Int32
}

// Stats is safe to call at any time.
func (g *GPU) Stats() GPUStats {
	c := &g.stats
	return GPUStats{
		Commands: c.commands.Load(), ReadBytes: c.read.Load(), WrittenBytes: c.written.Load(),
		Chunks: c.chunks.Load(), Moves: c.moves.Load(), Builds: c.builds.Load(), Harvests: c.harvests.Load(),
		Gathers: c.gathers.Load(), Checksums: c.checksums.Load(), Timeouts: c.timeouts.Load(),
		MovingNanos: c.moving.Load(),
		CPUNanos:    threadNanos(c.thread.Load()), DeviceBytes: c.device.Load(),
	}
}

// threadNanos is the CPU time of a thread of this process, 0 once it has ended. The kernel makes clock numbers of
// thread numbers: all bits but the lowest three are the number's complement, 4 says thread, 2 scheduled time.
func threadNanos(thread int32) uint64 {
	if thread == 0 {
		return 0
	}
	var t unix.Timespec
	if unix.ClockGettime(^thread<<3|4|2, &t) != nil {
		return 0
	}
	return uint64(t.Nano())
}
