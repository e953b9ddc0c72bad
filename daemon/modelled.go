package daemon

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"tuttifs/drive"
	"tuttifs/drivemodel"
	"tuttifs/extentmap"
)

// DriveProfiles say what the drives of a mount are modelled on. The zero value is drives as fast as they are.
type DriveProfiles struct {
	All *drivemodel.Profile            // of every drive without one of its own; nil for none
	By  map[uint16]*drivemodel.Profile // by the drive's index in the volume
}

func (p *DriveProfiles) of(index uint16) *drivemodel.Profile {
	if own := p.By[index]; own != nil {
		return own
	}
	return p.All
}

// Any says whether any drive may be modelled.
func (p *DriveProfiles) Any() bool { return p.All != nil || len(p.By) > 0 }

// modelledDrive makes metadata and the mount's own readers and writers wait as long as a modelled drive would take. Its
// controller does the same for engines' commands, on the same medium, and has the drive itself.
type modelledDrive struct {
	drive.Drive
	medium atomic.Pointer[drivemodel.Medium] // nil while the drive's index is not known, and for drives without a profile
}

// modelled gives a drive that was just opened to those who model it.
func (p *DriveProfiles) modelled(d drive.Drive) drive.Drive {
	if !p.Any() {
		return d
	}
	return &modelledDrive{Drive: d}
}

// begin starts to model a drive whose index is known by now. Drives of a volume draw different latencies.
func (p *DriveProfiles) begin(d drive.Drive, index uint16, log *slog.Logger) {
	m, ok := d.(*modelledDrive)
	profile := p.of(index)
	if !ok || profile == nil {
		return
	}
	m.medium.Store(drivemodel.NewMedium(profile, uint64(index)))
	log.Warn("a MODELLED drive: as slow as its profile says, not as fast as it is", "index", index, "name", d.Name(),
		"profile", profile.Summary(), "of", profile.Of)
}

// beginAll models the drives of a volume that was just opened.
func (p *DriveProfiles) beginAll(v *extentmap.Volume, log *slog.Logger) error {
	info := v.Info()
	for _, index := range slices.Sorted(maps.Keys(p.By)) {
		if !slices.ContainsFunc(info.Drives, func(d extentmap.DriveInfo) bool { return d.Index == index }) {
			return fmt.Errorf("daemon: a profile is given for drive %d, which the volume does not have: 'tuttifs info DRIVE' "+
				"lists them", index)
		}
	}
	for i := range info.Drives {
		p.begin(v.Drive(info.Drives[i].Index), info.Drives[i].Index, log)
	}
	return nil
}

// mediumOf splits what the volume holds: the drive itself, and what it is modelled by, if it is.
func mediumOf(d drive.Drive) (drive.Drive, *drivemodel.Medium) {
	if m, ok := d.(*modelledDrive); ok {
		return m.Drive, m.medium.Load()
	}
	return d, nil
}

func (m *modelledDrive) ReadAt(p []byte, off int64) error {
	due := m.arrive(false, len(p))
	err := m.Drive.ReadAt(p, off)
	time.Sleep(time.Until(due))
	return err
}

func (m *modelledDrive) WriteAt(p []byte, off int64) error {
	due := m.arrive(true, len(p))
	err := m.Drive.WriteAt(p, off)
	time.Sleep(time.Until(due))
	return err
}

// arrive gives a transfer to the modelled drive, in commands as large as controllers take, and says when all of them
// will have been completed.
func (m *modelledDrive) arrive(write bool, n int) (due time.Time) {
	medium := m.medium.Load()
	if medium == nil {
		return due
	}
	now := time.Now()
	for ; n > 0; n -= commandBytes {
		if done := medium.Serve(now, write, uint32(min(n, commandBytes))); done.After(due) {
			due = done
		}
	}
	return due
}
