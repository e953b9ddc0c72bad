package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"tuttifs/daemon"
	"tuttifs/drive"
	"tuttifs/extentmap"
)

// fsType is the type under which the kernel lists our mounts.
const fsType = "fuse.tuttifs"

// mountEntry is one line of /proc/self/mounts.
type mountEntry struct{ source, dir, kind, options string }

// readMounts lists the mounts of this process's namespace, the newest last.
func readMounts() ([]mountEntry, error) {
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, err
	}
	return parseMounts(string(b)), nil
}

// parseMounts reads lines of proc_pid_mounts(5), which may be of any length. Single spaces part the fields: they may be
// empty, or have other white space in them.
func parseMounts(text string) (out []mountEntry) {
	for line := range strings.SplitSeq(text, "\n") {
		if w := strings.Split(line, " "); len(w) >= 4 {
			out = append(out, mountEntry{unescape(w[0]), unescape(w[1]), w[2], w[3]})
		}
	}
	return out
}

// escape is how the kernel writes what would part fields or lines.
var escape = regexp.MustCompile(`\\[0-3][0-7]{2}`)

func unescape(s string) string {
	return escape.ReplaceAllStringFunc(s, func(e string) string {
		n, _ := strconv.ParseUint(e[1:], 8, 8) // it is such a number
		return string([]byte{byte(n)})
	})
}

// byOthers says whether neither root nor this user made the mount: anybody may make one of our type, which may then say
// anything, or nothing ever.
func (m mountEntry) byOthers() bool {
	for option := range strings.SplitSeq(m.options, ",") {
		if id, ok := strings.CutPrefix(option, "user_id="); ok {
			return id != "0" && id != strconv.Itoa(os.Geteuid())
		}
	}
	return true
}

// findMount returns the mount on dir if it is of our type: one below another is out of reach. It touches the mount
// itself only if that is a symbolic link's target, because a daemon that is stuck would never answer.
func findMount(dir string) (mountEntry, bool) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return mountEntry{}, false
	}
	mounts, err := readMounts()
	if err != nil {
		return mountEntry{}, false
	}
	on := func(dir string) (mountEntry, bool) {
		for _, m := range slices.Backward(mounts) {
			if m.dir == dir {
				return m, m.kind == fsType
			}
		}
		return mountEntry{}, false
	}
	if m, ok := on(abs); ok {
		return m, true
	}
	parent, err := filepath.EvalSymlinks(filepath.Dir(abs))
	if err != nil {
		return mountEntry{}, false
	}
	abs = filepath.Join(parent, filepath.Base(abs))
	if m, ok := on(abs); ok {
		return m, true
	}
	if abs, err = filepath.EvalSymlinks(abs); err != nil {
		return mountEntry{}, false
	}
	return on(abs)
}

// liveMount is a mount that answers.
type liveMount struct {
	dir    string
	volume daemon.VolumeDocument
}

// describe names the mount in messages, with its daemon's process if that can be seen from here.
func (m liveMount) describe() string {
	pid, err := daemonProcess(m.dir)
	if err != nil {
		return m.dir
	}
	return fmt.Sprintf("%s (pid %d)", m.dir, pid)
}

// drives are the names of the volume's drives, lost ones not among them.
func (m liveMount) drives() (names []string) {
	var doc daemon.DrivesDocument
	if readStatus(m.dir, "drives", &doc) != nil {
		return nil // unmounted meanwhile
	}
	for _, d := range doc.Drives {
		if d.State != "lost" {
			names = append(names, d.Name)
		}
	}
	return names
}

// liveMounts lists our mounts that answer, of those whose source, a label or a UUID, is of interest: others may be
// stuck. A dead one holds no drives, and one that may not be asked does not say.
func liveMounts(interest func(source string) bool) (list []liveMount) {
	mounts, err := readMounts()
	if err != nil {
		return nil
	}
	for _, m := range mounts {
		if m.kind != fsType || m.byOthers() || !interest(m.source) {
			continue
		}
		live := liveMount{dir: m.dir}
		if readStatus(m.dir, "volume", &live.volume) == nil {
			list = append(list, live)
		}
	}
	return list
}

// mountOfDrive finds the mount of the volume that a drive belongs to. Readers do not mind other readers. The label of a
// controller's namespace is not read, because a controller is no two processes' at once: its mount names it.
func mountOfDrive(path string, reader bool) (m liveMount, ok bool) {
	uuid, interest := "", func(string) bool { return true }
	if !drive.IsAddress(path) {
		label, err := readLabel(path)
		if err != nil {
			return m, false
		}
		uuid = extentmap.FormatUUID(label.Volume)
		interest = func(source string) bool { return source == label.Name || source == uuid }
	}
	for _, m := range liveMounts(interest) {
		ours := m.volume.UUID == uuid || uuid == "" && slices.Contains(m.drives(), path)
		if ours && !(reader && m.volume.ReadOnly) {
			return m, true
		}
	}
	return m, false
}

func sameFile(a, b string) bool {
	x, err := os.Stat(a)
	if err != nil {
		return false
	}
	y, err := os.Stat(b)
	return err == nil && os.SameFile(x, y)
}

// refuseLoop reports a regular file that a loop device shows: whatever uses the device would be overwritten.
func refuseLoop(path string) error {
	file, err := os.Stat(path)
	if err != nil || !file.Mode().IsRegular() {
		return nil
	}
	backings, _ := filepath.Glob("/sys/block/loop*/loop/backing_file") // the pattern is well formed
	for _, b := range backings {
		name, err := os.ReadFile(b)
		if err != nil {
			continue // detached meanwhile
		}
		if other, err := os.Stat(strings.TrimSuffix(string(name), "\n")); err == nil && os.SameFile(file, other) {
			device := "/dev/" + filepath.Base(filepath.Dir(filepath.Dir(b)))
			return fmt.Errorf("%s is the file behind %s: name that, or detach it with losetup -d %s", path, device, device)
		}
	}
	return nil
}

// refuseMounted reports a block device that some filesystem is mounted from, or swap lies on, and the file behind a
// loop device.
func refuseMounted(path string) error {
	var want unix.Stat_t
	if err := unix.Stat(path, &want); err != nil || want.Mode&unix.S_IFMT != unix.S_IFBLK {
		return refuseLoop(path)
	}
	same := func(p string) bool {
		var st unix.Stat_t
		return strings.HasPrefix(p, "/") && unix.Stat(p,
			&st) == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK && st.Rdev == want.Rdev
	}
	mounts, err := readMounts()
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if m.kind != fsType && same(m.source) {
			return fmt.Errorf("%s is mounted on %s: unmount it first", path, m.dir)
		}
	}
	swaps, err := os.ReadFile("/proc/swaps")
	if err != nil {
		return nil // no swap support in this kernel
	}
	for _, line := range strings.Split(string(swaps), "\n") {
		if name, _, _ := strings.Cut(line, " "); same(unescape(name)) {
			return fmt.Errorf("%s is in use as swap: swapoff it first", path)
		}
	}
	return nil
}
