package extentmap

import (
	"fmt"
	"io"
	"math/bits"
	"slices"
	"sort"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

// exclusively runs f while no checkpoint and no commit is under way.
func (v *Volume) exclusively(f func() error) error {
	v.checkpointMu.Lock()
	defer v.checkpointMu.Unlock()
	v.journalMu.Lock()
	defer v.journalMu.Unlock()
	if err := v.err(); err != nil {
		return err
	}
	return f()
}

// newMirrors are the drives that are to hold metadata as well, so that two do where there are two. Volume.mu.
func (v *Volume) newMirrors() (out []*member) {
	for _, m := range v.members {
		if len(v.metadata)+len(out) >= metadataDrives {
			break
		}
		if m.is(DriveOnline) && !m.role {
			out = append(out, m)
		}
	}
	return out
}

// lacksMirror says whether a drive could hold metadata that has too few copies.
func (v *Volume) lacksMirror() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.newMirrors()) > 0
}

// settleMembers makes drives that come back full members again, whose record tables are written, and gives the metadata
// a second copy where it has only one. What was written for that is whole before the labels say so; the journal is
// empty then. Under exclusively.
func (v *Volume) settleMembers() error {
	if err := v.admitStale(); err != nil {
		return err
	}
	v.mu.Lock()
	mirrors := v.newMirrors()
	v.mu.Unlock()
	if len(mirrors) == 0 {
		return nil
	}
	if err := v.mirrorTo(mirrors); err != nil {
		return err
	}
	v.labelMu.Lock()
	defer v.labelMu.Unlock()
	return v.renewLabels(slices.DeleteFunc(mirrors, (*member).lost), func(*ondisk.Label) {})
}

// admitStale names drives in the labels again that were behind.
func (v *Volume) admitStale() error {
	v.labelMu.Lock()
	defer v.labelMu.Unlock()
	var first []*member
	for _, m := range v.members {
		if m.stale && !m.lost() {
			m.stale, m.rank = false, rankCurrent
			first = append(first, m)
		}
	}
	if len(first) == 0 {
		return nil
	}
	return v.renewLabels(first, func(*ondisk.Label) {})
}

// mirrorTo writes the metadata to more drives, which hold it from now on. Under exclusively.
func (v *Volume) mirrorTo(mirrors []*member) error {
	err := v.write(mirrors, func(m *member) error {
		// Superblocks of an earlier time must not be found.
		zero := drive.AlignedBuffer(ondisk.SuperblockSlots * ondisk.BlockBytes)
		if err := m.writeAt(zero, v.region.SuperblockUnit); err != nil {
			return err
		}
		return m.flush()
	})
	if err != nil {
		return err
	}
	v.labelMu.Lock()
	v.mu.Lock()
	for _, m := range mirrors {
		if !m.lost() {
			m.role = true
			v.metadata = append(slices.Clip(v.metadata), m)
		}
	}
	v.mu.Unlock()
	v.labelMu.Unlock()
	v.applyMu.Lock()
	v.catDirty = true
	v.applyMu.Unlock()
	return v.checkpointLocked(false)
}

// AddOptions of AddDrive.
type AddOptions struct {
	Force bool // overwrite a known signature
	// Hold gives the drive no rows until Release: engines are attached that do not know it.
	Hold bool
}

// AddDrive makes an empty drive a member, or takes a member that was lost in again. From success on the drive belongs
// to the volume, which closes it.
func (v *Volume) AddDrive(d drive.Drive, o AddOptions) (index uint16, err error) {
	if v.readOnly {
		return 0, ErrReadOnly
	}
	v.changing.Lock()
	defer v.changing.Unlock()
	l, err := readLabel(d)
	if err == nil && l.Volume == v.uuid {
		if m := v.member(l.Index); m != nil && m.uuid == l.Drive {
			return l.Index, v.rejoin(m, d, l, o)
		}
	}
	if !o.Force {
		what, err := FindSignature(d)
		if err != nil {
			return 0, &DriveError{Err: ErrIO, Name: d.Name(), Index: -1, Advice: "cannot read the drive", Cause: err}
		}
		if what != "" {
			return 0, &DriveError{Err: ErrSignature, Name: d.Name(), Index: -1,
				Advice: fmt.Sprintf("it holds %s; use --force to overwrite it", what)}
		}
	}
	for _, m := range v.members {
		if m.dev == nil {
			continue
		}
		if same, err := sameDrive(d, m.dev); err != nil {
			return 0, err
		} else if same {
			return 0, &DriveError{Err: ErrDuplicate, Name: d.Name(), Index: int(m.index), UUID: m.uuid,
				Advice: "it is in use in this volume already"}
		}
	}
	l, err = v.newLabel(d)
	if err != nil {
		return 0, err
	}
	if err := clearDrive(d, &l.Region); err != nil {
		return 0, &DriveError{Err: ErrIO, Name: d.Name(), Index: int(l.Index), UUID: l.Drive,
			Advice: "cannot format", Cause: err}
	}
	m := newMember(v, d, l)
	m.held.Store(o.Hold)
	return l.Index, v.exclusively(func() error { return v.admit(m) })
}

// newLabel is the label of a drive that is to be added: under the lowest index that was never used.
func (v *Volume) newLabel(d drive.Drive) (*ondisk.Label, error) {
	v.labelMu.Lock()
	l := v.common
	clear(l.Extension[:]) // it is another drive's
	v.labelMu.Unlock()
	at := slices.IndexFunc(l.Members[:], func(m ondisk.Member) bool { return m.State == ondisk.DriveAbsent })
	if at < 0 {
		return nil, fmt.Errorf("%w: the volume has used all %d drive numbers", ErrInvalid, ondisk.MaxDrives)
	}
	l.Index, l.Units = uint16(at), uint64(d.Size())/ondisk.BlockBytes
	l.LBAShift = uint8(bits.TrailingZeros(uint(d.LBABytes())))
	l.Region.Segments = segmentsOf(&l.Region, l.Units)
	if l.Region.Segments < minSegments {
		need := (l.Region.SegmentUnit + minSegments*uint64(l.Region.SegmentUnits) + 1) * ondisk.BlockBytes
		return nil, &DriveError{Err: ErrTooSmall, Name: d.Name(), Index: -1,
			Advice: fmt.Sprintf("%d bytes; in this volume it needs at least %d", d.Size(), need)}
	}
	if _, err := io.ReadFull(v.o.Random, l.Drive[:]); err != nil {
		return nil, fmt.Errorf("extentmap: no random bytes for a UUID: %w", err)
	}
	l.Drive[6], l.Drive[8] = l.Drive[6]&0x0f|0x40, l.Drive[8]&0x3f|0x80 // RFC 9562, version 4
	return &l, nil
}

// admit makes a formatted drive a member: its own label says so first. Under exclusively.
func (v *Volume) admit(m *member) error {
	v.labelMu.Lock()
	before := v.common
	v.common.Members[m.index] = ondisk.Member{UUID: m.uuid, State: ondisk.DriveActive, Units: m.units}
	v.common.Sequence++
	v.common.Holders |= 1 << m.index
	m.label = v.labelOf(m)
	if err := writeLabel(m); err != nil {
		v.common = before
		v.labelMu.Unlock()
		_ = wipeLabels(m.dev) // it may have written a part
		return &DriveError{Err: ErrIO, Name: m.name(), Index: int(m.index), UUID: m.uuid,
			Advice: "cannot write its label", Cause: err}
	}
	v.mu.Lock()
	v.members = append(slices.Clip(v.members), m)
	sort.Slice(v.members, func(i, j int) bool { return v.members[i].index < v.members[j].index })
	v.byIndex[m.index].Store(m)
	v.drivesChanged.Store(true)
	v.mu.Unlock()
	v.discards.admit(m)
	err := v.renewLabels(nil, func(*ondisk.Label) {})
	v.labelMu.Unlock()
	if err != nil {
		return err
	}
	return v.settleMembers()
}

// rejoin takes a lost member in again: its payload is right, its metadata is written anew.
func (v *Volume) rejoin(m *member, d drive.Drive, l *ondisk.Label, o AddOptions) error {
	fail := func(kind error, advice string) error {
		return &DriveError{Err: kind, Name: d.Name(), Index: int(m.index), UUID: m.uuid, Advice: advice}
	}
	v.labelMu.Lock()
	common := v.common
	v.labelMu.Unlock()
	mine := uint64(0)
	v.mu.Lock()
	for _, x := range v.members {
		if !x.lost() {
			mine |= 1 << x.index
		}
	}
	v.mu.Unlock()
	switch {
	case !m.lost():
		return fail(ErrDuplicate, "it is in use in this volume already")
	case l.Holders&mine == 0 || l.Epoch > common.Epoch || l.Epoch == common.Epoch && l.Nonce != common.Nonce:
		return fail(ErrDiverged, "it went on without the drives that are mounted here; forget it, and add it with --force")
	case uint64(d.Size())/ondisk.BlockBytes < m.units:
		return fail(ErrTruncated, "smaller than its label says; restore its size")
	case m.stuck.Load() > 0:
		return fail(ErrAgain, "an operation that was given up has not returned yet")
	}
	return v.exclusively(func() error {
		back := v.replaceMember(m, d, l, o)
		v.discards.admit(back)
		v.reloadTables(back)
		// Its record tables first, while the labels still say that it is behind.
		if err := v.repairTables(); err != nil {
			return err
		}
		if err := v.settleMembers(); err != nil {
			return err
		}
		v.mu.Lock()
		defer v.mu.Unlock()
		v.reviewRows(back.index)
		return nil
	})
}

// replaceMember puts a drive that comes back in its own place. Whoever still has the lost one finds it lost.
func (v *Volume) replaceMember(m *member, d drive.Drive, l *ondisk.Label, o AddOptions) *member {
	back := newMember(v, d, l)
	back.stale, back.rank = true, l.Epoch
	back.held.Store(o.Hold)
	back.readErrors.Store(m.readErrors.Load())
	back.writeErrors.Store(m.writeErrors.Load())
	back.timeouts.Store(m.timeouts.Load())
	v.mu.Lock()
	defer v.mu.Unlock()
	back.owner, back.used, back.free, back.tables = m.owner, m.used, m.free, m.tables
	v.members = slices.Clone(v.members)
	v.members[slices.Index(v.members, m)] = back
	v.byIndex[m.index].Store(back)
	v.drivesChanged.Store(true)
	if m.dev != nil && m.dev != d {
		v.retired = append(v.retired, m.dev)
	}
	return back
}

// reloadTables has the record tables written anew that a drive holds which comes back, and reads those that no other
// drive had.
func (v *Volume) reloadTables(m *member) {
	v.applyMu.Lock()
	defer v.applyMu.Unlock()
	for _, p := range v.Pools() {
		for n := range p.highest.Load() {
			r := p.byNumber[n].Load()
			if r == nil || r.tables[0].Drive() != m.index && r.tables[1].Drive() != m.index {
				continue
			}
			if r.noTable.Load() {
				v.loadTable(r, func(block uint32, second bool) { v.markDamaged(r, block, second) })
				p.rederive(r)
				continue
			}
			for c := range r.tables {
				if r.tables[c].Drive() == m.index {
					r.fresh |= 1 << c
				}
			}
		}
	}
}

// rederive computes a row's free slots again, whose table was not known. Nothing of the row is in use.
func (p *Pool) rederive(r *row) {
	p.mu.Lock()
	for residue, n := range r.freeBy {
		p.countFree(r, uint32(residue), -int32(n))
	}
	p.count(r, -int32(r.used), -int32(r.freeing))
	p.mu.Unlock()
	p.deriveFree(r)
}

// Release lets a drive that was held have rows.
func (v *Volume) Release(index uint16) {
	if m := v.member(index); m != nil {
		m.held.Store(false)
	}
}

// Leave prepares forgetting a drive: the rows on it become unavailable and get no successors there, and its copy of the
// metadata moves to another drive.
func (v *Volume) Leave(index uint16) error {
	if v.readOnly {
		return ErrReadOnly
	}
	v.changing.Lock()
	defer v.changing.Unlock()
	m := v.member(index)
	switch {
	case m == nil:
		return fmt.Errorf("%w: no drive %d", ErrInvalid, index)
	case !m.is(DriveOnline):
		return nil
	}
	return v.exclusively(func() error { return v.leave(m) })
}

// leave is Leave under exclusively.
func (v *Volume) leave(m *member) error {
	v.mu.Lock()
	others := 0
	for _, x := range v.members {
		if x != m && x.is(DriveOnline) {
			others++
		}
	}
	if others == 0 {
		v.mu.Unlock()
		return fmt.Errorf("%w: drive %d is the last one in use", ErrInvalid, m.index)
	}
	m.state.Store(uint32(DriveLeaving))
	v.reviewRows(m.index)
	v.mu.Unlock()
	if !m.role {
		return nil
	}
	if err := v.settleMembers(); err != nil { // a sole copy of the metadata gets a second one first
		return err
	}
	v.labelMu.Lock()
	v.mu.Lock()
	if len(v.metadata) < 2 {
		m.state.CompareAndSwap(uint32(DriveLeaving), uint32(DriveOnline))
		v.reviewRows(m.index)
		v.mu.Unlock()
		v.labelMu.Unlock()
		return fmt.Errorf("%w: no other drive can hold the metadata", ErrInvalid)
	}
	m.role = false
	v.metadata = without(v.metadata, m)
	v.mu.Unlock()
	err := v.renewLabels(nil, func(*ondisk.Label) {})
	v.labelMu.Unlock()
	if err != nil {
		return err
	}
	return v.settleMembers()
}

// RowsOn lists the rows of a pool that have an entry on a drive.
func (p *Pool) RowsOn(index uint16) (rows []uint32) {
	for n := range p.highest.Load() {
		if r := p.byNumber[n].Load(); r != nil && r.driveSet>>index&1 != 0 {
			rows = append(rows, n)
		}
	}
	return rows
}

// GiveUpRow drops an unavailable row with all its files, whose drive is being forgotten. The caller has nothing of it
// in use: no slot reserved, none pinned. ErrAgain while slots of it are being freed.
func (p *Pool) GiveUpRow(number uint32) (*Ticket, error) {
	v := p.v
	r := p.rowByNumber(number)
	if r == nil {
		return doneTicket(nil), nil
	}
	if !r.away.Load() {
		return nil, fmt.Errorf("%w: row %d of pool %d is in use", ErrInvalid, number, p.id)
	}
	v.queueMu.Lock()
	p.mu.Lock()
	busy := r.freeing > 0 || r.dropping
	p.mu.Unlock()
	if busy || r.condemned {
		v.queueMu.Unlock()
		return nil, fmt.Errorf("%w: row %d of pool %d has slots being freed", ErrAgain, number, p.id)
	}
	r.condemned = true
	v.queueMu.Unlock()
	undo := func() {
		v.queueMu.Lock()
		r.condemned = false
		v.queueMu.Unlock()
	}
	ticket := NewTicket()
	r.dropped = ticket.Complete
	t := v.Begin()
	t.buf = (&ondisk.DropRow{Pool: uint16(p.id), Number: number}).Append(t.buf)
	_, err := t.Submit(func(err error) {
		if err != nil {
			undo()
			ticket.Complete(err)
		}
	})
	if err != nil {
		undo()
		return nil, err
	}
	return ticket, nil
}

// Forget removes a drive from the volume that has no rows any more. ErrAgain while it has some.
func (v *Volume) Forget(index uint16) error {
	if v.readOnly {
		return ErrReadOnly
	}
	v.changing.Lock()
	defer v.changing.Unlock()
	m := v.member(index)
	switch {
	case m == nil:
		return fmt.Errorf("%w: no drive %d", ErrInvalid, index)
	case m.is(DriveOnline):
		return fmt.Errorf("%w: drive %d is in use", ErrInvalid, index)
	}
	if err := v.exclusively(func() error { return v.remove(m) }); err != nil {
		return err
	}
	if m.is(DriveLeaving) {
		_ = wipeLabels(m.dev) // nobody looks for it any more; a label left behind is passed over by the next mount
	}
	if !v.ownDrives {
		return nil
	}
	return m.close()
}

// remove takes a drive off the volume. Under exclusively.
func (v *Volume) remove(m *member) error {
	v.applyMu.Lock()
	rows := len(v.limbo)
	for _, p := range v.Pools() {
		rows += len(p.RowsOn(m.index))
	}
	v.mu.Lock()
	for _, p := range v.pools {
		for _, r := range p.pending {
			if r.driveSet>>m.index&1 != 0 {
				rows++
			}
		}
	}
	v.mu.Unlock()
	if rows > 0 {
		v.applyMu.Unlock()
		return fmt.Errorf("%w: %d rows are on drive %d", ErrAgain, rows, m.index)
	}
	v.moveTables(m)
	v.applyMu.Unlock()
	if err := v.checkpointLocked(false); err != nil {
		return err
	}
	v.labelMu.Lock()
	defer v.labelMu.Unlock()
	v.mu.Lock()
	v.members = without(v.members, m)
	v.byIndex[m.index].Store(nil)
	v.mu.Unlock()
	return v.renewLabels(nil, func(l *ondisk.Label) { l.Members[m.index].State = ondisk.DriveRemoved })
}

// moveTables gives record tables that are on a drive other places. Volume.applyMu.
func (v *Volume) moveTables(m *member) {
	for _, p := range v.Pools() {
		for n := range p.highest.Load() {
			r := p.byNumber[n].Load()
			if r == nil {
				continue
			}
			for c := range r.tables {
				if r.tables[c].Drive() != m.index {
					continue
				}
				v.vacated = append(v.vacated, vacancy{r.tables[c], p.tableBlocks})
				r.tables[c] = ondisk.NoLocator
				r.moved, v.catDirty = true, true
				v.drivesChanged.Store(true) // the checkpoint finds a place, or leaves the row with one copy
			}
		}
	}
}

func (m *member) close() error {
	switch {
	case m.dev == nil:
		return nil
	case m.stuck.Load() > 0:
		go m.dev.Close() // it waits for what was given up
		return nil
	}
	return m.dev.Close()
}
