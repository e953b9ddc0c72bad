package drive

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"regexp"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"tuttifs/nvme"
)

var (
	// ErrNotNVMe: what is behind the drive has no log pages that can be asked for: a file, memory, or a block device of
	// another kind.
	ErrNotNVMe = errors.New("drive: not an NVMe namespace of the kernel's driver")
	// ErrNoLog: the drive does not offer this log page.
	ErrNoLog = errors.New("drive: no such log page")
)

const (
	// adminIoctl is NVME_IOCTL_ADMIN_CMD.
	adminIoctl = 0xc0484e41
	// LogBytesMax is the longest log page that ReadLog reads.
	LogBytesMax = 4096

	// namespaceIoctl is NVME_IOCTL_ID, which answers the namespace's number.
	namespaceIoctl = 0x4e40

	// identifyGroup is where ENDGID is in Identify Namespace (NVM 1.0 figure 97).
	identifyGroup = 102
	nsidAll       = 0xffffffff
	// retainEvents: looking at a log page must not acknowledge the events that others wait for (Base 2.0 figure 197).
	retainEvents = 1 << 15
	// logPatience is how long the drive may take for an answer, in milliseconds.
	logPatience = 5000
)

// adminCommand is the kernel's struct nvme_passthru_cmd.
type adminCommand struct {
	opcode, flags         uint8
	_                     uint16
	nsid, cdw2, cdw3      uint32
	metadata, addr        uint64
	metadataLen, dataLen  uint32
	cdw10, cdw11, cdw12   uint32
	cdw13, cdw14, cdw15   uint32
	timeoutMilli, result0 uint32
}

var _ = [1]struct{}{}[unsafe.Sizeof(adminCommand{})-72]

// namespaceName matches the end of a block device's path in sysfs: a namespace, or a partition of one.
var namespaceName = regexp.MustCompile(`/nvme\d+(c\d+)?n\d+(/nvme\d+n\d+p\d+)?$`)

// ReadLog reads a log page of the NVMe drive that a block device is a namespace of. It is the drive's page, whoever
// else has a part of that drive; the FDP statistics are those of the namespace's endurance group. p has its length: a
// multiple of 4, at most LogBytesMax. ErrNotNVMe and ErrNoLog say that there is none; reading needs CAP_SYS_ADMIN.
func ReadLog(d Drive, page uint8, p []byte) error {
	if n, ok := d.(interface{ ReadLog(uint8, []byte) error }); ok {
		return n.ReadLog(page, p)
	}
	f, ok := d.(*file)
	if !ok || f.kind != Block {
		return fmt.Errorf("drive %s: %w", d.Name(), ErrNotNVMe)
	}
	if len(p) == 0 || len(p)%4 != 0 || len(p) > LogBytesMax {
		return fmt.Errorf("drive %s: log page of %d bytes: %w", f.name, len(p), ErrRange)
	}
	if err := f.enter("log page", 0, 0); err != nil {
		return err
	}
	defer f.leave()
	if err := f.checkNVMe(); err != nil {
		return err
	}
	buf := AlignedBuffer(LogBytesMax)
	defer FreeBuffer(buf)
	err := error(nil)
	group := uint16(0)
	if page == nvme.LogFDPStats {
		group, err = f.enduranceGroup(buf)
	}
	if err == nil {
		c := logCommand(page, group, buf[:len(p)])
		err = noLog(f.admin(&c, buf))
	}
	if err != nil {
		return fmt.Errorf("drive %s: log page %02xh: %w", f.name, page, err)
	}
	copy(p, buf)
	return nil
}

// admin sends a command whose data are in buf.
func (f *file) admin(c *adminCommand, buf []byte) error {
	status, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(f.fd), adminIoctl, uintptr(unsafe.Pointer(c)))
	runtime.KeepAlive(buf)
	if errno != 0 {
		return errno
	}
	return adminError(status)
}

// enduranceGroup asks which one the namespace is in. ErrNoLog: in none.
func (f *file) enduranceGroup(buf []byte) (uint16, error) {
	nsid, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(f.fd), namespaceIoctl, 0)
	if errno != 0 {
		return 0, errno
	}
	c := identifyCommand(uint32(nsid), buf)
	if err := f.admin(&c, buf); err != nil {
		return 0, err
	}
	group := binary.LittleEndian.Uint16(buf[identifyGroup:])
	if group == 0 {
		return 0, ErrNoLog
	}
	return group, nil
}

// checkNVMe asks sysfs, so that the ioctl is never sent to a driver for which its number means something else.
func (f *file) checkNVMe() error {
	path, err := f.sysfsPath()
	if err != nil || !namespaceName.MatchString(path) {
		return fmt.Errorf("drive %s: %w", f.name, ErrNotNVMe)
	}
	return nil
}

// sysfsPath is where the kernel describes a block device.
func (f *file) sysfsPath() (string, error) {
	var st unix.Stat_t
	if err := unix.Fstat(f.fd, &st); err != nil {
		return "", err
	}
	return os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev)))
}

// logCommand is Get Log Page into a buffer: for the whole drive, or for an endurance group of it.
func logCommand(page uint8, group uint16, p []byte) adminCommand {
	words, nsid := uint32(len(p)/4-1), uint32(nsidAll)
	if group != 0 {
		nsid = 0
	}
	return adminCommand{
		opcode: nvme.AdminGetLogPage, nsid: nsid, addr: uint64(uintptr(unsafe.Pointer(&p[0]))), dataLen: uint32(len(p)),
		cdw10: uint32(page) | retainEvents | words<<16, cdw11: words>>16 | uint32(group)<<16, timeoutMilli: logPatience,
	}
}

// identifyCommand is Identify, of a namespace unless CDW10 is set, into a buffer of nvme.IdentifyBytes.
func identifyCommand(nsid uint32, buf []byte) adminCommand {
	return adminCommand{opcode: nvme.AdminIdentify, nsid: nsid, addr: uint64(uintptr(unsafe.Pointer(&buf[0]))),
		dataLen: nvme.IdentifyBytes, timeoutMilli: logPatience}
}

// adminError is the error of a completion's status, as the ioctl returns it.
func adminError(status uintptr) error {
	if st := nvme.Status(status); !st.OK() {
		return st
	}
	return nil
}

// noLog says of the answer to Get Log Page whether the page, or the command, is not there.
func noLog(err error) error {
	for _, none := range []nvme.Status{nvme.LogPageInvalid, nvme.InvalidField, nvme.InvalidOpcode, nvme.FDPDisabled} {
		if errors.Is(err, none) {
			return fmt.Errorf("%w: %w", ErrNoLog, err)
		}
	}
	return err
}
