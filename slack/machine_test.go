package slack

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestHere(t *testing.T) {
	root := t.TempDir()
	require.Zero(t, Here(root, ""))
	gpu, pci := "proc/driver/nvidia/gpus/0000:0f:00.0/information", "sys/bus/pci/devices/0000:0f:00.0/"
	for path, text := range map[string]string{
		"proc/cpuinfo":              "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n",
		"sys/module/nvidia/version": "580.159.04\n",
		gpu:                         "Model: \t\t NVIDIA H200\nIRQ:   \t\t 5\n",
		pci + "max_link_speed":      "32.0 GT/s PCIe\n",
		pci + "max_link_width":      "16\n",
	} {
		path = filepath.Join(root, path)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	want := Machine{GPU: "NVIDIA H200", Driver: "580.159.04", PCIe: "32.0 GT/s x16", CPU: "Some CPU @ 2 GHz"}
	require.Equal(t, want, Here(root, ""))
	require.Equal(t, want, Here(root, "0000:0F:00.0"))
	want.GPU, want.PCIe = "", ""
	require.Equal(t, want, Here(root, "0000:10:00.0"), "a GPU that is not there")
	require.NoError(t, os.WriteFile(filepath.Join(root, "proc/cpuinfo"), []byte("CPU part\t: 0xd4f\n"), 0o600))
	require.Equal(t, "0xd4f", Here(root, "").CPU)

	m := Machine{CPU: "x"}
	m.Fill(&Machine{CPU: "y", GPU: "z"})
	m.FillWords()
	require.Equal(t, Machine{CPU: "x", GPU: "z", Driver: "none", PCIe: "none"}, m)
}

func TestCheckMachine(t *testing.T) {
	f := fingerprint()
	here := f.Machine
	drives := len(f.Machine.Drives)
	require.Positive(t, drives)
	require.NoError(t, f.CheckMachine(&here, drives))
	require.NoError(t, f.CheckMachine(&Machine{}, drives), "what a machine does not tell is not compared")
	for says, change := range map[string]func(m *Machine){
		"GPU": func(m *Machine) { m.GPU += "!" }, "driver": func(m *Machine) { m.Driver += "!" },
		"PCIe link": func(m *Machine) { m.PCIe += "!" }, "CPU": func(m *Machine) { m.CPU += "!" },
	} {
		other := here
		change(&other)
		err := f.CheckMachine(&other, drives)
		require.ErrorIs(t, err, ErrFingerprint)
		require.ErrorContains(t, err, says)
	}
	require.ErrorContains(t, f.CheckMachine(&here, drives+1), "drives")
	f.Machine.Drives = nil
	require.NoError(t, f.CheckMachine(&here, drives+1), "without profiles any drives will do")
}

func TestCheckCache(t *testing.T) {
	x := table(t)
	m := &x.Fingerprint.Model
	same := Cache{TensorParallel: m.TensorParallel, BlockTokens: m.BlockTokens, Layers: m.Layers,
		BytesPerToken: x.IO.BytesPerToken}
	require.NoError(t, x.CheckCache(&same))
	require.NoError(t, x.CheckCache(&Cache{BlockTokens: m.BlockTokens}))
	for says, c := range map[string]Cache{
		"block tokens":           {BlockTokens: m.BlockTokens + 1},
		"tensor-parallel degree": {BlockTokens: m.BlockTokens, TensorParallel: m.TensorParallel + 1},
		"layers":                 {BlockTokens: m.BlockTokens, Layers: m.Layers + 1},
		"bytes of a token":       {BlockTokens: m.BlockTokens, BytesPerToken: 1},
	} {
		err := x.CheckCache(&c)
		require.ErrorIs(t, err, ErrFingerprint)
		require.ErrorContains(t, err, says)
	}
}
