package main

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/nvme"
	"tuttifs/nvme/emu"
	"tuttifs/nvme/nvmetest"
	"tuttifs/nvme/vfio"
)

// formattable opens addresses as namespaces of one virtual SSD each, which keep their format while the test runs.
func formattable(t *testing.T, formats bool) {
	t.Helper()
	before := drive.OpenAddress
	t.Cleanup(func() { drive.OpenAddress = before })
	controllers := map[string]*vfio.Controller{}
	drive.OpenAddress = func(address string, o drive.Options) (drive.Drive, error) {
		c := controllers[address]
		if c == nil {
			memory, err := drive.NewMemory(address, 64<<20)
			require.NoError(t, err)
			hardware, err := emu.New(emu.Config{Drive: memory, Queues: 4, Formats: formats})
			require.NoError(t, err)
			c, err = vfio.Open(nvmetest.NewEmulated(hardware), vfio.Options{})
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, c.Close()) })
			controllers[address] = c
		}
		return vfio.NewDrive(c, 1, o)
	}
}

const ssdAddress = "0000:01:00.0"

// blocksOf is a drive's block size now, and the first bytes of it.
func blocksOf(t *testing.T, address string) (lba int, head [8]byte) {
	t.Helper()
	d, err := drive.Open(address, drive.Options{ReadOnly: true})
	require.NoError(t, err)
	defer d.Close()
	require.NoError(t, d.ReadAt(head[:], 0))
	return d.LBABytes(), head
}

func runMkfs(t *testing.T, args ...string) (out, bad string, err error) {
	t.Helper()
	c := newMkfs()
	require.NoError(t, c.flags.Parse(args))
	e, stdout, stderr := testEnv()
	err = c.run(context.Background(), e, c.flags.Args())
	return stdout.String(), stderr.String(), err
}

// A namespace is formatted when it is asked for twice, and when nothing else speaks against it.
func TestMkfsBlocks(t *testing.T) {
	formattable(t, true)
	was, _ := blocksOf(t, ssdAddress)
	other := 512 + 4096 - was
	want := map[int]string{512: "512", 4096: "4k"}

	out, _, err := runMkfs(t, "--lba-size", "list", ssdAddress)
	require.NoError(t, err)
	require.Regexp(t, `(?m)^emulated/1 +4096 +0 +best`, out)
	require.Regexp(t, `(?m)^emulated/1 +512 +0 +better`, out)
	out, _, err = runMkfs(t, "--lba-size", "list", "--json", ssdAddress)
	require.NoError(t, err)
	require.Contains(t, out, `"relative_performance": "best"`)

	_, _, err = runMkfs(t, "--lba-size", want[other], ssdAddress)
	require.ErrorContains(t, err, "--format-nvm")
	require.ErrorContains(t, err, "lost")
	_, _, err = runMkfs(t, "--format-nvm", ssdAddress)
	require.ErrorContains(t, err, "is for --lba-size")
	_, _, err = runMkfs(t, "-n", "--lba-size", want[other], "--format-nvm", ssdAddress)
	require.NoError(t, err)
	lba, head := blocksOf(t, ssdAddress)
	require.Equal(t, was, lba, "nothing was changed yet")
	require.Zero(t, head)

	_, _, err = runMkfs(t, "--lba-size", want[other], "--format-nvm", ssdAddress)
	require.NoError(t, err)
	lba, head = blocksOf(t, ssdAddress)
	require.Equal(t, other, lba)
	require.NotZero(t, head, "there is a volume now")

	_, _, err = runMkfs(t, "--lba-size", want[was], "--format-nvm", ssdAddress)
	require.ErrorContains(t, err, "--force")
	lba, again := blocksOf(t, ssdAddress)
	require.Equal(t, other, lba, "it holds something known")
	require.Equal(t, head, again)
	_, bad, err := runMkfs(t, "-f", "--lba-size", "512", "--format-nvm", ssdAddress)
	require.NoError(t, err)
	require.Contains(t, bad, "4096 bytes best")
	lba, _ = blocksOf(t, ssdAddress)
	require.Equal(t, 512, lba)
	_, bad, err = runMkfs(t, "-f", "--lba-size", "4096", "--format-nvm", ssdAddress)
	require.NoError(t, err)
	require.Empty(t, bad)
}

// What has no choice is told apart from what was not asked for.
func TestMkfsBlocksWithoutChoice(t *testing.T) {
	formattable(t, false)
	file := t.TempDir() + "/d"
	out, _, err := runMkfs(t, "--lba-size", "list", "--size", "64m", ssdAddress, file)
	require.NoError(t, err)
	require.Regexp(t, `(?m)no choice`, out)
	require.NoFileExists(t, file)
	lba, _ := blocksOf(t, ssdAddress)
	other := map[int]string{512: "4096", 4096: "512"}[lba]
	_, _, err = runMkfs(t, "--lba-size", other, "--format-nvm", ssdAddress)
	require.ErrorContains(t, err, "does not offer it")
	_, _, err = runMkfs(t, "--lba-size", "512", "--format-nvm", "--size", "64m", file)
	require.NoError(t, err, "it has such blocks already")
	_, _, err = runMkfs(t, "-f", "--lba-size", "4096", "--format-nvm", file)
	require.ErrorIs(t, err, drive.ErrNoFormats)
	for _, text := range []string{"", "0", "1024", "8k", "LIST"} {
		require.Error(t, new(lbaSizeFlag).Set(text), text)
	}
	require.False(t, usableFormat(nvme.LBAFormat{LBADS: 9, MS: 8}))
	require.Zero(t, nvme.LBAFormat{LBADS: 200}.Bytes())
}
