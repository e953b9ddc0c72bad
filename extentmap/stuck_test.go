package extentmap_test

import (
	"sync/atomic"

	"tuttifs/drive"
)

// stuckDrive does not answer writes and flushes while on is set, until released.
type stuckDrive struct {
	drive.Drive
	on      atomic.Bool
	release chan struct{}
}

func (d *stuckDrive) wait() {
	if d.on.Load() {
		<-d.release
	}
}

func (d *stuckDrive) WriteAt(p []byte, off int64) error {
	d.wait()
	return d.Drive.WriteAt(p, off)
}

func (d *stuckDrive) Flush() error {
	d.wait()
	return d.Drive.Flush()
}
