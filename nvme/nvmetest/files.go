package nvmetest

import (
	"fmt"
	"path/filepath"

	"tuttifs/drive"
	"tuttifs/nvme/emu"
	"tuttifs/nvme/vfio"
)

// SSDs opens addresses as SSDs that the driver drives, for drive.OpenAddress: 0000:0N:00.0 is a virtual controller over
// the file driveN of a directory. The first has no SGLs and no doorbell buffer, the third places data; all move at
// most 128 KiB a command. They live as long as the process.
func SSDs(where string) func(address string, o drive.Options) (drive.Drive, error) {
	return func(address string, o drive.Options) (drive.Drive, error) {
		var n int
		if _, err := fmt.Sscanf(address, "0000:%02d:00.0", &n); err != nil {
			return nil, err
		}
		file, err := drive.Open(filepath.Join(where, fmt.Sprintf("drive%d", n)), drive.Options{NoLock: true})
		if err != nil {
			return nil, err
		}
		c := emu.Config{Drive: file, SGL: n > 0, MDTS: 5, Queues: 16, DoorbellBuffer: n > 0}
		if n == 2 {
			c.Placement = &emu.Placement{Handles: 4, UnitBytes: 1 << 20}
		}
		hardware, err := emu.New(c)
		if err != nil {
			return nil, err
		}
		transport := NewEmulated(hardware)
		if err := transport.ShareDoorbells(); err != nil {
			return nil, err
		}
		controller, err := vfio.Open(transport, vfio.Options{})
		if err != nil {
			return nil, err
		}
		return vfio.NewDrive(controller, 1, o)
	}
}

// Addresses are those of so many SSDs.
func Addresses(n int) (addresses []string) {
	for i := range n {
		addresses = append(addresses, fmt.Sprintf("0000:%02d:00.0", i))
	}
	return addresses
}
