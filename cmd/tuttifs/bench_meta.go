package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/extentmap/ondisk"
	"tuttifs/gpufile"
	"tuttifs/stripe"
)

// Bars of bench meta.
const (
	barBytesPerFile     = 200
	barMountSeconds     = 10
	barLookupsPerSecond = 5e6
)

const (
	benchMetaDrives = 4
	benchChain      = 64      // files of one prefix
	benchBatch      = 4096    // files of one transaction, keys of one lookup
	benchInFlight   = 4       // transactions
	benchSlab       = 1 << 20 // keys drawn at a time, at most
	benchLookupSlab = 16      // slabs looked up
	// benchSpare is the space of each drive beyond slots and tables: labels, journal, catalog, rows that round up.
	benchSpare = 256 << 20
)

type benchMetaOptions struct {
	files uint32
	dir   string
	json  bool
}

// benchMetaResult is printed; its JSON names are documented in docs/cli.md.
type benchMetaResult struct {
	OutputVersion       int     `json:"output_version"`
	Files               uint32  `json:"files"`
	CreateSeconds       float64 `json:"create_seconds"`
	UnmountSeconds      float64 `json:"unmount_seconds"`
	MountSeconds        float64 `json:"mount_seconds"`
	VolumeSeconds       float64 `json:"mount_volume_seconds"`
	MountCPUSeconds     float64 `json:"mount_cpu_seconds"`
	BytesPerFile        float64 `json:"bytes_per_file"`
	ProcessBytesPerFile float64 `json:"process_bytes_per_file"`
	HeapObjects         uint64  `json:"heap_objects"`
	HeapBytes           uint64  `json:"heap_bytes"`
	GCMilliseconds      float64 `json:"gc_milliseconds"`
	LookupsPerSecond    float64 `json:"lookups_per_second"`
	MetBars             bool    `json:"met_bars"`
}

func newBenchMeta() *command {
	o := &benchMetaOptions{}
	f := newFlags("bench meta")
	f.Uint32Var(&o.files, "files", 10_000_000, "number of GPU files")
	f.StringVar(&o.dir, "dir", os.TempDir(), "directory `DIR` for the four sparse drive files, removed afterwards")
	f.BoolVar(&o.json, "json", false, "print as JSON")
	return &command{
		name: "bench meta", synopsis: flagsOnly, summary: "measure memory, mount time and lookups at scale",
		exits: &plainExits, flags: f,
		long: `
Makes a volume of four sparse files, commits the given number of GPU files to it (without payload),
unmounts it and mounts it again. Prints how long the mount took, the resident memory a file that it
added, what the garbage collector sees of it, and lookups a second on one core, in batches of 4,096
keys drawn at random from all files. Ten million files write about 6 GB to the directory.`,
		example: `
tuttifs bench meta --files 10000000
tuttifs bench meta --files 1000000 --dir /mnt/scratch --json`,
		run: o.run,
	}
}

func (o *benchMetaOptions) run(ctx context.Context, e *env, _ []string) (err error) {
	if o.files == 0 {
		return usagef("--files must be at least 1")
	}
	dir, err := os.MkdirTemp(o.dir, "tuttifs-bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	b := &benchMeta{files: o.files, e: e, result: benchMetaResult{OutputVersion: outputVersion, Files: o.files}}
	if err := b.format(dir); err != nil {
		return err
	}
	if err := b.create(ctx); err != nil {
		return err
	}
	if err := b.remount(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	if err := b.lookups(ctx); err != nil {
		return err
	}
	r := &b.result
	r.MetBars = r.BytesPerFile <= barBytesPerFile && r.MountSeconds <= barMountSeconds &&
		r.LookupsPerSecond >= barLookupsPerSecond
	if o.json {
		return printJSON(e.stdout, r)
	}
	b.print()
	return nil
}

// benchMeta is one run.
type benchMeta struct {
	e      *env
	files  uint32
	paths  []string
	volume *extentmap.Volume
	store  *gpufile.Store
	result benchMetaResult
}

func benchGeometry() stripe.Geometry {
	byteOfKV := []stripe.Run{{Kind: stripe.RunKV, Bytes: 1}}
	return stripe.Geometry{Objects: []stripe.Object{{Runs: byteOfKV}}}.WithTrailers()
}

func benchIdentity() gpufile.Identity {
	return gpufile.Identity{
		Model: "bench", Revision: "1", DType: "bfloat16", Quantisation: "none", ScaleFormat: "none", Layout: "NHD",
		PageBytes: 1, BlockTokens: 16, FileTokens: 16, TP: 1, PP: 1, CP: 1, Group: "full",
	}
}

// benchKey is the key of file n, and the same in every run: 32 bytes of a mixed counter.
func benchKey(n uint64) (k gpufile.Key) {
	for i := range 4 {
		x := n*4 + uint64(i) + 0x9e3779b97f4a7c15
		x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
		x = (x ^ x>>27) * 0x94d049bb133111eb
		binary.LittleEndian.PutUint64(k[8*i:], x^x>>31)
	}
	return k
}

// format makes drives that just hold the files.
func (b *benchMeta) format(dir string) error {
	layout, err := stripe.NewLayout(benchGeometry(), benchMetaDrives)
	if err != nil {
		return err
	}
	perFile := layout.SlotUnits()*stripe.UnitBytes + 2*ondisk.RecordBytes
	size := (uint64(b.files)*perFile*17/16/benchMetaDrives + benchSpare) &^ (drive.UnitBytes - 1)
	var drives []drive.Drive
	for i := range benchMetaDrives {
		path := filepath.Join(dir, fmt.Sprintf("drive%d.img", i))
		if err := drive.Create(path, int64(size)); err != nil {
			return err
		}
		d, err := drive.Open(path, drive.Options{})
		if err != nil {
			return err
		}
		defer d.Close()
		b.paths, drives = append(b.paths, path), append(drives, d)
	}
	_, err = extentmap.Format(drives, extentmap.FormatOptions{})
	return err
}

// create commits all files, in large transactions, and unmounts.
func (b *benchMeta) create(ctx context.Context) error {
	start := time.Now()
	if err := b.mount(); err != nil {
		return err
	}
	spec := extentmap.PoolSpec{Name: "bench", Geometry: benchGeometry(), ChecksumAlg: 1}
	pool, ticket, err := b.store.OpenPool(benchIdentity(), spec)
	if err == nil {
		err = waitTicket(ticket)
	}
	if err == nil {
		err = b.commitAll(ctx, pool.Map())
	}
	b.result.CreateSeconds = time.Since(start).Seconds()
	start = time.Now()
	err = errors.Join(err, b.close())
	b.result.UnmountSeconds = time.Since(start).Seconds()
	return err
}

func (b *benchMeta) commitAll(ctx context.Context, p *extentmap.Pool) error {
	bar := newProgress(b.e, "creating", uint64(b.files))
	defer bar.finish()
	var inFlight []*extentmap.Ticket
	wait := func(most int) error {
		for len(inFlight) > most {
			if err := waitTicket(inFlight[0]); err != nil {
				return err
			}
			inFlight = inFlight[1:]
		}
		return nil
	}
	parent := extentmap.NoSlot
	for n := uint32(0); n < b.files; {
		if err := ctx.Err(); err != nil {
			return err
		}
		tx := b.volume.Begin()
		for range min(benchBatch, b.files-n) {
			if n%benchChain == 0 {
				parent = extentmap.NoSlot
			}
			slot, err := allocate(p, parent)
			if err != nil {
				return err
			}
			tx.Put(p, slot, b.record(n), 0)
			parent, n = slot, n+1
		}
		ticket, err := tx.Submit(nil)
		if err != nil {
			return err
		}
		inFlight = append(inFlight, ticket)
		if err := wait(benchInFlight); err != nil {
			return err
		}
		bar.set(uint64(n), strconv.Itoa(int(n))+" files")
	}
	return wait(0)
}

// allocate takes a slot, of a new row when the others are full.
func allocate(p *extentmap.Pool, parent uint32) (uint32, error) {
	for {
		if slot, ok := p.Alloc(parent); ok {
			return slot, nil
		}
		ticket, err := p.AddRow()
		if err == nil {
			err = waitTicket(ticket)
		}
		if err != nil {
			return 0, err
		}
	}
}

func (b *benchMeta) record(n uint32) *ondisk.Record {
	nonce, generation := b.volume.NextGeneration()
	r := &ondisk.Record{
		Key: benchKey(uint64(n)), Nonce: nonce, Generation: generation, CommitTime: time.Now().UnixNano(),
		Tokens: 16, Position: n % benchChain,
	}
	if r.Position > 0 {
		r.Parent = benchKey(uint64(n) - 1)
	}
	return r
}

func (b *benchMeta) mount() (err error) {
	start := time.Now()
	if b.volume, err = extentmap.Open(b.paths[:1], extentmap.Options{}); err != nil {
		return err
	}
	b.result.VolumeSeconds = time.Since(start).Seconds()
	b.store, err = gpufile.Open(b.volume, gpufile.Options{NoIO: true})
	return err
}

func (b *benchMeta) close() error {
	if b.store != nil {
		b.store.Close()
		b.store = nil
	}
	if b.volume == nil {
		return nil
	}
	err := b.volume.Close()
	b.volume = nil
	return err
}

// remount measures time and memory of a mount of the full volume.
func (b *benchMeta) remount() error {
	debug.FreeOSMemory()
	before, err := residentBytes()
	if err != nil {
		return err
	}
	start, cpu := time.Now(), cpuTime(unix.CLOCK_PROCESS_CPUTIME_ID)
	if err := b.mount(); err != nil {
		return err
	}
	r := &b.result
	r.MountSeconds = time.Since(start).Seconds()
	r.MountCPUSeconds = (cpuTime(unix.CLOCK_PROCESS_CPUTIME_ID) - cpu).Seconds()
	debug.FreeOSMemory()
	start = time.Now()
	runtime.GC()
	r.GCMilliseconds = float64(time.Since(start).Microseconds()) / 1e3
	var heap runtime.MemStats
	runtime.ReadMemStats(&heap)
	r.HeapObjects, r.HeapBytes = heap.HeapObjects, heap.HeapAlloc
	after, err := residentBytes()
	if err != nil {
		return err
	}
	r.BytesPerFile = (float64(after) - float64(before)) / float64(b.files)
	r.ProcessBytesPerFile = float64(after) / float64(b.files)
	return nil
}

// residentBytes is what the process occupies.
func residentBytes() (uint64, error) {
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0, err
	}
	fields := bytes.Fields(b)
	if len(fields) < 2 {
		return 0, fmt.Errorf("/proc/self/statm: %q", b)
	}
	pages, err := strconv.ParseUint(string(fields[1]), 10, 64)
	return pages * uint64(os.Getpagesize()), err
}

// lookups measures batches of keys drawn at random; drawing them is not timed.
func (b *benchMeta) lookups(ctx context.Context) error {
	pool := b.store.PoolByName("bench")
	if pool == nil {
		return errors.New("the pool is gone after the mount")
	}
	slab := min(benchSlab, (int(b.files)+benchBatch-1)/benchBatch*benchBatch)
	keys := make([]gpufile.Key, slab)
	slots := make([]uint32, benchBatch)
	bar := newProgress(b.e, "looking up", benchLookupSlab)
	defer bar.finish()
	var spent time.Duration
	seed := uint64(1)
	for round := range benchLookupSlab {
		for i := range keys {
			seed = seed*6364136223846793005 + 1442695040888963407
			keys[i] = benchKey(seed >> 32 * uint64(b.files) >> 32)
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		start := time.Now()
		for at := 0; at < len(keys); at += benchBatch {
			if n := pool.Lookup(keys[at:at+benchBatch], slots); n != benchBatch {
				return fmt.Errorf("only %d of %d keys were found after the mount", n, benchBatch)
			}
		}
		spent += time.Since(start)
		bar.set(uint64(round+1), "")
	}
	b.result.LookupsPerSecond = float64(benchLookupSlab*slab) / spent.Seconds()
	return nil
}

func (b *benchMeta) print() {
	r := &b.result
	t := table(b.e.stdout)
	defer t.Flush()
	verdict := func(ok bool) string {
		if ok {
			return "met"
		}
		return "MISSED"
	}
	fmt.Fprintf(t, "files\t%d\t\n", r.Files)
	fmt.Fprintf(t, "create\t%.1f s (%.0f a second)\t\n", r.CreateSeconds, float64(r.Files)/r.CreateSeconds)
	fmt.Fprintf(t, "unmount\t%.2f s\t\n", r.UnmountSeconds)
	fmt.Fprintf(t, "mount\t%.2f s (volume %.2f, indexes %.2f; %.2f of CPU)\tbar %d s: %s\n", r.MountSeconds,
		r.VolumeSeconds, r.MountSeconds-r.VolumeSeconds, r.MountCPUSeconds, barMountSeconds,
		verdict(r.MountSeconds <= barMountSeconds))
	fmt.Fprintf(t, "resident memory a file\t%.1f bytes (whole process %.1f)\tbar %d: %s\n", r.BytesPerFile,
		r.ProcessBytesPerFile, barBytesPerFile, verdict(r.BytesPerFile <= barBytesPerFile))
	fmt.Fprintf(t, "garbage collector\t%d objects, %s, a collection takes %.2f ms\t\n", r.HeapObjects,
		humanBytes(r.HeapBytes), r.GCMilliseconds)
	fmt.Fprintf(t, "lookups on one core\t%.2f million a second\tbar %.0f: %s\n", r.LookupsPerSecond/1e6,
		barLookupsPerSecond/1e6, verdict(r.LookupsPerSecond >= barLookupsPerSecond))
}
