package daemon

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/extentmap"
	"tuttifs/fs"
	"tuttifs/gpufile"
	"tuttifs/ioctl"
)

// stranger is a user without any rights: "nobody" of most systems.
const stranger = 65534

// userWorld is what the stranger is told: where things are, and what it should not have learned.
type userWorld struct {
	Mount, File   string
	Socket, Admin string // the attach socket, and that of 'tuttifs drive'
	Session       ioctl.Session
	Pool          ioctl.Target
}

// helpStranger tries what a user could try, and prints how each attempt ended.
func helpStranger(_ *testing.T, arg string) error {
	var u userWorld
	if err := json.Unmarshal([]byte(arg), &u); err != nil {
		return err
	}
	said := map[string]string{}
	note := func(what string, err error) {
		var errno unix.Errno
		switch {
		case err == nil:
			said[what] = ""
		case errors.As(err, &errno):
			said[what] = unix.ErrnoName(errno)
		default:
			said[what] = err.Error()
		}
	}
	open := func(what, path string, flags int) *os.File {
		f, err := os.OpenFile(path, flags, 0o600)
		note(what, err)
		return f
	}
	_, err := os.ReadDir(u.Mount)
	note("list", err)
	open("read", u.File, os.O_RDONLY).Close()
	open("write", u.File, os.O_WRONLY).Close()
	fresh := filepath.Join(filepath.Dir(u.File), "..", "ab", strings.Repeat("ab", 32))
	open("create", fresh, os.O_WRONLY|os.O_CREATE).Close()
	note("chmod", os.Chmod(u.File, 0o777))
	note("setxattr", unix.Setxattr(u.File, "user.x", []byte("y"), 0))
	control := filepath.Join(u.Mount, ioctl.ControlPath)
	open("control to write", control, os.O_RDWR).Close()
	if f := open("control to read", control, os.O_RDONLY); f != nil {
		c := ioctl.NewClient(f)
		note("hello", c.Hello(&ioctl.Hello{}))
		note("session, reading", c.SessionCreate(&ioctl.Session{}))
		note("evict, reading", c.Evict(&ioctl.Evict{Target: u.Pool, Count: 1}, ioctl.EvictCount))
		f.Close()
	}
	note("remove", os.Remove(u.File))
	if f, err := os.OpenFile(control, os.O_RDWR, 0); err == nil {
		c, stolen := ioctl.NewClient(f), u.Session
		note("join", c.SessionJoin(&stolen))
		note("evict", c.Evict(&ioctl.Evict{Target: u.Pool, Count: 1}, ioctl.EvictCount))
		f.Close()
	}
	stolen := u.Session
	_, err = stolen.Attach(ioctl.AttachOptions{})
	note("attach", err)
	_, err = net.Dial("unix", u.Admin)
	note("drives", err)
	_, err = os.ReadDir(filepath.Dir(u.Socket))
	note("sockets", err)
	b, err := json.Marshal(said)
	if err != nil {
		return err
	}
	fmt.Printf("stranger: %s\n", b)
	return nil
}

// TestSecondUser: another user of the machine, who even knows another's token, can do what the modes of the mount's
// files allow, and nothing else.
func TestSecondUser(t *testing.T) {
	needMount(t)
	// The stranger must reach this program and the mount point: directories for tests are their maker's alone.
	dir, err := os.MkdirTemp("", "tuttifs-user-")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	require.NoError(t, os.Chmod(dir, 0o755))
	program := filepath.Join(dir, "test")
	copyFile(t, os.Args[0], program)

	denied := map[string]string{"list": "EACCES", "read": "EACCES", "write": "EACCES", "create": "EACCES",
		"chmod": "EACCES", "setxattr": "EACCES", "control to write": "EACCES", "control to read": "EACCES",
		"attach": "EACCES", "drives": "EACCES", "sockets": "EACCES", "remove": "EACCES"}
	with := func(changes map[string]string) map[string]string {
		m := map[string]string{}
		for _, from := range []map[string]string{denied, changes} {
			for k, v := range from {
				m[k] = v
			}
		}
		return m
	}
	for _, x := range []struct {
		name   string
		others bool
		umask  uint32
		want   map[string]string
	}{
		{"not allowed", false, fs.UmaskNone, denied},
		{"no modes", true, 0o077, with(map[string]string{"attach": "EPERM"})},
		{"reading", true, 0o022, with(map[string]string{"attach": "EPERM", "list": "", "read": "", "chmod": "EPERM",
			"control to read": "", "hello": "", "session, reading": "EBADF", "evict, reading": "EBADF"})},
		{"writing", true, fs.UmaskNone, with(map[string]string{"attach": "EPERM", "list": "", "read": "", "write": "EPERM",
			"create": "", "chmod": "EPERM", "setxattr": "ENOTSUP", "control to read": "", "hello": "",
			"session, reading": "EBADF", "evict, reading": "EBADF", "control to write": "", "join": "ESTALE", "evict": "",
			"remove": ""})},
	} {
		t.Run(x.name, func(t *testing.T) {
			w := newWorld(t, gpufile.Options{NoIO: true}, ControlOptions{Shared: x.others})
			d := &Daemon{options: Options{SocketDir: socketDir(t)}, volume: w.volume, store: w.store, control: w.control}
			require.NoError(t, os.Chmod(d.options.SocketDir, 0o711))
			d.options.fill()
			admin, err := serveDrives(d)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, admin.close()) })
			mount, err := os.MkdirTemp(dir, "")
			require.NoError(t, err)
			w.mountWith(t, mount, fs.Options{AllowOther: x.others, Umask: x.umask, Payload: newPayload(w.volume, time.Minute)})

			c := w.open(true)
			s, a := c.session(ioctl.AttachOptions{})
			pool := c.pool(a, "p")
			c.store(a, pool, 1, 2)
			name := fmt.Sprintf("%x", key(1))
			u := userWorld{Mount: mount, Socket: w.control.SocketPath(), Session: *s, Pool: pool,
				File:  filepath.Join(mount, "p", "blocks", name[:2], name),
				Admin: DriveSocketPath(d.options.SocketDir, extentmap.FormatUUID(w.volume.Info().UUID))}
			arg, err := json.Marshal(&u)
			require.NoError(t, err)
			cmd := exec.Command(program, "-test.run=^TestHelper$", "-test.v")
			cmd.Dir = "/"
			cmd.Env = append(os.Environ(), helperVariable+"=stranger="+string(arg))
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: stranger, Gid: stranger}}
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s", out)
			_, line, ok := strings.Cut(string(out), "stranger: ")
			require.True(t, ok, "%s", out)
			line, _, _ = strings.Cut(line, "\n")
			var said map[string]string
			require.NoError(t, json.Unmarshal([]byte(line), &said))
			require.Equal(t, x.want, said)
		})
	}
}

func copyFile(t *testing.T, from, to string) {
	in, err := os.Open(from)
	require.NoError(t, err)
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE, 0o755)
	require.NoError(t, err)
	_, err = io.Copy(out, in)
	require.NoError(t, err)
	require.NoError(t, out.Close())
}
