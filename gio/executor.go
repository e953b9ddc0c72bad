package gio

// Executor produces commands: Ring on the CPU, GPU with kernels. Both have the same wire format and layout tables, and
// give the same results and errors (package giotest).
type Executor interface {
	// DMA is the part of the DMA memory that the executor leaves to its user.
	DMA() []byte
	// Register makes host memory usable in IOCTXs; see Ring.Register.
	Register(buf []byte) (*Memory, error)
	RegisterPadded(buf []byte) (*Memory, error)
	Unregister(m *Memory) error
	// Issue queues a batch; Wait completes it.
	Issue(write bool, m *Map, ctxs []IOCTX) (Ticket, error)
	Wait(t Ticket) ([]Result, error)
	OpenLayers(m *Map, rank uint16, slots []SlotIO) (Layers, error)
	CreateLayers(m *Map, rank uint16, slots []SlotIO) (Layers, error)
	// StoreStats are the store buffer's.
	StoreStats() StoreStats
	// Doorbells counts the writes of SSDs' doorbell registers, and those that doorbell buffers have saved.
	Doorbells() (written, saved uint64)
	Alive() int
	Abandon(cause error)
	Close() error
}

// Ticket is a batch in flight.
type Ticket interface {
	// Done says whether Wait would return at once.
	Done() bool
}

// Layers is the layer verbs' state for one batch of slots and one rank.
type Layers interface {
	RetrieveLayer(layer uint16, dst []uint64) (LayerTicket, error)
	StoreLayer(layer uint16, src []uint64) (LayerTicket, error)
	Finish() error
	Failed() []error
	Close()
}

// LayerTicket is a layer in flight.
type LayerTicket interface {
	// Wait completes the layer and, for reads, verifies it.
	Wait() error
}
