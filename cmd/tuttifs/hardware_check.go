package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// hardwareRoots are where the kernel shows the machine.
type hardwareRoots struct{ sys, proc, dev string }

// States of a check.
const (
	hardwareOK      = "ok"
	hardwareMissing = "missing" // queues of the drives' own cannot work without it
	hardwareAdvice  = "advice"  // they work, but better with it
)

type hardwareCheck struct {
	Name   string `json:"name"`
	State  string `json:"state"`
	Found  string `json:"found"`
	Remedy string `json:"remedy,omitempty"`
}

// hardwareController is an NVMe controller on the PCI bus.
type hardwareController struct {
	Address string   `json:"address"`
	Driver  string   `json:"driver"`          // "" if none has it
	Group   string   `json:"iommu_group"`     // "" without an IOMMU
	Shares  []string `json:"group_has_also"`  // other devices of its group, bridges aside
	Node    string   `json:"node,omitempty"`  // what a driver in user space opens
	Error   string   `json:"error,omitempty"` // why this user cannot
}

type hardwareDocument struct {
	OutputVersion int                  `json:"output_version"`
	Ready         bool                 `json:"ready"`
	Checks        []hardwareCheck      `json:"checks"`
	Controllers   []hardwareController `json:"controllers"`
}

// memlockMin is enough for the rings and buffers of a few drives and engines; pinned memory grows with both.
const memlockMin = 1 << 30

func newDrivesCheck() *command {
	asJSON := false
	f := newFlags("drives check")
	f.BoolVar(&asJSON, "json", false, "print as JSON")
	return &command{
		name: "drives check", synopsis: flagsOnly, summary: "what this machine lacks to drive NVMe itself, and how to get it",
		exits: &plainExits, flags: f,
		long: `
Looks whether NVMe drives can be driven from user space here, by way of VFIO: IOMMU, modules, groups,
permissions, limits. Nothing is changed. What is "missing" has to be had; "advice" makes things better.
Drives that the kernel drives need none of it.

Limits and permissions are those of this command's user and session: run it as the one who mounts. The
exit status is 1 if anything is missing. docs/hardware.md tells more.`,
		example: `tuttifs drives check`,
		run: func(_ context.Context, e *env, _ []string) error {
			doc := hardwareRoots{sys: "/sys", proc: "/proc", dev: "/dev"}.check()
			if asJSON {
				if err := printJSON(e.stdout, doc); err != nil {
					return err
				}
			} else {
				doc.print(e)
			}
			return doc.verdict()
		},
	}
}

// verdict is an error that counts what is missing.
func (d *hardwareDocument) verdict() error {
	missing := 0
	for i := range d.Checks {
		if d.Checks[i].State == hardwareMissing {
			missing++
		}
	}
	if missing == 0 {
		return nil
	}
	return fmt.Errorf("missing: %d of %d; each says how to get it", missing, len(d.Checks))
}

func (d *hardwareDocument) print(e *env) {
	w := table(e.stdout)
	for i := range d.Checks {
		c := &d.Checks[i]
		fmt.Fprintf(w, "%s\t%s\t%s\n", c.State, c.Name, c.Found)
		if c.Remedy != "" {
			fmt.Fprintf(w, "\t\t-> %s\n", c.Remedy)
		}
	}
	w.Flush()
	if len(d.Controllers) == 0 {
		return
	}
	fmt.Fprintf(w, "\nCONTROLLER\tDRIVER\tIOMMU GROUP\tWHICH HAS ALSO\n")
	for i := range d.Controllers {
		c := &d.Controllers[i]
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", c.Address, orDash(c.Driver), orDash(c.Group),
			orDash(strings.Join(c.Shares, " ")))
	}
	w.Flush()
}

// check looks at everything.
func (r hardwareRoots) check() *hardwareDocument {
	controllers := r.controllers()
	checks := []hardwareCheck{
		r.kernel(), r.iommu(), r.vfio(), checkControllers(controllers), checkGroups(controllers), checkNodes(controllers),
		r.memlock(), r.hugePages(), r.fuse(), r.uring(),
	}
	ready := !slices.ContainsFunc(checks, func(c hardwareCheck) bool { return c.State == hardwareMissing })
	return &hardwareDocument{OutputVersion: outputVersion, Ready: ready, Checks: checks, Controllers: controllers}
}

// kernelText reads a small file of the kernel, without the line's end; "" if it is not there.
func kernelText(path ...string) string {
	b, err := os.ReadFile(filepath.Join(path...))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func fileThere(path ...string) bool {
	_, err := os.Stat(filepath.Join(path...))
	return err == nil
}

// dirNames are the names in a directory, none if there is no such directory.
func dirNames(path ...string) (names []string) {
	list, _ := os.ReadDir(filepath.Join(path...))
	for _, d := range list {
		names = append(names, d.Name())
	}
	return names
}

// kernel: 6.1 is the oldest that tests run on; VFIO is older by far.
func (r hardwareRoots) kernel() hardwareCheck {
	release := kernelText(r.proc, "sys/kernel/osrelease")
	c := hardwareCheck{Name: "kernel", State: hardwareOK, Found: "Linux " + release}
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil || major < 6 || major == 6 && minor < 1 {
		c.State, c.Remedy = hardwareAdvice, "tested with Linux 6.1 and later: use one of those"
	}
	return c
}

func (r hardwareRoots) iommu() hardwareCheck {
	units, groups := dirNames(r.sys, "class/iommu"), dirNames(r.sys, "kernel/iommu_groups")
	c := hardwareCheck{Name: "IOMMU", State: hardwareOK, Found: fmt.Sprintf("on, %d groups", len(groups))}
	if len(units) > 0 && len(groups) > 0 {
		return c
	}
	c.State, c.Found = hardwareMissing, "off"
	tables := filepath.Join(r.sys, "firmware/acpi/tables")
	switch {
	case fileThere(tables, "DMAR"):
		c.Remedy = "the firmware offers it: boot the kernel with intel_iommu=on"
	case fileThere(tables, "IVRS"):
		c.Remedy = "the firmware offers it: boot the kernel without amd_iommu=off and iommu=off"
	case strings.Contains(kernelText(r.proc, "cpuinfo"), "AuthenticAMD"):
		c.Remedy = "enable IOMMU (AMD-Vi) in the firmware's set-up"
	case strings.Contains(kernelText(r.proc, "cpuinfo"), "GenuineIntel"):
		c.Remedy = "enable VT-d in the firmware's set-up, and boot the kernel with intel_iommu=on"
	default:
		c.Remedy = "enable it in the firmware's set-up; a virtual machine needs an emulated one"
	}
	return c
}

func (r hardwareRoots) vfio() hardwareCheck {
	c := hardwareCheck{Name: "VFIO", State: hardwareOK, Found: "vfio-pci, type 1"}
	const remedy = "modprobe %s; a line %[1]s in /etc/modules-load.d/tuttifs.conf does it at every boot"
	switch {
	case !fileThere(r.sys, "bus/pci/drivers/vfio-pci"):
		c.State, c.Found, c.Remedy = hardwareMissing, "no vfio-pci", fmt.Sprintf(remedy, "vfio-pci")
	case !fileThere(r.dev, "vfio/vfio"):
		c.State, c.Found, c.Remedy = hardwareMissing, "no /dev/vfio/vfio", fmt.Sprintf(remedy, "vfio")
	case !fileThere(r.sys, "module/vfio_iommu_type1"):
		c.State, c.Found = hardwareMissing, "no type 1 IOMMU driver"
		c.Remedy = fmt.Sprintf(remedy, "vfio_iommu_type1")
	case kernelText(r.sys, "module/vfio/parameters/enable_unsafe_noiommu_mode") == "Y":
		c.State, c.Found = hardwareAdvice, "vfio-pci, type 1, and a mode without an IOMMU"
		c.Remedy = "unsafe, and not used: echo N >/sys/module/vfio/parameters/enable_unsafe_noiommu_mode"
	}
	return c
}

// Beginnings of PCI class codes: NVMe is 01 08 (mass storage, non-volatile memory), bridges are 06.
const (
	classNVMe   = "0x0108"
	classBridge = "0x06"
)

// controllers lists the NVMe controllers, by address.
func (r hardwareRoots) controllers() []hardwareController {
	list := []hardwareController{}
	devices := filepath.Join(r.sys, "bus/pci/devices")
	for _, address := range dirNames(devices) {
		if !strings.HasPrefix(kernelText(devices, address, "class"), classNVMe) {
			continue
		}
		c := hardwareController{Address: address, Shares: []string{}}
		if driver, err := os.Readlink(filepath.Join(devices, address, "driver")); err == nil {
			c.Driver = filepath.Base(driver)
		}
		if group, err := os.Readlink(filepath.Join(devices, address, "iommu_group")); err == nil {
			c.Group = filepath.Base(group)
			for _, other := range dirNames(r.sys, "kernel/iommu_groups", c.Group, "devices") {
				if other != address && !strings.HasPrefix(kernelText(devices, other, "class"), classBridge) {
					c.Shares = append(c.Shares, other)
				}
			}
		}
		if c.Driver == "vfio-pci" && c.Group != "" {
			c.Node = "/dev/vfio/" + c.Group
			if err := unix.Access(filepath.Join(r.dev, "vfio", c.Group), unix.R_OK|unix.W_OK); err != nil {
				c.Error = err.Error()
			}
		}
		list = append(list, c)
	}
	return list
}

func checkControllers(list []hardwareController) hardwareCheck {
	c := hardwareCheck{Name: "NVMe", State: hardwareOK}
	drivers := map[string]int{}
	for i := range list {
		drivers[list[i].Driver]++
	}
	c.Found = fmt.Sprintf("%d controllers: %d with the kernel's driver, %d with vfio-pci", len(list), drivers["nvme"],
		drivers["vfio-pci"])
	if len(list) == 0 {
		c.State, c.Found = hardwareMissing, "no controllers on the PCI bus"
		c.Remedy = "look for them with lspci; volumes on files and other block devices need none"
	}
	return c
}

func checkGroups(list []hardwareController) hardwareCheck {
	c := hardwareCheck{Name: "groups", State: hardwareOK, Found: "each controller is alone in its group"}
	var without, shared []string
	for i := range list {
		if list[i].Group == "" {
			without = append(without, list[i].Address)
		} else if len(list[i].Shares) > 0 {
			shared = append(shared, list[i].Address)
		}
	}
	switch {
	case len(list) == 0:
		c.Found = "no controllers"
	case len(without) > 0:
		c.State, c.Found = hardwareMissing, "no group: "+strings.Join(without, " ")
		c.Remedy = "the IOMMU does not cover these: see IOMMU above"
	case len(shared) > 0:
		c.State, c.Found = hardwareAdvice, "in a group with other devices: "+strings.Join(shared, " ")
		c.Remedy = "other slots may have groups of their own; else all devices of a group must be bound to vfio-pci"
	}
	return c
}

func checkNodes(list []hardwareController) hardwareCheck {
	c := hardwareCheck{Name: "permissions", State: hardwareOK, Found: "nothing is bound to vfio-pci yet"}
	bound := 0
	for i := range list {
		if list[i].Node == "" {
			continue
		}
		bound++
		if list[i].Error != "" && c.State == hardwareOK {
			c.State, c.Found = hardwareMissing, list[i].Node+": "+list[i].Error
			c.Remedy = `as root, or with a line SUBSYSTEM=="vfio", GROUP="tuttifs", MODE="0660" in ` +
				`/etc/udev/rules.d/70-tuttifs.rules for a user of that group; bind the drive anew`
		}
	}
	if bound > 0 && c.State == hardwareOK {
		c.Found = fmt.Sprintf("%d groups can be opened", bound)
	}
	return c
}

// memlock looks at the limit of locked memory, which memory that drives reach counts against.
func (r hardwareRoots) memlock() hardwareCheck {
	c := hardwareCheck{Name: "locked memory", State: hardwareOK}
	limit, err := r.memlockLimit()
	switch {
	case err != nil:
		c.State, c.Found, c.Remedy = hardwareAdvice, err.Error(), "look at 'ulimit -l'"
	case limit == unix.RLIM_INFINITY:
		c.Found = "no limit"
	case r.capable(unix.CAP_IPC_LOCK):
		c.Found = "the limit of " + humanBytes(limit) + " does not hold for this user (CAP_IPC_LOCK)"
	case limit >= memlockMin:
		c.Found = "limit " + humanBytes(limit)
	default:
		c.State, c.Found = hardwareMissing, "limit "+humanBytes(limit)
		c.Remedy = "ulimit -l unlimited; for a unit LimitMEMLOCK=infinity, for logins memlock in /etc/security/limits.conf"
	}
	return c
}

func (r hardwareRoots) memlockLimit() (uint64, error) {
	for line := range strings.Lines(kernelText(r.proc, "self/limits")) {
		rest, found := strings.CutPrefix(line, "Max locked memory")
		words := strings.Fields(rest)
		if !found || len(words) == 0 {
			continue
		}
		if words[0] == "unlimited" {
			return unix.RLIM_INFINITY, nil
		}
		if n, err := strconv.ParseUint(words[0], 10, 64); err == nil {
			return n, nil
		}
	}
	return 0, errors.New("the kernel does not tell the limit")
}

// capable says whether this process has a capability in effect.
func (r hardwareRoots) capable(capability uint) bool {
	for line := range strings.Lines(kernelText(r.proc, "self/status")) {
		if hex, found := strings.CutPrefix(line, "CapEff:"); found {
			set, err := strconv.ParseUint(strings.TrimSpace(hex), 16, 64)
			return err == nil && set>>capability&1 != 0
		}
	}
	return false
}

// hugePages looks at those of shared memory, in which rings and buffers are: the IOMMU and the GPU need fewer entries.
func (r hardwareRoots) hugePages() hardwareCheck {
	c := hardwareCheck{Name: "huge pages", State: hardwareOK}
	modes := kernelText(r.sys, "kernel/mm/transparent_hugepage/shmem_enabled")
	_, mode, _ := strings.Cut(modes, "[")
	mode, _, _ = strings.Cut(mode, "]")
	switch mode {
	case "always", "within_size", "advise", "force":
		c.Found = "for shared memory: " + mode
	default:
		c.State, c.Found = hardwareAdvice, "not for shared memory"
		c.Remedy = "echo advise >/sys/kernel/mm/transparent_hugepage/shmem_enabled"
	}
	return c
}

func (r hardwareRoots) fuse() hardwareCheck {
	if !fileThere(r.dev, "fuse") {
		return hardwareCheck{Name: "FUSE", State: hardwareMissing, Found: "no /dev/fuse",
			Remedy: "modprobe fuse; a container has to be given the device"}
	}
	return hardwareCheck{Name: "FUSE", State: hardwareOK, Found: "/dev/fuse"}
}

// uring is about drives that the kernel drives. The file is there since Linux 6.6; before, nothing could be forbidden.
func (r hardwareRoots) uring() hardwareCheck {
	c := hardwareCheck{Name: "io_uring", State: hardwareOK, Found: "allowed"}
	if v := kernelText(r.proc, "sys/kernel/io_uring_disabled"); v != "" && v != "0" {
		c.State, c.Found = hardwareAdvice, "forbidden"
		c.Remedy = "sysctl kernel.io_uring_disabled=0: drives that the kernel drives are faster with it"
	}
	return c
}
