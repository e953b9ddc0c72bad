package vfio

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/drive"
	"tuttifs/nvme/treetest"
)

// tree is a fake of what a kernel shows: files by path, links ("-> TARGET"), directories ("/").
type tree map[string]string

const (
	a0 = "sys/bus/pci/devices/0000:01:00.0/"
	b0 = "sys/bus/pci/devices/0000:02:00.0/"
	c0 = "sys/bus/pci/devices/0000:03:00.0/"
)

// someDrives are three controllers: one with the kernel's driver, two namespaces and a partition; one bound to VFIO;
// one without an IOMMU group.
func someDrives() tree {
	return tree{
		a0 + "class": "0x010802\n", a0 + "driver": "-> sys/bus/pci/drivers/nvme",
		a0 + "iommu_group":                                   "-> sys/kernel/iommu_groups/7",
		a0 + "driver_override":                               "(null)\n",
		a0 + "nvme/nvme0/serial":                             "S1  \n",
		a0 + "nvme/nvme0/model":                              "Good \x1bDrive   \n",
		a0 + "nvme/nvme0/firmware_rev":                       "1.0\n",
		a0 + "nvme/nvme0/nvme0n1/nsid":                       "1\n",
		a0 + "nvme/nvme0/nvme0n1/size":                       "2048\n",
		a0 + "nvme/nvme0/nvme0n1/dev":                        "259:0\n",
		a0 + "nvme/nvme0/nvme0n1/holders/dm-3":               "/",
		a0 + "nvme/nvme0/nvme0n1/nvme0n1p1/dev":              "259:1\n",
		a0 + "nvme/nvme0/nvme0n1/nvme0n1p1/size":             "8\n",
		a0 + "nvme/nvme0/nvme0n1/queue/logical_block_size":   "512\n",
		a0 + "nvme/nvme0/nvme0c0n2/nsid":                     "2\n",
		a0 + "nvme/nvme0/nvme0c0n2/size":                     "4096\n",
		a0 + "nvme/nvme0/nvme0c0n2/queue/logical_block_size": "4096\n",
		a0 + "nvme/nvme0/hwmon1/name":                        "nvme\n",
		b0 + "class":                                         "0x010802\n",
		b0 + "driver":                                        "-> sys/bus/pci/drivers/vfio-pci",
		b0 + "iommu_group":                                   "-> sys/kernel/iommu_groups/8",
		b0 + "driver_override":                               "vfio-pci\n",
		b0 + "vfio-dev/vfio3":                                "/",
		c0 + "class":                                         "0x010802\n",
		"sys/bus/pci/devices/0000:00:1c.0/class":             "0x060400\n",
		"sys/bus/pci/devices/0000:00:1c.0/driver":            "-> sys/bus/pci/drivers/pcieport",
		"sys/bus/pci/devices/0000:02:00.1/class":             "0x020000\n",
		"sys/bus/pci/devices/0000:02:00.1/driver":            "-> sys/bus/pci/drivers/e1000",
		"sys/kernel/iommu_groups/7/devices/0000:01:00.0":     "/",
		"sys/kernel/iommu_groups/8/devices/0000:02:00.0":     "/",
		"sys/kernel/iommu_groups/8/devices/0000:02:00.1":     "/",
		"sys/kernel/iommu_groups/8/devices/0000:00:1c.0":     "/",
		"sys/bus/pci/drivers/vfio-pci":                       "/",
		"sys/bus/pci/drivers/nvme":                           "/",
		"dev/vfio/8":                                         "",
		"proc/swaps":                                         "Filename Type Size Used Priority\n",
		"proc/self/mountinfo": "22 1 259:1 / /mnt/a\\040b rw - ext4 /dev/nvme0n1p1 rw\n" +
			"23 1 0:4 / /proc rw - proc proc rw\n",
	}
}

func (tr tree) machine(t *testing.T) (*Machine, string) {
	t.Helper()
	root := treetest.Make(t, tr)
	return NewMachine(filepath.Join(root, "sys"), filepath.Join(root, "dev"), filepath.Join(root, "proc")), root
}

func TestDevices(t *testing.T) {
	m, _ := someDrives().machine(t)
	got, err := m.Devices()
	require.NoError(t, err)
	require.Equal(t, []Device{
		{Address: "0000:01:00.0", Driver: "nvme", Group: "7", Serial: "S1", Model: "Good ?Drive", Firmware: "1.0",
			Controller: "nvme0", Disks: []Disk{
				{Name: "nvme0n1", NSID: 1, Bytes: 1 << 20, LBABytes: 512,
					Uses: []string{"held by dm-3", "nvme0n1p1 mounted on /mnt/a b"}},
				{Name: "nvme0n2", NSID: 2, Bytes: 4096 * 512, LBABytes: 4096},
			}},
		{Address: "0000:02:00.0", Driver: "vfio-pci", Group: "8", Node: "vfio3", Others: []string{"0000:02:00.1 (e1000)"}},
		{Address: "0000:03:00.0"},
	}, got)
	_, err = m.Device("0000:09:00.0")
	require.ErrorIs(t, err, fs.ErrNotExist)
	_, err = m.Device("../../etc")
	require.ErrorIs(t, err, ErrUnsuitable)
	none, err := NewMachine(t.TempDir(), "", "").Devices()
	require.NoError(t, err)
	require.Empty(t, none, "no PCI")
}

func TestDevicesWithoutMounts(t *testing.T) {
	tr := someDrives()
	delete(tr, "proc/self/mountinfo")
	m, _ := tr.machine(t)
	_, err := m.Devices()
	require.ErrorContains(t, err, "mounted", "nobody may think that nothing is")
}

// kernel does what a kernel does with the attributes that Bind and Unbind write; obeys says which drivers take devices.
type kernel struct {
	t     *testing.T
	root  string
	obeys string
	wrote []string
}

func (k *kernel) write(path, word string) error {
	rel, err := filepath.Rel(k.root, path)
	require.NoError(k.t, err)
	k.wrote = append(k.wrote, strings.TrimPrefix(rel, "sys/bus/pci/")+" = "+strings.TrimSpace(word))
	device := filepath.Join(k.root, "sys/bus/pci/devices")
	switch filepath.Base(path) {
	case "driver_override":
		return os.WriteFile(path, []byte(word), 0o600)
	case "unbind":
		return os.Remove(filepath.Join(device, word, "driver"))
	case "drivers_probe":
		want, err := os.ReadFile(filepath.Join(device, word, "driver_override"))
		require.NoError(k.t, err)
		driver := strings.TrimSpace(string(want))
		if driver == "" {
			driver = KernelDriver
		}
		if !strings.Contains(k.obeys, driver) {
			return nil
		}
		return os.Symlink(filepath.Join(k.root, "sys/bus/pci/drivers", driver), filepath.Join(device, word, "driver"))
	}
	return fs.ErrNotExist
}

func TestBindAndUnbind(t *testing.T) {
	m, root := someDrives().machine(t)
	k := &kernel{t: t, root: root, obeys: "nvme vfio-pci"}
	m.Write = k.write
	require.NoError(t, m.Bind("0000:01:00.0"))
	require.Equal(t, []string{
		"devices/0000:01:00.0/driver_override = vfio-pci", "devices/0000:01:00.0/driver/unbind = 0000:01:00.0",
		"drivers_probe = 0000:01:00.0",
	}, k.wrote)
	d, err := m.Device("0000:01:00.0")
	require.NoError(t, err)
	require.Equal(t, VFIODriver, d.Driver)
	k.wrote = nil
	require.NoError(t, m.Bind("0000:01:00.0"))
	require.Empty(t, k.wrote, "it has it already")
	require.NoError(t, m.Unbind("0000:01:00.0"))
	require.Equal(t, []string{
		"devices/0000:01:00.0/driver_override = ", "devices/0000:01:00.0/driver/unbind = 0000:01:00.0",
		"drivers_probe = 0000:01:00.0",
	}, k.wrote)
	d, err = m.Device("0000:01:00.0")
	require.NoError(t, err)
	require.Equal(t, KernelDriver, d.Driver)
}

func TestBindRefuses(t *testing.T) {
	m, root := someDrives().machine(t)
	k := &kernel{t: t, root: root, obeys: "nvme"}
	m.Write = k.write
	require.ErrorContains(t, m.Bind("0000:03:00.0"), "IOMMU")
	err := m.Bind("0000:01:00.0")
	require.ErrorIs(t, err, ErrUnsuitable)
	require.ErrorContains(t, err, "kernel's log")
	d, err := m.Device("0000:01:00.0")
	require.NoError(t, err)
	require.Equal(t, KernelDriver, d.Driver, "it has it back")
	require.NoError(t, os.RemoveAll(filepath.Join(root, "sys/bus/pci/drivers/vfio-pci")))
	require.ErrorContains(t, m.Bind("0000:01:00.0"), "modprobe vfio-pci")
	m.Write = func(string, string) error { return fs.ErrPermission }
	require.NoError(t, os.MkdirAll(filepath.Join(root, "sys/bus/pci/drivers/vfio-pci"), 0o755))
	require.ErrorIs(t, m.Bind("0000:01:00.0"), fs.ErrPermission)
}

func TestOpenRefuses(t *testing.T) {
	m, root := someDrives().machine(t)
	_, err := m.Open("0000:01:00.0")
	require.ErrorContains(t, err, "tuttifs drives bind 0000:01:00.0")
	_, err = m.Open("0000:02:00.0")
	require.ErrorContains(t, err, filepath.Join(root, "dev/vfio/vfio"))
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.Empty(t, m.groups)
	require.NoError(t, os.WriteFile(filepath.Join(root, "dev/vfio/vfio"), nil, 0o600))
	_, err = m.Open("0000:02:00.0")
	require.ErrorIs(t, err, ErrUnsuitable, "no VFIO behind it")
	for _, f := range []string{"dev/iommu", "dev/vfio/devices/vfio3"} {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(root, f)), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(root, f), nil, 0o600))
	}
	_, err = m.Open("0000:02:00.0")
	require.ErrorContains(t, err, "iommufd")
	require.ErrorContains(t, err, "VFIO version", "both ways are tried")
	_, err = m.OpenDrive("0000:02:00.0/0", drive.Options{})
	require.ErrorIs(t, err, ErrUnsuitable)
	_, err = m.OpenDrive("/dev/nvme0n1", drive.Options{})
	require.ErrorIs(t, err, ErrUnsuitable)
	_, err = m.OpenDrive("0000:02:00.0/1", drive.Options{})
	require.Error(t, err)
	require.Empty(t, m.open)
}

func TestSplitName(t *testing.T) {
	for name, want := range map[string]uint32{
		"0000:02:00.0": 0, "0000:02:00.0/1": 1, "0000:02:00.0/4294967293": 4294967293,
	} {
		address, nsid, err := SplitName(name)
		require.NoError(t, err)
		require.Equal(t, "0000:02:00.0", address)
		require.Equal(t, want, nsid)
	}
	for _, name := range []string{
		"", "/dev/nvme0n1", "0000:02:00.0/0", "0000:02:00.0/4294967295", "0000:02:00.0/9999999999",
	} {
		_, _, err := SplitName(name)
		require.ErrorIs(t, err, ErrUnsuitable, name)
	}
}

// FuzzIOMMUInfo: what the kernel says of the IOMMU makes ranges or an error.
func FuzzIOMMUInfo(f *testing.F) {
	b := make([]byte, 80)
	b[4] = iommuInfoCaps
	b[16] = 24
	b[24], b[32] = capIOVARanges, 2
	b[47], b[55] = 0, 1
	f.Add(b)
	f.Add(make([]byte, 24))
	f.Fuzz(func(t *testing.T, b []byte) {
		ranges, err := parseIOMMUInfo(b)
		if err == nil && len(ranges) > 1+len(b)/16 {
			t.Fatal("more ranges than bytes")
		}
		if err == nil {
			if v, err := newIOVAs(ranges); err == nil {
				if at, err := v.alloc(PageBytes); err == nil {
					v.release(at, PageBytes)
				}
			}
		}
	})
}
