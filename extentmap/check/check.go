// Package check is fsck: it reads the medium itself through ondisk and never imports the engine that it judges.
//
// It only reads. Passes run in order: labels, superblocks, catalog, journal, record tables, records, and data if
// asked for. Each compares every copy of a structure with what it must be, and hands the next pass the best that is
// left. A journal that is not empty is no error: it is replayed in memory, and the record tables are judged with
// its changes in place.
//
// The checker needs about 140 bytes of memory for each slot of the volume.
package check

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

var (
	// ErrNotVolume: no drive has a readable label, or no superblock is left: there is nothing to check.
	ErrNotVolume = errors.New("check: not a tuttifs volume, or damaged beyond finding it")
	// ErrNewer: the volume needs a newer version of this program.
	ErrNewer = errors.New("check: format not understood by this version")
)

// Severity of a finding.
type Severity uint8

const (
	// Note: legal, and worth knowing.
	Note Severity = iota
	// Warning: odd and harmless; the volume is consistent.
	Warning
	// Error: damage. The volume is not clean.
	Error
)

func (s Severity) String() string {
	switch s {
	case Note:
		return "note"
	case Warning:
		return "warning"
	case Error:
		return "error"
	}
	return fmt.Sprintf("severity %d", uint8(s))
}

// Pass is one stage of the check.
type Pass uint8

// The passes, in order.
const (
	PassLabels Pass = 1 + iota
	PassSuperblocks
	PassCatalog
	PassJournal
	PassTables
	PassRecords
	PassData
)

// Passes is the number of passes without PassData.
const Passes = int(PassRecords)

func (p Pass) String() string {
	names := [...]string{"", "labels", "superblocks", "catalog", "journal", "record tables", "records", "data"}
	if int(p) < len(names) {
		return names[p]
	}
	return fmt.Sprintf("pass %d", uint8(p))
}

// NoBlock is the Block of findings that concern no block in particular.
const NoBlock = ^uint64(0)

// Finding is one thing that the check has to say.
type Finding struct {
	Severity  Severity
	Pass      Pass
	Structure string // "label", "superblock", "catalog", "journal", "row", "record table", "record", "object"
	Drive     string // name of the drive, "" for none in particular
	Block     uint64 // 4-KiB unit of the drive, or NoBlock
	Message   string
	Advice    string // what to do; "" for nothing
}

func (f Finding) String() string {
	s := f.Structure + ": "
	if f.Drive != "" {
		s += f.Drive + ": "
	}
	if f.Block != NoBlock {
		s += fmt.Sprintf("block %d: ", f.Block)
	}
	s += f.Message
	if f.Advice != "" {
		s += ": " + f.Advice
	}
	return s
}

// Options of Run.
type Options struct {
	// Report gets each finding; nil drops them. Of one pass and severity at most FindingsMax come, then one that
	// says how many more there are. Called by one goroutine at a time.
	Report func(Finding)
	// Progress is told how far a pass is, at its start and end at least. Called by one goroutine at a time.
	Progress func(p Pass, done, total uint64)
	// Data also reads all payloads of committed files and verifies their checksums.
	Data bool
	// Parallel is how many files are read at once by Data; 0 means 8.
	Parallel int
}

// FindingsMax bounds the findings of one pass and severity that are reported one by one.
const FindingsMax = 200

// Result is the outcome.
type Result struct {
	Volume   [16]byte
	Label    string
	Clean    bool // the volume was unmounted
	Errors   uint64
	Warnings uint64
	Notes    uint64

	Drives       int
	Pools        int
	Rows         int
	Transactions uint64 // batches of the journal that are not yet in the tables
	Slots        uint64
	Files        uint64 // committed
	Objects      uint64 // verified by PassData
	Bytes        uint64 // likewise
}

// Run checks the volume that the drives are members of. The error is for what keeps it from being checked (not a
// volume, a newer format, ctx); damage is told to Report and counted.
func Run(ctx context.Context, drives []drive.Drive, o Options) (Result, error) {
	c := &checker{ctx: ctx, o: o, reported: make(map[reportKey]uint64)}
	defer c.release()
	err := c.run(drives)
	c.endPass()
	return c.result, err
}

// checker is the state of one run.
type checker struct {
	ctx    context.Context
	o      Options
	result Result
	pass   Pass
	// mu guards result's counts, reported, and the calls of Report and Progress: data has many readers.
	mu       sync.Mutex
	reported map[reportKey]uint64 // findings of the pass

	members [ondisk.MaxDrives]*member
	label   *ondisk.Label // the newest: what the volume agrees on
	super   *ondisk.Superblock
	tag     uint64

	pools     map[uint16]*pool
	poolNames map[string]uint16
	families  map[uint16]string
	tenants   map[uint32]ondisk.Tenant
	journaled uint64 // highest commit sequence in the journal + 1
}

type reportKey struct {
	pass     Pass
	severity Severity
}

// member is one drive of the volume.
type member struct {
	drive.Drive
	label  *ondisk.Label
	claims []claim
}

func (c *checker) run(drives []drive.Drive) error {
	c.tenants = make(map[uint32]ondisk.Tenant)
	c.families = make(map[uint16]string)
	c.pools = make(map[uint16]*pool)
	c.poolNames = make(map[string]uint16)
	stages := []struct {
		pass Pass
		run  func() error
	}{
		{PassLabels, func() error { return c.checkLabels(drives) }},
		{PassSuperblocks, c.checkSuperblocks},
		{PassCatalog, c.checkCatalog},
		{PassJournal, c.checkJournal},
		{PassTables, c.checkTables},
		{PassRecords, c.checkRecords},
		{PassData, c.checkData},
	}
	for _, s := range stages {
		if s.pass == PassData && !c.o.Data {
			continue
		}
		c.endPass()
		c.pass = s.pass
		c.progress(0, 1)
		if err := s.run(); err != nil {
			return err
		}
		c.progress(1, 1)
		if err := c.ctx.Err(); err != nil {
			return err
		}
	}
	return nil
}

func (c *checker) progress(done, total uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.o.Progress != nil {
		c.o.Progress(c.pass, done, total)
	}
}

// report counts a finding and passes it on, unless there were too many like it.
func (c *checker) report(f Finding) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch f.Severity {
	case Error:
		c.result.Errors++
	case Warning:
		c.result.Warnings++
	default:
		c.result.Notes++
	}
	f.Pass = c.pass
	key := reportKey{c.pass, f.Severity}
	c.reported[key]++
	if c.reported[key] <= FindingsMax && c.o.Report != nil {
		c.o.Report(f)
	}
}

// endPass says how many findings of the pass were not reported.
func (c *checker) endPass() {
	for _, s := range []Severity{Note, Warning, Error} {
		if n := c.reported[reportKey{c.pass, s}]; n > FindingsMax && c.o.Report != nil {
			c.o.Report(Finding{Severity: s, Pass: c.pass, Structure: c.pass.String(), Block: NoBlock,
				Message: fmt.Sprintf("%d more findings of this kind", n-FindingsMax)})
		}
	}
	clear(c.reported)
}

// problem is what a check says about a place; finish it with at or volume.
type problem struct {
	severity  Severity
	structure string
	message   string
	advice    string
}

func errorf(structure, advice, format string, args ...any) problem {
	return problem{Error, structure, fmt.Sprintf(format, args...), advice}
}

func warningf(structure, advice, format string, args ...any) problem {
	return problem{Warning, structure, fmt.Sprintf(format, args...), advice}
}

func notef(structure, advice, format string, args ...any) problem {
	return problem{Note, structure, fmt.Sprintf(format, args...), advice}
}

// at reports a problem of a block of a drive.
func (c *checker) at(d drive.Drive, block uint64, p problem) {
	c.report(Finding{Severity: p.severity, Structure: p.structure, Drive: d.Name(), Block: block, Message: p.message,
		Advice: p.advice})
}

// volume reports a problem of no drive in particular.
func (c *checker) volume(p problem) {
	c.report(Finding{Severity: p.severity, Structure: p.structure, Block: NoBlock, Message: p.message,
		Advice: p.advice})
}

// tornOr is an error on a volume that was unmounted, and a note on one that was cut off while writing: what is
// named here may have been in the middle of being written, and the other copy counts.
func (c *checker) tornOr(p problem) problem {
	if !c.label.Clean {
		p.severity = Note
		p.advice = "the volume was not unmounted, and this may have been in writing; mount and unmount it, and check again"
	}
	return p
}

// release gives the record tables' memory back.
func (c *checker) release() {
	for _, q := range c.pools {
		for _, r := range q.rows {
			drive.FreeBuffer(r.table)
		}
	}
}

// read reads whole units of a drive.
func read(d drive.Drive, b []byte, unit uint64) error {
	if unit > ondisk.MaxUnit {
		return fmt.Errorf("unit %d: %w", unit, drive.ErrRange)
	}
	return d.ReadAt(b, int64(unit)*ondisk.BlockBytes)
}

func units(d drive.Drive) uint64 { return uint64(d.Size()) / ondisk.BlockBytes }

// metadata lists the members that hold superblocks, catalog and journal, by index.
func (c *checker) metadata() []*member {
	var list []*member
	for i, m := range c.members {
		if m != nil && c.label.Metadata>>i&1 != 0 {
			list = append(list, m)
		}
	}
	return list
}

// member is the drive of that index, or nil.
func (c *checker) member(index uint16) *member {
	if int(index) >= len(c.members) {
		return nil
	}
	return c.members[index]
}
