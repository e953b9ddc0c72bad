package main

import (
	"bufio"
	"bytes"
	"os"
	"path/filepath"
	"strings"

	"tuttifs/slack"
)

// Words for what a machine does not tell.
const (
	noGPU      = "none"
	unknownCPU = "unknown"
)

// describeMachine says which GPU, link and CPU are there, by what the kernel under root shows; of several GPUs, the
// first.
func describeMachine(root string) slack.Machine {
	m := slack.Machine{GPU: noGPU, Driver: noGPU, PCIe: noGPU, CPU: unknownCPU}
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
	here := slack.Machine{Driver: word("sys/module/nvidia/version")}
	for _, field := range []string{"model name", "CPU part"} { // the latter on arm64, which has no name
		if here.CPU == "" {
			here.CPU = line("proc/cpuinfo", field)
		}
	}
	gpus, err := filepath.Glob(filepath.Join(root, "proc/driver/nvidia/gpus/*"))
	if err == nil && len(gpus) > 0 {
		address := filepath.Base(gpus[0])
		here.GPU = line("proc/driver/nvidia/gpus/"+address+"/information", "Model")
		// The current speed falls when the GPU rests.
		dir := "sys/bus/pci/devices/" + address
		speed, width := word(dir+"/max_link_speed"), word(dir+"/max_link_width")
		if speed != "" && width != "" {
			here.PCIe = strings.TrimSuffix(speed, " PCIe") + " x" + width
		}
	}
	fillMachine(&here, &m)
	return here
}

// fillMachine fills in what m lacks.
func fillMachine(m, from *slack.Machine) {
	for _, f := range []struct{ to, from *string }{
		{&m.GPU, &from.GPU}, {&m.Driver, &from.Driver}, {&m.PCIe, &from.PCIe}, {&m.CPU, &from.CPU},
	} {
		if *f.to == "" {
			*f.to = *f.from
		}
	}
}
