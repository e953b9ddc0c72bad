package fs

import (
	"errors"
	"fmt"
	"runtime/debug"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"tuttifs/gpufile"
)

// ErrBusy: files or directories of the mount are in use.
var ErrBusy = errors.New("fs: the mount is in use")

const (
	requestBytesMax = 1 << 20 // one READ or WRITE
	backgroundMax   = 64
)

// Server is a live mount.
type Server struct {
	t    *tree
	dir  string
	done chan struct{} // closed when the mount is gone and nothing of it runs any more
}

// Mount mounts the store's tree at a directory and returns when it is usable. The process must not open files of the
// mount that it serves: its own end would wait for itself.
func Mount(dir string, s *gpufile.Store, o Options) (*Server, error) {
	b, err := newStoreBackend(s, o.Payload)
	if err != nil {
		return nil, err
	}
	m, err := mount(dir, b, o)
	if err != nil {
		b.close()
	}
	return m, err
}

func mount(dir string, b backend, o Options) (*Server, error) {
	t := newTree(b, o)
	server, err := fuse.NewServer(t, dir, mountOptions(&t.o))
	if err != nil {
		return nil, fmt.Errorf("fs: mount %s: %w", dir, err)
	}
	s := &Server{t: t, dir: dir, done: make(chan struct{})}
	go func() {
		server.Serve()
		t.closing.Wait()
		b.close()
		close(s.done)
	}()
	if err := server.WaitMount(); err != nil {
		unix.Unmount(dir, unix.MNT_DETACH)
		<-s.done
		return nil, fmt.Errorf("fs: mount %s: %w", dir, err)
	}
	return s, nil
}

func mountOptions(o *Options) *fuse.MountOptions {
	m := &fuse.MountOptions{
		Name:              "tuttifs",
		FsName:            o.Name,
		DirectMountStrict: true,
		AllowOther:        o.AllowOther,
		MaxWrite:          requestBytesMax,
		MaxBackground:     backgroundMax,
		DisableSplice:     true, // a pipe is shorter than a reply of 1 MiB
		DisableXAttrs:     o.NoXattr,
		// Names that every ls -l asks for and that nobody here has: answered before they are parsed.
		IgnoreSecurityLabels: true,
		// Files are read by direct I/O; private mappings of them work all the same. READDIRPLUS where it is of use: ls
		// -U does not pay for attributes that it does not look at.
		ExtraCapabilities: fuse.CAP_DIRECT_IO_ALLOW_MMAP | fuse.CAP_READDIRPLUS_AUTO,
		Options:           []string{"default_permissions"},
		Debug:             o.Debug,
		PanicHandler: func(v any) fuse.Status {
			o.Logf("a request failed by a fault of this program: %v\n%s", v, debug.Stack())
			return fuse.EIO
		},
	}
	if o.ReadOnly {
		m.Options = append(m.Options, "ro")
	}
	return m
}

// OnUnmount ends what open files hold; after a forced unmount the kernel sends no RELEASE.
func (t *tree) OnUnmount() {
	t.handles.m.Range(func(fh, _ any) bool {
		t.Release(nil, &fuse.ReleaseIn{Fh: fh.(uint64)})
		return true
	})
	for _, u := range t.writes.all() {
		t.giveUp(u)
	}
}

// Wait returns when the mount is gone and everything that it held is given back.
func (s *Server) Wait() { <-s.done }

// Done is closed when Wait would return.
func (s *Server) Done() <-chan struct{} { return s.done }

// Stats counts what was read and stored through the mount.
func (s *Server) Stats() Stats { return s.t.counter.stats() }

// Unmount asks the kernel to take the mount away: ErrBusy while it is in use, unless lazy, which detaches it at once
// and lets its users finish. Without lazy, it returns when everything is given back.
func (s *Server) Unmount(lazy bool) error {
	select {
	case <-s.done:
		return nil
	default:
	}
	flags := 0
	if lazy {
		flags = unix.MNT_DETACH
	}
	switch err := unix.Unmount(s.dir, flags); {
	case errors.Is(err, syscall.EBUSY):
		return fmt.Errorf("%w: %s", ErrBusy, s.dir)
	case err != nil && !errors.Is(err, syscall.EINVAL): // EINVAL: somebody else has unmounted it
		return fmt.Errorf("fs: unmount %s: %w", s.dir, err)
	}
	if !lazy {
		<-s.done
	}
	return nil
}
