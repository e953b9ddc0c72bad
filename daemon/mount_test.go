package daemon

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/fs"
	"tuttifs/gpufile"
	"tuttifs/ioctl"
)

// The tests below use a real mount from other processes: this binary again, as one of the helpers. The mount's own
// process must not open its files.

const helperVariable = "TUTTIFS_TEST_HELPER"

// helper functions get what the starting test passed: usually the mount point.
var helpers = map[string]func(t *testing.T, mount string) error{
	"verbs":   helpVerbs,
	"engine":  helpEngine,
	"fork":    helpFork,
	"serve":   helpServe,
	"fill":    helpFill,
	"reading": helpReading,

	"stranger": helpStranger,
}

// TestHelper is the body of helper processes.
func TestHelper(t *testing.T) {
	name, mount, ok := strings.Cut(os.Getenv(helperVariable), "=")
	if !ok {
		t.Skip("only run as a helper of other tests")
	}
	require.NoError(t, helpers[name](t, mount))
}

func needMount(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root here")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skip("no /dev/fuse")
	}
}

// mounted is a world with a real mount.
func mounted(t testing.TB, g gpufile.Options) (*world, string) {
	t.Helper()
	needMount(t)
	w := newWorld(t, g, ControlOptions{})
	dir := t.TempDir()
	w.mount(t, dir)
	return w, dir
}

func (w *world) mount(t testing.TB, dir string) { w.mountWith(t, dir, fs.Options{}) }

func (w *world) mountWith(t testing.TB, dir string, o fs.Options) {
	o.Name, o.Control = "test", w.control
	server, err := fs.Mount(dir, w.store, o)
	require.NoError(t, err)
	t.Cleanup(func() {
		err := server.Unmount(false)
		for deadline := time.Now().Add(5 * time.Second); err != nil && time.Now().Before(deadline); {
			time.Sleep(10 * time.Millisecond) // killed processes are still closing their files
			err = server.Unmount(false)
		}
		if err != nil {
			t.Errorf("unmount: %v", err)
			_ = server.Unmount(true)
			return // its connection ends with this process
		}
		server.Wait()
	})
}

// helper starts a helper process and returns the lines it prints.
func helper(t testing.TB, name, mount string) (*exec.Cmd, *bufio.Scanner) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^TestHelper$", "-test.v")
	cmd.Env = append(os.Environ(), helperVariable+"="+name+"="+mount)
	cmd.Stderr = os.Stderr
	lines := scanOutput(t, cmd)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return cmd, lines
}

func scanOutput(t testing.TB, cmd *exec.Cmd) *bufio.Scanner {
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	return bufio.NewScanner(out)
}

// say waits for a line that begins with prefix and returns the rest.
func say(t testing.TB, lines *bufio.Scanner, prefix string) string {
	t.Helper()
	var seen []string
	for lines.Scan() {
		if rest, ok := strings.CutPrefix(lines.Text(), prefix); ok {
			return rest
		}
		seen = append(seen, lines.Text())
	}
	t.Fatalf("the helper did not say %q but:\n%s", prefix, strings.Join(seen, "\n"))
	return ""
}

// TestVerbsOfAnotherProcess: the whole way through the kernel, malformed requests included.
func TestVerbsOfAnotherProcess(t *testing.T) {
	w, dir := mounted(t, gpufile.Options{NoIO: true})
	keeper := w.open(true)
	_, a := keeper.session(ioctl.AttachOptions{})
	keeper.pool(a, "p")
	cmd, lines := helper(t, "verbs", dir)
	say(t, lines, "verbs: done")
	require.NoError(t, cmd.Wait())
	require.Eventually(t, func() bool { return len(w.control.Members()) == 1 }, 10*time.Second, time.Millisecond)
	require.Equal(t, uint64(8), w.store.PoolByName("p").Stats().Files)
}

func helpVerbs(_ *testing.T, mount string) error {
	e, err := newEngine(mount)
	if err != nil {
		return err
	}
	defer e.close()
	if err := e.storeAndPin(8); err != nil {
		return err
	}
	if err := malformedThroughKernel(mount, e.c.File()); err != nil {
		return err
	}
	fmt.Println("verbs: done")
	return nil
}

// malformedThroughKernel checks what reaches the daemon through FUSE, which passes the sizes of the number.
func malformedThroughKernel(mount string, f *os.File) error {
	raw := func(fd uintptr, cmd uint32, b []byte) ioctl.Errno {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, uintptr(cmd), uintptr(unsafe.Pointer(unsafe.SliceData(b))))
		return errno
	}
	hello := func(edit func(h *ioctl.Header)) []byte {
		b := make([]byte, 16384)
		h := (*ioctl.Header)(unsafe.Pointer(&b[0]))
		*h = ioctl.Header{Size: uint32(unsafe.Sizeof(ioctl.Hello{})), Version: ioctl.Version}
		edit(h)
		return b
	}
	reader, err := ioctl.Open(mount, true)
	if err != nil {
		return err
	}
	defer reader.Close()
	dir, err := os.Open(mount)
	if err != nil {
		return err
	}
	defer dir.Close()
	for _, x := range []struct {
		name string
		want ioctl.Errno
		got  ioctl.Errno
	}{
		{"good", 0, raw(f.Fd(), ioctl.CmdHello, hello(func(*ioctl.Header) {}))},
		{"on a directory", 0, raw(dir.Fd(), ioctl.CmdHello, hello(func(*ioctl.Header) {}))},
		{"short", ioctl.EINVAL, raw(f.Fd(), ioctl.CmdHello-8<<16, hello(func(*ioctl.Header) {}))},
		{"long", ioctl.EINVAL, raw(f.Fd(), ioctl.CmdHello+8<<16, hello(func(*ioctl.Header) {}))},
		{"version", ioctl.EPROTO, raw(f.Fd(), ioctl.CmdHello, hello(func(h *ioctl.Header) { h.Version = 2 }))},
		{"size", ioctl.EINVAL, raw(f.Fd(), ioctl.CmdHello, hello(func(h *ioctl.Header) { h.Size-- }))},
		{"flags", ioctl.EINVAL, raw(f.Fd(), ioctl.CmdHello, hello(func(h *ioctl.Header) { h.Flags = 1 }))},
		{"number", ioctl.ENOTTY, raw(f.Fd(), ioctl.CmdHello|0xff, hello(func(*ioctl.Header) {}))},
		{"reader", ioctl.EBADF, raw(reader.File().Fd(), ioctl.CmdAbort, abortRequest())},
	} {
		if x.got != x.want {
			return fmt.Errorf("%s: errno %d, want %d", x.name, x.got, x.want)
		}
	}
	return nil
}

func abortRequest() []byte {
	a := ioctl.Abort{Header: ioctl.Header{Size: uint32(unsafe.Sizeof(ioctl.Abort{})), Version: ioctl.Version}}
	return append([]byte(nil), unsafe.Slice((*byte)(unsafe.Pointer(&a)), unsafe.Sizeof(a))...)
}

// engine is what helpers do with a mount.
type engine struct {
	c    *ioctl.Client
	s    ioctl.Session
	a    *ioctl.Attachment
	pool ioctl.Target
}

func newEngine(mount string) (*engine, error) {
	c, err := ioctl.Open(filepath.Join(mount, "p"), false) // no such path inside, yet the mount is found
	if err != nil {
		return nil, err
	}
	e := &engine{c: c}
	if err := c.SessionCreate(&e.s); err != nil {
		return nil, err
	}
	if e.a, err = e.s.Attach(ioctl.AttachOptions{Lanes: 2, Depth: 64, DMABytes: 1 << 20}); err != nil {
		return nil, err
	}
	return e, nil
}

func (e *engine) close() {
	_ = e.a.Close()
	_ = e.c.Close()
}

// storeAndPin stores a chain of n files, pins it, and reserves one more file.
func (e *engine) storeAndPin(n int) error {
	info := ioctl.PoolInfo{}
	ioctl.PutName(info.Name[:], "p")
	if err := e.c.PoolInfo(&info, ioctl.PoolByName); err != nil {
		return err
	}
	e.pool = info.Target
	r := ioctl.Reserve{Target: e.pool, Items: items(e.a, n), Grants: grantSpan, Reserve: 1}
	if err := again(func() error { return e.c.Reserve(&r, 0) }); err != nil {
		return err
	}
	commit := ioctl.Commit{Target: e.pool, Reserve: 1}
	if err := e.c.Commit(&commit); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if _, err := e.c.WaitTicket(ctx, e.a, commit.Ticket); err != nil {
		return err
	}
	pin := ioctl.Pin{Target: e.pool, Keys: keys(e.a, n), Grants: grantSpan, Request: 1}
	if err := e.c.Pin(&pin); err != nil {
		return err
	}
	if pin.Count != uint32(n) {
		return fmt.Errorf("%d of %d pinned", pin.Count, n)
	}
	more := ioctl.Reserve{Target: e.pool, Items: items(e.a, n+1), Grants: grantSpan, Reserve: 2}
	return again(func() error { return e.c.Reserve(&more, 0) })
}

// again repeats what says EAGAIN.
func again(f func() error) error {
	for range 1000 {
		err := f()
		if err == nil || !strings.Contains(err.Error(), ioctl.EAGAIN.Error()) {
			return err
		}
		time.Sleep(time.Millisecond)
	}
	return f()
}

func helpEngine(_ *testing.T, mount string) error {
	e, err := newEngine(mount)
	if err != nil {
		return err
	}
	if err := e.storeAndPin(8); err != nil {
		return err
	}
	fmt.Println("engine: ready", 0)
	select {}
}

// helpFork is helpEngine with a child that keeps the control file and the socket open.
func helpFork(_ *testing.T, mount string) error {
	e, err := newEngine(mount)
	if err != nil {
		return err
	}
	if err := e.storeAndPin(8); err != nil {
		return err
	}
	child := exec.Command("sleep", "600")
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	for _, n := range names {
		target, _ := os.Readlink("/proc/self/fd/" + n.Name())
		if !strings.HasPrefix(target, "socket:") && !strings.HasPrefix(target, mount) {
			continue
		}
		fd, _ := strconv.Atoi(n.Name())
		dup, err := unix.Dup(fd)
		if err != nil {
			return err
		}
		child.ExtraFiles = append(child.ExtraFiles, os.NewFile(uintptr(dup), target))
	}
	if len(child.ExtraFiles) < 2 {
		return fmt.Errorf("control file and socket not found among %d descriptors", len(names))
	}
	if err := child.Start(); err != nil {
		return err
	}
	fmt.Println("engine: ready", child.Process.Pid)
	select {}
}

// TestKillFreesEverything (invariant i): kill -9 of an engine leaves no member, pin, reservation, descriptor or
// mapping behind, even where a child of it lives on with all its descriptors.
func TestKillFreesEverything(t *testing.T) {
	w, dir := mounted(t, gpufile.Options{NoIO: true})
	keeper := w.open(true)
	_, a := keeper.session(ioctl.AttachOptions{})
	keeper.pool(a, "p")
	p := w.store.PoolByName("p")
	sessions := len(w.store.Sessions())
	for _, name := range []string{"engine", "fork"} {
		t.Run(name, func(t *testing.T) {
			fds, shared := descriptorCount(t), sharedMappings(t)
			cmd, lines := helper(t, name, dir)
			child, err := strconv.Atoi(say(t, lines, "engine: ready "))
			require.NoError(t, err)
			if child != 0 {
				t.Cleanup(func() { _ = unix.Kill(child, unix.SIGKILL) })
			}
			require.Equal(t, uint64(8), p.Stats().FilesPinned)
			require.Equal(t, uint64(1), p.Stats().FilesReserved)
			require.Len(t, w.control.Members(), 2)
			require.NoError(t, cmd.Process.Kill())
			_ = cmd.Wait()
			require.Eventually(t, func() bool { return len(w.control.Members()) == 1 }, 10*time.Second, time.Millisecond)
			require.Len(t, w.store.Sessions(), sessions)
			require.Zero(t, p.Stats().FilesPinned)
			require.Zero(t, p.Stats().FilesReserved)
			require.Equal(t, shared, sharedMappings(t))
			if child != 0 {
				require.NoError(t, unix.Kill(child, 0), "the child lives")
				require.NoError(t, unix.Kill(child, unix.SIGKILL))
			}
			require.Eventually(t, func() bool { return descriptorCount(t) <= fds }, 10*time.Second, time.Millisecond)
			require.Eventually(t, func() bool { return handleCount(w.control) == 1 }, 10*time.Second, time.Millisecond)
		})
	}
}

func handleCount(c *Control) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.handles)
}

func descriptorCount(t testing.TB) int {
	names, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(names)
}

// sharedMappings counts this process's mappings of sessions' memory.
func sharedMappings(t testing.TB) int {
	maps, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	return strings.Count(string(maps), "memfd:tuttifs-")
}

// TestDocExample builds the worked example of docs/abi.md and runs it against a mount that has its two keys.
func TestDocExample(t *testing.T) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler here")
	}
	w, dir := mounted(t, gpufile.Options{NoIO: true})
	c := w.open(true)
	_, a := c.session(ioctl.AttachOptions{})
	pool := c.pool(a, "p")
	r := ioctl.Reserve{Target: pool, Items: items(a, 2), Grants: grantSpan, Reserve: 1}
	two := ioctl.View[ioctl.ReserveItem](a.Arena, r.Items)
	for i := range two[0].Key {
		two[0].Key[i], two[1].Parent[i], two[1].Key[i] = 0x11, 0x11, 0x22
	}
	c.reserve(&r)
	commit := ioctl.Commit{Target: pool, Reserve: 1}
	require.Zero(t, issue(c, ioctl.CmdCommit, &commit, 0))
	require.Zero(t, c.wait(commit.Ticket).Errno)

	text, err := os.ReadFile("../docs/abi.md")
	require.NoError(t, err)
	_, rest, _ := strings.Cut(string(text), "```c\n")
	program, _, _ := strings.Cut(rest, "```\n")
	tmp := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(tmp, "example.c"), []byte(program), 0o644))
	out, err := exec.Command(cc, "-std=c11", "-I../include", "-o", filepath.Join(tmp, "example"),
		filepath.Join(tmp, "example.c")).CombinedOutput()
	require.NoError(t, err, "%s", out)
	out, err = exec.Command(filepath.Join(tmp, "example"), filepath.Join(dir, ioctl.ControlPath), "p").CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "2 of 2 blocks are present\n")
	require.Equal(t, 2, strings.Count(string(out), "slot "))
}
