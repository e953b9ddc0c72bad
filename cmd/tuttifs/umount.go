package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"tuttifs/daemon"
	"tuttifs/drive"
	"tuttifs/extentmap"
)

type umountOptions struct{ lazy bool }

// daemonExitMax bounds the wait for the daemon of an unmounted volume.
const daemonExitMax = time.Minute

func newUmount() *command {
	o := &umountOptions{}
	f := newFlags("umount")
	f.BoolVarP(&o.lazy, "lazy", "l", false,
		"detach now, even if it is busy or its daemon is dead; the daemon ends when the last file is closed")
	return &command{
		name: "umount", synopsis: "[FLAGS] DIR", summary: "unmount, and wait until the drives are released",
		exits: &plainExits, flags: f,
		long: `
Unmounts DIR and returns when the daemon has written a clean label and released the drives, so that
the volume can be checked or mounted again at once. Plain umount(8) works too; it does not wait for
the daemon. When the mount is busy, its users are named. A mount whose daemon has died is unmounted as
well, which succeeds and is said; the next mount replays the journal.`,
		example: `tuttifs umount /mnt/kv`,
		run:     o.run,
	}
}

func (o *umountOptions) run(ctx context.Context, e *env, args []string) error {
	if len(args) != 1 {
		return usagef("name one mount point")
	}
	entry, ok := findMount(args[0])
	if !ok {
		return fmt.Errorf("%s is not a tuttifs mount", args[0])
	}
	var volume mountedVolume
	var pidfd int
	var unseen error
	if !o.lazy { // a daemon that is stuck would never say anything
		volume = readMountedVolume(entry.dir)
		if pidfd, unseen = openDaemon(entry.dir); unseen == nil {
			defer unix.Close(pidfd)
		}
	}
	flags := unix.UMOUNT_NOFOLLOW
	if o.lazy {
		flags |= unix.MNT_DETACH
	}
	switch err := unix.Unmount(entry.dir, flags); {
	case errors.Is(err, unix.EBUSY):
		return busyError(entry.dir)
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("unmounting %s: %w (it needs root)", entry.dir, err)
	case errors.Is(err, unix.EINVAL):
		return fmt.Errorf("%s is not mounted any more: somebody else was faster", entry.dir)
	case err != nil:
		return fmt.Errorf("unmounting %s: %w", entry.dir, err)
	}
	switch {
	case o.lazy:
		return nil
	case errors.Is(unseen, errDaemonDead):
		e.warnf("%s is unmounted; its daemon had died. Nothing that was committed is lost: the next mount of %s replays the "+
			"journal, and 'tuttifs fsck -n DRIVE' checks it", entry.dir, entry.source)
		return nil
	case unseen != nil:
		e.warnf("%s is unmounted; its daemon may have the drives for a while yet: %v", entry.dir, unseen)
		return nil
	}
	if err := waitDaemon(ctx, pidfd); err != nil {
		return err
	}
	return volume.checkClean()
}

// mountedVolume is what a mount says about its volume before it is unmounted.
type mountedVolume struct {
	volume daemon.VolumeDocument
	drive  string // whose label can be read from here; "" for none
}

func readMountedVolume(dir string) mountedVolume {
	m := liveMount{dir: dir}
	if readStatus(dir, "volume", &m.volume) != nil {
		return mountedVolume{} // its daemon is dead or dying: then nothing is expected of it
	}
	for _, path := range m.drives() {
		if drive.IsAddress(path) { // it is its daemon's until that ends
			return mountedVolume{m.volume, path}
		}
		label, err := readLabel(path) // in a container, it may have another name, or none
		if err == nil && extentmap.FormatUUID(label.Volume) == m.volume.UUID {
			return mountedVolume{m.volume, path}
		}
	}
	return mountedVolume{volume: m.volume}
}

// checkClean looks at a label that the daemon should have marked clean, unless somebody has mounted the volume again.
func (v *mountedVolume) checkClean() error {
	if v.volume.ReadOnly || v.drive == "" {
		return nil
	}
	label, err := readLabel(v.drive)
	if err == nil && (label.Clean || label.Epoch != v.volume.Epoch) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("unmounted, but %s cannot be read any more: %w", v.drive, err)
	}
	return fmt.Errorf("unmounted, but the daemon could not finish writing: its log says why. Nothing that was "+
		"committed is lost: the next mount replays the journal, and 'tuttifs fsck -n %s' checks it", v.drive)
}

// openDaemon returns a pidfd of the daemon behind a mount.
func openDaemon(dir string) (int, error) {
	pid, err := daemonProcess(dir)
	if err != nil {
		return 0, err
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) { // it died this moment, or /proc is of a PID namespace around this one
		_, err = daemonProcess(dir)
		return 0, cmp.Or(err, errElsewhere)
	}
	return fd, err
}

func waitDaemon(ctx context.Context, pidfd int) error {
	for deadline := time.Now().Add(daemonExitMax); time.Now().Before(deadline); {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 100)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		if n > 0 {
			return nil
		}
	}
	return fmt.Errorf("unmounted, but the daemon is still busy after %v: see its log", daemonExitMax)
}

// busyError names the processes that hold files below dir.
func busyError(dir string) error {
	users := mountUsers(dir)
	if len(users) == 0 {
		return fmt.Errorf("%s is busy: another mount namespace or a nested mount holds it; 'tuttifs umount -l' "+
			"detaches it", dir)
	}
	return fmt.Errorf("%s is busy: %s; close these or use 'tuttifs umount -l'", dir, strings.Join(users, ", "))
}

// mountUsers lists processes with a file, directory or mapping of the mount, as "NAME (pid N)".
func mountUsers(dir string) (users []string) {
	prefix := strings.TrimSuffix(dir, "/") + "/"
	inside := func(link string) bool {
		target, err := os.Readlink(link)
		return err == nil && (target == dir || strings.HasPrefix(target, prefix))
	}
	procs, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	for _, p := range procs {
		pid, err := strconv.Atoi(p.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		base := filepath.Join("/proc", p.Name())
		if inside(base+"/cwd") || inside(base+"/root") || inside(base+"/exe") || anyInside(base+"/fd", inside) ||
			anyInside(base+"/map_files", inside) {
			name, _ := os.ReadFile(base + "/comm")
			users = append(users, fmt.Sprintf("%s (pid %d)", strings.TrimSpace(string(name)), pid))
		}
	}
	return users
}

func anyInside(dir string, inside func(string) bool) bool {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return false
	}
	for _, e := range entries {
		if inside(filepath.Join(dir, e.Name())) {
			return true
		}
	}
	return false
}
