package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/gio"
)

// Shape of the file-backed part: depth is what both sides keep in flight over all files together.
const (
	fileCount = 4
	fileDepth = 32
	fileLanes = 32
	fileBatch = 512
	// splitRounds bounds the rounds of rows for information.
	splitRounds = 3
)

// fileWork is the files that both contestants use.
type fileWork struct {
	fio    string
	dir    string
	paths  []string
	size   int64
	drives []drive.Drive
}

func (o *benchRingsOptions) benchFiles(ctx context.Context, fio string) (rows []rateRow, err error) {
	dir, remove, err := o.benchDir()
	if err != nil {
		return nil, err
	}
	defer remove()
	w := &fileWork{fio: fio, dir: dir, size: int64(o.size) / fileCount &^ (1<<20 - 1)}
	defer func() { err = errors.Join(err, w.close()) }()
	if err := w.makeFiles(ctx); err != nil {
		return nil, err
	}
	for _, object := range benchObjects {
		for _, write := range []bool{false, true} {
			for _, split := range []bool{false, true} {
				row, err := o.fileRow(ctx, w, object, write, split)
				if err != nil {
					return nil, err
				}
				rows = append(rows, row)
			}
		}
	}
	return rows, nil
}

// makeFiles writes the files once: reads of holes and first writes of them are another thing.
func (w *fileWork) makeFiles(ctx context.Context) error {
	chunk := drive.AlignedBuffer(1 << 20)
	defer drive.FreeBuffer(chunk)
	for i := range chunk {
		chunk[i] = byte(i * 7)
	}
	for i := range fileCount {
		path := filepath.Join(w.dir, "drive"+strconv.Itoa(i))
		if err := drive.Create(path, w.size); err != nil {
			return err
		}
		d, err := drive.Open(path, drive.Options{})
		if err != nil {
			return err
		}
		w.paths, w.drives = append(w.paths, path), append(w.drives, d)
		if !d.Direct() {
			return fmt.Errorf("%s allows no direct I/O: choose another directory with --dir", w.dir)
		}
		for at := int64(0); at < w.size; at += int64(len(chunk)) {
			if err := errors.Join(ctx.Err(), d.WriteAt(chunk, at)); err != nil {
				return err
			}
		}
		if err := d.Flush(); err != nil {
			return err
		}
	}
	return nil
}

func (w *fileWork) close() error {
	var errs []error
	for _, d := range w.drives {
		errs = append(errs, d.Close())
	}
	return errors.Join(errs...)
}

// fileRow compares one object size and direction. fio is one thread, and so are executor and controller together; split
// gives each its own, as a mount does, for information.
func (o *benchRingsOptions) fileRow(ctx context.Context, w *fileWork, object int, write, split bool) (
	row rateRow, err error) {
	row = rateRow{Arrangement: "one thread", Verb: "read", ObjectBytes: object, Threads: 1, Depth: fileDepth,
		Counts: !split, Split: split}
	rounds := o.rounds
	if split {
		row.Arrangement, row.Threads, rounds = "a thread for each side", 2, min(rounds, splitRounds)
	}
	if write {
		row.Verb = "write"
	}
	b, err := newBenchDrives(w.drives, object, nil)
	if err != nil {
		return row, err
	}
	// As little memory as fio has, which moves everything through one buffer a command in flight; twice that, so that
	// no two of them share one.
	dma := 2 * fileDepth * object
	shape := benchShape{lanes: fileLanes, depth: 64, chunk: fileDepth / fileLanes, dmaBytes: dma, stepped: !split}
	r, err := newBenchRig(b, shape)
	if err != nil {
		return row, err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	backend, _ := r.queues[0].Backend()
	row.Arrangement += ", " + string(backend)
	ctxs := b.shuffled()
	r.place(ctxs, object, dma)
	var mine, fios threadCost
	row.RingGBs, row.OtherGBs, row.Ratio, err = pairs(ctx, rounds, func() (float64, error) {
		rate, cost, err := r.timed(write, ctxs, object, o.period)
		mine.add(cost)
		return rate, err
	}, func() (float64, error) {
		rate, cost, err := w.runFio(ctx, object, write, o.period)
		fios.add(cost)
		return rate, err
	})
	row.CPUPerGB, row.PollerPerGB, row.OtherCPUPerGB = mine.perGB(), mine.pollerPerGB(), fios.perGB()
	return row, err
}

// timed streams for a time. The controller's CPU time is that of the process, without the executor's thread if it has
// one of its own: pollers, workers and the kernel's threads for io_uring.
func (r *benchRig) timed(write bool, ctxs []gio.IOCTX, object int, d time.Duration) (
	rate float64, cost threadCost, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	mine := threadClock()
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0) // as pollers do; 0 restores the default
	defer func() { _ = unix.Prctl(unix.PR_SET_TIMERSLACK, 0, 0, 0, 0) }()
	begin, process := time.Now(), cpuTime(unix.CLOCK_PROCESS_CPUTIME_ID)
	thread, poller := cpuTime(mine), cpuTime(r.clock)
	n, err := r.stream(write, ctxs, fileBatch, lasting(begin, d))
	seconds := time.Since(begin).Seconds()
	cost.cpu = cpuTime(unix.CLOCK_PROCESS_CPUTIME_ID) - process
	if r.done != nil { // the poller has a thread of its own
		cost.cpu -= cpuTime(mine) - thread
		cost.poller = cpuTime(r.clock) - poller
	}
	cost.bytes = float64(n) * float64(object)
	return cost.bytes / seconds / 1e9, cost, err
}

// fioReport is what is read of fio's JSON.
type fioReport struct {
	Jobs []struct {
		Error  int     `json:"error"`
		Read   fioSide `json:"read"`
		Write  fioSide `json:"write"`
		User   float64 `json:"usr_cpu"` // per cent of one CPU
		System float64 `json:"sys_cpu"`
	} `json:"jobs"`
}

type fioSide struct {
	Bytes     float64 `json:"io_bytes"`
	RuntimeMS float64 `json:"runtime"`
}

// runFio runs one job over the same files and returns its GB/s.
func (w *fileWork) runFio(ctx context.Context, object int, write bool, d time.Duration) (float64, threadCost, error) {
	mode := "randread"
	if write {
		mode = "randwrite"
	}
	cmd := exec.CommandContext(ctx, w.fio, "--name=tuttifs", "--ioengine=io_uring", "--direct=1", "--rw="+mode,
		"--bs="+strconv.Itoa(object), "--iodepth="+strconv.Itoa(fileDepth), "--filename="+strings.Join(w.paths, ":"),
		"--size="+strconv.FormatInt(w.size*fileCount, 10), "--file_service_type=random", "--randrepeat=0",
		"--norandommap=1", "--blockalign="+strconv.Itoa(drive.UnitBytes), // where objects begin
		"--time_based=1", "--runtime="+strconv.FormatInt(d.Milliseconds(), 10)+"ms", "--output-format=json")
	cmd.Dir, cmd.Stderr = w.dir, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return 0, threadCost{}, fmt.Errorf("fio: %w: %s", err, strings.TrimSpace(string(out)))
	}
	var report fioReport
	if i := strings.IndexByte(string(out), '{'); i > 0 {
		out = out[i:] // warnings come before the document
	}
	if err := json.Unmarshal(out, &report); err != nil {
		return 0, threadCost{}, fmt.Errorf("fio's report: %w", err)
	}
	if len(report.Jobs) != 1 || report.Jobs[0].Error != 0 {
		return 0, threadCost{}, fmt.Errorf("fio's report has %d jobs or an error", len(report.Jobs))
	}
	side := report.Jobs[0].Read
	if write {
		side = report.Jobs[0].Write
	}
	if side.RuntimeMS <= 0 || side.Bytes <= 0 {
		return 0, threadCost{}, errors.New("fio moved nothing")
	}
	seconds := (report.Jobs[0].User + report.Jobs[0].System) / 100 * side.RuntimeMS / 1e3
	cost := threadCost{cpu: time.Duration(seconds * float64(time.Second)), bytes: side.Bytes}
	return side.Bytes / side.RuntimeMS / 1e6, cost, nil
}
