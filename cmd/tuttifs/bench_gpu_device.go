package main

import (
	"errors"
	"fmt"
	"unsafe"

	"tuttifs/cuda"
)

// gpuDevice is a GPU with the bench's own kernels.
type gpuDevice struct {
	device  *cuda.Device
	context *cuda.Context
	module  *cuda.Module
	stream  *cuda.Stream

	fill, step, attention, plain *cuda.Function
}

// openGPUDevice binds the GPU's context to the calling thread, which is locked.
func openGPUDevice(driver *cuda.Driver, ordinal int) (g *gpuDevice, err error) {
	g = &gpuDevice{}
	if g.device, err = driver.Device(ordinal); err != nil {
		return nil, err
	}
	if g.context, err = g.device.Primary(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.close())
			g = nil
		}
	}()
	if err = g.context.Bind(); err != nil {
		return g, err
	}
	if g.module, err = g.context.LoadModule(cuda.BenchPTX); err != nil {
		return g, err
	}
	for name, f := range map[string]**cuda.Function{
		"tuttifs_bench_fill": &g.fill, "tuttifs_bench_step": &g.step,
		"tuttifs_bench_attention": &g.attention, "tuttifs_bench_attention_plain": &g.plain,
	} {
		if *f, err = g.module.Function(name); err != nil {
			return g, err
		}
	}
	g.stream, err = g.context.NewStream(0)
	return g, err
}

func (g *gpuDevice) close() error {
	err := g.context.Bind()
	if g.stream != nil {
		err = errors.Join(err, g.stream.Close())
	}
	if g.module != nil {
		err = errors.Join(err, g.module.Close())
	}
	return errors.Join(err, g.context.Unbind(), g.context.Close())
}

// fillDevice writes a pattern of words.
func (g *gpuDevice) fillDevice(p cuda.Pointer, n uint64, salt, keep, set uint64) error {
	params := cuda.BenchFillParams{Dst: uint64(p), Words: n / 8, Salt: salt, Keep: keep, Set: set}
	const threads = 256
	grid := min(uint32(g.device.SMs()*8), uint32((params.Words+threads-1)/threads))
	if err := g.stream.Launch(g.fill, grid, threads, 0, unsafe.Pointer(&params)); err != nil {
		return err
	}
	return g.stream.Synchronize()
}

// set writes the same byte everywhere.
func (g *gpuDevice) set(p cuda.Pointer, v byte, n uint64) error {
	if err := g.stream.Memset(p, v, n); err != nil {
		return err
	}
	return g.stream.Synchronize()
}

// read copies device memory to pinned memory.
func (g *gpuDevice) read(pinned []byte, p cuda.Pointer) error {
	if err := g.stream.CopyDtoH(unsafe.Pointer(&pinned[0]), p, uint64(len(pinned))); err != nil {
		return err
	}
	return g.stream.Synchronize()
}

// deviceMemory is allocations that are given back together.
type deviceMemory struct {
	gpu *gpuDevice
	all []cuda.Pointer
}

// numbers allocates n bytes of bf16 numbers in ±[0.5, 1) for kernels to work on.
func (m *deviceMemory) numbers(n uint64) (cuda.Pointer, error) {
	p, err := m.alloc(n)
	if err != nil {
		return 0, err
	}
	return p, m.gpu.fillDevice(p, n, uint64(len(m.all))<<40, cuda.BenchKeepBF16, cuda.BenchSetBF16)
}

func (m *deviceMemory) alloc(n uint64) (cuda.Pointer, error) {
	p, err := m.gpu.context.Alloc(n)
	if err != nil {
		return 0, fmt.Errorf("%d MiB of device memory: %w", n>>20, err)
	}
	m.all = append(m.all, p)
	return p, nil
}

func (m *deviceMemory) free() error {
	var errs []error
	for _, p := range m.all {
		errs = append(errs, m.gpu.context.Free(p))
	}
	m.all = nil
	return errors.Join(errs...)
}
