package drive

// Open opens an existing regular file or block device.
func Open(path string, o Options) (Drive, error) { panic("stub") }

// Create makes a sparse regular file of size bytes (a multiple of UnitBytes); it refuses an existing one.
func Create(path string, size int64) error { panic("stub") }

// NewMemory is a zero-filled drive in anonymous memory, outside the garbage collector's sight.
func NewMemory(name string, size int64) (Drive, error) { panic("stub") }

// AlignedBuffer returns n bytes aligned to 4096, outside the garbage collector's sight when n is 1 MiB or more.
func AlignedBuffer(n int) []byte { panic("stub") }
