package main

import (
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"tuttifs/drivemodel"
)

// loadProfile takes the name of a profile that is part of the program, or a file.
func loadProfile(nameOrFile string) (*drivemodel.Profile, error) {
	if p, ok := drivemodel.Shipped(nameOrFile); ok {
		return p, nil
	}
	if nameOrFile == "" {
		return nil, fmt.Errorf("a drive profile has no name: give a FILE, or one of %s",
			strings.Join(drivemodel.Names(), ", "))
	}
	f, err := os.OpenFile(nameOrFile, os.O_RDONLY|unix.O_NONBLOCK, 0) // a pipe would be waited for
	if err != nil {
		return nil, fmt.Errorf("%w; it is none of the names %s either", err, strings.Join(drivemodel.Names(), ", "))
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, drivemodel.FileBytesMax+1))
	if err != nil {
		return nil, err
	}
	p, err := drivemodel.Parse(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", nameOrFile, err)
	}
	return p, nil
}
