// Package fs is the FUSE tree: names, attributes, xattrs, ioctl dispatch. Management only. The only package that imports go-fuse, and the only one that knows errno.
package fs

import (
	"time"

	"tuttifs/gpufile"
)

// Payload reads and writes whole objects for the mount's own readers and writers (cat, cp): implemented by the daemon over drives and checksums.
type Payload interface {
	// ReadObject fills buf (the object's payload length) with verified bytes; an error means damage or I/O failure, never wrong bytes.
	// Trailers are read by the implementation; one reader of a whole file should keep the FileReader.
	OpenFile(p *gpufile.Pool, info gpufile.FileInfo) (FileReader, error)
	// CreateFile collects a whole file's objects for a reserved slot.
	CreateFile(p *gpufile.Pool, grant gpufile.Grant) (FileWriter, error)
}

// FileReader verifies and returns objects of one pinned file; object numbers are geometry indices. Safe for concurrent use.
type FileReader interface {
	ReadObject(object uint16, buf []byte) error
	Close()
}

// FileWriter writes objects of one reserved slot; Finish writes the trailers.
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

// Ioctler serves an ioctl of an open file of the mount (gpufile or .tuttifs/control or directory). opener identifies the open file handle; out is zeroed. It returns 0 or a positive errno number and the bytes of out that count (all).
// Called with pid of the caller for process death watching.
type Ioctler interface {
	Open(pid uint32, uid, gid uint32, writable bool) (handle uint64)
	Close(handle uint64)
	Ioctl(handle uint64, pid uint32, cmd uint32, arg uint64, in, out []byte) (errno int32)
}

// Options of Mount.
type Options struct {
	Name                      string // source shown by df, e.g. the volume's label or UUID
	ReadOnly                  bool
	NoXattr                   bool
	AllowOther                bool
	UID, GID                  uint32 // owner of everything
	Umask                     uint32 // 077 by default
	EntryTimeout, AttrTimeout time.Duration
	Debug                     bool
	Status                    []StatusFile
	Control                   Ioctler
	Payload                   Payload
}

// Server is a live mount.
type Server struct{ _ int }

// Mount mounts the store's tree and returns when it is usable.
func Mount(dir string, s *gpufile.Store, o Options) (*Server, error) { panic("stub") }

// Wait returns when the mount is gone. Unmount asks the kernel (EBUSY while files are open); lazy detaches.
func (s *Server) Wait()                   { panic("stub") }
func (s *Server) Unmount(lazy bool) error { panic("stub") }
