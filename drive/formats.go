package drive

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"regexp"

	"golang.org/x/sys/unix"

	"tuttifs/nvme"
)

// ErrNoFormats: what is behind the drive has one block size, which cannot be chosen.
var ErrNoFormats = errors.New("drive: its block size cannot be chosen")

// formatter is a namespace whose LBA format can be chosen.
type formatter interface {
	Formats() (list []nvme.LBAFormat, current int, err error)
	FormatNVM(lbaBytes int) error
}

// Formats are the LBA formats that an NVMe namespace can have, and the index of the one that it has. Those of drives of
// the kernel's driver take CAP_SYS_ADMIN. ErrNoFormats: it is no namespace.
func Formats(d Drive) (list []nvme.LBAFormat, current int, err error) {
	if f, ok := d.(formatter); ok {
		return f.Formats()
	}
	return nil, 0, fmt.Errorf("drive %s: %w", d.Name(), ErrNoFormats)
}

// FormatNVM formats a namespace with blocks of lbaBytes, in the format without metadata that performs best. Everything
// that the namespace holds is lost. The drive was opened for writing, which nobody else has then; it is closed and
// opened anew afterwards, whatever comes of it.
func FormatNVM(d Drive, lbaBytes int) error {
	if f, ok := d.(formatter); ok {
		return f.FormatNVM(lbaBytes)
	}
	return fmt.Errorf("drive %s: %w", d.Name(), ErrNoFormats)
}

// Of Format NVM.
const (
	formatPatience = 15 * 60 * 1000 // milliseconds
	identifyOACS   = 256            // of Identify Controller
	identifyFNA    = 524
)

var partition = regexp.MustCompile(`/nvme\d+n\d+p\d+$`)

// Formats asks the namespace that a block device is.
func (f *file) Formats() (list []nvme.LBAFormat, current int, err error) {
	if err := f.enter("formats", 0, 0); err != nil {
		return nil, 0, err
	}
	defer f.leave()
	n, _, err := f.identifyNamespace()
	if err != nil {
		return nil, 0, err
	}
	list, current = n.Formats()
	return list, current, nil
}

// identifyNamespace is ErrNoFormats for what is no whole namespace.
func (f *file) identifyNamespace() (n nvme.IdentifyNamespace, nsid uint32, err error) {
	if f.kind != Block {
		return n, 0, fmt.Errorf("drive %s: %w", f.name, ErrNoFormats)
	}
	path, err := f.sysfsPath()
	if err != nil || !namespaceName.MatchString(path) {
		return n, 0, fmt.Errorf("drive %s: not an NVMe namespace: %w", f.name, ErrNoFormats)
	}
	if partition.MatchString(path) {
		return n, 0, fmt.Errorf("drive %s: a partition of a namespace: %w", f.name, ErrNoFormats)
	}
	id, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(f.fd), namespaceIoctl, 0)
	if errno != 0 {
		return n, 0, fmt.Errorf("drive %s: number of its namespace: %w", f.name, errno)
	}
	b, err := f.identify(nvme.CNSNamespace, uint32(id))
	if err != nil {
		return n, 0, err
	}
	return n, uint32(id), n.Decode(b)
}

// identify reads one of the structures.
func (f *file) identify(cns, nsid uint32) ([]byte, error) {
	buf := AlignedBuffer(nvme.IdentifyBytes)
	defer FreeBuffer(buf)
	c := identifyCommand(nsid, buf)
	c.cdw10 = cns
	if err := f.admin(&c, buf); err != nil {
		return nil, fmt.Errorf("drive %s: identify %02xh: %w", f.name, cns, err)
	}
	return append([]byte(nil), buf...), nil
}

// FormatNVM has the kernel's driver send the command, which then looks at the namespace anew.
func (f *file) FormatNVM(lbaBytes int) error {
	if err := f.enterWrite("format", 0, 0); err != nil {
		return err
	}
	defer f.leave()
	n, nsid, err := f.identifyNamespace()
	if err != nil {
		return err
	}
	index, ok := n.FormatOf(uint8(bits.TrailingZeros(uint(lbaBytes))))
	if !ok || lbaBytes != 512 && lbaBytes != 4096 {
		return fmt.Errorf("drive %s: it has no format with blocks of %d bytes and no metadata: %w", f.name, lbaBytes,
			ErrNoFormats)
	}
	if err := f.mayFormat(); err != nil {
		return err
	}
	var e nvme.SQE
	nvme.BuildFormat(&e, 0, nsid, index)
	c := adminCommand{opcode: e.Opcode, nsid: e.NSID, cdw10: e.CDW10, timeoutMilli: formatPatience}
	if err := f.admin(&c, nil); err != nil {
		return fmt.Errorf("drive %s: format with blocks of %d bytes: %w", f.name, lbaBytes, err)
	}
	return nil
}

// mayFormat refuses controllers that cannot format, or would format other namespaces too.
func (f *file) mayFormat() error {
	b, err := f.identify(nvme.CNSController, 0)
	if err != nil {
		return err
	}
	if binary.LittleEndian.Uint16(b[identifyOACS:])&nvme.OACSFormat == 0 {
		return fmt.Errorf("drive %s: its controller has no Format NVM: %w", f.name, ErrNoFormats)
	}
	list, err := f.identify(nvme.CNSActiveNamespaces, 0)
	if err != nil {
		return err
	}
	if b[identifyFNA]&nvme.FNAFormatAll != 0 && binary.LittleEndian.Uint32(list[4:]) != 0 {
		return fmt.Errorf("drive %s: its controller formats all of its namespaces at once, and has several: %w", f.name,
			ErrNoFormats)
	}
	return nil
}
