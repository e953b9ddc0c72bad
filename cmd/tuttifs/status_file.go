package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"tuttifs/daemon"
)

// errDaemonDead: the mount is still there, and nobody answers any more.
var errDaemonDead = errors.New("the daemon of this mount has died")

// explainDead says what to do with a mount on which nobody answers any more.
func explainDead(dir string, err error) error {
	if errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.ECONNABORTED) {
		return fmt.Errorf("%s: %w: 'tuttifs umount %s' clears it", dir, errDaemonDead, dir)
	}
	return err
}

// readStatus decodes one of the status files of a mount.
func readStatus(dir, name string, v any) error {
	b, err := os.ReadFile(filepath.Join(dir, ".tuttifs", name))
	switch err = explainDead(dir, err); {
	case errors.Is(err, errDaemonDead):
		return err
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
		return fmt.Errorf("%s is not a tuttifs mount: %w", dir, err)
	case errors.Is(err, fs.ErrPermission):
		if _, ok := findMount(dir); !ok {
			return err
		}
		return fmt.Errorf("%w: the mount is its owner's, and others' with -o allow_other and a umask that lets them", err)
	case err != nil:
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%s: status file %s: %w", dir, name, err)
	}
	return nil
}

// noPool says that a mount has no such pool, unless it is no mount.
func noPool(dir, pool string) error {
	if err := readStatus(dir, "version", &daemon.VersionDocument{}); err != nil {
		return err
	}
	return fmt.Errorf("%s has no pool %q: 'tuttifs ls %s' lists them", dir, pool, dir)
}

// isMount says whether path is the root of a tuttifs mount, dead or alive.
func isMount(path string) bool {
	if _, ok := findMount(path); ok {
		return true
	}
	_, err := os.Stat(filepath.Join(path, ".tuttifs", "version"))
	return err == nil
}
