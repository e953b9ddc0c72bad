package fs

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/gpufile"
	"tuttifs/stripe"
)

// Real mounts are served by a process of their own, this test binary run again: a process that uses its own mount can
// hang beyond rescue. The server ends with its standard input, so it outlives no test, however that ends.

const serveEnv = "TUTTIFS_FS_TEST_SERVE"

// scene is what a server process mounts.
type scene struct {
	Dir      string
	ReadOnly bool
	NoXattr  bool
	Others   bool // allow_other, and files that everyone may read
	Limit    int
	Files    int    // in a pool of tiny files, all without children
	Big      bool   // files of 32 MiB in a pool "big", one stored
	Baseline string // another directory, where the bytes of big's file are served by the least that FUSE can do
	Procs    int
	Real     bool // a real store on drives in memory, instead of the stand-in
}

// pools is what a server process changes behind the mount's back, at the test's word.
type pools interface {
	// Do is given "damage" (one object of the file), "unlink", or "files" (how many there are).
	Do(word string, key gpufile.Key) any
}

// openReal opens a real store; set by the test package that may import the rooms which this one may not.
var openReal func(s scene) (store *gpufile.Store, payload Payload, p pools, end func() error, err error)

func TestMain(m *testing.M) {
	if text := os.Getenv(serveEnv); text != "" {
		var s scene
		if err := json.Unmarshal([]byte(text), &s); err != nil {
			panic(err)
		}
		if err := serve(s); err != nil {
			fmt.Println("failed:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// tinyGeometry is a file of 132 bytes.
func tinyGeometry() stripe.Geometry {
	return stripe.Geometry{Objects: []stripe.Object{{Runs: []stripe.Run{{Kind: stripe.RunIndexer,
		Bytes: 132}}}}}.WithTrailers()
}

const bigFile = 32 << 20

// bigGeometry is a file of 32 MiB in objects of 128 KiB.
func bigGeometry() stripe.Geometry {
	g := stripe.Geometry{}
	for layer := range uint16(256) {
		g.Objects = append(g.Objects, stripe.Object{Layer: layer, Runs: []stripe.Run{{Kind: stripe.RunKV,
			Bytes: 128 << 10}}})
	}
	return g.WithTrailers()
}

func serve(s scene) (err error) {
	if s.Procs > 0 {
		runtime.GOMAXPROCS(s.Procs)
	}
	o := Options{Name: "test", ReadOnly: s.ReadOnly, NoXattr: s.NoXattr, Control: &fakeControl{},
		Status: []StatusFile{{"fault", func() []byte { panic("a fault") }},
			{"version", func() []byte { return []byte("1\n") }}}}
	if s.Others {
		o.AllowOther, o.Umask = true, 0o022
	}
	var m *Server
	var p pools
	if s.Real {
		store, payload, real, end, err := openReal(s)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, end()) }()
		o.Payload, p = payload, real
		if m, err = Mount(s.Dir, store, o); err != nil {
			return err
		}
	} else {
		b, err := fakeScene(s)
		if err != nil {
			return err
		}
		p = b.list[0]
		if m, err = mount(s.Dir, b, o); err != nil {
			return err
		}
	}
	if s.Baseline != "" {
		unmount, err := Baseline(s.Baseline, testPayload(bigFile, 1))
		if err != nil {
			return err
		}
		defer unmount()
	}
	debug.FreeOSMemory()
	fmt.Println("ready")
	commands(os.Stdin, m, p)
	if err := m.Unmount(false); err != nil {
		m.Unmount(true)
		return err
	}
	return nil
}

func fakeScene(s scene) (*fakeBackend, error) {
	t := &fatalTB{}
	p := newFakePool(t, 1, "llama", smallGeometry())
	p.limit = s.Limit
	b := &fakeBackend{list: []*fakePool{p}}
	if s.Files > 0 {
		many := newFakePool(t, 2, "many", tinyGeometry())
		for i := range s.Files {
			if _, err := many.add(gpufile.ReserveItem{Key: testKey(byte(i), i), Tokens: 1}, 0, nil); err != nil {
				return nil, err
			}
		}
		b.list = append(b.list, many)
	}
	if s.Big {
		big := newFakePool(t, 3, "big", bigGeometry())
		if _, err := big.add(gpufile.ReserveItem{Key: testKey(0, 0), Tokens: 64}, 0, testPayload(bigFile,
			1)); err != nil {
			return nil, err
		}
		b.list = append(b.list, big)
	}
	return b, nil
}

func (p *fakePool) Do(word string, key gpufile.Key) any {
	switch word {
	case "damage":
		p.mu.Lock()
		defer p.mu.Unlock()
		p.files[p.byKey[key]].damaged = map[uint16]bool{4: true}
	case "unlink":
		return p.Unlink(&key)
	case "reported":
		p.mu.Lock()
		defer p.mu.Unlock()
		return len(p.reported)
	}
	return nil
}

// commands serves the test's words.
func commands(in io.Reader, m *Server, p pools) {
	for lines := bufio.NewScanner(in); lines.Scan(); {
		word, arg, _ := strings.Cut(lines.Text(), " ")
		var answer any
		switch word {
		case "busy":
			answer = errors.Is(m.Unmount(false), ErrBusy)
		case "stats":
			answer = m.Stats()
		default:
			var key gpufile.Key
			hex.Decode(key[:], []byte(arg))
			answer = p.Do(word, key)
		}
		fmt.Printf("%v\n", answer)
	}
}

// fatalTB lets a server process use the tests' helpers.
type fatalTB struct{ testing.TB }

func (*fatalTB) Errorf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
func (*fatalTB) FailNow()                          { panic("failed") }
func (*fatalTB) Helper()                           {}

// server is a mount served by another process.
type server struct {
	t             testing.TB
	dir, baseline string
	cmd           *exec.Cmd
	in            io.WriteCloser
	out           *bufio.Reader
}

func startServer(t testing.TB, s scene) *server {
	if os.Geteuid() != 0 {
		t.Skip("mounting takes root")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skip("no /dev/fuse here: ", err)
	}
	s.Dir = t.TempDir()
	if s.Baseline != "" {
		s.Baseline = t.TempDir()
	}
	text, err := json.Marshal(s)
	require.NoError(t, err)
	v := &server{t: t, dir: s.Dir, baseline: s.Baseline}
	v.cmd = exec.Command(os.Args[0])
	// The race detector lets a process linger for a second before it ends.
	v.cmd.Env = append(os.Environ(), serveEnv+"="+string(text), "GORACE=atexit_sleep_ms=0 "+os.Getenv("GORACE"))
	v.cmd.Stderr = &quietLog{t: t}
	v.in, err = v.cmd.StdinPipe()
	require.NoError(t, err)
	out, err := v.cmd.StdoutPipe()
	require.NoError(t, err)
	v.out = bufio.NewReader(out)
	require.NoError(t, v.cmd.Start())
	t.Cleanup(func() {
		v.stop(s.Dir, s.Baseline)
	})
	line, err := v.out.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "ready\n", line)
	return v
}

// stop ends the server; what it leaves mounted is aborted and detached, so that nothing can hang on it.
func (v *server) stop(dirs ...string) {
	v.in.Close()
	timer := time.AfterFunc(20*time.Second, func() {
		for _, dir := range dirs {
			abort(dir)
		}
		v.cmd.Process.Kill()
	})
	err := v.cmd.Wait()
	if !timer.Stop() {
		v.t.Error("the server had to be killed")
	} else if err != nil {
		v.t.Errorf("the server ended badly: %v", err)
	}
	for _, dir := range dirs {
		if dir != "" && abort(dir) {
			v.t.Errorf("%s was left mounted", dir)
		}
	}
}

// abort cuts a FUSE mount off from its server and takes it away. It reports whether there was one.
func abort(dir string) (found bool) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return false
	}
	for _, line := range strings.Split(string(text), "\n") {
		f := strings.Fields(line)
		if len(f) < 5 || f[4] != dir {
			continue
		}
		_, minor, _ := strings.Cut(f[2], ":")
		const control = "/sys/fs/fuse/connections"
		if _, err := os.Stat(filepath.Join(control, minor)); err != nil {
			if unix.Mount("fusectl", control, "fusectl", 0, "") == nil {
				defer unix.Unmount(control, 0)
			}
		}
		os.WriteFile(filepath.Join(control, minor, "abort"), []byte("1"), 0)
		unix.Unmount(dir, unix.MNT_DETACH)
		found = true
	}
	return found
}

// quietLog shows the server's log if the test fails.
type quietLog struct {
	t  testing.TB
	mu sync.Mutex
}

func (l *quietLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.t.Logf("server: %s", bytes.TrimSpace(p))
	return len(p), nil
}

func (v *server) ask(word string) string {
	v.t.Helper()
	_, err := fmt.Fprintln(v.in, word)
	require.NoError(v.t, err)
	line, err := v.out.ReadString('\n')
	require.NoError(v.t, err)
	return strings.TrimSpace(line)
}

func (v *server) path(names ...string) string {
	return filepath.Join(append([]string{v.dir}, names...)...)
}

func (v *server) block(k gpufile.Key) string {
	return v.path("llama", "blocks", shardName(k[0]), keyName(&k))
}

// source writes a file's bytes outside the mount.
func (v *server) source(seed int) (path string, data []byte) {
	data = testPayload(smallFile, seed)
	path = filepath.Join(v.t.TempDir(), "source")
	require.NoError(v.t, os.WriteFile(path, data, 0o600))
	return path, data
}

var smallFile = func() int64 {
	g := smallGeometry()
	return g.FileBytes()
}()

// run runs a tool and wants it to succeed; a tool that is not installed skips the test.
func run(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := tool(t, name, args...)
	require.NoError(t, err, "%s %v: %s", name, args, out)
	return out
}

func tool(t testing.TB, name string, args ...string) (string, error) {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		t.Skip(err)
	}
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// store copies a file in as people do.
func (v *server) store(key, parent gpufile.Key, seed int) []byte {
	v.t.Helper()
	path, data := v.source(seed)
	if parent != (gpufile.Key{}) {
		require.NoError(v.t, unix.Setxattr(path, "user.tuttifs.parent", []byte(keyName(&parent)), 0))
	}
	run(v.t, "cp", "--preserve=xattr", path, v.block(key))
	return data
}

// onBoth runs a test on the stand-in and on a real store, that once with a single processor, where other things
// dead-lock.
func onBoth(t *testing.T, test func(t *testing.T, v *server)) {
	t.Run("fake", func(t *testing.T) { test(t, startServer(t, scene{})) })
	t.Run("real", func(t *testing.T) { test(t, startServer(t, scene{Real: true, Procs: 1})) })
}

func TestMountTools(t *testing.T) { onBoth(t, testMountTools) }

func testMountTools(t *testing.T, v *server) {
	a, b := testKey(0xaa, 1), testKey(0xbb, 2)
	data := v.store(a, gpufile.Key{}, 1)
	v.store(b, a, 2)

	require.Equal(t, "llama\n", run(t, "ls", v.dir))
	require.Equal(t, "blocks\nidentity.json\nprefixes\n", run(t, "ls", v.path("llama")))
	require.Equal(t, keyName(&b)+"\n", run(t, "ls", v.path("llama", "prefixes")), "tips only")
	chain := run(t, "ls", "-l", v.path("llama", "prefixes", keyName(&b)))
	require.Contains(t, chain, "00000_"+keyName(&a)+" -> ../../blocks/aa/"+keyName(&a))
	require.Contains(t, chain, "00001_"+keyName(&b)+" -> ")
	run(t, "cmp", v.path("llama", "prefixes", keyName(&b), "00000_"+keyName(&a)), v.block(a))
	require.Contains(t, run(t, "ls", "-U", v.path(".tuttifs")), "version\ncontrol\n")
	require.Equal(t, "1\n", run(t, "cat", v.path(".tuttifs", "version")))
	require.Contains(t, run(t, "cat", v.path("llama", "identity.json")), `"model": "llama"`)

	stat := strings.Fields(run(t, "stat", "-c", "%s %b %B %a %h %F", v.block(a)))
	blocks, _ := strconv.Atoi(stat[1])
	require.Equal(t, []string{strconv.Itoa(len(data)), strconv.Itoa(blocks), "512", "600", "1", "regular",
		"file"}, stat)
	require.GreaterOrEqual(t, blocks*512, len(data))
	du := strings.Fields(run(t, "du", "-B1", v.block(a)))
	require.Equal(t, strconv.Itoa(blocks*512), du[0])
	df := run(t, "df", "-B1", "--output=source,fstype,size,used,avail", v.dir)
	require.Regexp(t, `test +fuse.tuttifs +[1-9][0-9]+ +[1-9][0-9]+ +[1-9][0-9]+`, df)
	require.Regexp(t, `[1-9][0-9]* +[1-9][0-9]* +[1-9][0-9]*`, run(t, "df", "--output=itotal,iused,iavail", v.dir))
	found := run(t, "find", v.path("llama", "blocks"), "-type", "f", "-size", "-1024k")
	require.Len(t, strings.Fields(found), 2)

	out := filepath.Join(t.TempDir(), "out")
	run(t, "cp", "-a", v.block(a), out)
	got, err := os.ReadFile(out)
	require.NoError(t, err)
	require.True(t, bytes.Equal(data, got))
	require.True(t, bytes.Equal(data, []byte(run(t, "cat", v.block(a)))))
	require.True(t, bytes.Equal(data[70_000:71_000], []byte(run(t, "dd", "status=none", "if="+v.block(a),
		"bs=1000", "skip=70", "count=1"))))

	run(t, "rm", v.block(b))
	_, err = tool(t, "rm", v.block(b))
	require.Error(t, err)
	require.Equal(t, keyName(&a)+"\n", run(t, "ls", v.path("llama", "prefixes")))
	run(t, "cp", "--preserve=xattr", out, v.block(b)) // the same key is storable again
}

func TestMountXattrTools(t *testing.T) {
	v := startServer(t, scene{})
	a, b := testKey(0xaa, 1), testKey(0xbb, 2)
	v.store(a, gpufile.Key{}, 1)
	v.store(b, a, 2)
	dump := run(t, "getfattr", "-d", "-m", "-", "--absolute-names", v.block(b))
	require.Contains(t, dump, `user.tuttifs.parent="`+keyName(&a)+`"`)
	require.Contains(t, dump, `user.tuttifs.position="1"`)
	require.NotContains(t, dump, "extents")
	require.Contains(t, run(t, "getfattr", "-n", "user.tuttifs.extents", "--absolute-names", v.block(b)),
		`0 0 1000 3\0121 1`)
	_, err := tool(t, "setfattr", "-n", "user.tuttifs.tenant", "-v", "7", v.block(b))
	require.Error(t, err)
	for _, name := range []string{"user.mime_type", "security.selinux", "system.posix_acl_access", "trusted.x"} {
		_, err := unix.Getxattr(v.block(a), name, nil)
		require.True(t, errors.Is(err, unix.ENODATA) || errors.Is(err, unix.EOPNOTSUPP), "%s: %v", name, err)
	}
	// A whole way round: out with all attributes, removed, in again.
	out := filepath.Join(t.TempDir(), keyName(&b))
	run(t, "cp", "-a", v.block(b), out)
	run(t, "rm", v.block(b))
	run(t, "cp", "-a", out, v.block(b))
	again := run(t, "getfattr", "-n", "user.tuttifs.parent", "--only-values", "--absolute-names", v.block(b))
	require.Equal(t, keyName(&a), again)

	quiet := startServer(t, scene{NoXattr: true})
	quiet.store(a, gpufile.Key{}, 1)
	_, err = unix.Getxattr(quiet.block(a), "user.tuttifs.key", nil)
	require.ErrorIs(t, err, unix.EOPNOTSUPP)
}

func TestMountRsync(t *testing.T) { onBoth(t, testMountRsync) }

func testMountRsync(t *testing.T, v *server) {
	var keys []gpufile.Key
	parent := gpufile.Key{}
	for i := range 4 {
		k := testKey(byte(0x10*i), i)
		v.store(k, parent, i)
		keys, parent = append(keys, k), k
	}
	out := t.TempDir()
	run(t, "rsync", "-aX", v.path("llama", "blocks")+"/", out)
	for _, k := range keys {
		run(t, "cmp", v.block(k), filepath.Join(out, shardName(k[0]), keyName(&k)))
		run(t, "rm", v.block(k))
	}
	back := func() string { return run(t, "rsync", "-aX", "--stats", out+"/", v.path("llama", "blocks")) }
	require.Contains(t, back(), "Number of regular files transferred: 4")
	for i, k := range keys {
		run(t, "cmp", v.block(k), filepath.Join(out, shardName(k[0]), keyName(&k)))
		value := run(t, "getfattr", "-n", "user.tuttifs.position", "--only-values", "--absolute-names", v.block(k))
		require.Equal(t, strconv.Itoa(i), value)
	}
	back() // times differ, bytes do not: no error
	require.Contains(t, run(t, "rsync", "-aX", "--size-only", "--stats", out+"/", v.path("llama", "blocks")),
		"Number of regular files transferred: 0")
	require.Len(t, strings.Fields(run(t, "find", v.path("llama", "blocks"), "-type", "f")), 4,
		"no temporary file is left")
}

func TestMountRemovePrefix(t *testing.T) { onBoth(t, testMountRemovePrefix) }

func testMountRemovePrefix(t *testing.T, v *server) {
	root, mid, tip, fork := testKey(1, 1), testKey(2, 2), testKey(3, 3), testKey(4, 4)
	v.store(root, gpufile.Key{}, 1)
	v.store(mid, root, 2)
	v.store(tip, mid, 3)
	v.store(fork, root, 4)
	run(t, "rm", "-r", v.path("llama", "prefixes", keyName(&tip)))
	left := strings.Fields(run(t, "find", v.path("llama", "blocks"), "-type", "f", "-printf", "%f\n"))
	require.ElementsMatch(t, []string{keyName(&root), keyName(&fork)}, left)
	require.Equal(t, keyName(&fork)+"\n", run(t, "ls", v.path("llama", "prefixes")))
	_, err := tool(t, "rm", "-r", v.path("llama", "prefixes", keyName(&root)))
	require.Error(t, err, "another chain goes on from it")
}

func TestMountRefusals(t *testing.T) {
	v := startServer(t, scene{Limit: 1})
	a, b := testKey(0xaa, 1), testKey(0xbb, 2)
	data := v.store(a, gpufile.Key{}, 1)
	path, _ := v.source(2)
	fails := func(want, name string, args ...string) {
		t.Helper()
		out, err := tool(t, name, args...)
		require.Error(t, err)
		require.Contains(t, out, want)
	}
	fails("No space left", "cp", path, v.block(b))
	fails("No such file", "stat", v.block(b))
	fails("Invalid argument", "cp", path, v.path("llama", "blocks", "aa", keyName(&b)))
	fails("not permitted", "cp", path, v.path("llama", "x"))
	fails("not permitted", "mkdir", v.path("pool"))
	fails("not permitted", "cp", path, v.block(a))
	fails("not permitted", "truncate", "-s", "0", v.block(a))
	fails("not permitted", "chmod", "644", v.block(a))
	fails("not permitted", "ln", "-s", "x", v.path("llama", "x"))
	short := filepath.Join(t.TempDir(), "short")
	require.NoError(t, os.WriteFile(short, data[:1000], 0o600))
	require.NoError(t, os.Remove(v.block(a)))
	fails("Input/output error", "cp", short, v.block(a))
	long := filepath.Join(t.TempDir(), "long")
	require.NoError(t, os.WriteFile(long, append(data, 1), 0o600))
	fails("File too large", "cp", long, v.block(a))
	require.Empty(t, run(t, "find", v.path("llama", "blocks"), "-type", "f"))

	// Shells open, duplicate and close before they write.
	for _, shell := range []string{"bash", "dash", "sh"} {
		run(t, shell, "-c", `cat "$0" > "$1"`, path, v.block(b))
		run(t, "cmp", path, v.block(b))
		run(t, "cp", "-f", path, v.block(b)) // removes first
		run(t, "rm", v.block(b))
	}

	ro := startServer(t, scene{ReadOnly: true})
	fails("Read-only file system", "cp", path, ro.block(a))
}

func TestMountDamage(t *testing.T) {
	v := startServer(t, scene{})
	a := testKey(0xaa, 1)
	data := v.store(a, gpufile.Key{}, 1)
	require.Equal(t, "<nil>", v.ask("damage "+keyName(&a)))
	f, err := os.Open(v.block(a))
	require.NoError(t, err)
	defer f.Close()
	got, err := io.ReadAll(f)
	require.ErrorIs(t, err, syscall.EIO)
	require.True(t, bytes.HasPrefix(data, got), "what came before the damage")
	require.Less(t, len(got), len(data)-300_000)
	out, err := tool(t, "cat", v.block(a))
	require.Error(t, err)
	require.Contains(t, out, "Input/output error")
	require.Eventually(t, func() bool { return v.ask("reported") == "2" }, time.Minute, 10*time.Millisecond)
}

// A reader holds its file; names and node ids that the kernel still knows lead nowhere else.
func TestMountRemoveAndReuse(t *testing.T) { onBoth(t, testMountRemoveAndReuse) }

func testMountRemoveAndReuse(t *testing.T, v *server) {
	a, b := testKey(0xaa, 1), testKey(0xbb, 2)
	data := v.store(a, gpufile.Key{}, 1)
	f, err := os.Open(v.block(a))
	require.NoError(t, err)
	require.Equal(t, "<nil>", v.ask("unlink "+keyName(&a)), "behind the kernel's back")
	v.store(b, gpufile.Key{}, 2)
	got, err := io.ReadAll(f)
	require.NoError(t, err)
	require.True(t, bytes.Equal(data, got))
	require.NoError(t, f.Close())
	_, err = os.ReadFile(v.block(a))
	require.ErrorIs(t, err, syscall.ENOENT)
}

// Damage in a real store: EIO and never bytes; the store looks at the file itself, and evicts it.
func TestMountDamageEvicts(t *testing.T) {
	v := startServer(t, scene{Real: true})
	a := testKey(0xaa, 1)
	data := v.store(a, gpufile.Key{}, 1)
	sum := run(t, "getfattr", "-n", "user.tuttifs.checksum", "--only-values", "--absolute-names", v.block(a))
	require.Regexp(t, `^sums-1:[0-9a-f]{32}$`, sum)
	require.Equal(t, "<nil>", v.ask("damage "+keyName(&a)))
	got, err := os.ReadFile(v.block(a))
	require.ErrorIs(t, err, syscall.EIO)
	require.True(t, bytes.HasPrefix(data, got))
	require.Eventually(t, func() bool { return v.ask("reported") == "1" }, time.Minute, 10*time.Millisecond)
	_, err = os.Open(v.block(a))
	require.ErrorIs(t, err, syscall.ENOENT)
	v.store(a, gpufile.Key{}, 1) // storable again
	got, err = os.ReadFile(v.block(a))
	require.NoError(t, err)
	require.True(t, bytes.Equal(data, got))
}

// What is open is not evicted to make room; what is not, is.
func TestMountFull(t *testing.T) {
	v := startServer(t, scene{Real: true, Limit: 1})
	a, b := testKey(0xaa, 1), testKey(0xbb, 2)
	v.store(a, gpufile.Key{}, 1)
	f, err := os.Open(v.block(a))
	require.NoError(t, err)
	path, _ := v.source(2)
	out, err := tool(t, "cp", path, v.block(b))
	require.Error(t, err)
	require.Contains(t, out, "No space left")
	require.NoError(t, f.Close())
	require.Eventually(t, func() bool { return v.ask("pins") == "0" }, time.Minute, time.Millisecond,
		"release is asynchronous")
	run(t, "cp", path, v.block(b))
	run(t, "cmp", path, v.block(b))
	_, err = os.Open(v.block(a))
	require.ErrorIs(t, err, syscall.ENOENT)
}

// Readers, writers, removers and listers at once, on a store that has room for half of what they store: a file is what
// was stored under its key, or it is not there.
func TestMountStress(t *testing.T) {
	const keys, rounds = 16, 40
	v := startServer(t, scene{Real: true, Limit: keys / 2})
	data := make([][]byte, keys)
	for i := range data {
		data[i] = testPayload(smallFile, i)
	}
	key := func(i int) gpufile.Key { return testKey(byte(i%3), i) }
	gone := func(err error) bool {
		for _, e := range []error{unix.ENOENT, unix.ESTALE, unix.EEXIST, unix.ENOSPC, unix.EBUSY, unix.EAGAIN} {
			if errors.Is(err, e) {
				return true
			}
		}
		return err == nil
	}
	jobs := map[string]func(i int) error{
		"write": func(i int) error {
			f, err := os.OpenFile(v.block(key(i)), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
			if err != nil {
				return err
			}
			_, err = f.Write(data[i])
			return errors.Join(err, f.Close())
		},
		"read": func(i int) error {
			got, err := os.ReadFile(v.block(key(i)))
			if err == nil && !bytes.Equal(got, data[i]) {
				// While it is being copied in, a file is as long as what is written of it.
				if !bytes.HasPrefix(data[i], got) {
					return errors.New("wrong bytes")
				}
			}
			return err
		},
		"remove": func(i int) error {
			if i%4 != 0 {
				return nil
			}
			return os.Remove(v.block(key(i)))
		},
		"list": func(i int) error {
			_, err := os.ReadDir(v.path("llama", "blocks", shardName(byte(i%3))))
			tips, err2 := os.ReadDir(v.path("llama", "prefixes"))
			for _, tip := range tips {
				if _, err := tip.Info(); !gone(err) {
					return err
				}
			}
			return errors.Join(err, err2)
		},
	}
	var wg sync.WaitGroup
	for name, job := range jobs {
		for worker := range 2 {
			wg.Go(func() {
				for round := range rounds {
					i := (round*7 + worker*5) % keys
					if err := job(i); !gone(err) {
						t.Errorf("%s %d: %v", name, i, err)
					}
				}
			})
		}
	}
	wg.Wait()
}

func TestMountMapping(t *testing.T) { onBoth(t, testMountMapping) }

func testMountMapping(t *testing.T, v *server) {
	a := testKey(0xaa, 1)
	data := v.store(a, gpufile.Key{}, 1)
	f, err := os.Open(v.block(a))
	require.NoError(t, err)
	defer f.Close()
	m, err := unix.Mmap(int(f.Fd()), 0, len(data), unix.PROT_READ, unix.MAP_PRIVATE)
	require.NoError(t, err)
	require.True(t, bytes.Equal(data, m))
	require.NoError(t, unix.Munmap(m))
	m, err = unix.Mmap(int(f.Fd()), 0, len(data), unix.PROT_READ, unix.MAP_SHARED)
	require.NoError(t, err, "read-only shared mappings, with this kernel's leave")
	require.True(t, bytes.Equal(data, m))
	require.NoError(t, unix.Munmap(m))
}

func TestMountIoctl(t *testing.T) {
	v := startServer(t, scene{})
	for i, name := range []string{v.dir, v.path(".tuttifs", "control"), v.path("llama", "identity.json")} {
		f, err := os.Open(name)
		require.NoError(t, err)
		defer f.Close()
		buf := [64]byte{}
		copy(buf[:], "question")
		cmd := uint32(3<<30 | 64<<16 | 'T'<<8 | 1) // _IOWR('T', 1, 64 bytes)
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), uintptr(cmd), ptr(&buf))
		require.Zero(t, errno)
		require.Contains(t, string(buf[:]), fmt.Sprintf("%d:", i+1))
		require.Contains(t, string(buf[:]), ":question")
	}
}

// A fault of this program fails one request; the mount goes on.
func TestMountSurvivesFaults(t *testing.T) {
	v := startServer(t, scene{})
	_, err := os.ReadFile(v.path(".tuttifs", "fault"))
	require.ErrorIs(t, err, syscall.EIO)
	require.Equal(t, "1\n", run(t, "cat", v.path(".tuttifs", "version")))
}

func TestMountOtherUsers(t *testing.T) {
	asNobody := func(name string, args ...string) error {
		cmd := exec.Command(name, args...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		return cmd.Run()
	}
	a := testKey(0xaa, 1)
	for _, others := range []bool{false, true} {
		v := startServer(t, scene{Others: others})
		v.store(a, gpufile.Key{}, 1)
		require.NoError(t, os.Chmod(filepath.Dir(v.dir), 0o755), "the mount point itself can be reached")
		path, _ := v.source(2)
		require.NoError(t, os.Chmod(path, 0o644))
		require.NoError(t, os.Chmod(filepath.Dir(path), 0o755))
		require.NoError(t, asNobody("cmp", path, path))
		if others {
			require.NoError(t, asNobody("cat", v.block(a)))
		} else {
			require.Error(t, asNobody("cat", v.block(a)))
		}
		require.Error(t, asNobody("cp", path, v.path("llama", "blocks", "bb", "x")))
		require.Error(t, asNobody("rm", "-f", v.block(a)))
		require.FileExists(t, v.block(a))
	}
}

func TestUnmountBusy(t *testing.T) {
	v := startServer(t, scene{})
	f, err := os.Open(v.path("llama"))
	require.NoError(t, err)
	require.Equal(t, "true", v.ask("busy"))
	require.NoError(t, f.Close())
}

// A daemon that is killed leaves a mount that answers with an error at once, and that abort takes away.
func TestMountKilled(t *testing.T) {
	v := startServer(t, scene{})
	require.NoError(t, v.cmd.Process.Kill())
	v.cmd.Wait()
	_, err := os.ReadDir(v.dir)
	require.ErrorIs(t, err, syscall.ENOTCONN)
	require.True(t, abort(v.dir))
	require.False(t, abort(v.dir))
	v.cmd = exec.Command("true") // for the cleanup
	require.NoError(t, v.cmd.Start())
}
