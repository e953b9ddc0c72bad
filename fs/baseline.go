package fs

import (
	"fmt"
	"log"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// BaselineName is the one file of a Baseline.
const BaselineName = "data"

// baseline is the least that a FUSE file can cost: its bytes lie in memory and are handed to the kernel as they are,
// unverified. What the tree reaches is judged against it.
type baseline struct {
	fuse.RawFileSystem
	data []byte
}

// baselineFile is the node of the file.
const baselineFile = fuse.FUSE_ROOT_ID + 1

// Baseline mounts a directory with one file that serves data by direct I/O. unmount takes it away.
func Baseline(dir string, data []byte) (unmount func() error, err error) {
	b := &baseline{fuse.NewDefaultRawFileSystem(), data}
	o := mountOptions(&Options{Name: "baseline", Logf: log.Printf})
	o.Name = "tuttifs-baseline"
	server, err := fuse.NewServer(b, dir, o)
	if err != nil {
		return nil, fmt.Errorf("fs: mount %s: %w", dir, err)
	}
	go server.Serve()
	if err := server.WaitMount(); err != nil {
		unix.Unmount(dir, unix.MNT_DETACH)
		return nil, fmt.Errorf("fs: mount %s: %w", dir, err)
	}
	return server.Unmount, nil
}

func (b *baseline) String() string { return "baseline" }

func (b *baseline) attr(node uint64, a *fuse.Attr) {
	*a = fuse.Attr{Ino: node, Mode: syscall.S_IFDIR | 0o700, Nlink: 2}
	if node == baselineFile {
		*a = fuse.Attr{Ino: node, Mode: syscall.S_IFREG | 0o600, Nlink: 1, Size: uint64(len(b.data)),
			Blksize: preferredBytes}
	}
}

func (b *baseline) Lookup(_ <-chan struct{}, _ *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	if name != BaselineName {
		return fuse.ENOENT
	}
	out.NodeId, out.Generation = baselineFile, 1
	b.attr(baselineFile, &out.Attr)
	return fuse.OK
}

func (b *baseline) GetAttr(_ <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	b.attr(in.NodeId, &out.Attr)
	return fuse.OK
}

func (b *baseline) Open(_ <-chan struct{}, _ *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	out.OpenFlags = fuse.FOPEN_DIRECT_IO
	return fuse.OK
}

func (b *baseline) Read(_ <-chan struct{}, in *fuse.ReadIn, _ []byte) (fuse.ReadResult, fuse.Status) {
	off := min(in.Offset, uint64(len(b.data)))
	return fuse.ReadResultData(b.data[off:min(off+uint64(in.Size), uint64(len(b.data)))]), fuse.OK
}
