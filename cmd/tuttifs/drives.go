package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"tuttifs/daemon"
	"tuttifs/drive"
	"tuttifs/nvme/vfio"
)

// drivesMachine is where the verbs about the machine's drives look and write.
type drivesMachine struct {
	*vfio.Machine
	dev string
}

func newDrivesMachine(r hardwareRoots) *drivesMachine {
	return &drivesMachine{vfio.NewMachine(r.sys, r.dev, r.proc), r.dev}
}

var thisMachine = hardwareRoots{sys: "/sys", proc: "/proc", dev: "/dev"}

type namespaceDocument struct {
	Name     string   `json:"name"` // the kernel's block device
	NSID     uint32   `json:"nsid"`
	Bytes    int64    `json:"bytes"`
	LBABytes int      `json:"lba_bytes"`
	Uses     []string `json:"uses"`
	Content  *content `json:"content,omitempty"` // absent if it could not be read
	// Log is what the drive says of its wear, where it may be asked.
	Log   *daemon.DriveLog `json:"log,omitempty"`
	Error string           `json:"error,omitempty"`
}

type controllerDocument struct {
	Address    string              `json:"address"`
	Driver     string              `json:"driver"`
	Group      string              `json:"iommu_group"`
	Others     []string            `json:"group_has_also"`
	Controller string              `json:"controller,omitempty"`
	Model      string              `json:"model,omitempty"`
	Serial     string              `json:"serial,omitempty"`
	Firmware   string              `json:"firmware,omitempty"`
	Namespaces []namespaceDocument `json:"namespaces"`
}

type drivesDocument struct {
	OutputVersion int                  `json:"output_version"`
	Controllers   []controllerDocument `json:"controllers"`
}

func newDrives() *command {
	asJSON := false
	f := newFlags("drives")
	f.BoolVar(&asJSON, "json", false, "print as JSON")
	return &command{
		name: "drives", synopsis: flagsOnly, summary: "the NVMe drives of this machine, who drives them and what they hold",
		exits: &plainExits, flags: f,
		long: `
Lists the NVMe controllers on the PCI bus: address, driver, IOMMU group, and as far as the kernel
drives them, model, serial number and namespaces with their use (mounts, holders, swap) and content.
Nothing is changed. What namespaces hold is shown to root only.

'tuttifs drives check' says what the machine lacks to drive NVMe itself, 'tuttifs drives bind' gives
a drive to it, 'tuttifs drives unbind' gives it back to the kernel.`,
		example: `tuttifs drives`,
		run: func(_ context.Context, e *env, _ []string) error {
			doc, err := newDrivesMachine(thisMachine).document()
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(e.stdout, doc)
			}
			doc.print(e)
			return nil
		},
	}
}

func newDrivesBind() *command {
	force := 0
	f := newFlags("drives bind")
	f.CountVar(&force, "force", "given twice: also drives in use, and those that hold what is not of tuttifs")
	return &command{
		name: "drives bind", synopsis: "[FLAGS] ADDRESS...",
		summary: "take NVMe drives from the kernel, for tuttifs to drive",
		exits:   &plainExits, flags: f,
		long: `
Gives the controllers at the PCI addresses (0000:3b:00.0) to vfio-pci. Then 'tuttifs mkfs' and
'tuttifs mount' take ADDRESS for their first namespace, and ADDRESS/2 for number 2, as they take
the path of a device. It lasts until 'tuttifs drives unbind', or until the machine starts again.

A drive in use is refused, and so is one that holds what is neither empty nor tuttifs's own: its
block devices are gone afterwards, and whatever used them fails. --force --force does it all the
same.`,
		example: `tuttifs drives bind 0000:3b:00.0 0000:5e:00.0`,
		run: func(_ context.Context, e *env, args []string) error {
			return newDrivesMachine(thisMachine).bind(e, args, force)
		},
	}
}

func newDrivesUnbind() *command {
	f := newFlags("drives unbind")
	return &command{
		name: "drives unbind", synopsis: "ADDRESS...", summary: "give NVMe drives back to the kernel",
		exits: &plainExits, flags: f,
		long: `
Gives the controllers at the PCI addresses back to the kernel's NVMe driver. A drive whose volume is
mounted, or that another process has, is refused. What it holds stays: the kernel shows it as a block
device, which can be mounted as part of its volume.`,
		example: `tuttifs drives unbind 0000:3b:00.0`,
		run: func(_ context.Context, e *env, args []string) error {
			return newDrivesMachine(thisMachine).unbind(e, args)
		},
	}
}

func (m *drivesMachine) document() (*drivesDocument, error) {
	list, err := m.Devices()
	if err != nil {
		return nil, err
	}
	doc := &drivesDocument{OutputVersion: outputVersion, Controllers: []controllerDocument{}}
	for i := range list {
		doc.Controllers = append(doc.Controllers, m.controller(&list[i]))
	}
	return doc, nil
}

func (m *drivesMachine) controller(d *vfio.Device) controllerDocument {
	c := controllerDocument{Address: d.Address, Driver: d.Driver, Group: d.Group, Others: d.Others,
		Controller: d.Controller, Model: d.Model, Serial: d.Serial, Firmware: d.Firmware,
		Namespaces: []namespaceDocument{}}
	for i := range d.Disks {
		c.Namespaces = append(c.Namespaces, m.namespace(&d.Disks[i]))
	}
	return c
}

// namespace looks into a disk. Who cannot read it is told so; who claims it is a use.
func (m *drivesMachine) namespace(d *vfio.Disk) namespaceDocument {
	n := namespaceDocument{Name: d.Name, NSID: d.NSID, Bytes: d.Bytes, LBABytes: d.LBABytes,
		Uses: append([]string{}, d.Uses...)}
	path := filepath.Join(m.dev, d.Name)
	f, err := os.Open(path)
	if err != nil {
		n.Error = err.Error()
		return n
	}
	defer f.Close()
	c, err := contentOf(f, d.Bytes)
	if err != nil {
		n.Error = err.Error()
		return n
	}
	n.Content = &c
	n.Log = logOf(path)
	// Filesystems, RAID and the like claim a device exclusively, and a daemon of tuttifs locks it.
	claim, err := unix.Open(path, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
	if err == nil {
		err = unix.Flock(claim, unix.LOCK_SH|unix.LOCK_NB)
		_ = unix.Close(claim) // which also ends the lock
	}
	if len(n.Uses) == 0 && (errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EWOULDBLOCK)) {
		n.Uses = append(n.Uses, "claimed by a process or the kernel")
	}
	return n
}

// logOf is nil for what is no NVMe drive, or may not be asked.
func logOf(path string) *daemon.DriveLog {
	d, err := drive.Open(path, drive.Options{ReadOnly: true, NoLock: true})
	if err != nil {
		return nil
	}
	defer d.Close()
	l, _ := daemon.DriveLogOf(d)
	return l
}

// amplification is the drive's own over its life, by the log that it has.
func (n *namespaceDocument) amplification() string {
	switch l := n.Log; {
	case l == nil:
		return "-"
	case l.Placement != nil:
		return timesOrDash(l.Placement.AmplificationLife)
	default:
		return timesOrDash(l.MediaFactorLife)
	}
}

func (d *drivesDocument) print(e *env) {
	if len(d.Controllers) == 0 {
		e.printf("no NVMe controllers\n")
		return
	}
	w := table(e.stdout)
	fmt.Fprintln(w, "ADDRESS\tDRIVER\tGROUP\tMODEL\tSERIAL\tNAMESPACE\tSIZE\tBLOCKS\tHOLDS\tAMPLIFIED\tIN USE")
	for i := range d.Controllers {
		c := &d.Controllers[i]
		group := orDash(c.Group)
		if len(c.Others) > 0 {
			group += " with " + strings.Join(c.Others, ", ")
		}
		head := []string{c.Address, orDash(c.Driver), group, orDash(c.Model), orDash(c.Serial)}
		if len(c.Namespaces) == 0 {
			fmt.Fprintln(w, strings.Join(append(head, "-", "-", "-", "-", "-", "-"), "\t"))
		}
		for _, n := range c.Namespaces {
			holds := "cannot be read"
			if n.Content != nil {
				holds = n.Content.What
			}
			fmt.Fprintln(w, strings.Join(append(head, n.Name, humanBytes(uint64(n.Bytes)), strconv.Itoa(n.LBABytes), holds,
				n.amplification(), orDash(strings.Join(n.Uses, "; "))), "\t"))
			head = []string{"", "", "", "", ""}
		}
	}
	w.Flush()
}

// objections are the reasons why a controller should stay with the kernel.
func (c *controllerDocument) objections() (list []string) {
	for _, n := range c.Namespaces {
		for _, use := range n.Uses {
			list = append(list, n.Name+" is in use: "+use)
		}
		switch {
		case n.Content == nil:
			list = append(list, fmt.Sprintf("what %s holds cannot be seen: %s", n.Name, n.Error))
		case !n.Content.Known:
			list = append(list, n.Name+" holds "+n.Content.What)
		}
	}
	return list
}

func checkAddresses(addresses []string) error {
	for _, a := range addresses {
		if !vfio.IsAddress(a) {
			return usagef("%q is no PCI address, such as 0000:3b:00.0; 'tuttifs drives' lists them", a)
		}
	}
	return nil
}

// bind checks all before it takes the first.
func (m *drivesMachine) bind(e *env, addresses []string, force int) error {
	if len(addresses) == 0 {
		return usagef("name the PCI addresses of the drives; 'tuttifs drives' lists them")
	}
	if err := checkAddresses(addresses); err != nil {
		return err
	}
	for _, a := range addresses {
		d, err := m.Device(a)
		if err != nil {
			return err
		}
		c := m.controller(d)
		if list := c.objections(); len(list) > 0 && force < 2 {
			return fmt.Errorf("%s: %s: it stays with the driver %s, unless --force is given twice", a,
				strings.Join(list, "; "), orDash(d.Driver))
		}
	}
	for _, a := range addresses {
		if err := m.Bind(a); err != nil {
			return err
		}
	}
	for _, a := range addresses {
		d, err := m.Device(a)
		if err != nil {
			return err
		}
		e.printf("%s: with %s, IOMMU group %s\n", a, d.Driver, orDash(d.Group))
		if len(d.Others) > 0 {
			e.warnf("%s shares its IOMMU group with %s: it cannot be opened before they are bound to vfio-pci or to nothing", a,
				strings.Join(d.Others, ", "))
		}
	}
	return nil
}

func (m *drivesMachine) unbind(e *env, addresses []string) error {
	if len(addresses) == 0 {
		return usagef("name the PCI addresses of the drives; 'tuttifs drives' lists them")
	}
	if err := checkAddresses(addresses); err != nil {
		return err
	}
	for _, a := range addresses {
		if err := m.Unbind(a); err != nil {
			return err
		}
		e.printf("%s: with %s\n", a, vfio.KernelDriver)
	}
	return nil
}
