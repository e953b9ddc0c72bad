package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/daemon"
	"tuttifs/extentmap"
	"tuttifs/nvme/emu"
)

// runInProcess runs the command line without a process of its own.
func runInProcess(t *testing.T, argv ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = runMain(context.Background(), &env{stdin: strings.NewReader(""), stdout: &out, stderr: &errs}, argv)
	return code, out.String(), errs.String()
}

func TestHelpOfEveryCommand(t *testing.T) {
	code, usage, _ := runInProcess(t, "tuttifs", "--help")
	require.Zero(t, code)
	for _, mk := range commands {
		c := mk()
		require.NotEmpty(t, c.summary, c.name)
		require.Contains(t, usage, c.summary)
		for _, flag := range []string{"--help", "-h"} {
			code, stdout, stderr := runInProcess(t, append(append([]string{"tuttifs"}, strings.Fields(c.name)...), flag)...)
			require.Zero(t, code, c.name)
			require.Empty(t, stderr, c.name)
			for _, section := range []string{"usage: tuttifs " + c.name, "FLAGS", "EXAMPLE", "EXIT STATUS"} {
				require.Contains(t, stdout, section, c.name)
			}
			require.Contains(t, c.example, "tuttifs "+c.name, "the example shows the command")
		}
		words := append([]string{"tuttifs"}, strings.Fields(c.name)...)
		_, want, _ := runInProcess(t, append(words, "--help")...)
		code, stdout, stderr := runInProcess(t, slices.Insert(slices.Clone(words), 1, "help")...)
		require.Zero(t, code, c.name)
		require.Empty(t, stderr, c.name)
		require.Equal(t, want, stdout, c.name)
		code, stdout, _ = runInProcess(t, append(words, "--version")...)
		require.Zero(t, code)
		require.Equal(t, "tuttifs "+version+"\n", stdout)
	}
	_, stdout, _ := runInProcess(t, "tuttifs", "help")
	require.Equal(t, usage, stdout)
	_, want, _ := runInProcess(t, "tuttifs", "bench", "--help")
	code, stdout, _ = runInProcess(t, "tuttifs", "help", "bench")
	require.Zero(t, code)
	require.Equal(t, want, stdout)
}

func TestUsageErrors(t *testing.T) {
	for _, c := range []struct {
		argv string
		code int
		says string
	}{
		{"tuttifs", 2, "usage: tuttifs COMMAND"},
		{"tuttifs frobnicate", 2, `unknown command "frobnicate"`},
		{"tuttifs bench", 2, "\"bench\" is one of 'tuttifs bench meta', 'tuttifs bench rings'"},
		{"tuttifs mkfs", 2, "name 1 to 64 drives"},
		{"tuttifs mkfs --nope x", 2, "unknown flag: --nope"},
		{"tuttifs mkfs --size 12q x", 2, "not a size"},
		{"tuttifs mkfs --size 0 x", 2, "--size 0: drives have at least 4096 bytes"},
		{"tuttifs mkfs -n --size 64m --width -1 x", 2, "width -1; 1 to 64"},
		{"tuttifs mkfs -n --size 64m --width 65 x", 2, "width 65; 1 to 64"},
		{"tuttifs mkfs -n --size 64m --segment 3 x", 2, "segment of 3 bytes; a power of two"},
		{"tuttifs mkfs -n --size 64m --journal 1 x", 2, "journal of 1 bytes; a multiple of 4096"},
		{"tuttifs mkfs -n --size 64m -L a/b x", 2, "has a slash"},
		{"tuttifs mkfs -U zz x", 2, "not a UUID"},
		{"tuttifs mkfs --size 1k x", 2, "at least 4096"},
		{"tuttifs mkfs -n --size 64m x y x", 2, "x is named twice"},
		{"mkfs.tuttifs --nope", 2, "mkfs.tuttifs: unknown flag"},
		{"tuttifs mount", 1, "name a drive"},
		{"tuttifs mount --nope", 1, "unknown flag"},
		{"tuttifs mount /x /y -o bogus,ro,strange=1", 1, `unknown mount option "bogus"; unknown mount option "strange=1"`},
		{"tuttifs mount /x /y -o policy=belady", 1, "one of lru, sieve, s3fifo"},
		{"tuttifs mount /x /y -o uid", 1, "write uid=N"},
		{"tuttifs mount /x /y -t ext4", 1, "not tuttifs"},
		{"mount.fuse.tuttifs /x /y -o bogus", 1, "mount.fuse.tuttifs: unknown mount option"},
		{"tuttifs /x /y -o bogus", 1, "unknown mount option"},
		{"tuttifs mount /no/such/drive /no/such/dir", 32, "/no/such/dir"},
		{"tuttifs mount /no/such/drive /", 32, "/no/such/drive"},
		{"tuttifs mount /x / --metrics here", 1, "write HOST:PORT"},
		{"tuttifs mount /x / --metrics 127.0.0.1:99999", 1, "invalid port; write HOST:PORT"},
		{"tuttifs mount UUID= /", 1, "UUID= names no volume"},
		{"tuttifs fsck LABEL=", 16, "LABEL= names no volume"},
		{"tuttifs mount nosuchvolume /", 32, "their directory with -o search=DIR"},
		{"tuttifs bench --help", 0, ""},
		{"tuttifs mount none /", 1, "none needs -o volume="},
		{"tuttifs umount", 2, "name one mount point"},
		{"tuttifs umount /", 1, "/ is not a tuttifs mount"},
		{"tuttifs info", 2, "name a mount point or drives"},
		{"tuttifs status /", 1, "not a tuttifs mount"},
		{"tuttifs ls", 2, "name a mount point"},
		{"tuttifs ls /", 1, "not a tuttifs mount"},
		{"tuttifs prefixes / pool", 1, "not a tuttifs mount"},
		{"tuttifs prefixes / pool --limit -1", 2, "non-negative"},
		{"tuttifs info /", 1, "name one of its drives"},
		{"tuttifs prefixes /", 2, "name a mount point"},
		{"tuttifs evict / p", 2, "choose one of"},
		{"tuttifs evict / p --all --count 1", 2, "choose one of"},
		{"tuttifs ls / pool", 1, "not a tuttifs mount"},
		{"tuttifs bench rings --dir /no/such/dir", 1, "/no/such/dir: no such file"},
		{"tuttifs bench rings --dir /proc/version", 2, "--dir /proc/version is not a directory"},
		{"tuttifs evict / p nokey", 2, "not a key"},
		{"tuttifs evict / p --all", 1, "/"},
		{"tuttifs evict / p --count 0", 2, "--count must be at least 1"},
		{"tuttifs evict / p --all --count 0", 2, "choose one of"},
		{"tuttifs trace --requests 0", 2, "at least 1"},
		{"tuttifs replay", 2, "name a trace"},
		{"tuttifs replay x", 2, "name the mount point"},
		{"tuttifs replay x /m --metadata-only", 2, "needs no mount"},
		{"tuttifs replay x /m --policy lru", 2, "mounted: -o policy=lru"},
		{"tuttifs replay x /m --scale 0", 2, "--scale"},
		{"tuttifs replay x /m --scale 4611686018427387904", 2, "--scale 4611686018427387904: 1 to 1073741824"},
		{"tuttifs replay x /m --speed nan", 2, "--speed NaN: 0, or 1e-06 to 1e+06"},
		{"tuttifs replay x /m --speed inf", 2, "--speed +Inf: 0, or"},
		{"tuttifs replay x /m --speed -1", 2, "--speed -1: 0, or"},
		{"tuttifs replay x /m --speed 1e-300", 2, "--speed 1e-300: 0, or"},
		{"tuttifs replay x /m --requests -1", 2, "--requests must not be negative"},
		{"tuttifs replay x /m --lanes 99999", 2, "--lanes 99999: 1 to 256"},
		{"tuttifs replay x /m --lanes -1", 2, "--lanes -1: 1 to 256"},
		{"tuttifs replay x /m --layers -1", 2, "layers is -1, want 1 to"},
		{"tuttifs replay x /m --head-dim 4611686018427387904", 2, "head dimension is 4611686018427387904, want 1 to"},
		{"tuttifs replay x /m --ranks 3", 2, "8 KV heads cannot be divided among 3 ranks"},
		{"tuttifs replay x /m --model deepseek-v3 --kv-heads 4", 2, "it has no --kv-heads"},
		{"tuttifs replay x /m --model gpt", 2, `unknown model "gpt": one of`},
		{"tuttifs replay x /m --host-buffer nan", 2, "not a size"},
		{"tuttifs replay x --metadata-only --admission most", 2, `"most"`},
		{"tuttifs replay x /m --memory 4k", 2, "at least 64.0 KiB"},
		{"tuttifs replay x /m --pool a/b", 2, "no dot first"},
		{"tuttifs replay x --metadata-only --policy belady", 2, "one of lru, sieve, s3fifo"},
		{"tuttifs replay / /m", 2, "/ is a directory: name the trace first"},
		{"tuttifs trace -o /no/such/dir/t", 1, "-o: /no/such/dir/t: its directory: no such file"},
		{"tuttifs bench gpu -o /no/such/dir/t", 1, "-o: /no/such/dir/t: its directory: no such file"},
		{"tuttifs help frobnicate", 2, `unknown command "frobnicate"`},
		{"tuttifs help mkfs x", 2, `unexpected argument "x"`},
		{"tuttifs replay /no/such/trace --metadata-only", 1, "/no/such/trace"},
		{"tuttifs fsck", 16, ""},
		{"fsck.tuttifs --nope", 16, "unknown flag"},
		{"fsck.fuse.tuttifs --nope", 16, "unknown flag"},
		{"tuttifs fsck -n /no/such/drive", 8, "/no/such/drive"},
	} {
		code, _, stderr := runInProcess(t, strings.Fields(c.argv)...)
		require.Equal(t, c.code, code, "%s: %s", c.argv, stderr)
		require.Contains(t, stderr, c.says, c.argv)
		require.NotContains(t, stderr, "goroutine", c.argv)
	}
}

// TestValuesOfFlags: a value that is none of its kind, or none at all, is a usage error of every flag of every command,
// and says which flag it is.
func TestValuesOfFlags(t *testing.T) {
	kinds := map[string]int{}
	for _, mk := range commands {
		c := mk()
		c.flags.VisitAll(func(f *pflag.Flag) {
			values := []string{"", "x", "-", "1e", "1 2"}
			switch kind := f.Value.Type(); {
			case kind == "bool":
				return
			case isWhole(f):
				values = append(values, "nan", "inf", "1.5", "99999999999999999999")
			case kind == "SIZE":
				values = append(values, "nan", "inf", "-1", "1.5", "99999999999999999999")
			case kind == "duration":
				values = append(values, "nan", "inf", "-1", "99999999999999999999h")
			case strings.HasPrefix(kind, "string"):
				values = values[:1]
				if _, may := f.Annotations[mayBeEmpty]; may {
					return
				}
			}
			kinds[f.Value.Type()]++
			for _, value := range values {
				argv := slices.Concat([]string{"tuttifs"}, strings.Fields(c.name), []string{"--" + f.Name + "=" + value})
				code, stdout, stderr := runInProcess(t, argv...)
				require.Equal(t, c.exits.usage, code, "%v: %s", argv, stderr)
				require.Empty(t, stdout, "%v", argv)
				require.Contains(t, stderr, "--"+f.Name, "%v", argv)
			}
		})
	}
	for _, kind := range []string{"int", "uint", "uint32", "uint64", "float64", "SIZE", "string", "stringSlice"} {
		require.Positive(t, kinds[kind], kind)
	}
	_, _, stderr := runInProcess(t, "tuttifs", "trace", "--requests", "99999999999999999999")
	require.Contains(t, stderr, "--requests 99999999999999999999: the number is too large")
	_, _, stderr = runInProcess(t, "tuttifs", "trace", "-o", "")
	require.Contains(t, stderr, "--output is empty: give it a value, or leave it out")
	_, _, stderr = runInProcess(t, "tuttifs", "replay", "x", "--metadata-only", "--admission", "all,")
	require.Contains(t, stderr, "--admission is empty")
	path := filepath.Join(t.TempDir(), "none", "[]") // a file may have this name
	code, _, stderr := runInProcess(t, "tuttifs", "trace", "--requests", "1", "-o", path)
	require.Equal(t, 1, code, stderr)
}

// An empty word, as of a variable that is not set, is not the label of volumes without one, nor a place.
func TestEmptyArguments(t *testing.T) {
	for _, mk := range commands {
		c := mk()
		argv := slices.Concat([]string{"tuttifs"}, strings.Fields(c.name), []string{"", "/", ""})
		code, stdout, stderr := runInProcess(t, argv...)
		require.Equal(t, c.exits.usage, code, c.name)
		require.Empty(t, stdout, c.name)
		require.Contains(t, stderr, "an argument is empty", c.name)
	}
}

// A word where none belongs, such as a part of a bench without its --only, runs nothing.
func TestUnexpectedArguments(t *testing.T) {
	refusing := 0
	for _, mk := range commands {
		c := mk()
		if c.synopsis != flagsOnly {
			require.Regexp(t, "[A-Z]", strings.TrimPrefix(c.synopsis, flagsOnly), "%s names its arguments", c.name)
			continue
		}
		refusing++
		code, stdout, stderr := runInProcess(t, append(append([]string{"tuttifs"}, strings.Fields(c.name)...), "x")...)
		require.Equal(t, c.exits.usage, code, c.name)
		require.Empty(t, stdout, c.name)
		require.Contains(t, stderr, `unexpected argument "x"`, c.name)
	}
	require.Positive(t, refusing)
}

func TestExitCodes(t *testing.T) {
	for _, c := range []struct {
		err                error
		plain, mount, fsck int
	}{
		{nil, 0, 0, 0},
		{errors.New("x"), 1, 32, 8},
		{usagef("x"), 2, 1, 16},
		{fmt.Errorf("y: %w", usagef("x")), 2, 1, 16},
		{fmt.Errorf("y: %w", os.ErrPermission), 1, 1, 8},
		{systemError{errors.New("x")}, 1, 2, 8},
		{context.Canceled, 130, 8, 32},
		{&panicError{"x", nil}, 70, 4, 8},
		{exitStatus(4), 4, 4, 4},
	} {
		require.Equal(t, c.plain, plainExits.code(c.err), "%v", c.err)
		require.Equal(t, c.mount, mountExits.code(c.err), "%v", c.err)
		require.Equal(t, c.fsck, fsckExits.code(c.err), "%v", c.err)
	}
}

// What the machine refuses says what to do.
func TestMountErrorsAdvise(t *testing.T) {
	for errno, says := range map[unix.Errno]string{unix.EROFS: "mount with -o ro", unix.ENOSPC: "make room there"} {
		err := explain(&extentmap.DriveError{Err: extentmap.ErrIO, Name: "d0", Cause: errno})
		require.ErrorIs(t, err, errno)
		require.ErrorContains(t, err, says)
		require.ErrorContains(t, explain(fmt.Errorf("%w: drive 0: %w", extentmap.ErrFailed, errno)), says)
		sockets := &os.PathError{Op: "mkdir", Path: "/run/tuttifs", Err: errno}
		require.Equal(t, error(sockets), explain(sockets), "this is of no drive")
	}
	require.Equal(t, "x", explain(errors.New("x")).Error())
}

func TestPanicsBecomeMessages(t *testing.T) {
	var errs bytes.Buffer
	e := &env{stdout: &errs, stderr: &errs, prog: "tuttifs fsck"}
	c := &command{exits: &fsckExits, flags: newFlags("x"), run: func(context.Context, *env,
		[]string) error {
		panic("broken")
	}}
	require.Equal(t, 8, runCommand(context.Background(), e, c, nil))
	require.Contains(t, errs.String(), "tuttifs fsck: defect in tuttifs: broken\n")
}

func TestErrorsAreOneLineEach(t *testing.T) {
	require.Equal(t, "p: a\np: b\n", message("p", errors.Join(errors.New("a"), errors.New("b"))))
	require.Equal(t, "p: interrupted\n", message("p", fmt.Errorf("x: %w", context.Canceled)))
}

func TestParseSize(t *testing.T) {
	for text, want := range map[string]uint64{"0": 0, "4096": 4096, "4k": 4096, "1M": 1 << 20, "2GiB": 2 << 30,
		"3tb": 3 << 40, "1p": 1 << 50} {
		n, err := parseSize(text)
		require.NoError(t, err, text)
		require.Equal(t, want, n, text)
	}
	for _, text := range []string{"", "k", "-1", "1.5g", "99999999999999999999", "18014398509481984k", "1e3", "0x10"} {
		_, err := parseSize(text)
		require.Error(t, err, text)
	}
}

func TestHumanBytes(t *testing.T) {
	for n, want := range map[uint64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB",
		1<<20 - 1: "1.0 MiB", 1 << 40: "1.0 TiB", 1<<64 - 1: "16.0 EiB"} {
		require.Equal(t, want, humanBytes(n))
	}
}

func TestMountOptions(t *testing.T) {
	s := newMountSettings()
	require.NoError(t, s.parse([]string{"ro,nofail,_netdev,noatime,x-systemd.automount",
		"uid=7,gid=8,umask=027,noxattr,allow_other",
		"policy=sieve,pollers=3,checkpoint=5,sockets=/s,volume=kv0,search=/a,search=/b,nodiscard,timeout=0,",
		"io=pread,quota=7:2g,quota=4294967295:0"}, false))
	d := s.daemon
	require.Equal(t, map[uint32]uint64{7: 2 << 30, 1<<32 - 1: 0}, d.Quotas)
	require.True(t, d.ReadOnly && d.NoXattr && d.AllowOther)
	require.EqualValues(t, []uint32{7, 8, 0o027}, []uint32{d.UID, d.GID, d.Umask})
	require.Equal(t, []int{3, 5}, []int{d.Pollers, d.CheckpointSeconds})
	require.Equal(t, []string{"sieve", "/s", "kv0"}, []string{d.Policy, d.SocketDir, s.volume})
	require.Equal(t, []string{"/a", "/b"}, s.search)
	require.Equal(t, emu.Pread, d.Backend)
	require.NoError(t, s.parse([]string{"io=auto"}, false))
	require.Equal(t, emu.Auto, s.daemon.Backend)
	require.False(t, *d.Discard)
	require.Zero(t, d.EntryTimeout)

	require.NoError(t, newMountSettings().parse([]string{"bogus,rw"}, true), "sloppy")
	for _, bad := range []string{"bogus", "ro=1", "uid=", "uid=-1", "umask=8", "umask=01000", "pollers=0", "io=memory",
		"checkpoint=x", "timeout=NaN", "volume", "quota=7", "quota=7:x", "quota=-1:1g", "quota=4294967296:1"} {
		require.ErrorContains(t, newMountSettings().parse([]string{bad}, false), bad)
	}
}

func TestEveryMountOptionIsInTheHelp(t *testing.T) {
	_, stdout, _ := runInProcess(t, "tuttifs", "mount", "--help")
	for _, o := range mountOptionTable {
		require.Contains(t, stdout, "\n  "+o.name)
		require.NotContains(t, toleratedOptions, o.name)
	}
}

func TestMountTable(t *testing.T) {
	require.Equal(t, `a b	c\d\040#\9`, unescape(`a\040b\011c\134d\134040\043\9`))
	const options = "rw,user_id=0,group_id=0"
	long := strings.Repeat("lowerdir=/x:", 1<<14)
	require.Equal(t, []mountEntry{
		{"overlay", "/merged", "overlay", long}, {"", "/mnt/a\u00a0b", fsType, options}, {"k v", "/mnt/c d", fsType, options},
	}, parseMounts("overlay /merged overlay "+long+" 0 0\n /mnt/a\u00a0b "+fsType+" "+options+" 0 0\n"+
		`k\040v /mnt/c\040d `+fsType+" "+options+" 0 0\n"))
	for options, others := range map[string]bool{
		options: false, "rw,user_id=" + strconv.Itoa(os.Geteuid()): false, "rw,user_id=4294967294": true, "rw": true,
	} {
		require.Equal(t, others, mountEntry{options: options}.byOthers(), options)
	}
}

// A directory that may not be looked into is no mount for that.
func TestStatusOfAPrivateDirectory(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("becoming another user needs root")
	}
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o700))
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	require.NoError(t, unix.Setfsuid(65534))
	err := readStatus(dir, "version", &daemon.VersionDocument{})
	require.NoError(t, unix.Setfsuid(0))
	require.ErrorIs(t, err, os.ErrPermission)
	require.NotContains(t, err.Error(), "owner")
}

func TestScaleKV(t *testing.T) {
	o := &replayOptions{model: "llama3-8b", scale: 1}
	whole, err := o.kv()
	require.NoError(t, err)
	require.Equal(t, []int{32, 512}, []int{whole.Layers, whole.Tokens})
	for scale, want := range map[int][2]int{1: {32, 512}, 4: {8, 512}, 8: {4, 512}, 64: {4, 64}, 1024: {4, 4},
		1 << 20: {4, 1}} {
		kv := scaleKV(whole, scale)
		require.Equal(t, want, [2]int{kv.Layers, kv.Tokens}, scale)
		g, err := kv.Geometry()
		require.NoError(t, err)
		require.NoError(t, g.Validate())
	}
	_, err = (&replayOptions{model: "llama3-9b"}).kv()
	require.ErrorContains(t, err, "unknown model")
}

// TestOutputThatCannotBeWritten: no text is lost without a word, and fsck's bits stay.
func TestOutputThatCannotBeWritten(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip("no /dev/full: ", err)
	}
	defer full.Close()
	t.Setenv("XDG_CACHE_HOME", t.TempDir()) // where profile model keeps its table
	path := filepath.Join(t.TempDir(), "drive")
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	require.NoError(t, os.Truncate(path, 512<<20))
	run := func(words ...string) (int, string) {
		var errs bytes.Buffer
		e := &env{stdin: strings.NewReader(""), stdout: full, stderr: &errs}
		return runMain(context.Background(), e, append([]string{"tuttifs"}, words...)), errs.String()
	}
	code, _ := run("mkfs", "-q", "-L", "full", path)
	require.Zero(t, code, "nothing was to be written")
	for _, c := range []struct {
		code  int
		words []string
	}{
		{1, []string{"version"}}, {1, []string{"help"}}, {1, []string{"cost"}}, {1, []string{"cost", "--help"}},
		{1, []string{"cost", "--json"}}, {1, []string{"trace"}}, {1, []string{"drives"}}, {1, []string{"info", path}},
		{1, []string{"mkfs", "--force", "-n", path}}, {2, []string{"cost", "--nonsense"}},
		{1, []string{"profile", "model", "--flops", "1e15", "--hbm", "3e12"}},
		{8, []string{"fsck", "-n", path}}, {8, []string{"fsck", "-n", "--json", path}},
	} {
		code, message := run(c.words...)
		require.Equal(t, c.code, code, c.words)
		if c.code != plainExits.usage {
			require.Equal(t, 1, strings.Count(message, "no space left"), "%v: %s", c.words, message)
		}
	}
	// Damage is still told by its bit.
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	_, err = f.WriteAt(make([]byte, 4096), 0)
	require.NoError(t, errors.Join(err, f.Close()))
	want, _, _ := runInProcess(t, "tuttifs", "fsck", "-n", path)
	require.NotZero(t, want)
	code, _ = run("fsck", "-n", path)
	require.Equal(t, want|fsckExits.failure, code)
}
