package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"tuttifs/checksum"
	"tuttifs/cuda"
	"tuttifs/drive"
	"tuttifs/drivemodel"
	"tuttifs/gio"
	"tuttifs/nvme/emu"
	"tuttifs/phase"
	"tuttifs/stripe"
)

// gpuDrivesMax is the most drives of the bench.
const gpuDrivesMax = 16

// gpuVolume is RAM-backed drives full of words that differ, for whatever layout.
type gpuVolume struct {
	drives []drive.Drive
	media  []*drivemodel.Medium // of the drives, whoever uses them; nil: as fast as memory is
}

// newGPUVolume makes drives that hold all layers, trailers, and some room for rounding, held back to a profile if there
// is one.
func newGPUVolume(o *benchGPUOptions, profile *drivemodel.Profile) (*gpuVolume, error) {
	layers, drives := uint64(o.layer)*uint64(o.scale.layers), uint64(o.drives)
	size := int64(layers/drives+layers/drives/8+1<<20) &^ (drive.UnitBytes - 1)
	v := &gpuVolume{}
	for i := range o.drives {
		d, err := drive.NewMemory(fmt.Sprintf("ram%d", i), size)
		if err != nil {
			v.close()
			return nil, err
		}
		_ = unix.Madvise(d.Bytes(), unix.MADV_HUGEPAGE) // fewer misses of the TLB
		v.drives = append(v.drives, d)
		var medium *drivemodel.Medium
		if profile != nil {
			medium = drivemodel.NewMedium(profile, uint64(i))
		}
		v.media = append(v.media, medium)
	}
	const piece = 4 << 20
	pieces := (int(size) + piece - 1) / piece
	parallel(o.drives*pieces, func(i int) {
		b := v.drives[i/pieces].Bytes()
		at := i % pieces * piece
		for end := min(at+piece, len(b)); at < end; at += 8 {
			w := cuda.BenchWord(uint64(i/pieces)<<48, uint64(at/8), ^uint64(0), 0)
			binary.LittleEndian.PutUint64(b[at:], w)
		}
	})
	return v, nil
}

func (v *gpuVolume) close() {
	for _, d := range v.drives {
		_ = d.Close()
	}
}

// parallel calls f with 0 to n-1 on all cores.
func parallel(n int, f func(i int)) {
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(n, runtime.GOMAXPROCS(0)) {
		wg.Go(func() {
			for i := next.Add(1) - 1; i < int64(n); i = next.Add(1) - 1 {
				f(int(i))
			}
		})
	}
	wg.Wait()
}

// gpuShape is the objects that are moved: layers of slots, an object each.
type gpuShape struct {
	object int // bytes
	layers int
	slots  int
	runs   int // of an object in the pool
}

// shape has as many slots as fill a layer.
func (o *benchGPUOptions) shape(object int) gpuShape {
	return gpuShape{object: object, layers: o.scale.layers, slots: int(o.layer) / object, runs: o.runs}
}

func (s *gpuShape) layerBytes() int { return s.slots * s.object }

// gpuImage is a shape on the drives: the map, seeds, and trailers that fit what the drives hold.
type gpuImage struct {
	volume *gpuVolume
	shape  gpuShape
	m      *gio.Map
	slots  []gio.SlotIO
	blocks []uint32 // of the pool, by slot: random
}

// newImage lays a shape over the drives and writes its trailers.
func (v *gpuVolume) newImage(shape gpuShape) (*gpuImage, error) {
	var g stripe.Geometry
	run := stripe.Run{Kind: stripe.RunKV, Bytes: uint32(shape.object / shape.runs)}
	for layer := range shape.layers {
		object := stripe.Object{Layer: uint16(layer)}
		for range shape.runs {
			object.Runs = append(object.Runs, run)
		}
		g.Objects = append(g.Objects, object)
	}
	layout, err := stripe.NewLayout(g.WithTrailers(), len(v.drives))
	if err != nil {
		return nil, err
	}
	row := gio.MapRow{Units: make([]uint64, len(v.drives))}
	for i := range v.drives {
		row.Drives = append(row.Drives, uint16(i))
	}
	entry := uint64(v.drives[0].Size()) / drive.UnitBytes
	im := &gpuImage{volume: v, shape: shape}
	if im.m, err = gio.NewMap(layout, entry, []gio.MapRow{row}, 1); err != nil {
		return nil, err
	}
	if n := layout.SlotsPerRow(entry); int(n) < shape.slots {
		return nil, fmt.Errorf("drives of %d bytes hold %d slots of %d layers, not %d",
			v.drives[0].Size(), n, shape.layers, shape.slots)
	}
	pool := checksum.NewPoolSeed([32]byte{1}, 1)
	for i, block := range rand.Perm(shape.slots) {
		key := [32]byte{byte(i), byte(i >> 8), byte(i >> 16), byte(i >> 24)}
		im.slots = append(im.slots, gio.SlotIO{Slot: uint32(i), Seed: pool.Seed(&key, 1, uint64(i))})
		im.blocks = append(im.blocks, uint32(block))
	}
	im.seal()
	return im, nil
}

// object is an object's bytes on its drive.
func (im *gpuImage) object(slot int, object uint16) []byte {
	index, unit, _, _ := im.m.Locate(uint32(slot), object)
	return im.volume.drives[index].Bytes()[unit*drive.UnitBytes:][:im.m.ObjectBytes(object)]
}

// sums are what a slot's trailer should hold.
func (im *gpuImage) sums(slot int, sums []uint64) []uint64 {
	sums = sums[:0]
	for _, object := range im.m.Layout().RankObjects(0) {
		sums = append(sums, checksum.Sum(im.slots[slot].Seed, 0, object, im.object(slot, object)))
	}
	return sums
}

// seal writes the trailers of all slots as they should be.
func (im *gpuImage) seal() {
	trailer := im.m.Layout().TrailerObject(0)
	parallel(im.shape.slots, func(i int) {
		checksum.PutTrailer(im.object(i, trailer), im.slots[i].Seed, 0, trailer,
			im.sums(i, make([]uint64, 0, im.shape.layers)))
	})
}

// checkTrailers says whether every trailer fits what the drives hold.
func (im *gpuImage) checkTrailers() error {
	trailer := im.m.Layout().TrailerObject(0)
	errs := make([]error, im.shape.slots)
	parallel(im.shape.slots, func(i int) {
		got := make([]uint64, im.shape.layers)
		if !checksum.ParseTrailer(im.object(i, trailer), im.slots[i].Seed, 0, trailer, got) {
			errs[i] = fmt.Errorf("the trailer of slot %d is damaged", i)
			return
		}
		for k, want := range im.sums(i, make([]uint64, 0, len(got))) {
			if got[k] != want {
				errs[i] = fmt.Errorf("slot %d object %d has sum %#x, its trailer says %#x", i, k, want, got[k])
				return
			}
		}
	})
	return firstError(errs)
}

// errGPUBytes: wrong bytes. No figure counts then.
var errGPUBytes = errors.New("wrong bytes")

// compare compares a layer's memory of the pool with the drives. runAt is where a block's run begins in it.
func (im *gpuImage) compare(layer int, memory []byte, runAt func(block uint32, run int) int) error {
	object := im.m.Layout().LayerObjects(uint16(layer), 0)[0]
	n := im.shape.object / im.shape.runs
	errs := make([]error, im.shape.slots)
	parallel(im.shape.slots, func(i int) {
		stored := im.object(i, object)
		for run := range im.shape.runs {
			if !bytes.Equal(stored[run*n:(run+1)*n], memory[runAt(im.blocks[i], run):][:n]) {
				errs[i] = fmt.Errorf("%w: slot %d layer %d run %d is not in block %d of the pool what it is on its drive",
					errGPUBytes, i, layer, run, im.blocks[i])
			}
		}
	})
	return firstError(errs)
}

func firstError(errs []error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// controllers are virtual controllers in front of the drives, with their phases if there are any.
func (v *gpuVolume) controllers(inOrder bool, phases []*phase.Token) ([]*emu.Controller, error) {
	var all []*emu.Controller
	for i, d := range v.drives {
		config := emu.Config{Drive: d, Medium: v.media[i], Index: uint16(i), SGL: true, InOrder: inOrder,
			Serial: fmt.Sprintf("BENCH%d", i)}
		if phases != nil {
			config.Phase = phases[i]
		}
		c, err := emu.New(config)
		if err != nil {
			return nil, err
		}
		all = append(all, c)
	}
	return all, nil
}
