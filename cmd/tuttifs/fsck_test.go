package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/extentmap/check"
)

// volumeFiles formats n drive files.
func volumeFiles(t *testing.T, n int) (paths []string) {
	t.Helper()
	dir := t.TempDir()
	var drives []drive.Drive
	for i := range n {
		path := filepath.Join(dir, fmt.Sprintf("d%d", i))
		require.NoError(t, drive.Create(path, 4<<20))
		d, err := drive.Open(path, drive.Options{})
		require.NoError(t, err)
		drives, paths = append(drives, d), append(paths, path)
	}
	_, err := extentmap.Format(drives, extentmap.FormatOptions{Label: "kv0"})
	require.NoError(t, err)
	for _, d := range drives {
		require.NoError(t, d.Close())
	}
	return paths
}

// overwrite puts noise at an offset of a file.
func overwrite(t *testing.T, path string, off int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	require.NoError(t, err)
	defer f.Close()
	_, err = f.WriteAt([]byte(strings.Repeat("noise ", 20)), off)
	require.NoError(t, err)
}

func TestFsckClean(t *testing.T) {
	paths := volumeFiles(t, 3)
	for _, argv := range [][]string{
		{"tuttifs", "fsck", paths[1]}, {"tuttifs", "fsck", "-n", paths[0]}, {"fsck.fuse.tuttifs", "-f", "-v",
			paths[2]},
		{"fsck.tuttifs", "-y", "--data", paths[0], paths[1], paths[2]},
	} {
		code, stdout, stderr := runInProcess(t, argv...)
		require.Zero(t, code, "%v: %s%s", argv, stdout, stderr)
		require.Empty(t, stderr)
		require.Contains(t, stdout, "Pass 1: labels\nPass 2: superblocks\n")
		require.Contains(t, stdout, "clean: 0 files in 0 pools on 3 drives")
	}
	for _, flag := range []string{"-p", "-a", "-q", "-pa", "-pf"} {
		code, stdout, stderr := runInProcess(t, "fsck.tuttifs", flag, paths[0])
		require.Zero(t, code)
		require.Empty(t, stdout+stderr, "%s is silent when all is well", flag)
	}
}

func TestFsckDamage(t *testing.T) {
	paths := volumeFiles(t, 3)
	overwrite(t, paths[1], 4096) // a superblock
	for _, flag := range []string{"-n", "-q", "-f", "-v"} {
		code, stdout, stderr := runInProcess(t, "tuttifs", "fsck", flag, paths[0])
		require.Equal(t, 4, code, flag)
		require.Empty(t, stderr)
		require.Contains(t, stdout, "error: superblock: "+paths[1]+": block 1: ")
		require.Contains(t, stdout, "kv0 (")
		require.Contains(t, stdout, "DAMAGED: 1 errors, 0 warnings; -y repairs what can be")
	}
	before, err := os.ReadFile(paths[1])
	require.NoError(t, err)
	code, stdout, _ := runInProcess(t, "tuttifs", "fsck", "--json", paths[0])
	require.Equal(t, 4, code)
	var doc fsckDocument
	require.NoError(t, json.Unmarshal([]byte(stdout), &doc))
	require.Equal(t, outputVersion, doc.OutputVersion)
	require.Equal(t, []any{"kv0", 4, uint64(1), 3, true}, []any{doc.Label, doc.ExitStatus, doc.Errors, doc.Drives,
		doc.Unmounted})
	require.Len(t, doc.Findings, 1)
	require.Equal(t, []any{"error", "superblock", 2, uint64(1)},
		[]any{doc.Findings[0].Severity, doc.Findings[0].Structure, doc.Findings[0].Pass, *doc.Findings[0].Block})
	after, err := os.ReadFile(paths[1])
	require.NoError(t, err)
	require.True(t, bytes.Equal(before, after), "nothing is written")
}

func TestFsckRepairs(t *testing.T) {
	paths := volumeFiles(t, 3)
	for _, flag := range []string{"-p", "-a", "-y", "-yf"} {
		overwrite(t, paths[1], 4096)
		code, stdout, stderr := runInProcess(t, "fsck.tuttifs", flag, paths[0])
		require.Equal(t, 1, code, stdout)
		require.Empty(t, stderr)
		require.Contains(t, stdout, "repaired, 1 errors, 0 files given up")
		require.Contains(t, stdout, "repair: it is written anew from another copy")
		code, stdout, _ = runInProcess(t, "fsck.tuttifs", flag, paths[0])
		require.Zero(t, code, stdout)
	}
	overwrite(t, paths[0], 4096)
	code, stdout, _ := runInProcess(t, "tuttifs", "fsck", "-y", "--json", paths[0])
	require.Equal(t, 1, code)
	var doc fsckDocument
	require.NoError(t, json.Unmarshal([]byte(stdout), &doc))
	require.Equal(t, []any{uint64(1), uint64(1), uint64(0), 1},
		[]any{doc.Errors, doc.Repaired, doc.ErrorsLeft, doc.ExitStatus})
	require.Equal(t, []any{"safe", true}, []any{doc.Findings[0].Repair, doc.Findings[0].Repaired})

	// What a person should agree to is left by -p: both copies of a label.
	for _, off := range []int64{0, 4<<20 - 4096} {
		overwrite(t, paths[2], off)
	}
	code, stdout, _ = runInProcess(t, "fsck.tuttifs", "-pf", paths[0], paths[2])
	require.Equal(t, 4, code, stdout)
	require.Contains(t, stdout, "nothing was repaired: drive 2 is missing")
	code, stdout, _ = runInProcess(t, "fsck.tuttifs", "-y", paths[0], paths[2])
	require.Equal(t, 4, code, "nothing proves that an empty volume's third drive is it: %s", stdout)
}

// The clean mark saves -p the record tables, and nobody else.
func TestFsckQuick(t *testing.T) {
	paths := volumeFiles(t, 2)
	code, stdout, _ := runInProcess(t, "fsck.tuttifs", "-p", "--json", paths[0])
	require.Zero(t, code)
	require.Contains(t, stdout, `"skipped": true`)
	for _, flags := range []string{"-pf", "-n", "-y", "-f"} {
		code, stdout, _ = runInProcess(t, "fsck.tuttifs", flags, "--json", paths[0])
		require.Zero(t, code)
		require.Contains(t, stdout, `"skipped": false`, flags)
	}
}

// Each repair is asked for where somebody can answer.
func TestFsckAsks(t *testing.T) {
	finding := check.Finding{Severity: check.Error, Pass: check.PassLabels, Structure: "label", Block: check.NoBlock,
		Message: "spoilt", Repair: check.RepairSafe, Fix: "it is mended"}
	for _, x := range []struct {
		answers string
		want    []bool
	}{
		{"y\nn\nYES\n", []bool{true, false, true}},
		{"what?\n\ny\nn\ny", []bool{true, false, true}},
		{"n\na\n", []bool{false, true, true}},
		{"y\ne\n", []bool{true, false, false}},
		{"", []bool{false, false, false}},
	} {
		var out bytes.Buffer
		e := &env{stdout: &out, stderr: &out}
		r := &fsckReport{o: &fsckOptions{}, e: e, tell: &fsckProgress{e: e},
			answers: bufio.NewReader(strings.NewReader(x.answers))}
		var got []bool
		for range 3 {
			got = append(got, r.ask(finding))
			r.add(finding)
		}
		require.Equal(t, x.want, got, "%q", x.answers)
		require.Equal(t, 3, strings.Count(out.String(), "error: label: spoilt"), "each is printed once")
		require.Contains(t, out.String(), "repair: it is mended? [y]es")
	}
}

func TestFsckOperational(t *testing.T) {
	paths := volumeFiles(t, 2)
	noise := filepath.Join(t.TempDir(), "noise")
	require.NoError(t, os.WriteFile(noise, make([]byte, 1<<20), 0o600))
	code, _, stderr := runInProcess(t, "tuttifs", "fsck", "-n", noise)
	require.Equal(t, 4|8, code, "no label where one was expected, and nothing to check")
	require.Contains(t, stderr, "not a tuttifs volume")
	code, _, stderr = runInProcess(t, "tuttifs", "fsck", "-n", noise+"2")
	require.Equal(t, 8, code)
	require.Contains(t, stderr, noise+"2")
	code, stdout, _ := runInProcess(t, "tuttifs", "fsck", "-n", "--json", noise)
	require.Equal(t, 12, code)
	require.Contains(t, stdout, `"failure": "check: not a tuttifs volume`)

	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	var out, errs bytes.Buffer
	e := &env{stdin: strings.NewReader(""), stdout: &out, stderr: &errs}
	require.Equal(t, 32, runMain(ctx, e, []string{"tuttifs", "fsck", "-n", paths[0]}))
	require.Contains(t, errs.String(), "interrupted")

	for _, argv := range []string{"fsck -n -p x", "fsck -y -n x", "fsck -a -y x", "fsck -n", "fsck -C x y",
		"fsck -C 977 x",
		"fsck --parallel -1 x"} {
		code, stdout, stderr := runInProcess(t, append([]string{"tuttifs"}, strings.Fields(argv)...)...)
		require.Equal(t, 16, code, argv)
		require.Empty(t, stdout)
		require.Contains(t, stderr, "tuttifs fsck: ")
	}
}

func TestFsckBusy(t *testing.T) {
	paths := volumeFiles(t, 2)
	v, err := extentmap.Open(paths[:1], extentmap.Options{})
	require.NoError(t, err)
	for _, flag := range []string{"-f", "-p", "-y"} {
		code, _, stderr := runInProcess(t, "tuttifs", "fsck", flag, paths[1])
		require.Equal(t, 8, code)
		require.Contains(t, stderr, "unmount the volume, or look at it with -n")
		require.Contains(t, stderr, "in use by another process")
	}
	code, stdout, stderr := runInProcess(t, "tuttifs", "fsck", "-n", paths[1])
	require.Zero(t, code, stdout)
	require.Contains(t, stderr, "in use: "+paths[1]+", "+paths[0]+": what is found")
	require.Contains(t, stdout, "consistent, not unmounted")
	overwrite(t, paths[0], 4<<20-4096)
	code, stdout, _ = runInProcess(t, "tuttifs", "fsck", "-n", paths[1])
	require.Zero(t, code, "a label that is being written may be torn: %s", stdout)
	require.Equal(t, 1, strings.Count(stdout, "second copy is bad"), "only the last run counts: %s", stdout)
	require.NoError(t, v.Close())
	code, stdout, _ = runInProcess(t, "tuttifs", "fsck", paths[1])
	require.Zero(t, code, "unmounting wrote both copies: %s", stdout)
}

func TestFsckProgress(t *testing.T) {
	paths := volumeFiles(t, 1)
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	code, _, stderr := runInProcess(t, "tuttifs", "fsck", "-n", "-C", strconv.Itoa(int(w.Fd())), paths[0])
	require.Equal(t, 16, code, "a descriptor of this process's own")
	require.Contains(t, stderr, "bad file descriptor")
	_, err = unix.FcntlInt(w.Fd(), unix.F_SETFD, 0) // as if it had been inherited
	require.NoError(t, err)
	code, _, stderr = runInProcess(t, "tuttifs", "fsck", "-n", "-C"+strconv.Itoa(int(w.Fd())), paths[0])
	require.Zero(t, code)
	require.Empty(t, stderr)
	require.NoError(t, w.Close())
	var lines bytes.Buffer
	_, err = lines.ReadFrom(r)
	require.NoError(t, err)
	require.Contains(t, lines.String(), "1 0 1 labels\n1 1 1 labels\n2 0 1 superblocks\n")
	require.Contains(t, lines.String(), "6 1 1 records\n")

	code, _, stderr = runInProcess(t, "tuttifs", "fsck", "-n", "-C", "0", paths[0])
	require.Zero(t, code)
	require.Empty(t, stderr, "no bar where there is no terminal")
}
