package daemon

import (
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"tuttifs/drive"
	"tuttifs/drivemodel"
	"tuttifs/extentmap"
	"tuttifs/lifetime"
	"tuttifs/phase"
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

// mountedDrive is a drive as all but its controller see it: metadata, and the mount's own readers and writers, keep to
// the drive's phases, and wait as long as a modelled drive would take. The controller does the same for engines'
// commands, with the same token and medium, and has the drive itself.
type mountedDrive struct {
	drive.Drive
	use atomic.Pointer[driveUse] // nil while the drive's index is not known: then nobody else uses it
}

// driveUse is what all who use one drive share.
type driveUse struct {
	medium *drivemodel.Medium // nil for drives without a profile
	phase  *phase.Token
	gates  [phase.Kinds]*phase.Gate
}

// begin joins those who use a drive whose index is known by now. Modelled drives of a volume draw different latencies.
func (o *Options) begin(d drive.Drive, index uint16) {
	m, ok := d.(*mountedDrive)
	if !ok {
		return
	}
	use := &driveUse{phase: phase.New(o.Phases)}
	for k := range use.gates {
		use.gates[k] = use.phase.Gate(phase.Kind(k))
	}
	if profile := o.Profiles.of(index); profile != nil {
		use.medium = drivemodel.NewMedium(profile, uint64(index))
		o.Log.Warn("a MODELLED drive: as slow as its profile says, not as fast as it is", "index", index, "name", d.Name(),
			"profile", profile.Summary(), "of", profile.Of)
	}
	m.use.Store(use)
}

// beginAll does it for the drives of a volume that was just opened.
func (o *Options) beginAll(v *extentmap.Volume) error {
	info := v.Info()
	for _, index := range slices.Sorted(maps.Keys(o.Profiles.By)) {
		if !slices.ContainsFunc(info.Drives, func(d extentmap.DriveInfo) bool { return d.Index == index }) {
			return fmt.Errorf("daemon: a profile is given for drive %d, which the volume does not have: 'tuttifs info DRIVE' "+
				"lists them", index)
		}
	}
	for i := range info.Drives {
		o.begin(v.Drive(info.Drives[i].Index), info.Drives[i].Index)
	}
	return nil
}

// useOf splits what the volume holds: the drive itself, and what those who use it share, nil where that is nothing.
func useOf(d drive.Drive) (drive.Drive, *driveUse) {
	if m, ok := d.(*mountedDrive); ok {
		return m.Drive, m.use.Load()
	}
	return d, nil
}

// readAs and writeAs are transfers that are not of metadata.
func readAs(k phase.Kind, d drive.Drive, p []byte, off int64) error {
	if m, ok := d.(*mountedDrive); ok {
		return m.read(k, p, off)
	}
	return d.ReadAt(p, off)
}

func writeAs(k phase.Kind, d drive.Drive, p []byte, off int64) error {
	if m, ok := d.(*mountedDrive); ok {
		return m.write(k, lifetime.Normal, p, off)
	}
	return d.WriteAt(p, off)
}

func (m *mountedDrive) ReadAt(p []byte, off int64) error { return m.read(phase.Metadata, p, off) }
func (m *mountedDrive) WriteAt(p []byte, off int64) error {
	return m.write(phase.Metadata, lifetime.Metadata, p, off)
}

func (m *mountedDrive) read(k phase.Kind, p []byte, off int64) error {
	return m.during(k, phase.Read, len(p), func() error { return m.Drive.ReadAt(p, off) })
}

func (m *mountedDrive) write(k phase.Kind, c lifetime.Class, p []byte, off int64) error {
	return m.during(k, phase.Write, len(p), func() error { return drive.WriteFor(m.Drive, c, p, off) })
}

// WriteZeroes and Discard are writes of no bytes.
func (m *mountedDrive) WriteZeroes(off, n int64) error {
	return m.during(phase.Metadata, phase.Write, 0, func() error { return m.Drive.WriteZeroes(off, n) })
}

func (m *mountedDrive) Discard(off, n int64) error {
	_, err := m.DiscardRanges([]drive.Range{{Off: off, N: n}})
	return err
}

func (m *mountedDrive) DiscardMost() int { return drive.DiscardMost(m.Drive) }

// DiscardRanges asks for the phase once. Of up to DiscardMost ranges that is for a command, for which reads need not
// wait long.
func (m *mountedDrive) DiscardRanges(ranges []drive.Range) (commands int, err error) {
	err = m.during(phase.Data, phase.Write, 0, func() (err error) {
		commands, err = drive.DiscardRanges(m.Drive, ranges)
		return err
	})
	return commands, err
}

// during runs a transfer in its phase, for as long as a modelled drive would take at least.
func (m *mountedDrive) during(k phase.Kind, d phase.Direction, n int, transfer func() error) error {
	use := m.use.Load()
	if use == nil {
		return transfer()
	}
	gate := use.gates[k]
	gate.Enter(d, n)
	defer gate.Leave(d, n)
	due := use.arrive(d, n)
	err := transfer()
	time.Sleep(time.Until(due))
	return err
}

// arrive gives a transfer to the modelled drive, in commands as large as controllers take, and says when all of them
// will have been completed.
func (u *driveUse) arrive(d phase.Direction, n int) (due time.Time) {
	if u.medium == nil {
		return due
	}
	now := time.Now()
	for ; n > 0; n -= commandBytes {
		if done := u.medium.Serve(now, d == phase.Write, uint32(min(n, commandBytes))); done.After(due) {
			due = done
		}
	}
	return due
}
