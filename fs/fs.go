// Package fs is the FUSE tree: names, attributes, xattrs, ioctl dispatch. Management only. The only package that
// imports go-fuse, and the only one that knows errno.
//
// The tree holds nothing per file: node ids are computed from (pool, slot, generation), listings stream by cookie, and
// everything that is shown is asked of gpufile at that moment. What it does hold is bounded: open files, files being
// copied in (uploadBytesMax), and buffers of readers (flightBytesMax, keepBytesMax).
//
// Locks: openDir.mu comes before all others, of which no two are held at once. Some are held over calls into gpufile, a
// Payload or an Ioctler; none of these calls back.
package fs

import (
	"time"

	"tuttifs/gpufile"
)

// Payload reads and writes whole objects for the mount's own readers and writers (cat, cp): implemented by the daemon
// over drives and checksums.
type Payload interface {
	// OpenFile prepares reads of a file that the caller holds until the reader is closed. Trailers are read by the
	// implementation; one reader of a whole file should keep the FileReader.
	OpenFile(p *gpufile.Pool, info gpufile.FileInfo) (FileReader, error)
	// CreateFile collects a whole file's objects for a reserved slot.
	CreateFile(p *gpufile.Pool, grant gpufile.Grant) (FileWriter, error)
}

// FileReader verifies and returns objects of one pinned file; object numbers are geometry indices. Safe for concurrent
// use.
type FileReader interface {
	// ReadObject fills buf, whose length is the object's payload, with verified bytes. An error means damage or I/O
	// failure, and then buf holds nothing of use: the caller hands on all of it or none. Whatever lies between buf's
	// length and its capacity may be overwritten (a drive transfers whole units).
	ReadObject(object uint16, buf []byte) error
	// Checksum describes the file's sums as its trailers hold them: the algorithm's name and a hexadecimal digest.
	Checksum() (string, error)
	Close()
}

// FileWriter writes objects of one reserved slot; Finish writes the trailers. WriteObject is safe for concurrent use.
type FileWriter interface {
	WriteObject(object uint16, payload []byte) error
	Finish() error
	Close()
}

// StatusFile is one generated file of /.tuttifs/.
type StatusFile struct {
	Name string
	// Content makes the text at open; size is exact from then on.
	Content func() []byte
}

// Ioctler serves an ioctl of an open file of the mount (GPU file, .tuttifs/control or directory). The handle stands for
// one open file; it is opened at the first ioctl. Out is zeroed. Ioctl returns 0 or a positive errno number; the bytes
// of out reach the caller either way. pid is the calling thread's process, for watching its death.
type Ioctler interface {
	Open(pid uint32, uid, gid uint32, writable bool) (handle uint64)
	Close(handle uint64)
	Ioctl(handle uint64, pid uint32, cmd uint32, arg uint64, in, out []byte) (errno int32)
}

// UmaskNone asks for a umask of zero, which as a plain zero would mean the default.
const UmaskNone = 0o10000

// Options of Mount. Zero fields take the defaults named here.
type Options struct {
	Name       string // source shown by df, e.g. the volume's label or UUID; "tuttifs"
	ReadOnly   bool
	NoXattr    bool   // extended attributes are answered ENOSYS once, and the kernel never asks again
	AllowOther bool   // users other than the one who mounted may enter; modes still apply
	UID, GID   uint32 // owner of everything
	Umask      uint32 // taken off 0666 and 0777; 0 means 077, UmaskNone means none
	// EntryTimeout and AttrTimeout say how long the kernel may keep names and attributes: 1 s; negative means not at
	// all.
	EntryTimeout, AttrTimeout time.Duration
	Debug                     bool // log every request
	// Logf tells of files that could not be read or stored; nil means the standard logger.
	Logf    func(format string, args ...any)
	Status  []StatusFile
	Control Ioctler // nil: every ioctl is ENOTTY
	Payload Payload // nil: files can be listed, but neither read nor stored
}
