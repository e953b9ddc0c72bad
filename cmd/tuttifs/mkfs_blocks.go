package main

import (
	"errors"
	"fmt"
	"strings"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/nvme"
)

// blockSizes are the LBA sizes that tuttifs can use.
var blockSizes = map[string]int{"512": 512, "4096": 4096, "4k": 4096, "4K": 4096}

// lbaSizeFlag is --lba-size: a block size, or the wish to see which there are.
type lbaSizeFlag struct {
	bytes int // 0: as it is
	list  bool
}

func (f *lbaSizeFlag) Type() string { return "512|4096|list" }

func (f *lbaSizeFlag) String() string {
	switch {
	case f.list:
		return "list"
	case f.bytes != 0:
		return fmt.Sprint(f.bytes)
	}
	return ""
}

func (f *lbaSizeFlag) Set(text string) error {
	n, ok := blockSizes[text]
	if !ok && text != "list" {
		return errors.New("block sizes are 512 and 4096; 'list' shows what the drives offer")
	}
	f.bytes, f.list = n, text == "list"
	return nil
}

// formatDocument is one LBA format of a drive.
type formatDocument struct {
	Drive       string `json:"drive"`
	Index       int    `json:"index"`
	LBABytes    int    `json:"lba_bytes"`
	Metadata    int    `json:"metadata_bytes"`
	Performance string `json:"relative_performance"` // as the drive's maker ranks them
	InUse       bool   `json:"in_use"`
	Usable      bool   `json:"usable"`         // by tuttifs: 512 or 4096 bytes, without metadata
	Lack        string `json:"lack,omitempty"` // why there is no choice
}

func usableFormat(f nvme.LBAFormat) bool { return f.MS == 0 && (f.Bytes() == 512 || f.Bytes() == 4096) }

// formatsOf lists what a drive offers. A drive without a choice is one line.
func formatsOf(d drive.Drive) []formatDocument {
	list, current, err := drive.Formats(d)
	if err != nil {
		lack := err.Error()
		if errors.Is(err, drive.ErrNoFormats) {
			lack = "no choice"
		}
		return []formatDocument{{Drive: d.Name(), LBABytes: d.LBABytes(), InUse: true, Usable: true, Lack: lack}}
	}
	var out []formatDocument
	for i, f := range list {
		if f.Bytes() != 0 {
			out = append(out, formatDocument{Drive: d.Name(), Index: i, LBABytes: f.Bytes(), Metadata: int(f.MS),
				Performance: f.Performance(), InUse: i == current, Usable: usableFormat(f)})
		}
	}
	return out
}

// listFormats is mkfs --lba-size list.
func (o *mkfsOptions) listFormats(e *env, drives []drive.Drive) error {
	formats := []formatDocument{}
	for _, d := range drives {
		formats = append(formats, formatsOf(d)...)
	}
	if o.json {
		return printJSON(e.stdout, map[string]any{"output_version": outputVersion, "formats": formats})
	}
	w := table(e.stdout)
	fmt.Fprintln(w, "DRIVE\tBLOCKS\tMETADATA\tRELATIVE PERFORMANCE\t")
	for _, f := range formats {
		var notes []string
		if f.InUse {
			notes = append(notes, "in use")
		}
		if !f.Usable {
			notes = append(notes, "not for tuttifs")
		}
		if f.Lack != "" {
			notes = append(notes, f.Lack)
		}
		fmt.Fprintf(w, "%s\t%d\t%d\t%s\t%s\n", f.Drive, f.LBABytes, f.Metadata, orDash(f.Performance),
			strings.Join(notes, ", "))
	}
	return w.Flush()
}

// betterFormat is a block size that the drive's maker ranks above the present one, 0 if there is none.
func betterFormat(d drive.Drive) (bytes int, than, now string) {
	list, current, err := drive.Formats(d)
	if err != nil || current < 0 {
		return 0, "", ""
	}
	best := list[current]
	for _, f := range list {
		if usableFormat(f) && f.RP&3 < best.RP&3 {
			best = f
		}
	}
	if best.RP&3 == list[current].RP&3 {
		return 0, "", ""
	}
	return best.Bytes(), best.Performance(), list[current].Performance()
}

// chooseBlocks gives the drives blocks of --lba-size, where they have others: with --format-nvm only, and not before
// everything else that could refuse them has had its say. The drives at the paths are opened anew then.
func (o *mkfsOptions) chooseBlocks(paths []string, drives []drive.Drive, fo extentmap.FormatOptions) error {
	var others []int
	for i, d := range drives {
		if d.LBABytes() != o.lbaSize.bytes {
			others = append(others, i)
		}
	}
	if len(others) == 0 {
		return nil
	}
	for _, i := range others {
		d := drives[i]
		list, _, err := drive.Formats(d)
		if err != nil {
			return fmt.Errorf("--lba-size %d: %w", o.lbaSize.bytes, err)
		}
		offered := false
		for _, f := range list {
			offered = offered || usableFormat(f) && f.Bytes() == o.lbaSize.bytes
		}
		if !offered {
			return fmt.Errorf("--lba-size %d: %s does not offer it: 'tuttifs mkfs --lba-size list' shows what it does",
				o.lbaSize.bytes, d.Name())
		}
		if !o.formatNVM {
			return fmt.Errorf("%s has blocks of %d bytes: to have it formatted with blocks of %d give --format-nvm too; "+
				"everything in the namespace is lost then", d.Name(), d.LBABytes(), o.lbaSize.bytes)
		}
	}
	if _, err := extentmap.Plan(drives, fo); err != nil {
		return err
	}
	if o.dryRun {
		return nil
	}
	for _, i := range others {
		if err := o.formatDrive(paths[i], &drives[i]); err != nil {
			return err
		}
	}
	return nil
}

// formatDrive formats a drive and opens it again; nil is left of one that could not be.
func (o *mkfsOptions) formatDrive(path string, d *drive.Drive) error {
	err := errors.Join(drive.FormatNVM(*d, o.lbaSize.bytes), (*d).Close())
	*d = nil
	if err != nil {
		return fmt.Errorf("--lba-size %d: %w", o.lbaSize.bytes, err)
	}
	opened, err := drive.Open(path, drive.Options{})
	if err != nil {
		return fmt.Errorf("--lba-size %d: %w", o.lbaSize.bytes, err)
	}
	*d = opened
	if got := opened.LBABytes(); got != o.lbaSize.bytes {
		return fmt.Errorf("--lba-size %d: %s was formatted, and has blocks of %d bytes", o.lbaSize.bytes, path, got)
	}
	return nil
}
