package main

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"tuttifs/extentmap"
)

// resolve turns what fstab or a person wrote into paths of drives.
func (s *mountSettings) resolve(specs []string) ([]string, error) {
	if len(specs) == 1 {
		kind, value, ok := strings.Cut(specs[0], "=")
		switch {
		case specs[0] == "none" && s.volume == "":
			return nil, usagef("none needs -o volume=LABEL or -o volume=UUID")
		case specs[0] == "none":
			return s.findVolume(s.volume)
		case ok && (kind == "UUID" || kind == "LABEL") && value != "":
			return s.findVolume(value)
		}
	}
	for _, path := range specs {
		if _, err := os.Stat(path); err != nil {
			return nil, err
		}
	}
	return specs, nil
}

// findVolume looks at the labels of all block devices and of the files in the search directories.
func (s *mountSettings) findVolume(name string) ([]string, error) {
	search := s.search
	if len(search) == 0 {
		search = []string{searchDir}
	}
	var found []string
	volumes := map[[16]byte]bool{}
	for _, path := range append(blockDevices(), filesIn(search)...) {
		label, err := readLabel(path)
		if err != nil || label.Name != name && !strings.EqualFold(extentmap.FormatUUID(label.Volume), name) {
			continue // not ours, not readable, or not the one
		}
		found = append(found, path)
		volumes[label.Volume] = true
	}
	switch {
	case len(found) == 0:
		return nil, fmt.Errorf("no volume %q among block devices and in %s: name a drive, or its directory with "+
			"-o search=DIR", name, strings.Join(search, ", "))
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
