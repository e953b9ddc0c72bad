package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/cuda"
	"tuttifs/cuda/cudatest"
	"tuttifs/gio"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
)

// smallBenchGPU is the bench on a driver without a GPU, as small as it can be.
func smallBenchGPU(t *testing.T, gpus int) *benchGPUOptions {
	kernels := cudatest.Kernels()
	maps.Copy(kernels, cudatest.BenchKernels())
	fake := cudatest.Start(t, cudatest.Config{Kernels: kernels, Devices: gpus, MemoryBytes: 4 << 30})
	return &benchGPUOptions{
		json: true, gpus: gpus, drives: 4, pollers: 2, lanes: 2, runs: 2, layer: 1 << 20, staging: 8 << 20, bounce: 4 << 20,
		move: 256 << 10, moves: 2, blocks: 4,
		dir: t.TempDir(), open: func() (*cuda.Driver, error) { return fake.Driver(), nil },
		scale: gpuScale{
			rounds: 1, period: 4 * time.Millisecond, window: time.Millisecond, ours: 10 * time.Millisecond,
			others: 5 * time.Millisecond, pairs: 2, layers: 2, objects: gpuObjects[:1], gemm: 64,
			tokens: cuda.BenchQueries, cached: cuda.BenchKeys, heads: 1, kvHeads: 1, steps: 3, stepRows: 8,
			commands: 256, tensors: 6000, fileBytes: 1 << 20, memcpyBytes: 1 << 20,
		},
	}
}

// The bench runs and fills its report; how fast is not a test's business.
func TestBenchGPU(t *testing.T) {
	o := smallBenchGPU(t, 2)
	var out, warnings bytes.Buffer
	e := &env{stdout: &out, stderr: &warnings, prog: "tuttifs bench gpu"}
	o.output = filepath.Join(t.TempDir(), "figures")
	require.NoError(t, o.run(t.Context(), e))
	var r gpuReport
	require.NoError(t, json.Unmarshal(out.Bytes(), &r))
	saved, err := os.ReadFile(o.output)
	require.NoError(t, err)
	require.Equal(t, out.String(), string(saved))
	require.Empty(t, r.Failures)
	require.Equal(t, outputVersion, r.OutputVersion)
	require.Len(t, r.Seconds, len(gpuParts()))
	perPart := map[string]int{}
	for _, row := range r.Rates {
		perPart[row.Part]++
		require.Positive(t, row.GBs)
		require.Positive(t, row.BusyPerGB)
		require.Positive(t, row.MovingPerGB)
		require.True(t, row.Verified)
	}
	require.Equal(t, map[string]int{"restore": 6, "store": 6, "descriptors": 4, "cpu": 6}, perPart)
	require.Len(t, r.Sums, 2)
	ways := map[string]bool{}
	for _, row := range r.Beside {
		ways[row.Way+" "+row.Verb] = true
		require.True(t, row.Verified)
		require.GreaterOrEqual(t, row.Pairs, 2)
	}
	require.Len(t, ways, 8, "%v", r.Notes)
	require.Len(t, r.Decode, 5)
	require.Len(t, r.Backlog, 5)
	for _, row := range r.Backlog {
		require.True(t, row.Verified)
		require.Positive(t, row.Pairs)
		require.Positive(t, row.Write)
		if row.Phases {
			require.Zero(t, row.Mixed)
		}
	}
	require.GreaterOrEqual(t, len(r.Others), 10)
	endToEnd := 0
	for _, row := range r.Others {
		require.True(t, row.Verified)
		require.Positive(t, row.GBs)
		if row.EndToEnd {
			endToEnd++
		}
	}
	require.GreaterOrEqual(t, endToEnd, 4)
	require.Len(t, r.Commands, 4)
	for _, bar := range r.Bars {
		if bytes := map[string]int{"empty commands": 0, "4-KiB commands": gpuSmall}; strings.HasSuffix(bar.Name, "commands") {
			require.Contains(t, r.Commands, gpuCommands{"ring", bytes[bar.Name], bar.Got}, "not the polling kernel's")
		}
	}
	require.Len(t, r.Registrations, 2)
	for _, row := range r.Registrations {
		require.Equal(t, row.FreeBefore, row.FreeAfter)
		require.Less(t, row.FreeDuring, row.FreeBefore)
	}
	require.Len(t, r.Ablation, 16)
	require.Len(t, r.Several.Together, 2)
	require.True(t, r.Several.Verified)
	require.NotEmpty(t, r.Bars)

	out.Reset()
	require.NoError(t, r.print(e))
	require.Contains(t, out.String(), "green context of 2 SMs")
}

func TestBenchGPURunsOnlyWhatIsAskedFor(t *testing.T) {
	o := smallBenchGPU(t, 1)
	o.only, o.json = []string{"commands"}, false
	var out, warnings bytes.Buffer
	require.NoError(t, o.run(t.Context(), &env{stdout: &out, stderr: &warnings}))
	require.Contains(t, out.String(), "Commands")
	require.NotContains(t, out.String(), "Ablation")
}

// Modelled drives are stated, measured by the parts that say something of them, and hold the rates down.
func TestBenchGPUModelled(t *testing.T) {
	o := smallBenchGPU(t, 1)
	o.profile, o.drives, o.only = "cloud", 2, []string{"restore", "store"}
	var out, warnings bytes.Buffer
	e := &env{stdout: &out, stderr: &warnings}
	require.NoError(t, o.run(t.Context(), e))
	var r gpuReport
	require.NoError(t, json.Unmarshal(out.Bytes(), &r))
	require.Equal(t, "cloud", r.Profile.Name)
	require.Equal(t, 2, r.Drives)
	require.Empty(t, r.Bars, "they are of drives in memory")
	require.Len(t, r.Rates, 12)
	for _, row := range r.Rates {
		require.True(t, row.Verified)
		most := 2 * max(r.Profile.RateAt(0, row.ObjectBytes), r.Profile.RateAt(1, row.ObjectBytes)) / 1e9
		require.Less(t, row.GBs, 1.05*most, "%d bytes", row.ObjectBytes)
	}
	out.Reset()
	require.NoError(t, r.print(e))
	require.Contains(t, out.String(), "MODELLED")

	o.only = nil
	for _, p := range gpuParts() {
		require.Equal(t, p.modelled, o.wanted(&p), p.name)
	}
	o.profile = "nosuch"
	require.ErrorContains(t, o.run(t.Context(), e), "nosuch")
}

// What there is no time for is left out and named.
func TestBenchGPUEndsInTime(t *testing.T) {
	o := smallBenchGPU(t, 1)
	o.limit = time.Nanosecond
	var out bytes.Buffer
	require.NoError(t, o.run(t.Context(), &env{stdout: &out}))
	var r gpuReport
	require.NoError(t, json.Unmarshal(out.Bytes(), &r))
	require.Len(t, r.Notes, len(gpuParts())-1, "all but that of several GPUs")
	require.Contains(t, r.Notes[0], "restore is not complete")
	require.Empty(t, r.Rates)
}

// Bytes that are not those of the drives end the bench.
func TestBenchGPUSeesWrongBytes(t *testing.T) {
	o := smallBenchGPU(t, 1)
	v, err := newGPUVolume(o, nil)
	require.NoError(t, err)
	defer v.close()
	image, err := v.newImage(o.shape(64 << 10))
	require.NoError(t, err)
	require.NoError(t, image.checkTrailers())
	memory := make([]byte, image.shape.layerBytes())
	half := image.shape.object / 2
	for slot, block := range image.blocks {
		for run := range image.shape.runs {
			copy(memory[image.shape.runAt(block, run):], image.object(slot, 1)[run*half:(run+1)*half])
		}
	}
	require.NoError(t, image.compare(1, memory, image.shape.runAt))
	require.ErrorIs(t, image.compare(0, memory, image.shape.runAt), errGPUBytes)
	memory[len(memory)-1] ^= 1
	require.ErrorIs(t, image.compare(1, memory, image.shape.runAt), errGPUBytes)
	image.object(3, 0)[17] ^= 1
	require.ErrorContains(t, image.checkTrailers(), "slot 3 object 0")
}

// withSmallBench has a GPU, drives and nothing measured yet.
func withSmallBench(t *testing.T, f func(b *gpuBench)) {
	o := smallBenchGPU(t, 1)
	driver, err := o.open()
	require.NoError(t, err)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	b := &gpuBench{o: o, ctx: t.Context(), driver: driver}
	defer func() { require.NoError(t, b.close()) }()
	require.NoError(t, b.open())
	f(b)
}

// The CPU executor and the copy engine say what a drive says, and can go on afterwards.
func TestBenchGPUFeedFails(t *testing.T) {
	withSmallBench(t, func(b *gpuBench) {
		require.NoError(t, b.withFeed(b.o.shape(64<<10), func(f *gpuFeed) error {
			for _, write := range []bool{false, true} {
				require.NoError(t, f.prepare(write))
				f.rig.drives[1].SetFaults(func(*nvme.SQE) *emu.Fault { return &emu.Fault{Status: uint16(nvme.InternalError)} })
				require.ErrorIs(t, f.run(copyBatch, write, func() bool { return true }), gio.ErrStatus)
				for i := range f.parts {
					require.Nil(t, f.parts[i].ticket)
				}
				f.rig.drives[1].SetFaults(nil)
				row, err := f.measure(copyPerObject, write)
				require.NoError(t, err)
				require.True(t, row.Verified)
			}
			return nil
		}))
	})
}

// Traffic rests and goes on, and its end has the error that it ended with.
func TestBenchGPUTraffic(t *testing.T) {
	withSmallBench(t, func(b *gpuBench) {
		var bytes atomic.Uint64
		broken := errors.New("broken")
		way := &gpuWay{bytes: bytes.Load, run: func(rounds func(round gpuRound) error) error {
			n := 0
			return rounds(func(more func() bool) error {
				if n++; n == 3 {
					return broken
				}
				for more() {
					bytes.Add(uint64(b.o.staging))
					runtime.Gosched()
				}
				return nil
			})
		}}
		traffic, step := b.begin(way), func() error { return nil }
		for range 2 {
			require.NoError(t, b.start(traffic, step))
			require.NoError(t, b.stop(traffic, step))
			moved := bytes.Load()
			require.Positive(t, moved)
			require.Equal(t, moved, bytes.Load(), "it rests")
		}
		require.ErrorContains(t, b.start(traffic, step), "ended before")
		require.ErrorIs(t, traffic.end(), broken)
	})
}

// Every change of the ablation changes something, whatever the ring is, and none comes twice.
func TestBenchGPUAblationChanges(t *testing.T) {
	o := smallBenchGPU(t, 1)
	driver, err := o.open()
	require.NoError(t, err)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	b := &gpuBench{o: o}
	b.gpu, err = openGPUDevice(driver, 0)
	require.NoError(t, err)
	defer func() { require.NoError(t, b.gpu.close()) }()
	sms := b.gpu.device.SMs()
	o.staging, o.bounce, o.scale.sizes = gio.StagingDefault, 64<<20, true
	for _, ring := range []struct{ lanes, moves, move, blocks int }{
		{8, gio.MovesDefault, gio.MoveDefault, gio.HarvestBlocksDefault},
		{1, 1, 512 << 10, 1}, {2, 2, 4 << 20, 2}, {2, 3, 2 << 20, sms / 2}, {8, 3, 1 << 20, sms}, {8, 3, 1 << 20, 1024},
	} {
		o.lanes, o.moves, o.move, o.blocks = ring.lanes, ring.moves, sizeFlag(ring.move), ring.blocks
		base := gio.GPUConfig{StagingBytes: int(o.staging), MoveBytes: ring.move, Moves: ring.moves,
			HarvestBlocks: min(ring.blocks, sms)}
		names, grids := map[string]bool{}, []int{}
		for i, change := range b.changes() {
			require.False(t, names[change.name], change.name)
			names[change.name] = true
			c := base
			if change.setup.change != nil {
				change.setup.change(&c)
				require.NotEqual(t, base, c, change.name)
			}
			if c.HarvestBlocks != base.HarvestBlocks {
				grids = append(grids, c.HarvestBlocks)
			}
			s := change.setup
			require.NotEqual(t, ring.lanes, s.lanes, change.name)
			require.NotEqual(t, int(o.bounce), s.bounce, change.name)
			require.Equal(t, i > 0, change.plain || s.change != nil || s.inOrder || s.lanes+s.bounce > 0, change.name)
		}
		if ring.blocks == gio.HarvestBlocksDefault {
			require.Equal(t, []int{4, 8, 32, sms}, grids)
		}
	}
}

func TestBenchGPURefusesBadFlags(t *testing.T) {
	for name, spoil := range map[string]func(o *benchGPUOptions){
		"part":    func(o *benchGPUOptions) { o.only = []string{"restore", "everything"} },
		"profile": func(o *benchGPUOptions) { o.profile, o.only = "paper", []string{"restore", "register"} },
		"drives":  func(o *benchGPUOptions) { o.drives = gpuDrivesMax + 1 },
		"gpus":    func(o *benchGPUOptions) { o.gpus = 0 },
		"pollers": func(o *benchGPUOptions) { o.pollers = -1 },
		"lanes":   func(o *benchGPUOptions) { o.lanes = gio.LanesMax + 1 },
		"runs":    func(o *benchGPUOptions) { o.runs = 3 },
		"layer":   func(o *benchGPUOptions) { o.layer = 1<<20 + 1 },
		"staging": func(o *benchGPUOptions) { o.staging = 0 },
		"move":    func(o *benchGPUOptions) { o.move = 1 },
		"moves":   func(o *benchGPUOptions) { o.moves = gio.MovesMax + 1 },
		"blocks":  func(o *benchGPUOptions) { o.blocks = 0 },
		"limit":   func(o *benchGPUOptions) { o.limit = -1 },
	} {
		o := smallBenchGPU(t, 1)
		spoil(o)
		var usage *usageError
		require.ErrorAs(t, o.run(t.Context(), &env{}), &usage, name)
	}
	o := smallBenchGPU(t, 1)
	o.device = 1
	require.ErrorContains(t, o.run(t.Context(), &env{}), "there are 1 GPUs")
}

// Without a GPU there is a message, and the status of a failure.
func TestBenchGPUWithoutGPU(t *testing.T) {
	o := smallBenchGPU(t, 1)
	o.open = func() (*cuda.Driver, error) { return nil, cuda.ErrNoDriver }
	err := o.run(t.Context(), &env{})
	require.ErrorIs(t, err, cuda.ErrNoDriver)
	require.ErrorContains(t, err, "needs an NVIDIA GPU")
	require.Equal(t, 1, plainExits.code(err))
}

func TestInterval(t *testing.T) {
	mean, half := interval([]float64{1, 2, 3, 4})
	require.InDelta(t, 2.5, mean, 1e-9)
	require.InDelta(t, 3.182*math.Sqrt(5.0/3/4), half, 1e-9)
	_, half = interval([]float64{7})
	require.True(t, math.IsInf(half, 1))
	mean, _ = interval(nil)
	require.True(t, math.IsNaN(mean))
	require.InDelta(t, 2.042, student(30), 0.01)
	require.InDelta(t, 1.984, student(100), 0.01)
}

func TestQuantile(t *testing.T) {
	require.Equal(t, 3.0, quantile([]float64{1, 2, 3, 4}, 0.5))
	require.Equal(t, 4.0, quantile([]float64{1, 2, 3, 4}, 0.99))
	require.Equal(t, 4.0, quantile([]float64{1, 2, 3, 4}, 1))
}
