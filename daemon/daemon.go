// Package daemon is a running mount: volume, store, virtual controllers, the sessions' shared memory, FUSE tree and
// metrics joined together. It ends when the mount goes away or when its context does, and leaves a clean label in both
// cases.
package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/fs"
	"tuttifs/gpufile"
	"tuttifs/nvme/emu"
	"tuttifs/phase"
	"tuttifs/wear"
)

// Options of Run. Zero fields take defaults.
type Options struct {
	Paths             []string // drives of the volume; the others are found beside them
	Dir               string   // mount point
	Version           string   // of this program
	ReadOnly          bool
	Degraded          bool          // mount without drives that are missing
	DriveTimeout      time.Duration // for one operation of a drive; 0: 30 s
	Discard           *bool         // nil: on for block devices, off for files
	CheckpointSeconds int           // 0: 30
	Policy            string        // "": lru
	Admission         wear.GateOptions
	Quotas            map[uint32]uint64 // of tenants, bytes; 0 for none
	Endurance         wear.Ratings      // of the drives, for the status
	Pollers           int               // polling threads of a process in its session; 0: by drives and cores
	Backend           emu.Backend       // way of engines' commands to the drives
	Profiles          DriveProfiles     // of modelled drives
	Phases            phase.Options     // of reads and writes on each drive; Stuck follows from DriveTimeout
	Real              Trust             // whose engines may have queue pairs of the SSDs themselves
	SocketDir         string            // for engines' attachments; "": /run/tuttifs
	MetricsAddress    string            // "" for none
	NoXattr           bool
	AllowOther        bool
	UID, GID          uint32
	Umask             uint32        // taken off 0777
	EntryTimeout      time.Duration // 0: the kernel keeps nothing
	AttrTimeout       time.Duration
	Log               *slog.Logger
	// Ready is called once, when the mount is usable.
	Ready func()
}

// Daemon is a mount and what it needs.
type Daemon struct {
	options Options
	started time.Time
	volume  *extentmap.Volume
	store   *gpufile.Store
	control *Control
	server  *fs.Server
	serving atomic.Pointer[fs.Server] // server, once mounted: status and metrics may be asked for before
	metrics *metricsServer
	drives  *drives
	wear    *wearWatch
}

func (o *Options) fill() {
	if o.Policy == "" {
		o.Policy = "lru"
	}
	if o.SocketDir == "" {
		o.SocketDir = defaultSocketDir()
	}
	if o.CheckpointSeconds == 0 {
		o.CheckpointSeconds = 30
	}
	if o.DriveTimeout == 0 {
		o.DriveTimeout = 30 * time.Second
	}
	o.Phases = o.Phases.WithDefaults()
	o.Phases.Stuck = max(min(phase.StuckDefault, o.DriveTimeout/3), 2*max(o.Phases.Patience, o.Phases.Metadata))
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
}

// defaultPollers is how many polling threads a process has in its session: one moves 5 to 14 GB/s of a drive's bytes,
// which is what an SSD does, and takes a core while it does. Several processes, as ranks are, are to leave cores to
// engines.
func defaultPollers(drives, cores int) int { return max(1, min(drives, cores/8)) }

// CheckMountPoint explains why dir cannot be mounted on.
func CheckMountPoint(dir string) error {
	// Attributes of a dead mount may still be in the kernel's cache; statfs always asks.
	var st unix.Stat_t
	var space unix.Statfs_t
	err := unix.Statfs(dir, &space)
	if err == nil {
		err = unix.Stat(dir, &st)
	}
	switch {
	case errors.Is(err, unix.ENOTCONN), errors.Is(err, unix.ECONNABORTED):
		return fmt.Errorf("%s is a mount whose daemon has died: 'tuttifs umount %s' clears it", dir, dir)
	case err != nil:
		return fmt.Errorf("%s: %w", dir, err)
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return fmt.Errorf("%s is not a directory", dir)
	}
	return nil
}

// Run mounts and serves until ctx is done or the mount is gone, and then shuts down cleanly.
func Run(ctx context.Context, o Options) (err error) {
	o.fill()
	d := &Daemon{options: o, started: time.Now()}
	if err := o.Phases.Validate(); err != nil {
		return err
	}
	if err := CheckMountPoint(o.Dir); err != nil {
		return err
	}
	// Whatever was opened is closed again, in the reverse order, however far it went.
	defer func() { err = errors.Join(err, d.close()) }()
	if err := d.open(); err != nil {
		return err
	}
	if o.Ready != nil {
		o.Ready()
	}
	o.Log.Info("mounted", "dir", o.Dir, "volume", extentmap.FormatUUID(d.volume.Info().UUID))
	gone := make(chan struct{})
	go func() { d.server.Wait(); close(gone) }()
	select {
	case <-gone:
		o.Log.Info("the mount is gone")
	case <-ctx.Done():
		o.Log.Info("asked to stop")
		d.unmount(gone)
	}
	return nil
}

func (d *Daemon) open() (err error) {
	o := &d.options
	d.volume, err = extentmap.Open(o.Paths, extentmap.Options{
		ReadOnly: o.ReadOnly, Discard: o.Discard, CheckpointSeconds: o.CheckpointSeconds, Degraded: o.Degraded,
		DriveTimeout: o.DriveTimeout, Open: func(path string, do drive.Options) (drive.Drive, error) {
			dev, err := drive.Open(path, do)
			if err != nil {
				return nil, err
			}
			return &mountedDrive{Drive: dev}, nil
		},
	})
	if err != nil {
		return err
	}
	if err := o.beginAll(d.volume); err != nil {
		return err
	}
	if err := setQuotas(d.volume, o.Quotas); err != nil {
		return err
	}
	if d.store, err = gpufile.Open(d.volume, gpufile.Options{Policy: o.Policy,
		Admission: o.Admission}); err != nil {
		return err
	}
	if o.Pollers == 0 {
		o.Pollers = defaultPollers(len(d.volume.Info().Drives), runtime.GOMAXPROCS(0))
	}
	payload := newPayload(d.volume, o.DriveTimeout)
	d.store.SetVerifier(payload.verify)
	d.control, err = NewControl(d.store, ControlOptions{
		SocketDir: o.SocketDir, Shared: o.AllowOther, Pollers: o.Pollers, Backend: o.Backend, Real: o.Real,
		Logf: func(format string, args ...any) { o.Log.Info(fmt.Sprintf(format, args...)) },
	})
	if err != nil {
		return err
	}
	if d.drives, err = serveDrives(d); err != nil {
		return err
	}
	d.wear = newWearWatch(d.volume, d.control.engineWrites,
		func(index uint16) uint64 { return payload.written[index].Load() }, drive.ReadLog, o.Endurance)
	d.wear.run()
	for _, index := range d.wear.unrated() {
		o.Log.Warn("a rating is given for a drive that the volume does not have (-o endurance)", "index", index)
	}
	if o.MetricsAddress != "" {
		if d.metrics, err = serveMetrics(d, o.MetricsAddress); err != nil {
			return err
		}
	}
	info := d.volume.Info()
	name := info.Label
	if name == "" {
		name = extentmap.FormatUUID(info.UUID)
	}
	umask, entry, attr := o.Umask, o.EntryTimeout, o.AttrTimeout
	if umask == 0 {
		umask = fs.UmaskNone
	}
	if entry == 0 {
		entry = -1
	}
	if attr == 0 {
		attr = -1
	}
	d.server, err = fs.Mount(o.Dir, d.store, fs.Options{
		Name: name, ReadOnly: o.ReadOnly, NoXattr: o.NoXattr, AllowOther: o.AllowOther, UID: o.UID, GID: o.GID, Umask: umask,
		EntryTimeout: entry, AttrTimeout: attr, Status: d.statusFiles(), Control: d.control, Payload: payload,
		Logf: func(format string, args ...any) { o.Log.Warn(fmt.Sprintf(format, args...)) },
	})
	if err != nil {
		return fmt.Errorf("mounting on %s: %w", o.Dir, err)
	}
	d.serving.Store(d.server)
	return nil
}

// Engines keep files of the mount open. When the daemon is told to stop, they are quiesced first, and the tree is
// detached if they do not let go: the end of this process ends the connection.
const (
	unmountPatience = time.Second
	unmountRetry    = 50 * time.Millisecond
)

func (d *Daemon) unmount(gone <-chan struct{}) {
	log := d.options.Log
	if err := d.control.Shutdown(); err != nil {
		log.Error("stopping sessions", "error", err)
	}
	for deadline := time.Now().Add(unmountPatience); time.Now().Before(deadline); time.Sleep(unmountRetry) {
		if d.server.Unmount(false) == nil {
			<-gone
			return
		}
	}
	log.Warn("files of the mount are open: detaching it", "dir", d.options.Dir)
	if err := d.server.Unmount(true); err != nil {
		log.Error("detaching", "error", err)
	}
	select {
	case <-gone:
	case <-time.After(unmountPatience):
	}
}

// close releases everything in the order that leaves nothing behind: no engine's command in flight, then no lease, then
// a clean label.
func (d *Daemon) close() (err error) {
	if d.metrics != nil {
		err = errors.Join(err, d.metrics.close())
	}
	if d.drives != nil {
		err = errors.Join(err, d.drives.close())
	}
	if d.wear != nil {
		d.wear.close()
	}
	if d.control != nil {
		err = errors.Join(err, d.control.Shutdown())
	}
	if d.store != nil {
		d.store.Close()
	}
	if d.volume != nil {
		err = errors.Join(err, d.volume.Close())
	}
	return err
}

// statusFiles are the generated files of /.tuttifs/.
func (d *Daemon) statusFiles() []fs.StatusFile {
	file := func(name string, document func() any) fs.StatusFile {
		return fs.StatusFile{Name: name, Content: func() []byte {
			b, err := json.MarshalIndent(document(), "", "  ")
			if err != nil {
				d.options.Log.Error("status file", "name", name, "error", err)
			}
			return append(b, '\n')
		}}
	}
	return []fs.StatusFile{
		file("version", d.versionDocument), file("volume", d.volumeDocument), file("drives", d.drivesDocument),
		file("stats", func() any { return d.stats() }), file("sessions", d.sessionsDocument),
		file("options", d.optionsDocument),
	}
}
