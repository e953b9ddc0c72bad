package extentmap

import (
	"bytes"
	"encoding/binary"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

// signature is a magic string at a fixed place.
type signature struct {
	what  string
	off   int
	magic string
}

var signatures = []signature{
	{"a tuttifs drive", 0, ondisk.LabelMagic},
	{"an XFS filesystem", 0, "XFSB"},
	{"an ext2, ext3 or ext4 filesystem", 0x438, "\x53\xef"},
	{"a btrfs filesystem", 0x10040, "_BHRfS_M"},
	{"an F2FS filesystem", 0x400, "\x10\x20\xf5\xf2"},
	{"an LVM physical volume", 0x000, "LABELONE"},
	{"an LVM physical volume", 0x200, "LABELONE"},
	{"an LVM physical volume", 0x400, "LABELONE"},
	{"an LVM physical volume", 0x600, "LABELONE"},
	{"a LUKS volume", 0, "LUKS\xba\xbe"},
	{"a Linux RAID member", 0x1000, "\xfc\x4e\x2b\xa9"},
	{"a Linux RAID member", 0, "\xfc\x4e\x2b\xa9"},
	{"a bcache or bcachefs device", 0x1018, "\xc6\x85\x73\xf6\x4e\x1a\x45\xca"},
	{"swap space", 0xff6, "SWAPSPACE2"},
	{"swap space", 0xff6, "SWAP-SPACE"},
	{"a GUID partition table", 0x200, "EFI PART"},
	{"a GUID partition table", 0x1000, "EFI PART"},
	{"an NTFS filesystem", 3, "NTFS    "},
	{"an exFAT filesystem", 3, "EXFAT   "},
	{"a FAT filesystem", 0x36, "FAT"},
	{"a FAT filesystem", 0x52, "FAT32"},
	{"an ISO 9660 filesystem", 0x8001, "CD001"},
	{"a squashfs filesystem", 0, "hsqs"},
	{"an EROFS filesystem", 0x400, "\xe2\xe1\xf5\xe0"},
}

// signatureBytes covers all places of the table.
const signatureBytes = 0x11000

// zfsUberblock is where the first uberblock of a ZFS label lies.
const (
	zfsUberblock      = 0x20000
	zfsMagic     uint = 0x00bab10c
)

// FindSignature says what a drive already holds, or "" if it looks unused.
func FindSignature(d drive.Drive) (string, error) {
	b := make([]byte, min(signatureBytes, d.Size()))
	if err := d.ReadAt(b, 0); err != nil {
		return "", err
	}
	for _, s := range signatures {
		if s.off+len(s.magic) <= len(b) && string(b[s.off:s.off+len(s.magic)]) == s.magic {
			return s.what, nil
		}
	}
	// The boot sector's 0x55aa alone also ends FAT volumes and plain boot code; with a partition type it is a table.
	if len(b) >= 512 && b[510] == 0x55 && b[511] == 0xaa {
		for i := range 4 {
			if b[446+16*i+4] != 0 {
				return "a partition table (MBR)", nil
			}
		}
	}
	if d.Size() >= zfsUberblock+8 {
		var m [8]byte
		if err := d.ReadAt(m[:], zfsUberblock); err != nil {
			return "", err
		}
		if uint(binary.LittleEndian.Uint64(m[:])) == zfsMagic {
			return "a ZFS member", nil
		}
	}
	return findTailSignature(d)
}

// findTailSignature looks at the drive's last unit: the label's second copy, or a backup partition table.
func findTailSignature(d drive.Drive) (string, error) {
	var b [ondisk.BlockBytes]byte
	if err := d.ReadAt(b[:], d.Size()-ondisk.BlockBytes); err != nil {
		return "", err
	}
	switch {
	case string(b[:8]) == ondisk.LabelMagic:
		return "a tuttifs drive", nil
	case bytes.HasPrefix(b[:], []byte("EFI PART")), bytes.HasPrefix(b[ondisk.BlockBytes-512:], []byte("EFI PART")):
		return "a GUID partition table", nil
	}
	return "", nil
}
