package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"tuttifs/drive"
	"tuttifs/extentmap"
)

// errNoVolume: no drive has that label or UUID where volumes are looked for.
var errNoVolume = errors.New("no volume")

// resolve turns what fstab or a person wrote into paths of drives.
func (s *mountSettings) resolve(specs []string) ([]string, error) {
	if len(specs) == 1 {
		kind, value, ok := strings.Cut(specs[0], "=")
		switch {
		case specs[0] == "none" && s.volume == "":
			return nil, usagef("none needs -o volume=LABEL or -o volume=UUID")
		case specs[0] == "none":
			return s.findVolume(s.volume)
		case ok && (kind == "UUID" || kind == "LABEL") && value == "":
			return nil, usagef("%s names no volume", specs[0])
		case ok && (kind == "UUID" || kind == "LABEL"):
			return s.findVolume(value)
		}
	}
	for _, path := range specs {
		_, err := os.Stat(path)
		switch {
		case err == nil, drive.IsAddress(path):
		case len(specs) == 1 && os.IsNotExist(err) && !strings.Contains(path, "/"):
			found, err := s.findVolume(path)
			if errors.Is(err, errNoVolume) {
				err = fmt.Errorf("no such file or device, and %w", err)
			}
			return found, err
		default:
			return nil, err
		}
	}
	return slices.Concat(specs, s.searchMembers(specs)), nil
}

// searchMembers lists what -o search= names of the volume that the first drive belongs to.
func (s *mountSettings) searchMembers(specs []string) (found []string) {
	if len(s.search) == 0 {
		return nil
	}
	if drive.IsAddress(specs[0]) {
		return nil // all members of such a volume are named
	}
	label, err := readLabel(specs[0])
	if err != nil {
		return nil // whoever opens it says what is wrong
	}
	for _, path := range filesIn(s.search) {
		l, err := readLabel(path)
		known := func(spec string) bool { return sameFile(spec, path) }
		if err == nil && l.Volume == label.Volume && !slices.ContainsFunc(specs, known) {
			found = append(found, path)
		}
	}
	return found
}

// findVolume looks at the labels of all block devices and of the files in the search directories. If it is none of
// these, it may be mounted already, and its drives may lie anywhere.
func (s *mountSettings) findVolume(name string) ([]string, error) {
	search := s.search
	if len(search) == 0 {
		search = []string{searchDir}
	}
	is := func(label, uuid string) bool { return label == name || strings.EqualFold(uuid, name) }
	var found []string
	volumes := map[string]bool{}
	for _, path := range append(blockDevices(), filesIn(search)...) {
		label, err := readLabel(path)
		if err != nil {
			continue // not ours, or not readable
		}
		if uuid := extentmap.FormatUUID(label.Volume); is(label.Name, uuid) {
			found = append(found, path)
			volumes[uuid] = true
		}
	}
	if len(found) == 0 {
		_, err := parseUUID(name)
		interest := func(source string) bool { return err == nil || source == name } // a label stands for the UUID there
		for _, m := range liveMounts(interest) {
			if is(m.volume.Label, m.volume.UUID) && !volumes[m.volume.UUID] { // readers may have mounted it twice
				found = append(found, m.drives()...)
				volumes[m.volume.UUID] = true
			}
		}
	}
	switch {
	case len(found) == 0:
		return nil, fmt.Errorf("%w %q among block devices and in %s: name one of its drives", errNoVolume, name,
			strings.Join(search, ", "))
	case len(volumes) > 1:
		return nil, fmt.Errorf("%d volumes have the label %q (%s): use UUID=", len(volumes), name, strings.Join(found, ", "))
	}
	return found, nil
}

// blockDevices lists what /proc/partitions does.
func blockDevices() (paths []string) {
	f, err := os.Open("/proc/partitions")
	if err != nil {
		return nil
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if w := strings.Fields(s.Text()); len(w) == 4 && w[0] != "major" {
			paths = append(paths, filepath.Join("/dev", w[3]))
		}
	}
	return paths
}

// filesIn lists the regular files of directories.
func filesIn(dirs []string) (paths []string) {
	for _, dir := range dirs {
		entries, err := os.ReadDir(dir)
		if err != nil {
			continue
		}
		for _, e := range entries {
			if e.Type().IsRegular() {
				paths = append(paths, filepath.Join(dir, e.Name()))
			}
		}
	}
	return paths
}
