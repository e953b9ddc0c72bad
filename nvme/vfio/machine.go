package vfio

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/nvme"
)

// Machine is where controllers are found and opened: a tree of sysfs, of device nodes and of procfs. A process has one.
type Machine struct {
	sys, dev, proc string
	// Write puts a word into an attribute of sysfs, by its path. Where the tree is a test's, so is the kernel.
	Write func(path, word string) error

	transport func(address string) (Transport, error) // Open, or a test's

	groupsMu sync.Mutex
	groups   map[string]*group // open IOMMU groups

	mu   sync.Mutex
	open map[string]*shared // controllers that drives are open on, by address
}

// NewMachine takes the places of sysfs, device nodes and procfs: "/sys", "/dev" and "/proc".
func NewMachine(sys, dev, proc string) *Machine {
	m := &Machine{sys: sys, dev: dev, proc: proc, Write: writeAttribute, groups: map[string]*group{},
		open: map[string]*shared{}}
	m.transport = m.Open
	return m
}

func writeAttribute(path, word string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(word)
	return errors.Join(err, f.Close())
}

// Device is an NVMe controller on the PCI bus, as the kernel knows it.
type Device struct {
	Address string // 0000:3b:00.0
	Driver  string // "" if it has none
	Group   string // number of its IOMMU group, "" without an IOMMU
	Node    string // character device of VFIO, "" where the kernel has none
	// Serial, Model and Firmware are what the kernel's driver read; empty with another one.
	Serial, Model, Firmware string
	Controller              string // the kernel's name for it: nvme0
	Disks                   []Disk
	// Others are the devices of its IOMMU group that must be with VFIO, or without a driver, as well.
	Others []string
}

// Disk is a namespace as the kernel's driver shows it.
type Disk struct {
	Name     string // nvme0n1
	NSID     uint32
	Bytes    int64
	LBABytes int
	// Uses are what the disk and its partitions serve for: mount points, holders, swap.
	Uses []string
}

// Names of drivers.
const (
	KernelDriver = "nvme"
	VFIODriver   = "vfio-pci"
)

var addressPattern = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)

// word reads an attribute, "" if there is none.
func (m *Machine) word(parts ...string) string {
	b, err := os.ReadFile(filepath.Join(append([]string{m.sys}, parts...)...))
	if err != nil {
		return ""
	}
	return nvme.Text([]byte(strings.TrimRight(string(b), "\n ")))
}

func (m *Machine) number(parts ...string) uint64 {
	n, _ := strconv.ParseUint(m.word(parts...), 0, 64) // absent is 0
	return n
}

// linked is the last part of where a link leads.
func (m *Machine) linked(parts ...string) string {
	to, err := os.Readlink(filepath.Join(append([]string{m.sys}, parts...)...))
	if err != nil {
		return ""
	}
	return filepath.Base(to)
}

// list names the entries of a directory; none if there is no such directory.
func (m *Machine) list(parts ...string) []string {
	entries, _ := os.ReadDir(filepath.Join(append([]string{m.sys}, parts...)...))
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// IsAddress says whether text has the form of a PCI address; a device need not be there.
func IsAddress(text string) bool { return addressPattern.MatchString(text) }

const devices = "bus/pci/devices"

// Devices lists the NVMe controllers of the machine, by address.
func (m *Machine) Devices() ([]Device, error) {
	dir := filepath.Join(m.sys, devices)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // a machine without PCI
	}
	if err != nil {
		return nil, fmt.Errorf("vfio: list of PCI devices: %w", err)
	}
	uses, err := m.uses()
	if err != nil {
		return nil, err
	}
	var out []Device
	for _, e := range entries {
		if a := e.Name(); addressPattern.MatchString(a) && m.number(devices, a, "class") == classNVMe {
			out = append(out, m.device(a, uses))
		}
	}
	slices.SortFunc(out, func(a, b Device) int { return cmp.Compare(a.Address, b.Address) })
	return out, nil
}

// Device is one of them.
func (m *Machine) Device(address string) (*Device, error) {
	if !IsAddress(address) {
		return nil, fmt.Errorf("vfio: %q is no PCI address, such as 0000:3b:00.0: %w", address, ErrUnsuitable)
	}
	all, err := m.Devices()
	if err != nil {
		return nil, err
	}
	for i := range all {
		if all[i].Address == address {
			return &all[i], nil
		}
	}
	return nil, fmt.Errorf("vfio: no NVMe controller at %s ('tuttifs drives' lists them): %w", address, fs.ErrNotExist)
}

func (m *Machine) device(address string, uses map[string][]string) Device {
	d := Device{
		Address: address, Driver: m.linked(devices, address, "driver"), Group: m.linked(devices, address, "iommu_group"),
	}
	for _, name := range m.list(devices, address, "vfio-dev") {
		d.Node = name
	}
	if d.Group != "" {
		for _, other := range m.list(devices, address, "iommu_group/devices") {
			if driver := m.linked(devices, other, "driver"); other != address && !harmless(driver) {
				d.Others = append(d.Others, fmt.Sprintf("%s (%s)", other, driver))
			}
		}
	}
	for _, name := range m.list(devices, address, "nvme") {
		d.Controller = name
		at := []string{devices, address, "nvme", name}
		d.Serial, d.Model = m.word(append(at, "serial")...), m.word(append(at, "model")...)
		d.Firmware = m.word(append(at, "firmware_rev")...)
		for _, disk := range m.list(at...) {
			if diskPattern.MatchString(disk) {
				d.Disks = append(d.Disks, m.disk(append(at, disk), disk, uses))
			}
		}
		slices.SortFunc(d.Disks, func(a, b Disk) int { return cmp.Compare(a.NSID, b.NSID) })
	}
	return d
}

// harmless drivers leave an IOMMU group to VFIO: none, VFIO's, and those of bridges and stubs.
func harmless(driver string) bool {
	return driver == "" || driver == VFIODriver || driver == "pcieport" || driver == "pci-stub"
}

// diskPattern is a namespace's name. With multipath, the hidden device of a path has a c in it.
var diskPattern = regexp.MustCompile(`^nvme[0-9]+(c[0-9]+)?n[0-9]+$`)

var hiddenPath = regexp.MustCompile(`c[0-9]+n`)

func (m *Machine) disk(at []string, name string, uses map[string][]string) Disk {
	d := Disk{
		NSID: uint32(m.number(append(at, "nsid")...)), Bytes: int64(m.number(append(at, "size")...)) * 512,
		LBABytes: int(m.number(append(at, "queue/logical_block_size")...)),
		// The path of a multipath disk is hidden; the disk is what people name.
		Name: hiddenPath.ReplaceAllString(name, "n"),
	}
	if d.Name != name {
		if there := m.linked("class/block", d.Name); there != "" {
			at = []string{"class/block", d.Name}
		}
	}
	d.Uses = append(d.Uses, m.usesOf(at, uses)...)
	for _, part := range m.list(at...) {
		if strings.HasPrefix(part, d.Name+"p") {
			for _, use := range m.usesOf(append(slices.Clone(at), part), uses) {
				d.Uses = append(d.Uses, part+" "+use)
			}
		}
	}
	return d
}

func (m *Machine) usesOf(at []string, uses map[string][]string) []string {
	out := slices.Clone(uses[m.word(append(slices.Clone(at), "dev")...)])
	for _, holder := range m.list(append(slices.Clone(at), "holders")...) {
		out = append(out, "held by "+holder)
	}
	return out
}

// uses finds what block devices are mounted on, and which are swap, by their number.
func (m *Machine) uses() (map[string][]string, error) {
	out := map[string][]string{}
	b, err := os.ReadFile(filepath.Join(m.proc, "self/mountinfo"))
	if err != nil {
		return nil, fmt.Errorf("vfio: what is mounted cannot be known: %w", err)
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 5 {
			continue
		}
		numbers := []string{f[2]}
		// Filesystems of several devices have a number of their own: their source says more.
		if i := slices.Index(f, "-"); i > 0 && i+2 < len(f) {
			if n := m.numberOf(f[i+2]); n != "" && n != f[2] {
				numbers = append(numbers, n)
			}
		}
		for _, n := range numbers {
			out[n] = append(out[n], "mounted on "+unescape(f[4]))
		}
	}
	b, err = os.ReadFile(filepath.Join(m.proc, "swaps"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("vfio: what is swap cannot be known: %w", err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && f[1] == "partition" {
			if n := m.numberOf(unescape(f[0])); n != "" {
				out[n] = append(out[n], "swap")
			}
		}
	}
	return out, nil
}

// numberOf is the number of a block device by its path in /dev, "" if it is none.
func (m *Machine) numberOf(path string) string {
	rel, ok := strings.CutPrefix(path, "/dev/")
	var st unix.Stat_t
	if !ok || unix.Stat(filepath.Join(m.dev, rel), &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return ""
	}
	return fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
}

// unescape undoes the kernel's octal numbers for blanks and backslashes in paths.
func unescape(path string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(path)
}

// Bind takes a controller from the driver that has it and gives it to VFIO. Nobody is asked: what uses its disks loses
// them.
func (m *Machine) Bind(address string) error {
	d, err := m.Device(address)
	if err != nil {
		return err
	}
	switch {
	case d.Driver == VFIODriver:
		return nil
	case d.Group == "":
		return fmt.Errorf("nvme %s: no IOMMU group: switch the IOMMU on in the firmware and the kernel (intel_iommu=on, "+
			"amd_iommu=on): %w", address, ErrUnsuitable)
	case m.linked("bus/pci/drivers", VFIODriver, "module") == "" && !m.exists("bus/pci/drivers", VFIODriver):
		return fmt.Errorf("nvme %s: the driver %s is not loaded: modprobe vfio-pci: %w", address, VFIODriver, ErrUnsuitable)
	}
	return m.move(d, VFIODriver, VFIODriver)
}

// Unbind gives a controller back to the kernel's own driver.
func (m *Machine) Unbind(address string) error {
	d, err := m.Device(address)
	if err != nil {
		return err
	}
	switch {
	case d.Driver == KernelDriver:
		return nil
	case d.Driver == VFIODriver:
		// The kernel would wait for whoever has it.
		if err := m.probeFree(d); err != nil {
			return err
		}
	}
	return m.move(d, "", KernelDriver)
}

func (m *Machine) exists(parts ...string) bool {
	_, err := os.Stat(filepath.Join(append([]string{m.sys}, parts...)...))
	return err == nil
}

// probeFree is drive.ErrBusy while a process has the controller. Other errors are no obstacle: nobody can have it then.
func (m *Machine) probeFree(d *Device) error {
	t, err := m.Open(d.Address)
	switch {
	case err == nil:
		return t.Close()
	case errors.Is(err, drive.ErrBusy):
		return fmt.Errorf("is its volume mounted? %w", err)
	}
	return nil
}

// move names the driver that may have the device, takes it from the one that has it, and has it probed.
func (m *Machine) move(d *Device, override, want string) error {
	at := func(parts ...string) string {
		return filepath.Join(append([]string{m.sys, devices, d.Address}, parts...)...)
	}
	step := func(what, path, word string) error {
		if err := m.Write(path, word); err != nil {
			return fmt.Errorf("nvme %s: %s: %w", d.Address, what, err)
		}
		return nil
	}
	// An empty line clears the override.
	if err := step("driver_override", at("driver_override"), override+"\n"); err != nil {
		return err
	}
	if d.Driver != "" {
		if err := step("take it from "+d.Driver, at("driver/unbind"), d.Address); err != nil {
			return errors.Join(err, m.Write(at("driver_override"), "\n"))
		}
	}
	err := step("probe", filepath.Join(m.sys, "bus/pci/drivers_probe"), d.Address)
	if got := m.linked(devices, d.Address, "driver"); err == nil && got != want {
		err = fmt.Errorf("nvme %s: the driver is %q, not %q: see the kernel's log: %w", d.Address, got, want, ErrUnsuitable)
	}
	if err != nil && override != "" {
		// Back to where it was, as well as that can be done.
		return errors.Join(err, m.Write(at("driver_override"), "\n"),
			m.Write(filepath.Join(m.sys, "bus/pci/drivers_probe"), d.Address))
	}
	return err
}

// Open opens a controller that is bound to VFIO, by iommufd where the kernel has it, else by its IOMMU group.
func (m *Machine) Open(address string) (Transport, error) {
	d, err := m.Device(address)
	if err != nil {
		return nil, err
	}
	if d.Driver != VFIODriver {
		return nil, fmt.Errorf("nvme %s: its driver is %q: 'tuttifs drives bind %s' gives it to %s: %w", address, d.Driver,
			address, VFIODriver, ErrUnsuitable)
	}
	if d.Node == "" || !m.nodes(d) {
		t, err := m.openByGroup(d)
		if err != nil {
			return nil, err
		}
		return t, nil
	}
	t, err := m.openByNode(d)
	if err == nil {
		return t, nil
	}
	if errors.Is(err, drive.ErrBusy) {
		return nil, err
	}
	byGroup, also := m.openByGroup(d)
	if also != nil {
		return nil, errors.Join(err, also)
	}
	return byGroup, nil
}

// nodes says whether the nodes of iommufd are there.
func (m *Machine) nodes(d *Device) bool {
	_, one := os.Stat(filepath.Join(m.dev, "iommu"))
	_, two := os.Stat(filepath.Join(m.dev, "vfio/devices", d.Node))
	return one == nil && two == nil
}
