package main

import (
	"bytes"
	"container/list"
	"context"
	"debug/elf"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/daemon"
	"tuttifs/gpufile"
)

// These tests run the built binary in processes of its own, as people and mount(8) do.

// commandMax bounds every command of a test.
const commandMax = 2 * time.Minute

var built struct {
	once sync.Once
	dir  string
	err  error
}

func TestMain(m *testing.M) {
	code := m.Run()
	if built.dir != "" {
		os.RemoveAll(built.dir)
	}
	os.Exit(code)
}

// builtBinary builds the command the way the Makefile does.
func builtBinary(t *testing.T) string {
	t.Helper()
	built.once.Do(func() {
		if built.dir, built.err = os.MkdirTemp("", "tuttifs-cli-test"); built.err != nil {
			return
		}
		cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", filepath.Join(built.dir, "tuttifs"), ".")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			built.err = fmt.Errorf("%w: %s", err, out)
		}
	})
	require.NoError(t, built.err)
	return filepath.Join(built.dir, "tuttifs")
}

type result struct {
	code           int
	stdout, stderr string
}

// execAs runs the binary under the name argv0.
func execAs(t *testing.T, argv0 string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), commandMax)
	defer cancel()
	cmd := exec.CommandContext(ctx, builtBinary(t))
	cmd.Args = append([]string{argv0}, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("%s %v: %v", argv0, args, err)
	}
	require.NoError(t, ctx.Err(), "%s %v: %s", argv0, args, &stderr)
	return result{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

// tuttifs runs a command that must succeed and returns its output.
func tuttifs(t *testing.T, args ...string) string {
	t.Helper()
	r := execAs(t, "tuttifs", args...)
	require.Zero(t, r.code, "tuttifs %v: %s", args, r.stderr)
	return r.stdout
}

// refused runs a command that must fail with a status and words on standard error.
func refused(t *testing.T, code int, says string, args ...string) {
	t.Helper()
	r := execAs(t, "tuttifs", args...)
	require.Equal(t, code, r.code, "tuttifs %v: %s%s", args, r.stdout, r.stderr)
	require.Contains(t, r.stderr, says)
}

func decode[T any](t *testing.T, text string) (v T) {
	t.Helper()
	require.NoError(t, json.Unmarshal([]byte(text), &v), text)
	return v
}

// formatted makes and formats n files of a size and returns their paths.
func formatted(t *testing.T, n int, size string, flags ...string) []string {
	t.Helper()
	dir := t.TempDir()
	var paths []string
	for i := range n {
		paths = append(paths, filepath.Join(dir, fmt.Sprintf("d%d", i)))
	}
	tuttifs(t, append(append([]string{"mkfs", "-q", "--size", size}, flags...), paths...)...)
	t.Cleanup(func() {
		if !t.Failed() {
			tuttifs(t, "fsck", "-n", "--data", paths[0])
		}
	})
	return paths
}

// mountPoint makes a directory on which nothing is mounted when the test ends, whatever happened.
func mountPoint(t *testing.T) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("mounting needs root")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skip("no /dev/fuse here")
	}
	dir := filepath.Join(t.TempDir(), "mnt")
	require.NoError(t, os.Mkdir(dir, 0o755))
	t.Cleanup(func() {
		for _, mounted := findMount(dir); mounted; _, mounted = findMount(dir) {
			if t.Failed() {
				abortMount(dir)
			}
			if r := execAs(t, "tuttifs", "umount", dir); r.code != 0 {
				abortMount(dir)
				_ = unix.Unmount(dir, unix.MNT_DETACH)
				t.Errorf("left mounted: %s", r.stderr)
			}
		}
	})
	return dir
}

// abortMount ends a FUSE connection from outside, so that nothing waits for a daemon that is stuck.
func abortMount(dir string) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return
	}
	for _, line := range strings.Split(string(b), "\n") {
		w := strings.Fields(line)
		if len(w) > 4 && unescape(w[4]) == dir {
			if _, minor, ok := strings.Cut(w[2], ":"); ok {
				_ = os.WriteFile("/sys/fs/fuse/connections/"+minor+"/abort", []byte("1"), 0)
			}
		}
	}
}

// mounted mounts a volume in the background, as a person would.
func mounted(t *testing.T, drive string, flags ...string) (dir string) {
	t.Helper()
	dir = mountPoint(t)
	mountOn(t, drive, dir, flags...)
	return dir
}

func mountOn(t *testing.T, drive, dir string, flags ...string) {
	t.Helper()
	flags = append(flags, "--log", filepath.Join(filepath.Dir(dir), "log"), "-o",
		"sockets="+filepath.Join(filepath.Dir(dir), "sockets"))
	tuttifs(t, append(append([]string{"mount"}, flags...), drive, dir)...)
}

// daemonPID is the process behind a mount.
func daemonPID(t *testing.T, dir string) int {
	t.Helper()
	var v daemon.VersionDocument
	require.NoError(t, readStatus(dir, "version", &v))
	require.Positive(t, v.PID)
	return v.PID
}

// waitGone waits until a process has ended.
func waitGone(t *testing.T, pid int) {
	t.Helper()
	require.Eventually(t, func() bool {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return err != nil || bytes.Contains(b, []byte(") Z "))
	}, time.Minute, 10*time.Millisecond, "process %d ends", pid)
}

// smallTrace writes a generated trace and returns its path.
func smallTrace(t *testing.T, requests int) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "t.jsonl")
	tuttifs(t, "trace", "--requests", fmt.Sprint(requests), "-o", path)
	return path
}

func replayed(t *testing.T, trace, dir string, flags ...string) replayDocument {
	t.Helper()
	return decode[replayDocument](t, tuttifs(t, append([]string{"replay", "--json", "--scale", "1024", trace, dir},
		flags...)...))
}

// glibc is all that the binary may want of the system: by it libcuda is opened where there is one.
var glibc = []string{"libc.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}

func TestBinaryNeedsOnlyLibc(t *testing.T) {
	f, err := elf.Open(builtBinary(t))
	require.NoError(t, err)
	defer f.Close()
	libraries, err := f.ImportedLibraries()
	require.NoError(t, err)
	require.Subset(t, glibc, libraries)
}

func TestBinaryWithoutGPUIsStatic(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tuttifs")
	cmd := exec.Command("go", "build", "-tags", "nogpu", "-trimpath", "-o", path, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	f, err := elf.Open(path)
	require.NoError(t, err)
	defer f.Close()
	for _, p := range f.Progs {
		require.NotEqual(t, elf.PT_INTERP, p.Type, "the binary asks for an interpreter")
	}
	libraries, err := f.ImportedLibraries()
	require.NoError(t, err)
	require.Empty(t, libraries)
}

func TestMkfsInfoFsck(t *testing.T) {
	dir := t.TempDir()
	d0, d1 := filepath.Join(dir, "d0"), filepath.Join(dir, "d1")
	const uuid = "01234567-89ab-4def-8123-456789abcdef"

	plan := decode[planDocument](t, tuttifs(t, "mkfs", "-n", "--json", "--size", "64m", "-L", "kv", "-U", uuid, d0, d1))
	require.Equal(t, "file", plan.Drives[0].Kind)
	require.True(t, plan.DryRun)
	require.NoFileExists(t, d0)
	require.Equal(t, []any{uuid, "kv", 2, 2}, []any{plan.UUID, plan.Label, plan.Width, len(plan.Drives)})

	refused(t, 1, "give --size", "mkfs", d0)
	require.Contains(t, tuttifs(t, "mkfs", "--size", "64m", "-L", "kv", "-U", uuid, d0, d1), uuid)
	st, err := os.Stat(d1)
	require.NoError(t, err)
	require.EqualValues(t, 64<<20, st.Size())

	info := decode[infoDocument](t, tuttifs(t, "info", "--json", d1))
	require.Equal(t, []any{uuid, "kv", 2}, []any{info.UUID, info.Label, len(info.Drives)})
	require.Equal(t, plan.UsableBytes, info.Space.TotalBytes)
	require.Contains(t, tuttifs(t, "info", d0), uuid)
	tuttifs(t, "fsck", "-n", d0)
	require.Zero(t, execAs(t, "fsck.tuttifs", "-n", d1).code)
	require.Zero(t, execAs(t, "fsck.fuse.tuttifs", "-n", d1).code)

	refused(t, 1, d0, "mkfs", d0)
	r := execAs(t, "mkfs.tuttifs", "-q", "-f", d0, d1)
	require.Zero(t, r.code, r.stderr)
	require.Empty(t, r.stdout)
	require.NotEqual(t, uuid, decode[infoDocument](t, tuttifs(t, "info", "--json", d1)).UUID)
}

func TestMkfsLeavesNothingOfAFailure(t *testing.T) {
	dir := t.TempDir()
	refused(t, 1, "", "mkfs", "--size", "64m", filepath.Join(dir, "d0"), filepath.Join(dir, "no", "d1"))
	refused(t, 1, "", "mkfs", "--size", "4k", filepath.Join(dir, "d0"))
	refused(t, 2, "d0 is named twice", "mkfs", "--size", "64m", filepath.Join(dir, "d0"), dir+"/./d0")
	require.NoFileExists(t, filepath.Join(dir, "d0"))
}

// A size that an existing file does not have, and a promise that the filesystem cannot keep, are told.
func TestMkfsWarns(t *testing.T) {
	dir := t.TempDir()
	d0 := filepath.Join(dir, "d0")
	tuttifs(t, "mkfs", "-q", "--size", "16m", d0)
	r := execAs(t, "tuttifs", "mkfs", "-f", "--size", "64m", d0)
	require.Zero(t, r.code, r.stderr)
	require.Contains(t, r.stderr, "d0 exists and keeps its 16.0 MiB")
	r = execAs(t, "tuttifs", "mkfs", "--size", "8t", filepath.Join(dir, "d1"))
	if r.code != 0 {
		t.Skipf("no file of 8 TiB here: %s", r.stderr)
	}
	require.Contains(t, r.stderr, "storing fails when that is full")
	r = execAs(t, "tuttifs", "mkfs", "-n", "-f", filepath.Join(dir, "d1"))
	require.Zero(t, r.code, r.stderr)
	require.Contains(t, r.stderr, "storing fails when that is full", "a file that is there is as sparse")
}

func TestMkfsRefusesWhatIsKnown(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ext4")
	image := make([]byte, 64<<20)
	image[1080], image[1081] = 0x53, 0xef // the magic number of ext2, ext3 and ext4
	require.NoError(t, os.WriteFile(path, image, 0o600))
	refused(t, 1, "ext", "mkfs", path)
	refused(t, 1, "-f", "mkfs", "-n", path)
	after, err := os.ReadFile(path)
	require.NoError(t, err)
	require.True(t, bytes.Equal(image, after), "a refusal changes nothing")
	tuttifs(t, "mkfs", "-q", "--force", path)
	tuttifs(t, "fsck", "-n", path)
}

func TestMissingAndForeignDrives(t *testing.T) {
	a, b := formatted(t, 2, "64m"), formatted(t, 1, "64m")
	away := filepath.Join(t.TempDir(), "away")
	require.NoError(t, os.Rename(a[1], away))
	dir := mountPoint(t)
	refused(t, 32, "missing", "mount", a[0], dir)
	refused(t, 32, "", "mount", a[0], b[0], dir)
	empty := filepath.Join(filepath.Dir(a[0]), "empty")
	require.NoError(t, os.WriteFile(empty, make([]byte, 1<<20), 0o600))
	refused(t, 32, "empty", "mount", empty, dir)
	require.NoError(t, os.Rename(away, a[1]))
	mountOn(t, a[1], dir)
}

func TestWholeWay(t *testing.T) {
	label := fmt.Sprintf("whole-%d", os.Getpid()) // other runs of this test on this machine have others
	paths := formatted(t, 4, "256m", "-L", label)
	dir := mounted(t, paths[1])
	trace := smallTrace(t, 40)

	first := replayed(t, trace, dir)
	require.Zero(t, first.VerifyFailures)
	require.EqualValues(t, 40, first.Requests)
	require.Greater(t, first.HitRate, 0.3)
	require.Equal(t, first.Blocks, first.HitBlocks+first.StoredBlocks)
	require.Positive(t, first.BytesRead)
	require.EqualValues(t, first.Requests, first.Lookup.Count)

	// Every view agrees about what is there.
	pool := "replay-llama3-8b"
	pools := decode[struct{ Pools []lsPool }](t, tuttifs(t, "ls", "--json", dir))
	require.Len(t, pools.Pools, 1)
	require.Equal(t, first.StoredBlocks, pools.Pools[0].Stats.Files)
	files := strings.Count(tuttifs(t, "ls", "--json", dir, pool), "\n")
	require.EqualValues(t, first.StoredBlocks, files)
	require.Equal(t, 3, strings.Count(tuttifs(t, "ls", "--limit", "3", dir, pool), "\n"))
	info := decode[infoDocument](t, tuttifs(t, "info", "--json", dir))
	require.Equal(t, label, info.Label)
	require.Equal(t, first.StoredBlocks, info.Space.Files)
	status := decode[statusDocument](t, tuttifs(t, "status", "--json", dir))
	require.Equal(t, status.Total.Lookups, status.Total.Hits+status.Total.Misses)
	require.Equal(t, first.Blocks, status.Total.Lookups)
	require.GreaterOrEqual(t, status.IO.BytesRead, first.BytesRead)
	require.Zero(t, status.IO.Refused)
	var fsStat unix.Statfs_t
	require.NoError(t, unix.Statfs(dir, &fsStat))
	require.Equal(t, status.Space.TotalBytes, fsStat.Blocks*uint64(fsStat.Bsize))

	tips := decode[struct{ Tips []string }](t, tuttifs(t, "prefixes", "--json", dir, pool)).Tips
	require.NotEmpty(t, tips)
	chain := decode[struct{ Chain []chainBlock }](t, tuttifs(t, "prefixes", "--json", dir, pool, tips[0])).Chain
	require.NotEmpty(t, chain)
	require.Equal(t, tips[0], chain[len(chain)-1].Key)
	require.Zero(t, chain[0].Position)
	require.NotNil(t, chain[0].Tokens)
	require.EqualValues(t, traceBlockTokens, *chain[0].Tokens)

	// The file shows the bytes that were stored, object after object.
	kv, err := (&replayOptions{model: "llama3-8b", scale: 1024}).kv()
	require.NoError(t, err)
	geometry, err := kv.Geometry()
	require.NoError(t, err)
	raw, err := hex.DecodeString(tips[0])
	require.NoError(t, err)
	key := gpufile.Key(raw)
	whole, err := os.ReadFile(filepath.Join(dir, pool, "blocks", tips[0][:2], tips[0]))
	require.NoError(t, err)
	require.EqualValues(t, geometry.FileBytes(), len(whole))
	for i := range geometry.Objects {
		if o := &geometry.Objects[i]; !o.IsTrailer() {
			require.True(t, checkContent(whole[:o.Bytes()], &key, uint16(i)), "object %d", i)
			whole = whole[o.Bytes():]
		}
	}

	// A second mount of the same volume is refused by name, and mkfs as well.
	at := fmt.Sprintf("part of the volume that is mounted on %s (pid %d)", dir, daemonPID(t, dir))
	refused(t, 32, at, "mount", paths[0], mountPoint(t))
	refused(t, 1, at+": unmount it first", "mkfs", "-f", paths[0])

	// Its label and UUID are known by the mount, wherever its drives are.
	for _, spec := range []string{label, "LABEL=" + label, info.UUID, "UUID=" + info.UUID} {
		refused(t, 32, at, "mount", spec, mountPoint(t))
	}
	refused(t, 32, at, "mount", label, dir)
	refused(t, 8, "mounted on "+dir, "fsck", label)
	refused(t, 1, paths[2]+" is drive 2 of the volume that is mounted on "+dir, "drive", "add", dir, paths[2])
	refused(t, 2, "name one mount point, or drives", "info", dir, paths[0])
	tuttifs(t, "fsck", "-n", "LABEL="+label)

	// Everything survives a remount through the names of mount(8).
	tuttifs(t, "umount", dir)
	r := execAs(t, "mount.fuse.tuttifs", paths[3], dir, "-o", "rw,nofail,dev,suid,sockets="+filepath.Dir(dir), "-n")
	require.Zero(t, r.code, r.stderr)
	again := replayed(t, trace, dir)
	require.Equal(t, 1.0, again.HitRate)
	require.Zero(t, again.VerifyFailures)
	require.Zero(t, again.BytesWritten)

	// Evicted files are gone, and nothing else is.
	evicted := decode[struct{ Evicted int }](t, tuttifs(t, "evict", "--json", "--prefix", dir, pool, tips[1]))
	require.GreaterOrEqual(t, evicted.Evicted, 1)
	require.Len(t, decode[struct{ Chain []chainBlock }](t, tuttifs(t, "prefixes", "--json", dir, pool, tips[0])).Chain,
		len(chain))
	require.Equal(t, "1 files evicted\n", tuttifs(t, "evict", dir, pool, tips[0]))
	refused(t, 1, "has no block", "prefixes", dir, pool, tips[0])
	refused(t, 1, "has no pool", "prefixes", dir, "other")
	refused(t, 1, "has no pool", "evict", dir, "nopool", "--all")
	tuttifs(t, "evict", dir, pool, "--all")
	require.Empty(t, tuttifs(t, "ls", dir, pool))
	tuttifs(t, "umount", dir)
}

// Every kind of geometry makes the whole way: ranks, split K and V, latents, indexers, layers of several objects,
// windows that are smaller than a request.
func TestReplayGeometries(t *testing.T) {
	paths := formatted(t, 3, "512m")
	dir := mounted(t, paths[0], "-o", "pollers=2")
	trace := smallTrace(t, 6)
	for name, flags := range map[string]string{
		"ranks":   "--model llama3-70b --scale 4096 --ranks 2",
		"split":   "--model qwen3-32b --scale 2048 --split --ranks 4",
		"latent":  "--model deepseek-v3 --scale 512",
		"indexer": "--model deepseek-v3.2 --scale 512",
		"tiny":    "--model tiny --scale 64 --lanes 2",
		"own":     "--layers 3 --kv-heads 2 --head-dim 8 --dtype-bytes 1 --block-tokens 16",
		"narrow":  "--model llama3-8b --scale 512 --memory 256k",
		"large":   "--model llama3-8b --scale 8 --block-tokens 1024 --requests 2",
	} {
		t.Run(name, func(t *testing.T) {
			args := append([]string{"replay", "--json", "--pool", name}, strings.Fields(flags)...)
			first := decode[replayDocument](t, tuttifs(t, append(args, trace, dir)...))
			require.Zero(t, first.VerifyFailures)
			require.Positive(t, first.BytesWritten)
			again := decode[replayDocument](t, tuttifs(t, append(args, trace, dir)...))
			require.Zero(t, again.VerifyFailures)
			require.Equal(t, 1.0, again.HitRate)
		})
	}
	refused(t, 1, "raise --memory", "replay", "--memory", "64k", trace, dir)
	refused(t, 1, "or another --pool", "replay", "--pool", "own", trace, dir)
}

func TestKilledDaemon(t *testing.T) {
	paths := formatted(t, 2, "256m", "-L", "killed")
	dir := mounted(t, paths[0])
	trace := smallTrace(t, 25)
	require.Zero(t, replayed(t, trace, dir).VerifyFailures)
	pid := daemonPID(t, dir)
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	waitGone(t, pid)

	// The dead mount says what it is and what to do, from every command.
	clears := "'tuttifs umount " + dir + "' clears it"
	refused(t, 32, clears, "mount", paths[0], dir)
	refused(t, 8, clears, "scrub", dir)
	for _, words := range []string{"info DIR", "status DIR", "ls DIR", "ls DIR p", "prefixes DIR p", "evict DIR p --all",
		"drive list DIR", "drive add DIR " + paths[0]} {
		refused(t, 1, clears, strings.Fields(strings.ReplaceAll(words, "DIR", dir))...)
	}
	refused(t, 1, "unmount it if it is still there", "replay", trace, dir)
	r := execAs(t, "tuttifs", "umount", dir)
	require.Zero(t, r.code, r.stderr)
	require.Contains(t, r.stderr, dir+" is unmounted; its daemon had died")
	require.Contains(t, r.stderr, "the next mount of killed replays the journal")
	refused(t, 1, "not a tuttifs mount", "umount", dir)

	// What -p does with it is said.
	r = execAs(t, "fsck.tuttifs", "-p", paths[0])
	require.Equal(t, fsckCorrected, r.code, r.stderr)
	require.Contains(t, r.stdout, "repair: the journal is brought into the record tables, and the volume is clean")
	require.Contains(t, r.stdout, "repaired, 0 errors, 0 files given up")
	require.NotContains(t, r.stdout, "Pass")

	mountOn(t, paths[0], dir)
	again := replayed(t, trace, dir)
	require.Equal(t, 1.0, again.HitRate, "what was committed is there")
	require.Zero(t, again.VerifyFailures)
	pid = daemonPID(t, dir)
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	waitGone(t, pid)
	tuttifs(t, "umount", "-l", dir)
	mountOn(t, paths[0], dir)
	require.Equal(t, 1.0, replayed(t, trace, dir).HitRate)
}

// A log that nobody reads is refused before anything is mounted, with what to do.
func TestLogThatCannotBeWritten(t *testing.T) {
	paths := formatted(t, 1, "64m")
	dir := mountPoint(t)
	pipe := filepath.Join(filepath.Dir(dir), "pipe")
	require.NoError(t, unix.Mkfifo(pipe, 0o600))
	refused(t, 32, "--log: open "+pipe+": no such device or address: start what reads the pipe first", "mount", "--log",
		pipe, paths[0], dir)
	refused(t, 32, "--log: open /no/such/log: ", "mount", "--log", "/no/such/log", paths[0], dir)
	_, mounted := findMount(dir)
	require.False(t, mounted)
}

func TestStopBySignal(t *testing.T) {
	paths := formatted(t, 1, "256m")
	dir := mounted(t, paths[0])
	pid := daemonPID(t, dir)
	open, err := os.Open(filepath.Join(dir, ".tuttifs", "version"))
	require.NoError(t, err)
	defer open.Close()
	refused(t, 1, fmt.Sprintf("pid %d", os.Getpid()), "umount", dir)
	require.NoError(t, syscall.Kill(pid, syscall.SIGTERM))
	waitGone(t, pid)
	_, still := findMount(dir)
	require.False(t, still)
}

// started runs a slow replay in the background and returns when it has stored something.
func started(t *testing.T, trace, dir string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(builtBinary(t), "replay", "--scale", "1024", "--speed", "1", trace, dir)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	require.Eventually(t, func() bool {
		return decode[statusDocument](t, tuttifs(t, "status", "--json", dir)).Total.Committed > 0
	}, time.Minute, 20*time.Millisecond, "%s", &stderr)
	return cmd
}

// Promise i: the death of an engine leaves nothing behind.
func TestKilledEngine(t *testing.T) {
	paths := formatted(t, 1, "256m")
	dir := mounted(t, paths[0])
	trace := smallTrace(t, 500)
	engine := started(t, trace, dir)
	require.NoError(t, engine.Process.Kill())
	require.Error(t, engine.Wait())
	require.Eventually(t, func() bool {
		s := decode[statusDocument](t, tuttifs(t, "status", "--json", dir))
		return s.Sessions == 0 && s.Total.FilesPinned == 0 && s.Total.FilesReserved == 0
	}, time.Minute, 20*time.Millisecond, "leases end with their holder")
	require.Zero(t, replayed(t, trace, dir, "--requests", "50").VerifyFailures)
}

// Two engines share a pool that is too small for them: nobody gets wrong bytes, and what one stores the other finds.
func TestTwoEngines(t *testing.T) {
	paths := formatted(t, 2, "64m")
	dir := mounted(t, paths[0])
	trace := smallTrace(t, 120)
	var engines [2]*exec.Cmd
	var output [2]bytes.Buffer
	for i := range engines {
		engines[i] = exec.Command(builtBinary(t), "replay", "--json", "--scale", "1024", trace, dir)
		engines[i].Stdout, engines[i].Stderr = &output[i], os.Stderr
		require.NoError(t, engines[i].Start())
		t.Cleanup(func() { _ = engines[i].Process.Kill() })
	}
	stored, hit := uint64(0), uint64(0)
	for i := range engines {
		require.NoError(t, engines[i].Wait(), "%s", &output[i])
		doc := decode[replayDocument](t, output[i].String())
		require.Zero(t, doc.VerifyFailures)
		stored, hit = stored+doc.StoredBlocks, hit+doc.HitBlocks
	}
	status := decode[statusDocument](t, tuttifs(t, "status", "--json", dir))
	require.Equal(t, stored, status.Total.Committed)
	require.Equal(t, hit, status.Total.Hits)
	require.Zero(t, status.Total.FilesPinned+status.Total.FilesReserved+status.Total.Bad+status.IO.Refused)
}

// A daemon that is told to stop does not wait for engines.
func TestStopUnderAnEngine(t *testing.T) {
	paths := formatted(t, 1, "256m")
	dir := mounted(t, paths[0])
	engine := started(t, smallTrace(t, 500), dir)
	pid := daemonPID(t, dir)
	require.NoError(t, syscall.Kill(pid, syscall.SIGTERM))
	waitGone(t, pid)
	require.Error(t, engine.Wait(), "the engine is told")
	require.Equal(t, 1, engine.ProcessState.ExitCode())
	_, still := findMount(dir)
	require.False(t, still)
	tuttifs(t, "fsck", "-n", "--data", paths[0])
}

func TestForegroundMount(t *testing.T) {
	paths := formatted(t, 1, "256m")
	dir := mountPoint(t)
	cmd := exec.Command(builtBinary(t), "mount", "--foreground", "-o", "sockets="+filepath.Dir(dir), paths[0], dir)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	require.Eventually(t, func() bool {
		var v daemon.VersionDocument
		return readStatus(dir, "version", &v) == nil && v.PID == cmd.Process.Pid
	}, time.Minute, 10*time.Millisecond)
	require.NoError(t, cmd.Process.Signal(os.Interrupt))
	require.NoError(t, cmd.Wait(), "an interrupt is a clean unmount")
	require.Contains(t, stderr.String(), "msg=mounted")
	tuttifs(t, "mount", "-f", paths[0], dir)
	_, mounted := findMount(dir)
	require.False(t, mounted, "-f checks and does not mount")
}

func TestUmountByOthers(t *testing.T) {
	paths := formatted(t, 1, "256m")
	dir := mounted(t, paths[0])
	pid := daemonPID(t, dir)
	require.NoError(t, unix.Unmount(dir, 0))
	waitGone(t, pid)
	mountOn(t, paths[0], dir, "-o", "ro")
	require.True(t, decode[infoDocument](t, tuttifs(t, "info", "--json", dir)).ReadOnly)
	var options daemon.OptionsDocument
	require.NoError(t, readStatus(dir, "options", &options))
	require.True(t, options.ReadOnly)
	require.Equal(t, "lru", options.Policy)
	trace := smallTrace(t, 2)
	require.Equal(t, 1, execAs(t, "tuttifs", "replay", trace, dir).code, "a read-only volume takes no pool")
}

// umount(8) does not wait for the daemon, so that mount does; a volume that stays mounted is refused, its mount named.
func TestMountAgain(t *testing.T) {
	paths := formatted(t, 2, "64m")
	dir := mounted(t, paths[0])
	for range 3 {
		require.NoError(t, unix.Unmount(dir, 0))
		mountOn(t, paths[0], dir)
	}
	refused(t, 32, paths[1]+" is part of the volume that is mounted on "+dir, "mount", paths[1], t.TempDir())
	copies := filepath.Join(t.TempDir(), "d0")
	image, err := os.ReadFile(paths[0])
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(copies, image, 0o600))
	refused(t, 32, copies+" is part of the volume that is mounted on "+dir, "mount", copies, t.TempDir())
	refused(t, 1, "unmount it, and mount with the new ones", "mount", paths[0], dir, "-o", "remount,ro")
	comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", daemonPID(t, dir)))
	require.NoError(t, err)
	require.Equal(t, "tuttifs\n", string(comm))
}

// A drive file whose filesystem is full ends a mount without a clean label, and umount says so.
func TestUmountTellsOfAFailure(t *testing.T) {
	dir := mountPoint(t)
	small := t.TempDir()
	require.NoError(t, unix.Mount("tmpfs", small, "tmpfs", 0, "size=12m"))
	defer func() { require.NoError(t, unix.Unmount(small, 0)) }()
	drive := filepath.Join(small, "d0")
	tuttifs(t, "mkfs", "-q", "--size", "64m", drive)
	mountOn(t, drive, dir)
	refused(t, 1, "make room there", "replay", smallTrace(t, 50), dir, "--scale", "256")
	refused(t, 1, "the daemon could not finish writing", "umount", dir)
	refused(t, 32, "make room there, or mount with -o ro", "mount", drive, dir)
	mountOn(t, drive, dir, "-o", "ro")
	tuttifs(t, "umount", dir)
	tuttifs(t, "fsck", "-n", "--data", drive)
}

// A volume without room for one file takes none, and replay says so.
func TestReplayStoresNothing(t *testing.T) {
	paths := formatted(t, 1, "4m")
	dir := mounted(t, paths[0])
	r := execAs(t, "tuttifs", "replay", "--model", "tiny", "--memory", "16m", smallTrace(t, 2), dir)
	require.Zero(t, r.code, r.stderr)
	require.Contains(t, r.stderr, "nothing was stored: no file fits")
}

func TestFullVolumeEvicts(t *testing.T) {
	paths := formatted(t, 1, "64m")
	dir := mounted(t, paths[0], "-o", "policy=s3fifo")
	trace := smallTrace(t, 200)
	doc := replayed(t, trace, dir)
	require.Zero(t, doc.VerifyFailures)
	require.Positive(t, doc.Evictions)
	second := replayed(t, trace, dir)
	require.Zero(t, second.VerifyFailures)
	require.Less(t, second.HitRate, 1.0)
}

func TestDamageIsAMiss(t *testing.T) {
	paths := formatted(t, 1, "256m")
	dir := mounted(t, paths[0])
	trace := smallTrace(t, 25)
	replayed(t, trace, dir)
	pool := "replay-llama3-8b"
	key, _, _ := strings.Cut(tuttifs(t, "ls", "--limit", "1", dir, pool), " ")
	block := filepath.Join(dir, pool, "blocks", key[:2], key)
	whole, err := os.ReadFile(block)
	require.NoError(t, err)
	tuttifs(t, "umount", dir)

	f, err := os.OpenFile(paths[0], os.O_RDWR, 0)
	require.NoError(t, err)
	image, err := io.ReadAll(f)
	require.NoError(t, err)
	at := bytes.Index(image, whole[:512])
	require.Positive(t, at, "the block's first object lies on the drive")
	_, err = f.WriteAt([]byte{image[at+100] ^ 1}, int64(at+100))
	require.NoError(t, err)
	require.NoError(t, f.Close())

	mountOn(t, paths[0], dir)
	_, err = os.ReadFile(block)
	require.Error(t, err, "damaged bytes are not handed out")
	r := execAs(t, "tuttifs", "replay", "--json", "--scale", "1024", trace, dir)
	doc := decode[replayDocument](t, r.stdout)
	status := decode[statusDocument](t, tuttifs(t, "status", "--json", dir))
	require.Positive(t, doc.VerifyFailures+status.Total.Bad)
	third := replayed(t, trace, dir)
	require.Zero(t, third.VerifyFailures)
}

func TestMetrics(t *testing.T) {
	paths := formatted(t, 1, "256m")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := l.Addr().String()
	require.NoError(t, l.Close())
	dir := mounted(t, paths[0], "--metrics", address)
	scrape := func() string {
		r, err := http.Get("http://" + address + "/metrics")
		require.NoError(t, err)
		defer r.Body.Close()
		b, err := io.ReadAll(r.Body)
		require.NoError(t, err)
		return string(b)
	}
	before := scrape()
	for _, name := range []string{"lookups_total", "hits_total", "misses_total", "evicted_total", "bad_total",
		"io_reads_total", "io_refused_total",
		"drive_read_errors_total", "sessions"} {
		require.Contains(t, before, "\ntuttifs_"+name+" 0\n")
	}
	doc := replayed(t, smallTrace(t, 10), dir)
	require.Contains(t, scrape(), fmt.Sprintf("\ntuttifs_lookups_total %d\n", doc.Blocks))
	require.Contains(t, scrape(), `tuttifs_pool_files{pool="replay-llama3-8b"} `+fmt.Sprint(doc.StoredBlocks))
	var options daemon.OptionsDocument
	require.NoError(t, readStatus(dir, "options", &options))
	require.Equal(t, address, options.Metrics)
}

func TestVolumeByLabel(t *testing.T) {
	paths := formatted(t, 2, "256m", "-L", "by-label")
	search := filepath.Dir(paths[0])
	dir := mountPoint(t)
	refused(t, 32, `no volume "other"`, "mount", "none", dir, "-o", "volume=other,search="+search)
	r := execAs(t, "mount.fuse.tuttifs", "none", dir, "-o", "volume=by-label,search="+search+",sockets="+filepath.Dir(dir))
	require.Zero(t, r.code, r.stderr)
	uuid := decode[infoDocument](t, tuttifs(t, "info", "--json", dir)).UUID
	tuttifs(t, "umount", dir)
	r = execAs(t, "mount.fuse.tuttifs", "by-label", dir, "-o", "search="+search+",sockets="+filepath.Dir(dir))
	require.Zero(t, r.code, r.stderr)
	tuttifs(t, "umount", dir)
	r = execAs(t, "tuttifs", "UUID="+uuid, dir, "-o", "search="+search+",sockets="+filepath.Dir(dir))
	require.Zero(t, r.code, r.stderr)
}

func TestSearchFindsMembers(t *testing.T) {
	paths := formatted(t, 2, "64m")
	dir, elsewhere := mountPoint(t), filepath.Join(t.TempDir(), "d1")
	require.NoError(t, os.Rename(paths[1], elsewhere))
	defer func() { require.NoError(t, os.Rename(elsewhere, paths[1])) }()
	refused(t, 32, "missing", "mount", paths[0], dir)
	mountOn(t, paths[0], dir, "-o", "search="+filepath.Dir(elsewhere)+",search="+filepath.Dir(paths[0]))
	tuttifs(t, "umount", dir)
}

func TestMetadataOnlyReplay(t *testing.T) {
	trace := smallTrace(t, 300)
	doc := decode[replayDocument](t, tuttifs(t, "replay", "--metadata-only", "--json", trace))
	require.EqualValues(t, 300, doc.Requests)
	require.Zero(t, doc.Evictions)
	require.Zero(t, doc.BytesRead+doc.BytesWritten)
	requests, err := os.ReadFile(trace)
	require.NoError(t, err)
	all, err := readTrace(bytes.NewReader(requests), trace, 0)
	require.NoError(t, err)
	require.EqualValues(t, uniqueBlocks(all), doc.StoredBlocks, "without a limit every block is stored once")

	last := 0.0
	for _, capacity := range []string{"200", "800", "3000"} {
		n, err := strconv.Atoi(capacity)
		require.NoError(t, err)
		for _, policy := range []string{"lru", "sieve", "s3fifo"} {
			doc := decode[replayDocument](t, tuttifs(t, "replay", "--metadata-only", "--json", "--capacity-blocks", capacity,
				"--policy", policy, trace))
			require.LessOrEqual(t, doc.StoredBlocks-doc.Evictions, uint64(n))
			if policy == "lru" {
				require.EqualValues(t, countLRU(all, n), doc.HitBlocks, "as an independent count finds")
				require.Greater(t, doc.HitRate, last, "more room, more hits")
				last = doc.HitRate
			}
		}
	}
	refused(t, 2, "policy", "replay", "--metadata-only", "--policy", "belady", trace)
	require.NoError(t, os.WriteFile(trace, []byte("{}\n"), 0o600))
	refused(t, 1, trace+":1: timestamp is missing", "replay", "--metadata-only", trace)
}

// countLRU counts the blocks of longest resident prefixes under LRU, where a request refreshes its blocks leaf first.
func countLRU(requests []traceRequest, capacity int) (hits int) {
	order, place := list.New(), map[uint64]*list.Element{}
	for _, r := range requests {
		for _, id := range r.HashIDs {
			if place[id] == nil {
				break
			}
			hits++
		}
		for _, id := range slices.Backward(r.HashIDs) {
			if e := place[id]; e != nil {
				order.MoveToBack(e)
			} else {
				place[id] = order.PushBack(id)
			}
		}
		for order.Len() > capacity {
			delete(place, order.Remove(order.Front()).(uint64))
		}
	}
	return hits
}
