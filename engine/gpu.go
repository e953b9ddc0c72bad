package engine

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"tuttifs/cuda"
	"tuttifs/gio"
	"tuttifs/ioctl"
)

// GPUOptions of a session whose commands are built by a GPU.
type GPUOptions struct {
	// Device is the GPU's ordinal (as CUDA_VISIBLE_DEVICES leaves it), PCI bus address or UUID ("GPU-..."); empty is 0.
	Device string
	// Auto takes the CPU executor where there is no driver or no GPU. Session.Describe says which it became.
	Auto         bool
	StagingBytes int  // of device memory, 256 MiB
	Polling      bool // the polling executor instead of the ring
	PollSMs      int  // its green context, 0: the whole GPU
	// DMA is how SSDs that serve queue pairs of the session's reach the GPU's memory; nil is by a mapping of its
	// dma-buf. It is used where all drives do, and a probe has shown that it works.
	DMA DeviceDMA
	// Driver is this machine's where it is nil.
	Driver *cuda.Driver
	// Tune, where it is set, changes the ring's configuration before the ring is made: benches switch single ideas off.
	Tune func(*gio.GPUConfig)
}

// ErrNoGPU: the session was to use a GPU, and there is none that can be used.
var ErrNoGPU = errors.New("engine: no usable GPU")

// Defaults of sessions with a GPU. Bounce memory stays small, so that it lives in the CPU's last-level cache; lanes
// are deep, so that the GPU can build far ahead of the doorbells.
const (
	gpuLanes       = 8
	gpuDepth       = 1024
	gpuBounceBytes = 64 << 20
	gpuStoreLanes  = 4
	// gpuScratchBytes is for trailers, half for those that are read: two thousand of a page each.
	gpuScratchBytes = 16 << 20
	// gpuDMABytes are for PRP lists, trailers on their way and buffers of the session's user.
	gpuDMABytes = 24 << 20
)

// scratchOf is what trailers have of the DMA memory that is neither bounce cells nor store buffer: all that they can
// use of the default, and two thirds of less.
func scratchOf(rest int) int { return min(gpuScratchBytes, rest/3*2&^4095) }

// gpuSide is what a session has of a GPU.
type gpuSide struct {
	context *cuda.Context
	ring    *gio.GPU
	memory  *deviceMemory // nil where no drive is real
}

// open retains the GPU's context; it stays nil where Auto allows for the CPU.
func (g *gpuSide) open(o *GPUOptions) (err error) {
	g.context, err = o.openContext()
	return err
}

// close releases the context. The ring was closed before; a call to a driver that hung meanwhile might not return.
func (g *gpuSide) close(ring error) error {
	if g.context == nil || errors.Is(ring, gio.ErrStuck) {
		return nil
	}
	return g.context.Close()
}

// buildGPU makes the ring on the GPU, which registers the queues and the DMA memory with CUDA until it is closed.
func (s *Session) buildGPU(config gio.RingConfig, o *GPUOptions) error {
	c := gio.GPUConfig{RingConfig: config, Context: s.gpu.context, StagingBytes: o.StagingBytes,
		Polling: o.Polling, PollSMs: o.PollSMs}
	if t := s.paces.Table(); t != nil { // the scheduler has the largest in short windows, and while compute stands
		grids := t.IO.Harvest.Grids
		c.HarvestBlocks = max(gio.HarvestBlocksDefault, grids[len(grids)-1].Blocks)
	}
	if s.attach.Reply.Mode == ioctl.ModeReal {
		s.gpu.memory = s.newDeviceMemory(o)
		if s.gpu.memory.dma != nil {
			c.Peer, c.Unpeer = s.gpu.memory.peer, s.gpu.memory.unpeer
		}
	}
	if o.Tune != nil {
		o.Tune(&c)
	}
	ring, err := gio.NewGPU(c)
	if err != nil {
		return err
	}
	s.gpu.ring, s.ring = ring, ring
	device := s.gpu.context.Device()
	executor := "GPU ring"
	if c.Polling {
		executor = "GPU polling executor"
	}
	s.about = fmt.Sprintf("%s on device %d, %s, %s; %s; staging %s", executor, device.Ordinal, device.Name(),
		device.PCIBusID(), aboutRing(&c.RingConfig), sizeText(c.StagingBytes))
	return nil
}

// openContext finds the GPU and retains its primary context. It is nil where Auto allows for the CPU.
func (o *GPUOptions) openContext() (*cuda.Context, error) {
	driver := o.Driver
	if driver == nil {
		var err error
		driver, err = cuda.Open()
		if o.Auto && (errors.Is(err, cuda.ErrNoDriver) || errors.Is(err, cuda.ErrNoDevice)) {
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrNoGPU, err)
		}
	}
	device, err := findDevice(driver, o.Device)
	if err != nil {
		return nil, err
	}
	context, err := device.Primary()
	if err != nil {
		return nil, fmt.Errorf("%w: device %q: %w", ErrNoGPU, o.Device, err)
	}
	return context, nil
}

// findDevice is the device of an ordinal, a PCI bus address or a UUID.
func findDevice(driver *cuda.Driver, name string) (*cuda.Device, error) {
	if name == "" {
		name = "0"
	}
	var seen []string
	for i := range driver.Devices() {
		d, err := driver.Device(i)
		if err != nil {
			return nil, fmt.Errorf("%w: device %d: %w", ErrNoGPU, i, err)
		}
		names := []string{strconv.Itoa(i), d.PCIBusID(), uuidText(d.UUID())}
		for _, s := range names {
			if strings.EqualFold(s, name) {
				return d, nil
			}
		}
		seen = append(seen, strings.Join(names, " "))
	}
	return nil, fmt.Errorf("%w: no device %q; there are: %s", ErrNoGPU, name, strings.Join(seen, ", "))
}

// uuidText is a device's UUID as nvidia-smi writes it.
func uuidText(u [16]byte) string {
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}
