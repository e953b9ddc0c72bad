package cudatest

import (
	"regexp"
	"strconv"
	"unsafe"

	"tuttifs/cuda"
)

// module is PTX, of which nothing but the kernels' names and parameters is read.
type module struct {
	context *context
	entries map[string]int // bytes of parameters by kernel
}

type kernel struct {
	module *module
	name   string
	run    Kernel
	bytes  int
}

var (
	entryPattern = regexp.MustCompile(`\.entry\s+([\w$]+)\s*\(([^)]*)\)`)
	paramPattern = regexp.MustCompile(`\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)\s+[\w$]+(?:\[(\d+)\])?`)
)

// entries lists a module's kernels.
func entries(ptx string) map[string]int {
	all := map[string]int{}
	for _, entry := range entryPattern.FindAllStringSubmatch(ptx, -1) {
		bytes := 0
		for _, p := range paramPattern.FindAllStringSubmatch(entry[2], -1) {
			bits, _ := strconv.Atoi(p[1])
			n, err := strconv.Atoi(p[2])
			if err != nil {
				n = 1 // not an array
			}
			bytes += n * bits / 8
		}
		all[entry[1]] = bytes
	}
	return all
}

// cString is the text at an address up to its NUL. Modules are long: it is read without the race detector's knowledge.
//
//go:norace
//go:nocheckptr
func cString(p unsafe.Pointer) string {
	n := 0
	for *(*byte)(unsafe.Add(p, n)) != 0 {
		n++
	}
	return string(unsafe.Slice((*byte)(p), n))
}

// directives are what every PTX begins with.
var directives = regexp.MustCompile(`(?m)^\.version \d+\.\d+\n\.target sm_\d+\n\.address_size 64$`)

// moduleLoad takes what begins with PTX's directives for PTX. Of other images it complains in the log, the first of the
// options.
func (f *Fake) moduleLoad(h *uintptr, image unsafe.Pointer, n uint32, options *int32,
	values unsafe.Pointer) cuda.Result {
	c, r := f.enterBound("ModuleLoadDataEx")
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	ptx := cString(image)
	if !directives.MatchString(ptx) {
		const log = "cudatest: the image does not begin with .version, .target and .address_size"
		if o := unsafe.Slice(options, n); n == 2 && o[0] == 5 && o[1] == 6 {
			v := (*struct {
				log *byte
				n   uintptr
			})(values)
			fill(v.log, int32(v.n), log)
		}
		return cuda.ErrInvalidPTX
	}
	*h = f.handle()
	f.modules[*h] = &module{context: c, entries: entries(ptx)}
	return cuda.Success
}

// enterModule begins a call that concerns a module.
func (f *Fake) enterModule(function string, h uintptr) (*module, cuda.Result) {
	if _, r := f.enterBound(function); r != cuda.Success {
		return nil, r
	}
	m := f.modules[h]
	if m == nil {
		f.misused("cu%s of a module that is not there", function)
		return nil, cuda.ErrInvalidHandle
	}
	return m, cuda.Success
}

func (f *Fake) moduleUnload(h uintptr) cuda.Result {
	m, r := f.enterModule("ModuleUnload", h)
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	delete(f.modules, h)
	for h, k := range f.kernels {
		if k.module == m {
			delete(f.kernels, h)
		}
	}
	return cuda.Success
}

func (f *Fake) moduleFunction(h *uintptr, in uintptr, name *byte) cuda.Result {
	m, r := f.enterModule("ModuleGetFunction", in)
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	s := cString(unsafe.Pointer(name))
	bytes, there := m.entries[s]
	if !there {
		return cuda.ErrNotFound
	}
	run := f.config.Kernels[s]
	if run == nil {
		f.misused("kernel %s is in the module, and not in Go", s)
		return cuda.ErrNotFound
	}
	*h = f.handle()
	f.kernels[*h] = &kernel{module: m, name: s, run: run, bytes: bytes}
	return cuda.Success
}

// Limits of a launch that needs no permission: threads of a block, and bytes of dynamic shared memory.
const (
	threadsMax = 1024
	sharedMax  = 48 << 10
)

func (f *Fake) launch(h uintptr, gridX, gridY, gridZ, blockX, blockY, blockZ, sharedBytes uint32, in uintptr,
	params *unsafe.Pointer) cuda.Result {
	s, r := f.enterStream("LaunchKernel", in)
	defer f.mu.Unlock()
	if r != cuda.Success {
		return r
	}
	k := f.kernels[h]
	switch {
	case k == nil:
		f.misused("cuLaunchKernel of a kernel that is not there")
		return cuda.ErrInvalidHandle
	case k.module.context.device != s.context.device:
		f.misused("%s of a module of device %d in a stream of device %d", k.name, k.module.context.device,
			s.context.device)
		return cuda.ErrInvalidHandle
	case gridX == 0 || gridY != 1 || gridZ != 1 || blockX == 0 || blockX > threadsMax || blockY != 1 || blockZ != 1 ||
		sharedBytes > sharedMax:
		f.misused("%s with a grid of %dx%dx%d blocks of %dx%dx%d threads and %d bytes of shared memory", k.name, gridX,
			gridY, gridZ, blockX, blockY, blockZ, sharedBytes)
		return cuda.ErrInvalidValue
	case k.bytes > 0 && (params == nil || *params == nil):
		f.misused("%s wants %d bytes of parameters", k.name, k.bytes)
		return cuda.ErrInvalidValue
	}
	// Words, so that the kernel's struct is aligned.
	words := make([]uint64, (k.bytes+7)/8+1)
	if k.bytes > 0 {
		copy(unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), k.bytes), unsafe.Slice((*byte)(*params), k.bytes))
	}
	s.enqueue(operation{name: k.name, run: func() cuda.Result {
		k.run(gridX, blockX, unsafe.Pointer(&words[0]))
		return cuda.Success
	}})
	return cuda.Success
}
