package engine

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"tuttifs/ioctl"
)

// Mount is an opened mount point.
type Mount struct {
	path   string
	client *ioctl.Client
	hello  ioctl.Hello
}

// Open opens a tuttifs mount point (any path in it) and checks the ABI version.
func Open(path string) (*Mount, error) {
	client, err := openControl(path)
	if err != nil {
		return nil, explain(err)
	}
	m := &Mount{path: path, client: client}
	if err := client.Hello(&m.hello); err != nil {
		_ = client.Close()
		return nil, fmt.Errorf("engine: open %s: %w", path, explain(err))
	}
	return m, nil
}

// openControl opens the control file for writing, or for reading where the mount allows no more.
func openControl(path string) (*ioctl.Client, error) {
	client, err := ioctl.Open(path, false)
	if errors.Is(err, unix.EROFS) || errors.Is(err, unix.EACCES) {
		return ioctl.Open(path, true)
	}
	return client, err
}

// Hello is what the mount said of itself when it was opened.
func (m *Mount) Hello() ioctl.Hello { return m.hello }

// Close closes the mount; its sessions go on.
func (m *Mount) Close() error { return m.client.Close() }
