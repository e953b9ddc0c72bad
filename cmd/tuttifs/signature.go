package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"tuttifs/extentmap"
	"tuttifs/extentmap/ondisk"
)

// signature is what marks a disk as something's: bytes at a place, counted from the end if it is negative.
type signature struct {
	at    int64
	magic string
	name  string
}

// signatures are the common ones. What is not among them is unknown data, and no less somebody's.
var signatures = []signature{
	{0x438, "\x53\xef", "ext2, ext3 or ext4"}, {0, "XFSB", "XFS"}, {0x10040, "_BHRfS_M", "btrfs"},
	{0x400, "\x10\x20\xf5\xf2", "F2FS"},
	{0x1018, "\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81", "bcache"},
	{0x10000, "\x01\x16\x19\x70", "GFS2"}, {0x400, "\xe2\xe1\xf5\xe0", "EROFS"}, {0, "hsqs", "SquashFS"},
	{0, "LUKS\xba\xbe", "LUKS"}, {4096 - 10, "SWAPSPACE2", "swap"}, {0x8001, "CD001", "ISO 9660"},
	{3, "NTFS    ", "NTFS"}, {3, "EXFAT   ", "exFAT"}, {0x52, "FAT32   ", "FAT"}, {0x36, "FAT1", "FAT"},
	{0, "LABELONE", "LVM"}, {512, "LABELONE", "LVM"}, {1024, "LABELONE", "LVM"}, {1536, "LABELONE", "LVM"},
	{0, "\xfc\x4e\x2b\xa9", "Linux RAID"}, {4096, "\xfc\x4e\x2b\xa9", "Linux RAID"},
	{-8192, "\xfc\x4e\x2b\xa9", "Linux RAID"}, {-65536, "\xfc\x4e\x2b\xa9", "Linux RAID"},
	{-131072, "\xfc\x4e\x2b\xa9", "Linux RAID"},
	{0, "bluestore block device", "Ceph BlueStore"}, {0, "SPDKBLOB", "SPDK blobstore"},
	{512, "EFI PART", "GPT partitions"}, {4096, "EFI PART", "GPT partitions"},
	{510, "\x55\xaa", "MBR partitions"}, // last: boot sectors of filesystems have it too
}

const (
	signatureSpan    = 1 << 20 // looked at, from either end
	signatureSamples = 256     // looked at in between, before a disk is called empty
	zfsUberblocks    = 128 << 10
	zfsMagic         = 0x00bab10c
)

// content is what a disk holds.
type content struct {
	// Known is true for what nobody misses, or what is ours: nothing at all, or a volume of tuttifs.
	Known bool   `json:"known"`
	What  string `json:"what"`
	// Volume and Drive are of a member of a volume.
	Volume string `json:"volume,omitempty"`
	Label  string `json:"label,omitempty"`
	Drive  *int   `json:"drive,omitempty"`
}

// contentOf reads the ends of a disk of size bytes.
func contentOf(r io.ReaderAt, size int64) (content, error) {
	span := min(size, signatureSpan)
	head, tail := make([]byte, span), make([]byte, span)
	for _, part := range []struct {
		b  []byte
		at int64
	}{{head, 0}, {tail, size - span}} {
		if _, err := r.ReadAt(part.b, part.at); err != nil && !errors.Is(err, io.EOF) {
			return content{}, err
		}
	}
	if c, ok := ourContent(head, tail, size); ok {
		return c, nil
	}
	for _, s := range signatures {
		from, at := head, s.at
		if at < 0 {
			from, at = tail, span+at
		}
		if at >= 0 && at < int64(len(from)) && bytes.HasPrefix(from[at:], []byte(s.magic)) {
			return content{What: s.name}, nil
		}
	}
	for at := zfsUberblocks; at+8 <= len(head); at += 1024 {
		if binary.LittleEndian.Uint64(head[at:]) == zfsMagic || binary.BigEndian.Uint64(head[at:]) == zfsMagic {
			return content{What: "ZFS"}, nil
		}
	}
	empty := isZero(head) && isZero(tail)
	// Data without any of these marks need not begin at the beginning.
	for i := int64(1); empty && i < signatureSamples; i++ {
		b := make([]byte, ondisk.BlockBytes)
		if _, err := r.ReadAt(b, size/signatureSamples*i&^(ondisk.BlockBytes-1)); err != nil && !errors.Is(err, io.EOF) {
			return content{}, err
		}
		empty = isZero(b)
	}
	if empty {
		return content{Known: true, What: "empty"}, nil
	}
	return content{What: "unknown data"}, nil
}

func isZero(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 }

// ourContent looks for the two copies of a label.
func ourContent(head, tail []byte, size int64) (content, bool) {
	units := size / ondisk.BlockBytes
	for _, copy := range []struct {
		b    []byte
		unit int64
	}{{head, 0}, {tail, units - 1}} {
		at := copy.unit*ondisk.BlockBytes - (size - int64(len(tail)))
		if copy.unit == 0 {
			at = 0
		}
		if at < 0 || at+ondisk.BlockBytes > int64(len(copy.b)) {
			continue
		}
		if l, err := ondisk.DecodeLabel(copy.b[at:at+ondisk.BlockBytes], uint64(copy.unit)); err == nil {
			index := int(l.Index)
			what := fmt.Sprintf("tuttifs, drive %d of %s", index, extentmap.FormatUUID(l.Volume))
			if l.Name != "" {
				what += " (" + l.Name + ")"
			}
			return content{Known: true, What: what, Volume: extentmap.FormatUUID(l.Volume), Label: l.Name, Drive: &index}, true
		}
	}
	return content{}, false
}
