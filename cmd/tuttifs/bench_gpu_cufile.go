package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"tuttifs/cuda"
	"tuttifs/drive"
)

// cuFileThreads read at a time.
const cuFileThreads = 8

// cuFile reads objects from a file by cuFile, and states what the medium gives to plain direct reads of them.
func (b *gpuBench) cuFile(object int) (row gpuOther, err error) {
	row = gpuOther{Way: "cuFile, a read for each object", Verb: verb(false), ObjectBytes: object, PerObject: true}
	lib, err := cuda.OpenCUFile()
	if err != nil {
		return row, err
	}
	defer func() { err = errors.Join(err, lib.Close()) }()
	f, err := b.cuFileFile()
	if err != nil {
		return row, err
	}
	defer func() { err = errors.Join(err, f.Close(), os.Remove(f.Name())) }()
	size := min(b.o.scale.fileBytes, int(b.o.layer)) / object * object
	memory := deviceMemory{gpu: b.gpu}
	defer func() { err = errors.Join(err, memory.free()) }()
	pool, err := memory.alloc(uint64(size))
	if err != nil {
		return row, err
	}
	if err := b.gpu.set(pool, 0xa5, uint64(size)); err != nil {
		return row, err
	}
	handle, err := lib.Register(f)
	if err != nil {
		return row, fmt.Errorf("%w (it needs the block device's entry in udev's database)", err)
	}
	defer handle.Close()
	if err := lib.RegisterBuffer(pool, uint64(size)); err != nil {
		return row, err
	}
	defer func() { err = errors.Join(err, lib.UnregisterBuffer(pool)) }()
	row.GBs, err = b.timedReads(size, object, func(_ []byte, at int) error {
		return handle.ReadAt(pool, int64(at), uint64(object), int64(at))
	})
	if err != nil {
		return row, err
	}
	media, err := b.timedReads(size, object, func(buffer []byte, at int) error {
		_, err := f.ReadAt(buffer, int64(at))
		return err
	})
	if err != nil {
		return row, err
	}
	row.Note = fmt.Sprintf("from %s, whose medium gives %.2f GB/s to plain direct reads", f.Name(), media)
	got := b.scratch.Bytes[:size]
	if err := b.gpu.read(got, pool); err != nil {
		return row, err
	}
	if string(got) != string(b.volume.drives[0].Bytes()[:size]) {
		return row, fmt.Errorf("%w: by cuFile", errGPUBytes)
	}
	row.Verified = true
	return row, nil
}

// cuFileFile is a file that holds the first bytes of the first drive, open for direct I/O. The caller removes it.
func (b *gpuBench) cuFileFile() (*os.File, error) {
	dir := b.o.dir
	if dir == "" {
		dir = os.TempDir()
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return nil, fmt.Errorf("%s: %w", dir, err)
	}
	if fs.Type != unix.EXT4_SUPER_MAGIC && fs.Type != unix.XFS_SUPER_MAGIC {
		return nil, fmt.Errorf("%s is on no filesystem that cuFile takes: choose a folder on ext4 with --dir", dir)
	}
	w, err := os.CreateTemp(dir, "tuttifs-bench-gpu-")
	if err != nil {
		return nil, err
	}
	_, err = w.Write(b.volume.drives[0].Bytes()[:b.o.scale.fileBytes])
	if err = errors.Join(err, w.Sync(), w.Close()); err != nil {
		return nil, errors.Join(err, os.Remove(w.Name()))
	}
	f, err := os.OpenFile(w.Name(), os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return nil, errors.Join(err, os.Remove(w.Name()))
	}
	return f, nil
}

// timedReads reads every object of size bytes once, from all threads, and returns GB/s.
func (b *gpuBench) timedReads(size, object int, read func(buffer []byte, at int) error) (float64, error) {
	errs := make([]error, cuFileThreads)
	var wg sync.WaitGroup
	begin := time.Now()
	for i := range cuFileThreads {
		wg.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			if errs[i] = b.gpu.context.Bind(); errs[i] != nil {
				return
			}
			buffer := drive.AlignedBuffer(object)
			defer drive.FreeBuffer(buffer)
			for at := i * object; at < size && errs[i] == nil; at += cuFileThreads * object {
				errs[i] = errors.Join(b.ctx.Err(), read(buffer, at))
			}
			errs[i] = errors.Join(errs[i], b.gpu.context.Unbind())
		})
	}
	wg.Wait()
	return float64(size) / time.Since(begin).Seconds() / 1e9, firstError(errs)
}
