package main

import (
	"bytes"
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/nvme/vfio"
)

const diskBytes = 8 << 20

// twoDrives is a machine with a controller that the kernel drives, with one namespace, and one that VFIO has.
func twoDrives(t *testing.T) (*drivesMachine, string) {
	t.Helper()
	m := goodMachine()
	const at = driveB + "nvme/nvme0/"
	for path, content := range map[string]string{
		"model": "Fast Drive\n", "serial": "S2\n", "firmware_rev": "1\n", "nvme0n1/nsid": "1\n",
		"nvme0n1/size": "16384\n", "nvme0n1/dev": "259:0\n", "nvme0n1/queue/logical_block_size": "4096\n",
	} {
		m[at+path] = content
	}
	m[driveA+"driver_override"], m[driveB+"driver_override"] = "vfio-pci\n", "(null)\n"
	m["proc/self/mountinfo"], m["proc/swaps"] = "", ""
	m["dev/nvme0n1"] = strings.Repeat("\x00", diskBytes)
	r := m.build(t)
	machine := newDrivesMachine(r)
	root := filepath.Dir(r.sys)
	machine.Write = func(path, word string) error { // what a kernel does
		device := filepath.Join(root, "sys/bus/pci/devices", word)
		switch filepath.Base(path) {
		case "driver_override":
			return os.WriteFile(path, []byte(word), 0o600)
		case "unbind":
			return os.Remove(filepath.Join(device, "driver"))
		case "drivers_probe":
			want, err := os.ReadFile(filepath.Join(device, "driver_override"))
			require.NoError(t, err)
			driver := strings.TrimSpace(string(want))
			if driver == "" {
				driver = vfio.KernelDriver
			}
			return os.Symlink(filepath.Join(root, "sys/bus/pci/drivers", driver), filepath.Join(device, "driver"))
		}
		return fs.ErrNotExist
	}
	return machine, root
}

func testEnv() (*env, *bytes.Buffer, *bytes.Buffer) {
	var out, bad bytes.Buffer
	return &env{stdout: &out, stderr: &bad, prog: "tuttifs drives"}, &out, &bad
}

func TestDrivesList(t *testing.T) {
	m, root := twoDrives(t)
	doc, err := m.document()
	require.NoError(t, err)
	require.Len(t, doc.Controllers, 2)
	require.Equal(t, controllerDocument{Address: "0000:02:00.0", Driver: "nvme", Group: "8", Controller: "nvme0",
		Model: "Fast Drive", Serial: "S2", Firmware: "1", Namespaces: []namespaceDocument{{Name: "nvme0n1", NSID: 1,
			Bytes: diskBytes, LBABytes: 4096, Uses: []string{}, Content: &content{Known: true, What: "empty"}}}},
		doc.Controllers[1])
	e, out, _ := testEnv()
	doc.print(e)
	require.Regexp(t, `(?m)^0000:01:00.0 +vfio-pci +7 +- +- +- +- +- +- +- +-$`, out.String())
	require.Regexp(t, `(?m)^0000:02:00.0 +nvme +8 +Fast Drive +S2 +nvme0n1 +8.0 MiB +4096 +empty +- +-$`, out.String())
	out.Reset()
	require.NoError(t, printJSON(e.stdout, doc))
	require.Contains(t, out.String(), `"group_has_also": null`)

	require.NoError(t, os.Remove(filepath.Join(root, "dev/nvme0n1")))
	doc, err = m.document()
	require.NoError(t, err)
	require.Nil(t, doc.Controllers[1].Namespaces[0].Content)
	require.NotEmpty(t, doc.Controllers[1].Namespaces[0].Error)
}

func TestDrivesBind(t *testing.T) {
	m, root := twoDrives(t)
	disk := filepath.Join(root, "dev/nvme0n1")
	e, out, _ := testEnv()
	var usage *usageError
	require.ErrorAs(t, m.bind(e, nil, 0), &usage)
	require.ErrorAs(t, m.unbind(e, nil), &usage)
	require.ErrorIs(t, m.bind(e, []string{"0000:09:00.0"}, 2), fs.ErrNotExist)

	put := func(at int64, text string) {
		f, err := os.OpenFile(disk, os.O_WRONLY, 0)
		require.NoError(t, err)
		_, err = f.WriteAt([]byte(text), at)
		require.NoError(t, err)
		require.NoError(t, f.Close())
	}
	put(0x438, "\x53\xef")
	for force := range 2 {
		err := m.bind(e, []string{"0000:02:00.0"}, force)
		require.ErrorContains(t, err, "nvme0n1 holds ext2, ext3 or ext4")
		require.ErrorContains(t, err, "--force is given twice")
	}
	put(0x438, "\x00\x00")

	locked, err := unix.Open(disk, unix.O_RDWR|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	require.NoError(t, unix.Flock(locked, unix.LOCK_EX))
	require.ErrorContains(t, m.bind(e, []string{"0000:02:00.0"}, 1), "in use: claimed")
	require.NoError(t, unix.Close(locked))

	require.NoError(t, os.WriteFile(filepath.Join(root, "proc/self/mountinfo"),
		[]byte("22 1 259:0 / /mnt/x rw - xfs /dev/nvme0n1 rw\n"), 0o600))
	require.ErrorContains(t, m.bind(e, []string{"0000:02:00.0"}, 0), "in use: mounted on /mnt/x")
	require.Empty(t, out.String())
	require.NoError(t, m.bind(e, []string{"0000:02:00.0"}, 2), "told twice")
	require.Equal(t, "0000:02:00.0: with vfio-pci, IOMMU group 8\n", out.String())
	require.NoError(t, m.unbind(e, []string{"0000:02:00.0"}))
	require.NoError(t, os.WriteFile(filepath.Join(root, "proc/self/mountinfo"), nil, 0o600))

	d, err := drive.Open(disk, drive.Options{})
	require.NoError(t, err)
	_, err = extentmap.Format([]drive.Drive{d}, extentmap.FormatOptions{Label: "kv0", SegmentBytes: 256 << 10,
		JournalBytes: 1 << 20})
	require.NoError(t, err)
	require.NoError(t, d.Close())
	doc, err := m.document()
	require.NoError(t, err)
	c := doc.Controllers[1].Namespaces[0].Content
	require.True(t, c.Known)
	require.Equal(t, "kv0", c.Label)
	require.Zero(t, *c.Drive)
	require.NoError(t, m.bind(e, []string{"0000:02:00.0"}, 0), "our own")
}

func TestDiskContent(t *testing.T) {
	at := func(off int, magic string) []byte {
		b := make([]byte, diskBytes)
		if off < 0 {
			off += len(b)
		}
		copy(b[off:], magic)
		return b
	}
	for _, s := range signatures {
		c, err := contentOf(bytes.NewReader(at(int(s.at), s.magic)), diskBytes)
		require.NoError(t, err)
		require.Equal(t, content{What: s.name}, c)
	}
	for _, odd := range []struct {
		b    []byte
		want content
	}{
		{at(0, ""), content{Known: true, What: "empty"}}, {at(5000, "x"), content{What: "unknown data"}},
		{at(-1, "x"), content{What: "unknown data"}}, {at(diskBytes/2, "x"), content{What: "unknown data"}},
		{at(132<<10, "\x0c\xb1\xba\x00\x00\x00\x00\x00"), content{What: "ZFS"}},
		{make([]byte, 100), content{Known: true, What: "empty"}},
	} {
		c, err := contentOf(bytes.NewReader(odd.b), int64(len(odd.b)))
		require.NoError(t, err)
		require.Equal(t, odd.want, c)
	}
}

func TestDrivesUsage(t *testing.T) {
	e, _, bad := testEnv()
	require.Equal(t, plainExits.usage, runMain(context.Background(), e, []string{"tuttifs", "drives", "0000:01:00.0"}))
	require.Contains(t, bad.String(), `unexpected argument "0000:01:00.0"`)
	for _, verb := range []string{"bind", "unbind"} {
		e, _, bad = testEnv()
		require.Equal(t, plainExits.usage, runMain(context.Background(), e, []string{"tuttifs", "drives", verb, "nonsense"}))
		require.Contains(t, bad.String(), `"nonsense" is no PCI address`)
	}
	e, out, _ := testEnv()
	require.Zero(t, runMain(context.Background(), e, []string{"tuttifs", "drives", "bind", "--help"}))
	require.Contains(t, out.String(), "ADDRESS")
}
