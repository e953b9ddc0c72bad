package gio

import (
	"errors"
	"fmt"

	"tuttifs/cuda"
)

// GPU is the executor on the GPU.
type GPU struct{}

var errNotYet = errors.New("gio: the GPU executor is being written")

// NewGPU checks the configuration.
func NewGPU(c GPUConfig) (*GPU, error) { return nil, fmt.Errorf("%w", errNotYet) }

func (g *GPU) DMA() []byte                                              { return nil }
func (g *GPU) Register(buf []byte) (*Memory, error)                     { return nil, errNotYet }
func (g *GPU) RegisterPadded(buf []byte) (*Memory, error)               { return nil, errNotYet }
func (g *GPU) RegisterDevice(p cuda.Pointer, n uint64) (*Memory, error) { return nil, errNotYet }
func (g *GPU) RegisterPaged(p Paged) (*Memory, error)                   { return nil, errNotYet }
func (g *GPU) Unregister(m *Memory) error                               { return errNotYet }

// Issue queues a batch: the Ticket is a GPUTicket.
func (g *GPU) Issue(write bool, m *Map, ctxs []IOCTX) (Ticket, error) { return nil, errNotYet }

// IssueAfter queues a batch that waits for an event of the engine's, if it is not nil.
func (g *GPU) IssueAfter(write bool, m *Map, ctxs []IOCTX, after *cuda.Event) (GPUTicket, error) {
	return nil, errNotYet
}

func (g *GPU) Wait(t Ticket) ([]Result, error) { return nil, errNotYet }

// OpenLayers: the Layers are GPULayers, here and below.
func (g *GPU) OpenLayers(m *Map, rank uint16, slots []SlotIO) (Layers, error) { return nil, errNotYet }
func (g *GPU) CreateLayers(m *Map, rank uint16, slots []SlotIO) (Layers, error) {
	return nil, errNotYet
}
func (g *GPU) Alive() int          { return 0 }
func (g *GPU) Abandon(cause error) {}
func (g *GPU) Close() error        { return nil }
func (g *GPU) Stats() GPUStats     { return GPUStats{} }

// Block is the descriptor of a class's runs of a block, for memory of RegisterPaged.
func (m *Memory) Block(class int, block uint64) uint64 { return 0 }

// DeviceBytes is what the registration costs on the device.
func (m *Memory) DeviceBytes() uint64 { return 0 }

var _ Executor = (*GPU)(nil)
