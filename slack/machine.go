package slack

import (
	"bufio"
	"bytes"
	"os"
	"path/filepath"
	"strings"
)

// Words for what a machine does not tell.
const (
	noGPU      = "none"
	unknownCPU = "unknown"
)

// Here says which GPU, link and CPU this machine has, by what the kernel shows under root: of several GPUs the one at
// a PCI address, or the first where that is "". What it does not tell is left empty.
func Here(root, address string) Machine {
	line := func(path, field string) string {
		b, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			return ""
		}
		for s := bufio.NewScanner(bytes.NewReader(b)); s.Scan(); {
			name, value, _ := strings.Cut(s.Text(), ":")
			if value = strings.TrimSpace(value); strings.TrimSpace(name) == field && value != "" {
				return strings.ToValidUTF8(value[:min(len(value), 200)], "?")
			}
		}
		return ""
	}
	word := func(path string) string {
		b, err := os.ReadFile(filepath.Join(root, path))
		if err != nil || len(b) > 200 {
			return ""
		}
		return strings.ToValidUTF8(strings.TrimSpace(string(b)), "?")
	}
	m := Machine{Driver: word("sys/module/nvidia/version")}
	for _, field := range []string{"model name", "CPU part"} { // the latter on arm64, which has no name
		if m.CPU == "" {
			m.CPU = line("proc/cpuinfo", field)
		}
	}
	address = strings.ToLower(address)
	if address == "" {
		if gpus, err := filepath.Glob(filepath.Join(root, "proc/driver/nvidia/gpus/*")); err == nil && len(gpus) > 0 {
			address = filepath.Base(gpus[0])
		}
	}
	if address != "" {
		m.GPU = line("proc/driver/nvidia/gpus/"+address+"/information", "Model")
		// The current speed falls when the GPU rests.
		dir := "sys/bus/pci/devices/" + address
		speed, width := word(dir+"/max_link_speed"), word(dir+"/max_link_width")
		if speed != "" && width != "" {
			m.PCIe = strings.TrimSuffix(speed, " PCIe") + " x" + width
		}
	}
	return m
}

// Fill fills in what m lacks by what another says.
func (m *Machine) Fill(from *Machine) {
	for _, f := range []struct{ to, from *string }{
		{&m.GPU, &from.GPU}, {&m.Driver, &from.Driver}, {&m.PCIe, &from.PCIe}, {&m.CPU, &from.CPU},
	} {
		if *f.to == "" {
			*f.to = *f.from
		}
	}
}

// FillWords fills what is still missing with the words for that.
func (m *Machine) FillWords() {
	m.Fill(&Machine{GPU: noGPU, Driver: noGPU, PCIe: noGPU, CPU: unknownCPU})
}
