package main

import (
	"errors"
	"fmt"
	"time"

	"tuttifs/cuda"
	"tuttifs/gio"
)

// Bars of a registration, bytes of device memory for each tensor.
const (
	gpuSGLBar      = 24
	gpuPRPBar      = 280
	gpuRegisterBar = 10 // seconds
)

// gpuRegistration is a pool of many tensors registered.
type gpuRegistration struct {
	Way           string  `json:"way"`
	Tensors       uint64  `json:"tensors"`
	TensorBytes   int     `json:"tensor_bytes"`
	PoolBytes     uint64  `json:"pool_bytes"`      // of all tensors
	SpanBytes     uint64  `json:"allocated_bytes"` // all classes share it
	Seconds       float64 `json:"seconds"`
	PerTensor     float64 `json:"device_bytes_per_tensor"`
	DeviceBytes   uint64  `json:"device_bytes"`
	FreeBefore    uint64  `json:"free_bytes_before"`
	FreeDuring    uint64  `json:"free_bytes_during"`
	FreeAfter     uint64  `json:"free_bytes_after"`
	UnregisterSec float64 `json:"unregister_seconds"`
}

// Shape of the pool that is registered.
const (
	registerClasses = 60
	registerTensor  = 128 << 10
)

// register measures the registration of very many tensors.
func (b *gpuBench) register() error {
	for _, prp := range []bool{false, true} {
		row, err := b.registerOne(prp)
		if err != nil {
			return fmt.Errorf("%s: %w", row.Way, err)
		}
		b.report.Registrations = append(b.report.Registrations, row)
		bar := float64(gpuSGLBar)
		if prp {
			bar = gpuPRPBar
		}
		b.report.atMost(row.Way+" registration, device memory a tensor", row.PerTensor, bar, "bytes")
		b.report.atMost(row.Way+" registration", row.Seconds, gpuRegisterBar, "s")
		b.report.Bars = append(b.report.Bars, gpuBar{Name: row.Way + " unregistration gives all memory back",
			Met: row.FreeAfter >= row.FreeBefore})
	}
	return nil
}

func (b *gpuBench) registerOne(prp bool) (row gpuRegistration, err error) {
	row = gpuRegistration{Way: "SGL", TensorBytes: registerTensor}
	if prp {
		row.Way = "PRP"
	}
	setup := gpuSetup{prp: prp, change: func(c *gio.GPUConfig) {
		// Lists are only made for memory that controllers reach. Nothing is read or written here, so say that they do.
		c.Peer = func(p cuda.Pointer, _ uint64) (uint64, bool) { return uint64(p), true }
	}}
	shape := b.smallShape()
	shape.slots = min(shape.slots, 256)
	err = b.withRig(shape, setup, func(r *gpuRig) error { return b.registerIn(r, &row) })
	return row, err
}

func (b *gpuBench) registerIn(r *gpuRig, row *gpuRegistration) (err error) {
	context := b.gpu.context
	blocks := uint64(max(1, b.o.scale.tensors/registerClasses))
	row.Tensors = blocks * registerClasses
	row.PoolBytes = row.Tensors * registerTensor
	free, _, err := context.MemInfo()
	if err != nil {
		return err
	}
	// All classes have the same memory: a whole pool of so many tensors would not fit the GPU.
	if row.SpanBytes = blocks * registerTensor; row.SpanBytes > free/2 {
		return fmt.Errorf("%s of device memory are needed, %s are free", humanBytes(row.SpanBytes), humanBytes(free))
	}
	memory := deviceMemory{gpu: b.gpu}
	defer func() { err = errors.Join(err, memory.free()) }()
	base, err := memory.alloc(row.SpanBytes)
	if err != nil {
		return err
	}
	paged := gio.Paged{Blocks: blocks}
	for range registerClasses {
		paged.Classes = append(paged.Classes, []cuda.StridedRun{
			{Base: uint64(base), Stride: registerTensor, Bytes: registerTensor}})
	}
	if row.FreeBefore, _, err = context.MemInfo(); err != nil {
		return err
	}
	begin := time.Now()
	m, err := r.ring.RegisterPaged(paged)
	if err != nil {
		return err
	}
	row.Seconds = time.Since(begin).Seconds()
	row.DeviceBytes = m.DeviceBytes()
	row.PerTensor = float64(row.DeviceBytes) / float64(row.Tensors)
	if row.FreeDuring, _, err = context.MemInfo(); err != nil {
		return err
	}
	begin = time.Now()
	if err := r.ring.Unregister(m); err != nil {
		return err
	}
	row.UnregisterSec = time.Since(begin).Seconds()
	row.FreeAfter, _, err = context.MemInfo()
	return err
}
