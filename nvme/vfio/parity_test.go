package vfio

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// TestParityKernel compares numbers and structures with what a C compiler makes of the installed headers.
func TestParityKernel(t *testing.T) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler")
	}
	for header, checks := range map[string]map[string]uintptr{
		"linux/vfio.h": {
			"VFIO_GET_API_VERSION": ioctlAPIVersion, "VFIO_CHECK_EXTENSION": ioctlExtension, "VFIO_SET_IOMMU": ioctlSetIOMMU,
			"VFIO_GROUP_GET_STATUS": ioctlGroupStatus, "VFIO_GROUP_SET_CONTAINER": ioctlSetContainer,
			"VFIO_GROUP_GET_DEVICE_FD": ioctlDeviceFD, "VFIO_DEVICE_GET_INFO": ioctlDeviceInfo,
			"VFIO_DEVICE_GET_REGION_INFO": ioctlRegionInfo, "VFIO_DEVICE_SET_IRQS": ioctlSetIRQs,
			"VFIO_DEVICE_RESET": ioctlDeviceReset, "VFIO_IOMMU_GET_INFO": ioctlIOMMUInfo, "VFIO_IOMMU_MAP_DMA": ioctlMapDMA,
			"VFIO_IOMMU_UNMAP_DMA": ioctlUnmapDMA, "VFIO_API_VERSION": apiVersion, "VFIO_TYPE1v2_IOMMU": iommuType1v2,
			"VFIO_GROUP_FLAGS_VIABLE": groupViable, "VFIO_IOMMU_INFO_CAPS": iommuInfoCaps,
			"VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE": capIOVARanges, "VFIO_DMA_MAP_FLAG_READ": dmaRead,
			"VFIO_DMA_MAP_FLAG_WRITE": dmaWrite, "VFIO_DEVICE_FLAGS_RESET": deviceResets, "VFIO_DEVICE_FLAGS_PCI": devicePCI,
			"VFIO_REGION_INFO_FLAG_MMAP": regionMaps, "VFIO_PCI_BAR0_REGION_INDEX": regionBAR0,
			"VFIO_PCI_CONFIG_REGION_INDEX": regionConfig, "VFIO_PCI_REQ_IRQ_INDEX": irqRequest,
			"VFIO_IRQ_SET_DATA_EVENTFD": irqDataEventFD, "VFIO_IRQ_SET_ACTION_TRIGGER": irqActionTrigger,
			"sizeof(struct vfio_group_status)":                   unsafe.Sizeof(groupStatus{}),
			"sizeof(struct vfio_region_info)":                    unsafe.Sizeof(regionInfo{}),
			"offsetof(struct vfio_region_info, size)":            unsafe.Offsetof(regionInfo{}.size),
			"offsetof(struct vfio_region_info, offset)":          unsafe.Offsetof(regionInfo{}.offset),
			"offsetof(struct vfio_device_info, num_irqs)":        unsafe.Offsetof(deviceInfo{}.irqs),
			"sizeof(struct vfio_irq_set)":                        unsafe.Offsetof(irqSet{}.eventfd),
			"offsetof(struct vfio_irq_set, count)":               unsafe.Offsetof(irqSet{}.count),
			"sizeof(struct vfio_iommu_type1_dma_map)":            unsafe.Sizeof(dmaMap{}),
			"offsetof(struct vfio_iommu_type1_dma_map, vaddr)":   unsafe.Offsetof(dmaMap{}.vaddr),
			"offsetof(struct vfio_iommu_type1_dma_map, size)":    unsafe.Offsetof(dmaMap{}.size),
			"sizeof(struct vfio_iommu_type1_dma_unmap)":          unsafe.Sizeof(dmaUnmap{}),
			"offsetof(struct vfio_iommu_type1_dma_unmap, iova)":  unsafe.Offsetof(dmaUnmap{}.iova),
			"offsetof(struct vfio_iommu_type1_info, cap_offset)": 16,
		},
		"linux/iommufd.h": {
			"IOMMU_IOAS_ALLOC": ioctlIOASAlloc, "IOMMU_IOAS_MAP": ioctlIOASMap, "IOMMU_IOAS_UNMAP": ioctlIOASUnmap,
			"IOMMU_IOAS_MAP_WRITEABLE": ioasWritable, "IOMMU_IOAS_MAP_READABLE": ioasReadable,
			"sizeof(struct iommu_ioas_alloc)":         unsafe.Sizeof(ioasAlloc{}),
			"sizeof(struct iommu_ioas_map)":           unsafe.Sizeof(ioasMap{}),
			"offsetof(struct iommu_ioas_map, iova)":   unsafe.Offsetof(ioasMap{}.iova),
			"sizeof(struct iommu_ioas_unmap)":         unsafe.Sizeof(ioasUnmap{}),
			"offsetof(struct iommu_ioas_unmap, iova)": unsafe.Offsetof(ioasUnmap{}.iova),
		},
	} {
		t.Run(header, func(t *testing.T) {
			probe := exec.Command(cc, "-E", "-x", "c", "-")
			probe.Stdin = bytes.NewBufferString("#include <" + header + ">\n")
			if probe.Run() != nil {
				t.Skipf("header %s is not installed", header)
			}
			var src bytes.Buffer
			fmt.Fprintf(&src, "#include <stddef.h>\n#include <%s>\n", header)
			for expr, want := range checks {
				fmt.Fprintf(&src, "_Static_assert((unsigned long)(%s) == %d, \"%s\");\n", expr, want, expr)
			}
			file := filepath.Join(t.TempDir(), "parity.c")
			require.NoError(t, os.WriteFile(file, src.Bytes(), 0o600))
			out, err := exec.Command(cc, "-fsyntax-only", file).CombinedOutput()
			require.NoError(t, err, "%s", out)
		})
	}
}
