package main

import (
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/nvme/treetest"
)

// machine is what a kernel shows: files by path, links by path and target ("-> ..."), directories by path and "/".
type machine map[string]string

const (
	driveA = "sys/bus/pci/devices/0000:01:00.0/"
	driveB = "sys/bus/pci/devices/0000:02:00.0/"
)

// goodMachine lacks nothing: two drives, one of which is bound to vfio-pci.
func goodMachine() machine {
	return machine{
		"proc/sys/kernel/osrelease":                             "6.1.0-57-cloud-amd64\n",
		"proc/sys/kernel/io_uring_disabled":                     "0\n",
		"proc/cpuinfo":                                          "vendor_id : GenuineIntel\n",
		"proc/self/limits":                                      limitsOf("unlimited"),
		"proc/self/status":                                      "Name:\ttuttifs\nCapEff:\t0000000000000000\n",
		"dev/fuse":                                              "",
		"dev/vfio/vfio":                                         "",
		"dev/vfio/7":                                            "",
		"sys/class/iommu/dmar0":                                 "/",
		"sys/bus/pci/drivers/vfio-pci":                          "/",
		"sys/bus/pci/drivers/nvme":                              "/",
		"sys/module/vfio_iommu_type1":                           "/",
		driveA + "class":                                        "0x010802\n",
		driveA + "iommu_group":                                  "-> sys/kernel/iommu_groups/7",
		driveA + "driver":                                       "-> sys/bus/pci/drivers/vfio-pci",
		driveB + "class":                                        "0x010802\n",
		driveB + "iommu_group":                                  "-> sys/kernel/iommu_groups/8",
		driveB + "driver":                                       "-> sys/bus/pci/drivers/nvme",
		"sys/bus/pci/devices/0000:00:1c.0/class":                "0x060400\n",
		"sys/bus/pci/devices/0000:00:1f.0/class":                "0x020000\n",
		"sys/kernel/iommu_groups/7/devices/0000:01:00.0":        "-> " + driveA,
		"sys/kernel/iommu_groups/7/devices/0000:00:1c.0":        "-> sys/bus/pci/devices/0000:00:1c.0",
		"sys/kernel/iommu_groups/8/devices/0000:02:00.0":        "-> " + driveB,
		"sys/kernel/mm/transparent_hugepage/shmem_enabled":      "always within_size [advise] never deny force\n",
		"sys/module/vfio/parameters/enable_unsafe_noiommu_mode": "N\n",
	}
}

func limitsOf(locked string) string {
	return "Limit                     Soft Limit           Hard Limit           Units\n" +
		"Max processes             95911                95911                processes\n" +
		"Max locked memory         " + locked + "              unlimited            bytes\n"
}

// build makes the tree and returns its roots.
func (m machine) build(t *testing.T) hardwareRoots {
	t.Helper()
	root := treetest.Make(t, m)
	return hardwareRoots{sys: root + "/sys", proc: root + "/proc", dev: root + "/dev"}
}

func TestHardwareReady(t *testing.T) {
	doc := goodMachine().build(t).check()
	for _, c := range doc.Checks {
		require.Equal(t, hardwareOK, c.State, "%+v", c)
		require.Empty(t, c.Remedy)
		require.NotEmpty(t, c.Found)
	}
	require.True(t, doc.Ready)
	require.NoError(t, doc.verdict())
	require.Equal(t, []hardwareController{
		{Address: "0000:01:00.0", Driver: "vfio-pci", Group: "7", Shares: []string{}, Node: "/dev/vfio/7"},
		{Address: "0000:02:00.0", Driver: "nvme", Group: "8", Shares: []string{}},
	}, doc.Controllers)
}

// TestHardwareLacks changes the good machine in one way each. What is gone is taken away with all that is below it.
func TestHardwareLacks(t *testing.T) {
	const gone = "\x00"
	for name, test := range map[string]struct {
		change              machine
		check, state, found string
		remedy              string
	}{
		"an old kernel": {machine{"proc/sys/kernel/osrelease": "5.15.0-91-generic"},
			"kernel", hardwareAdvice, "5.15", "6.1"},
		"no version": {machine{"proc/sys/kernel/osrelease": gone}, "kernel", hardwareAdvice, "Linux", "6.1"},
		"IOMMU off, and offered": {machine{"sys/class/iommu": gone, "sys/firmware/acpi/tables/DMAR": "x"},
			"IOMMU", hardwareMissing, "off", "intel_iommu=on"},
		"IOMMU off, AMD": {machine{"sys/class/iommu": gone, "sys/firmware/acpi/tables/IVRS": "x"},
			"IOMMU", hardwareMissing, "off", "amd_iommu=off"},
		"IOMMU hidden by the firmware": {machine{"sys/class/iommu": gone},
			"IOMMU", hardwareMissing, "off", "VT-d"},
		"IOMMU hidden by the firmware, AMD": {
			machine{"sys/class/iommu": gone, "proc/cpuinfo": "vendor_id : AuthenticAMD"},
			"IOMMU", hardwareMissing, "off", "AMD-Vi"},
		"no IOMMU of a known kind": {machine{"sys/class/iommu": gone, "proc/cpuinfo": "CPU implementer : 0x41"},
			"IOMMU", hardwareMissing, "off", "virtual machine"},
		"no vfio-pci": {machine{"sys/bus/pci/drivers/vfio-pci": gone},
			"VFIO", hardwareMissing, "no vfio-pci", "modprobe vfio-pci;"},
		"no container": {machine{"dev/vfio/vfio": gone}, "VFIO", hardwareMissing, "/dev/vfio/vfio", "modprobe vfio;"},
		"no type 1": {machine{"sys/module/vfio_iommu_type1": gone},
			"VFIO", hardwareMissing, "type 1", "modprobe vfio_iommu_type1;"},
		"no-IOMMU mode": {machine{"sys/module/vfio/parameters/enable_unsafe_noiommu_mode": "Y\n"},
			"VFIO", hardwareAdvice, "without an IOMMU", "echo N"},
		"no controllers": {machine{"sys/bus/pci/devices": gone}, "NVMe", hardwareMissing, "no controllers", "lspci"},
		"a controller without a group": {machine{driveB + "iommu_group": gone},
			"groups", hardwareMissing, "0000:02:00.0", "IOMMU"},
		"a group with a network card": {
			machine{"sys/kernel/iommu_groups/8/devices/0000:00:1f.0": "-> sys/bus/pci/devices/0000:00:1f.0"},
			"groups", hardwareAdvice, "0000:02:00.0", "vfio-pci"},
		"no node of a group": {machine{"dev/vfio/7": gone},
			"permissions", hardwareMissing, "/dev/vfio/7: no such file", "udev"},
		"little locked memory": {machine{"proc/self/limits": limitsOf("8388608")},
			"locked memory", hardwareMissing, "8.0 MiB", "LimitMEMLOCK=infinity"},
		"no limits": {machine{"proc/self/limits": "Max processes 1 1 processes\n"},
			"locked memory", hardwareAdvice, "does not tell", "ulimit"},
		"a limit that is no number": {machine{"proc/self/limits": limitsOf("many")},
			"locked memory", hardwareAdvice, "does not tell", "ulimit"},
		"no huge pages": {
			machine{"sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force"},
			"huge pages", hardwareAdvice, "not for shared memory", "echo advise"},
		"a kernel without huge pages": {machine{"sys/kernel/mm": gone}, "huge pages", hardwareAdvice, "not for", "echo"},
		"no FUSE":                     {machine{"dev/fuse": gone}, "FUSE", hardwareMissing, "/dev/fuse", "modprobe fuse"},
		"no io_uring": {machine{"proc/sys/kernel/io_uring_disabled": "2\n"},
			"io_uring", hardwareAdvice, "forbidden", "sysctl"},
	} {
		t.Run(name, func(t *testing.T) {
			m := goodMachine()
			for path, content := range test.change {
				if m[path] = content; content == gone {
					maps.DeleteFunc(m, func(p, _ string) bool { return p == path || strings.HasPrefix(p, path+"/") })
				}
			}
			doc := m.build(t).check()
			missing := false
			for _, c := range doc.Checks {
				if c.Name == test.check {
					require.Equal(t, test.state, c.State, "%+v", c)
					require.Contains(t, c.Found, test.found)
					require.Contains(t, c.Remedy, test.remedy)
				} else if name != "no controllers" {
					require.Equal(t, hardwareOK, c.State, "%+v", c)
				}
				missing = missing || c.State == hardwareMissing
			}
			require.Equal(t, !missing, doc.Ready)
			require.Equal(t, missing, doc.verdict() != nil)
		})
	}
}

// TestHardwareLimits: what is enough, and who is not limited.
func TestHardwareLimits(t *testing.T) {
	m := goodMachine()
	m["proc/self/limits"] = limitsOf("1073741824")
	require.Equal(t, "limit 1.0 GiB", m.build(t).memlock().Found)
	m["proc/self/limits"] = limitsOf("8388608")
	m["proc/self/status"] = "CapEff:\t000001ffffffffff\n"
	c := m.build(t).memlock()
	require.Equal(t, hardwareOK, c.State)
	require.Contains(t, c.Found, "CAP_IPC_LOCK")
	m["proc/self/status"] = "CapEff:\tx\n"
	require.Equal(t, hardwareMissing, m.build(t).memlock().State)
}

// TestHardwareNothing: a tree without anything is no reason to fail in another way.
func TestHardwareNothing(t *testing.T) {
	doc := machine{}.build(t).check()
	require.False(t, doc.Ready)
	require.Empty(t, doc.Controllers)
	var out bytes.Buffer
	doc.print(&env{stdout: &out})
	require.Contains(t, out.String(), "missing  IOMMU")
	require.NotContains(t, out.String(), "CONTROLLER")
}

// TestDrivesCheck runs on this machine, whatever it is.
func TestDrivesCheck(t *testing.T) {
	c := newDrivesCheck()
	require.NoError(t, c.flags.Parse([]string{"--json"}))
	var out bytes.Buffer
	err := c.run(context.Background(), &env{stdout: &out}, nil)
	var doc hardwareDocument
	require.NoError(t, json.Unmarshal(out.Bytes(), &doc))
	require.Equal(t, outputVersion, doc.OutputVersion)
	require.Equal(t, doc.Ready, err == nil)
	out.Reset()
	c = newDrivesCheck()
	require.Equal(t, err, c.run(context.Background(), &env{stdout: &out}, nil))
	for _, check := range doc.Checks {
		require.Contains(t, out.String(), check.Name)
	}
	require.Error(t, newDrivesCheck().run(context.Background(), &env{stdout: &out}, []string{"x"}))
}
