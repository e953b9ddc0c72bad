package main

import (
	"errors"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

// readLabel decodes one of the two label copies of a drive, which may be in use.
func readLabel(path string) (*ondisk.Label, error) {
	d, err := drive.Open(path, drive.Options{ReadOnly: true, NoLock: true})
	if err != nil {
		return nil, err
	}
	defer d.Close()
	block := drive.AlignedBuffer(ondisk.BlockBytes)
	read := func(off int64) (*ondisk.Label, error) {
		if err := d.ReadAt(block, off); err != nil {
			return nil, err
		}
		return ondisk.DecodeLabel(block, uint64(off)/ondisk.BlockBytes)
	}
	first, err := read(0)
	if err == nil {
		return first, nil
	}
	last, lastErr := read(d.Size() - ondisk.BlockBytes)
	if lastErr == nil {
		return last, nil
	}
	return nil, errors.Join(err, lastErr)
}
