package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/nvme/emu"
)

// DriveRequest is what 'tuttifs drive' and 'tuttifs scrub' ask of a running mount, over a socket that only the mount's
// owner and root can use: one JSON object each way, one request a connection; a scrub is answered with a ScrubReply now
// and then.
type DriveRequest struct {
	Version int    `json:"version"` // DriveProtocol
	Verb    string `json:"verb"`    // "add", "replace", "forget" or "scrub"
	Path    string `json:"path,omitempty"`
	Index   uint16 `json:"index"`
	Force   bool   `json:"force,omitempty"`
	Rate    uint64 `json:"rate,omitempty"` // of a scrub, in bytes a second; 0 for no bound
}

// DriveReply answers a DriveRequest.
type DriveReply struct {
	Error string `json:"error,omitempty"`
	Index uint16 `json:"index"` // of the drive that was added
}

const (
	// DriveProtocol is the version of DriveRequest.
	DriveProtocol = 1
	// driveRequestMax bounds a request: a path and little else.
	driveRequestMax = 64 << 10
	// forgetPatience is how long the readers of a drive that is being forgotten are waited for.
	forgetPatience = 2 * time.Minute
	// probeInterval is how often drives with new errors are asked whether they are there.
	probeInterval = time.Second
	// probeAllEvery is how many intervals it takes until all of them are: one that does not answer has no errors.
	probeAllEvery = 10
)

// drives is the part of the daemon that changes the volume's drives and watches over them.
type drives struct {
	d        *Daemon
	listener *net.UnixListener
	stop     context.CancelFunc
	context  context.Context
	workers  sync.WaitGroup
	changing sync.Mutex
	scrubs   sync.Mutex // held by the one that runs
}

// DriveSocketPath is where the daemon of a volume takes DriveRequests.
func DriveSocketPath(socketDir, uuid string) string { return filepath.Join(socketDir, uuid+".drives") }

// serveDrives begins to watch the drives and to take requests.
func serveDrives(d *Daemon) (*drives, error) {
	path := DriveSocketPath(d.options.SocketDir, extentmap.FormatUUID(d.volume.Info().UUID))
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("daemon: old socket: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("daemon: socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("daemon: socket: %w", err), l.Close())
	}
	s := &drives{d: d, listener: l}
	s.context, s.stop = context.WithCancel(context.Background())
	s.workers.Go(s.accept)
	s.workers.Go(s.watch)
	return s, nil
}

func (s *drives) close() error {
	s.stop()
	err := s.listener.Close()
	s.workers.Wait()
	return err
}

func (s *drives) accept() {
	for {
		conn, err := s.listener.AcceptUnix()
		if err != nil {
			select {
			case <-s.context.Done():
				return
			case <-time.After(50 * time.Millisecond): // out of descriptors, most likely
				continue
			}
		}
		s.workers.Go(func() { s.serve(conn) })
	}
}

func (s *drives) serve(conn *net.UnixConn) {
	defer conn.Close()
	defer context.AfterFunc(s.context, func() { _ = conn.Close() })()
	if cred, err := peer(conn); err != nil || cred.Uid != 0 && cred.Uid != uint32(os.Geteuid()) {
		return
	}
	_ = conn.SetReadDeadline(time.Now().Add(attachPatience))
	var r DriveRequest
	var reply DriveReply
	err := json.NewDecoder(io.LimitReader(conn, driveRequestMax)).Decode(&r)
	switch {
	case err != nil:
		err = fmt.Errorf("daemon: request: %w", err)
	case r.Version != DriveProtocol:
		err = fmt.Errorf("daemon: request of version %d; this daemon speaks %d: use the tuttifs that mounted it", r.Version,
			DriveProtocol)
	case r.Verb == "scrub":
		s.scrub(conn, r.Rate)
		return
	default:
		reply.Index, err = s.change(&r)
	}
	if err != nil {
		reply.Error = err.Error()
	}
	_ = json.NewEncoder(conn).Encode(&reply) // whoever does not wait for the answer does not get it
}

// change does what a request asks for.
func (s *drives) change(r *DriveRequest) (index uint16, err error) {
	s.changing.Lock()
	defer s.changing.Unlock()
	log := s.d.options.Log
	defer func() { log.Info("drive", "verb", r.Verb, "path", r.Path, "index", index, "error", err) }()
	switch r.Verb {
	case "add":
		return s.add(r.Path, r.Force)
	case "replace":
		if err := s.known(r.Index); err != nil {
			return 0, err
		}
		if index, err = s.add(r.Path, r.Force); err != nil {
			return 0, err
		}
		if index == r.Index {
			return index, nil // the lost drive itself is back
		}
		return index, s.forget(r.Index)
	case "forget":
		if err := s.known(r.Index); err != nil {
			return 0, err
		}
		return r.Index, s.forget(r.Index)
	}
	return 0, fmt.Errorf("daemon: no verb %q", r.Verb)
}

func (s *drives) known(index uint16) error {
	for _, d := range s.d.volume.Info().Drives {
		if d.Index == index {
			return nil
		}
	}
	return fmt.Errorf("daemon: the volume has no drive %d", index)
}

// add opens a drive and gives it to the volume. Engines that are attached do not know it: it gets no rows before the
// last of them has ended or attached anew.
func (s *drives) add(path string, force bool) (uint16, error) {
	if !filepath.IsAbs(path) && !drive.IsAddress(path) {
		return 0, fmt.Errorf("daemon: %q is not an absolute path", path)
	}
	dev, err := drive.Open(path, drive.Options{})
	if errors.Is(err, drive.ErrBusy) && s.ours(path) {
		dev, err = drive.Open(path, drive.Options{NoLock: true})
	}
	if err != nil {
		return 0, err
	}
	dev = &mountedDrive{Drive: dev}
	index, err := s.d.volume.AddDrive(dev, extentmap.AddOptions{Force: force, Hold: true})
	if err != nil {
		return 0, errors.Join(err, dev.Close())
	}
	s.d.options.begin(dev, index)
	if err := s.d.control.addDrive(dev, index); err != nil {
		return index, err
	}
	return index, nil
}

// ours says whether the lock on a drive may be our own: it is a member that was lost, and is still open.
func (s *drives) ours(path string) bool {
	for _, d := range s.d.volume.Info().Drives {
		if d.State != extentmap.DriveLost || d.Name == "" {
			continue
		}
		a, errA := os.Stat(path)
		b, errB := os.Stat(d.Name)
		if errA == nil && errB == nil && os.SameFile(a, b) {
			return true
		}
	}
	return false
}

func (s *drives) forget(index uint16) error {
	ctx, cancel := context.WithTimeoutCause(s.context, forgetPatience,
		fmt.Errorf("gave up after %v; the drive takes no new files, ask again", forgetPatience))
	defer cancel()
	s.d.control.dropDrive(index)
	return s.d.store.ForgetDrive(ctx, index)
}

// watch looks after drives that fail, and lets drives have rows that were added.
func (s *drives) watch() {
	tick := time.NewTicker(probeInterval)
	defer tick.Stop()
	seen := map[uint16]uint64{}
	states := map[uint16]extentmap.DriveState{}
	var probing [extentmap.MaxDrives]atomic.Bool
	for n := 0; ; n++ {
		select {
		case <-s.context.Done():
			return
		case <-tick.C:
		}
		controllers := s.d.control.Controllers()
		for _, d := range s.d.volume.Info().Drives {
			errs := d.ReadErrors + d.WriteErrors
			if c := controllers[d.Index]; c != nil {
				st := c.Stats()
				errs += st.Errors - min(st.Refused, st.Errors)
			}
			if (errs > seen[d.Index] || n%probeAllEvery == 0) && probing[d.Index].CompareAndSwap(false, true) {
				seen[d.Index] = errs
				s.workers.Go(func() {
					defer probing[d.Index].Store(false)
					if err := s.d.volume.Probe(d.Index); err != nil {
						s.d.options.Log.Error("drive", "index", d.Index, "name", d.Name, "error", err)
					}
				})
			}
			if d.State != states[d.Index] {
				states[d.Index] = d.State
				s.d.options.Log.Warn("drive", "index", d.Index, "name", d.Name, "state", d.State.String(), "cause", d.Cause)
			}
			if d.Held && s.d.control.allKnow(d.Index) {
				s.d.volume.Release(d.Index)
			}
		}
	}
}

// addDrive makes a controller for a drive that was added, or that came back by another way. Sessions that attach from
// now on have queues to it.
func (c *Control) addDrive(dev drive.Drive, index uint16) error {
	dc, err := newController(dev, index, false, c.o)
	if err != nil {
		return err
	}
	c.choose(dc)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drives = append(without(c.drives, index), dc)
	return nil
}

// dropDrive takes a drive from sessions that attach from now on.
func (c *Control) dropDrive(index uint16) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drives = without(c.drives, index)
}

// without copies the list: members keep the one that they began with.
func without(list []driveController, index uint16) []driveController {
	var out []driveController
	for _, d := range list {
		if d.index != index {
			out = append(out, d)
		}
	}
	return out
}

// driveList is what sessions that attach now have queues to.
func (c *Control) driveList() []driveController {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.drives
}

// allKnow says whether every attached process has queues to the controller that a drive has now.
func (c *Control) allKnow(index uint16) bool {
	var now *emu.Controller
	for _, d := range c.driveList() {
		if d.index == index {
			now = d.controller
		}
	}
	for _, m := range c.liveMembers() {
		m.setup.Lock()
		attached, knows := len(m.lanes) > 0, false
		for _, d := range m.drives {
			knows = knows || d.controller == now
		}
		m.setup.Unlock()
		if attached && !knows {
			return false
		}
	}
	return true
}
