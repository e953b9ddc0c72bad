package gio

import (
	"tuttifs/cuda"
)

// GPUConfig of the executor whose commands are built by kernels.
type GPUConfig struct {
	// RingConfig is as for the CPU ring; Step is not used.
	RingConfig
	// Context is the primary context of the device.
	Context *cuda.Context
	// StagingBytes of device memory between the copy engine and the harvest; 0 means StagingDefault.
	StagingBytes int
	// MoveBytes is one piece of the copy engine's work, 0 means MoveDefault; Moves are outstanding, 0 means 2. Both
	// bound how long an engine's own small copies wait.
	MoveBytes int
	Moves     int
	// HarvestBytes that arrived start a harvest, and so does a batch's end; 0 means HarvestDefault.
	HarvestBytes int
	// HarvestBlocks is the grid of harvest and gather; 0 means HarvestBlocksDefault.
	HarvestBlocks int
	// Peer says by what I/O address controllers reach device memory, false where they do not. Nil: never; transfers
	// of device memory are bounced.
	Peer func(p cuda.Pointer, n uint64) (address uint64, ok bool)
	// Polling serves each batch by a kernel that polls the completion queues, on PollSMs SMs (0: anywhere).
	Polling bool
	PollSMs int
	// BuildPerChunk launches a build for every chunk when its lane is free, instead of building ahead.
	BuildPerChunk bool
}

// Defaults of GPUConfig.
const (
	StagingDefault       = 256 << 20
	MoveDefault          = 2 << 20
	HarvestDefault       = 64 << 20
	HarvestBlocksDefault = 32
)

// Paged is a pool of KV blocks as an engine allocates it: every class (of objects: a layer, say) has its runs (K, V)
// in every block.
type Paged struct {
	Blocks  uint64
	Classes [][]cuda.StridedRun
}

// GPUTicket is a batch in flight of a GPU executor.
type GPUTicket interface {
	Ticket
	// WaitOn makes everything that is enqueued on s from now on wait for the batch: for a read until its bytes are in
	// place, for a write until its source may be changed. It blocks until the kernels that do it are enqueued, since
	// a stream cannot wait for what is not there yet. Outcomes are told by Wait.
	WaitOn(s *cuda.Stream) error
}

// GPULayerTicket is a layer in flight of a GPU executor.
type GPULayerTicket interface {
	LayerTicket
	// WaitOn is as for GPUTicket.
	WaitOn(s *cuda.Stream) error
}

// GPULayers are Layers whose verbs wait for an event of the engine's: the target's last reader, or the compute that
// produced the source. Nil waits for nothing. The event was recorded before, and stays alive until the ticket's Wait.
type GPULayers interface {
	Layers
	RetrieveLayerAfter(layer uint16, dst []uint64, after *cuda.Event) (GPULayerTicket, error)
	StoreLayerAfter(layer uint16, src []uint64, after *cuda.Event) (GPULayerTicket, error)
}

// GPUStats counts since the start.
type GPUStats struct {
	Commands, ReadBytes, WrittenBytes uint64 // payload and padding, commands that were rung
	Chunks, Moves                     uint64
	Builds, Harvests, Gathers         uint64 // launches
	Checksums, Timeouts               uint64 // IOCTXs
	CPUNanos                          uint64 // of the I/O thread
	DeviceBytes                       uint64 // device memory that the executor holds, registrations included
}
