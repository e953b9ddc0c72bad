package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"log/syslog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tuttifs/daemon"
	"tuttifs/drive"
	"tuttifs/extentmap"
)

type mountOptions struct {
	options    []string
	metrics    string
	log        string
	foreground bool
	sloppy     bool
	fake       bool
	verbose    bool
	fsType     string
	namespace  string
	ignored    bool
}

// readyFdVariable names the pipe on which the daemon tells its parent that the mount is usable.
const readyFdVariable = "TUTTIFS_READY_FD"

func newMount() *command {
	o := &mountOptions{}
	f := newFlags("mount")
	f.StringArrayVarP(&o.options, "options", "o", nil, "mount `OPTIONS`, comma-separated (see below)")
	f.SetAnnotation("options", mayBeEmpty, nil)
	f.StringVar(&o.metrics, "metrics", "",
		"serve Prometheus metrics on this `ADDRESS`, e.g. 127.0.0.1:9464 (nothing listens by default)")
	f.StringVar(&o.log, "log", "",
		"append the daemon's log to this `FILE` (default: syslog; standard error with --foreground)")
	f.BoolVar(&o.foreground, "foreground", false, "do not become a daemon")
	f.BoolVarP(&o.sloppy, "sloppy", "s", false, "ignore unknown mount options")
	f.BoolVarP(&o.fake, "fake", "f", false, "check the arguments but do not mount")
	f.BoolVarP(&o.verbose, "verbose", "v", false, "log more")
	f.StringVarP(&o.fsType, "types", "t", "", "for mount(8): the `TYPE`, fuse.tuttifs or tuttifs")
	f.StringVarP(&o.namespace, "namespace", "N", "",
		"for mount(8): mount namespaces are entered before the helper is called")
	f.BoolVarP(&o.ignored, "no-mtab", "n", false, "for mount(8): there is no mtab")
	return &command{
		name: "mount", synopsis: "[FLAGS] SPEC... DIR", summary: "mount a volume", exits: &mountExits, flags: f,
		long: `
Mounts the volume that SPEC names on DIR and returns when it is usable; the daemon goes on in the
background until the mount is gone or it gets SIGTERM. SPEC is a drive of the volume, UUID=...,
LABEL=..., a label or UUID alone, or none with -o volume=LABEL. The volume's other drives are found
in the same directory and in those of -o search; or name them all. Drives that are just being let go
by another process are waited for, for a few seconds.

OPTIONS (-o)
` + mountOptionsHelp(),
		example: `
tuttifs mount /dev/nvme1n1 /mnt/kv -o allow_other,policy=s3fifo --metrics 127.0.0.1:9464
# in /etc/fstab:
kv0 /mnt/kv fuse.tuttifs nofail 0 0`,
		run: o.run,
	}
}

func (o *mountOptions) run(ctx context.Context, e *env, args []string) error {
	if len(args) < 2 {
		return usagef("name a drive (or UUID=, LABEL=, none) and a directory")
	}
	if o.fsType != "" && o.fsType != "tuttifs" && o.fsType != fsType {
		return usagef("type %q is not tuttifs", o.fsType)
	}
	s := newMountSettings()
	if err := s.parse(o.options, o.sloppy); err != nil {
		return err
	}
	if err := checkMetrics(ctx, o.metrics); err != nil {
		return err
	}
	specs, dir := args[:len(args)-1], args[len(args)-1]
	if err := daemon.CheckMountPoint(dir); err != nil {
		return err
	}
	paths, err := s.resolve(specs)
	if errors.Is(err, errNoVolume) {
		return fmt.Errorf("%w, or their directory with -o search=DIR", err)
	}
	if err != nil {
		return err
	}
	do := &s.daemon
	if do.Dir, err = filepath.Abs(dir); err != nil {
		return err
	}
	if do.Dir, err = filepath.EvalSymlinks(do.Dir); err != nil {
		return err
	}
	if do.SocketDir != "" {
		if do.SocketDir, err = filepath.Abs(do.SocketDir); err != nil {
			return err
		}
	}
	for _, p := range paths {
		if drive.IsAddress(p) {
			do.Paths = append(do.Paths, p)
			continue
		}
		abs, err := filepath.Abs(p)
		if err != nil {
			return err
		}
		do.Paths = append(do.Paths, abs)
	}
	do.Version, do.MetricsAddress = version, o.metrics
	switch {
	case o.fake:
		return nil
	case do.Profiles.Any() && os.Getenv(readyFdVariable) == "":
		e.warnf("drives are MODELLED (-o drive_profile): this mount is as slow as their profiles say")
	}
	switch {
	case os.Getenv(readyFdVariable) != "":
		return o.serveDetached(ctx, e, *do)
	case o.foreground:
		return o.serve(ctx, e, *do)
	}
	return detach(ctx, e)
}

// checkMetrics judges the address of --metrics, "" for none, but for whether it can be had.
func checkMetrics(ctx context.Context, address string) error {
	if address == "" {
		return nil
	}
	_, port, err := net.SplitHostPort(address)
	if err == nil {
		_, err = net.DefaultResolver.LookupPort(ctx, "tcp", port)
	}
	if err != nil {
		return usagef("--metrics %s: %v; write HOST:PORT", address, err)
	}
	return nil
}

// serve runs the daemon in this process, on this terminal.
func (o *mountOptions) serve(ctx context.Context, e *env, do daemon.Options) error {
	logger, closeLog, err := o.logger(e.stderr)
	if err != nil {
		return err
	}
	defer closeLog()
	do.Log = logger
	return runDaemon(ctx, do)
}

// Drives that are locked and mounted nowhere belong to a check, or to a daemon that umount(8) did not wait for: it is
// worth waiting for them a little.
const (
	busyPatience = 5 * time.Second
	busyRetry    = 100 * time.Millisecond
)

// runDaemon serves until the mount is gone. A volume that is mounted already is refused at once and its mount named.
func runDaemon(ctx context.Context, do daemon.Options) error {
	// Locks see neither that a file is behind a loop device nor that two devices are paths to one drive.
	if m, ok := mountOfDrive(do.Paths[0], do.ReadOnly); ok {
		return fmt.Errorf("%s is part of the volume that is mounted on %s", do.Paths[0], m.describe())
	}
	for deadline := time.Now().Add(busyPatience); ; time.Sleep(busyRetry) {
		err := daemon.Run(ctx, do)
		if !errors.Is(err, extentmap.ErrBusy) {
			return explain(err)
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			return err
		}
	}
}

// explain adds what to do to errors that are about the machine rather than about the volume.
func explain(err error) error {
	var ofDrive *extentmap.DriveError // the directory of sockets has advice of its own
	switch {
	case errors.Is(err, os.ErrPermission) && os.Geteuid() != 0:
		return fmt.Errorf("%w (mounting needs root)", err)
	case !errors.As(err, &ofDrive) && !errors.Is(err, extentmap.ErrFailed):
		return err
	case errors.Is(err, unix.EROFS):
		return fmt.Errorf("%w: the drive cannot be written; mount with -o ro", err)
	case errors.Is(err, unix.ENOSPC):
		return fmt.Errorf("%w, or mount with -o ro", explainFull(err))
	}
	return err
}

// explainFull adds what to do when a drive file cannot grow.
func explainFull(err error) error {
	if errors.Is(err, unix.ENOSPC) {
		return fmt.Errorf("%w: the filesystem that the drive file lies on is full; make room there", err)
	}
	return err
}

// serveDetached is the child: standard error is the parent's until the mount is usable, and nothing after that.
func (o *mountOptions) serveDetached(ctx context.Context, e *env, do daemon.Options) error {
	var fd int
	if _, err := fmt.Sscan(os.Getenv(readyFdVariable), &fd); err != nil {
		return usagef("%s is not a descriptor", readyFdVariable)
	}
	os.Unsetenv(readyFdVariable)
	// Started from /proc/self/exe, the process would be called exe in ps(1) and top(1). A name is not worth failing for.
	_ = os.WriteFile("/proc/self/comm", []byte("tuttifs"), 0)
	unix.CloseOnExec(fd)
	ready := os.NewFile(uintptr(fd), "ready")
	defer ready.Close()
	logger, closeLog, err := o.logger(nil)
	if err != nil {
		return err
	}
	defer closeLog()
	do.Log = logger
	served := false
	do.Ready = func() {
		served = true
		if err := leaveTerminal(); err != nil {
			logger.Error("leaving the terminal", "error", err)
		}
		if _, err := ready.WriteString("mounted\n"); err != nil {
			logger.Warn("nobody waited for the mount", "error", err)
		}
		ready.Close()
	}
	err = runDaemon(ctx, do)
	if err != nil && served {
		logger.Error("unmounted with errors", "error", err)
	}
	return err
}

// leaveTerminal lets go of the directory, the terminal and the parent's pipes.
func leaveTerminal() error {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	for fd := range 3 {
		if err := unix.Dup3(int(null.Fd()), fd, 0); err != nil {
			return err
		}
	}
	return os.Chdir("/")
}

// logger writes to the log file if one is named, else to w, else to syslog.
func (o *mountOptions) logger(w io.Writer) (*slog.Logger, func(), error) {
	level := slog.LevelInfo
	if o.verbose {
		level = slog.LevelDebug
	}
	var closer io.Closer = io.NopCloser(nil)
	switch {
	case o.log != "":
		// A pipe that nobody reads is not waited for: no signal would end that.
		f, err := os.OpenFile(o.log, os.O_APPEND|os.O_CREATE|os.O_WRONLY|unix.O_NONBLOCK, 0o640)
		switch {
		case errors.Is(err, unix.ENXIO):
			return nil, nil, fmt.Errorf("--log: %w: start what reads the pipe first, or name a regular file", err)
		case err != nil:
			return nil, nil, fmt.Errorf("--log: %w", err)
		}
		w, closer = f, f
		if err := debug.SetCrashOutput(f, debug.CrashOptions{}); err != nil {
			return nil, nil, err
		}
	case w == nil:
		s, err := syslog.New(syslog.LOG_DAEMON|syslog.LOG_INFO, "tuttifs")
		if err != nil { // no syslog here, as in most containers: --log is for those
			w = io.Discard
			break
		}
		w, closer = s, s
	}
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: level})), func() { closer.Close() }, nil
}

// detach starts this program again as the daemon, in a session of its own, and waits until it serves or has failed.
// A Go process cannot fork; starting itself with a pipe is the way that works for a static binary.
func detach(ctx context.Context, e *env) error {
	r, w, err := os.Pipe()
	if err != nil {
		return systemError{err}
	}
	defer r.Close()
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = slices.Clone(os.Args)
	cmd.Env = append(os.Environ(), readyFdVariable+"=3")
	cmd.Stderr, cmd.ExtraFiles = os.Stderr, []*os.File{w}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	w.Close()
	if err != nil {
		return systemError{fmt.Errorf("starting the daemon: %w", err)}
	}
	stop := context.AfterFunc(ctx, func() { cmd.Process.Signal(syscall.SIGTERM) })
	defer stop()
	if line, _ := io.ReadAll(r); strings.HasPrefix(string(line), "mounted") {
		return cmd.Process.Release()
	}
	err = cmd.Wait()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		return exitStatus(exit.ExitCode()) // it has said why
	}
	if err == nil {
		return &panicError{"the daemon ended before the mount was usable", debug.Stack()}
	}
	return systemError{fmt.Errorf("the daemon: %w", err)}
}
