// Package check is fsck: it reads the medium itself through ondisk and never imports the engine that it judges.
//
// Passes run in order: labels, superblocks, catalog, journal, record tables, records, and data if asked for. Each
// compares every copy of a structure with what it must be, and hands the next pass the best that is left. A journal
// that is not empty is no error: it is replayed in memory, and the record tables are judged with its changes in place.
//
// Passes only read. Of each finding that can be repaired the caller is asked whether it shall be, and what follows is
// judged as if it were; when all passes are through, what is in memory is written out in the order in which a mount
// would do it (see repair.go). Until then, nothing is.
//
// The checker needs about 140 bytes of memory for each slot of the volume.
package check

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"tuttifs/drive"
	"tuttifs/extentmap/ondisk"
)

var (
	// ErrNotVolume: no drive has a readable label, or no superblock is left: there is nothing to check.
	ErrNotVolume = errors.New("check: not a tuttifs volume, or damaged beyond finding it")
	// ErrDraft: the volume is from before the format was frozen.
	ErrDraft = errors.New("check: made before the format was frozen; make the volume anew with tuttifs mkfs --force")
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

// Repair says what a finding's repair costs.
type Repair uint8

const (
	// RepairNone: it cannot be repaired here.
	RepairNone Repair = iota
	// RepairSafe: everything that is needed is there a second time, and nothing is lost.
	RepairSafe
	// RepairAsk: something is given up, or taken for granted that a person should have a look at.
	RepairAsk
)

func (r Repair) String() string {
	switch r {
	case RepairNone:
		return "none"
	case RepairSafe:
		return "safe"
	case RepairAsk:
		return "ask"
	}
	return fmt.Sprintf("repair %d", uint8(r))
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
	Advice    string // what to do if it is not repaired; "" for nothing
	Repair    Repair
	Fix       string // what repairing does; "" for RepairNone
	Accepted  bool   // the repair was asked for: it is made at the end
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
	switch {
	case f.Accepted:
		s += "; repair: " + f.Fix
	case f.Advice != "":
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
	// Parallel is how many reads, of 2 MiB at most, Data makes at once; 0 means 4 for each drive, and 8 at least.
	Parallel int
	// Quick stops behind the journal if the volume was unmounted and is without errors that far.
	Quick bool
	// Repair is asked whether a finding with a Repair shall be repaired; nil repairs nothing. The drives must then be
	// open for writing, and nobody else may have them. Called by one goroutine at a time.
	Repair func(Finding) bool
	// Trust names the drive whose history counts where drives contradict each other; "" for none: then they are
	// not made to agree.
	Trust string
	// Random is where a repair's nonce comes from; crypto/rand if nil.
	Random io.Reader
	// Now is the clock; time.Now if nil.
	Now func() time.Time
}

// FindingsMax bounds the findings of one pass and severity that are reported one by one.
const FindingsMax = 200

// Result is the outcome.
type Result struct {
	Volume   [16]byte
	Label    string
	Clean    bool // the volume was unmounted
	Skipped  bool // Quick saw enough
	Errors   uint64
	Warnings uint64
	Notes    uint64
	// Repaired findings of any severity, and the errors among them: Errors - RepairedErrors are left.
	Repaired       uint64
	RepairedErrors uint64
	// Obstacle says why nothing was repaired although something was to be; "" if there is no such thing.
	Obstacle string

	Drives       int
	Pools        int
	Rows         int
	Transactions uint64 // batches of the journal that are not yet in the tables
	Slots        uint64
	Files        uint64 // committed, without those given up
	GivenUp      uint64 // files whose records were dropped; unknown ones of lost blocks are not among them
	Objects      uint64 // verified by PassData
	Bytes        uint64 // likewise
}

// Run checks the volume that the drives are members of. The error is for what keeps it from being checked (not a
// volume, a newer format, ctx); damage is told to Report and counted.
func Run(ctx context.Context, drives []drive.Drive, o Options) (Result, error) {
	c := newChecker(ctx, o)
	defer c.release()
	err := c.run(drives)
	c.endPass()
	if err == nil && o.Repair != nil {
		c.result.Obstacle = c.obstacle
		if c.accepted > 0 {
			err = c.repair()
		}
	}
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
	newest  uint64 // checkpoint that may have written tables
	noSlot  bool   // a superblock slot is right on no drive: it may have been the newest
	tag     uint64

	pools     map[uint16]*pool
	poolNames map[string]uint16
	families  map[uint16]string
	tenants   map[uint32]ondisk.Tenant
	journaled uint64 // highest commit sequence in the journal + 1

	accepted       uint64 // findings to be repaired
	acceptedErrors uint64
	obstacle       string          // why nothing can be
	dropped        map[uint16]bool // pools that are given up
	head           uint64          // first journal block that no batch is in
	nextCommit     uint64          // above all commit sequences
	unreadable     []extent        // of the journals
}

type reportKey struct {
	pass     Pass
	severity Severity
}

// member is one drive of the volume.
type member struct {
	drive.Drive
	label  *ondisk.Label
	copies []*ondisk.Label // those that are labels
	claims []claim
	// badFirst and badLast: that copy of the label must be written before the other is touched.
	badFirst, badLast bool
	// behind: the drive missed a part of the history. What lies on it is written anew, and believed only where there
	// is nothing else.
	behind bool
	// stale: behind, and the others know it. The next mount takes it in again by itself.
	stale bool
	lost  atomic.Bool // reading its label fails by now
}

func newChecker(ctx context.Context, o Options) *checker {
	return &checker{
		ctx: ctx, o: o, reported: make(map[reportKey]uint64), tenants: make(map[uint32]ondisk.Tenant),
		families: make(map[uint16]string), pools: make(map[uint16]*pool), poolNames: make(map[string]uint16),
		dropped: make(map[uint16]bool),
	}
}

func (c *checker) run(drives []drive.Drive) error {
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
		if s.pass == PassJournal && c.o.Quick && c.label.Clean && c.result.Errors == 0 && c.accepted == 0 {
			c.result.Skipped = true
			return nil
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

// report counts a finding and passes it on, unless there were too many like it. It says whether it will be repaired.
func (c *checker) report(f Finding) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	f.Pass = c.pass
	if f.Repair != RepairNone && c.o.Repair != nil {
		f.Accepted = c.o.Repair(f)
	}
	if f.Accepted {
		c.accepted++
	}
	switch f.Severity {
	case Error:
		c.result.Errors++
		if f.Accepted {
			c.acceptedErrors++
		}
	case Warning:
		c.result.Warnings++
	default:
		c.result.Notes++
	}
	key := reportKey{c.pass, f.Severity}
	c.reported[key]++
	if c.reported[key] <= FindingsMax && c.o.Report != nil {
		c.o.Report(f)
	}
	return f.Accepted
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
	repair    Repair
	fix       string
}

func errorf(structure, advice, format string, args ...any) problem {
	return problem{severity: Error, structure: structure, message: fmt.Sprintf(format, args...), advice: advice}
}

func warningf(structure, advice, format string, args ...any) problem {
	return problem{severity: Warning, structure: structure, message: fmt.Sprintf(format, args...), advice: advice}
}

func notef(structure, advice, format string, args ...any) problem {
	return problem{severity: Note, structure: structure, message: fmt.Sprintf(format, args...), advice: advice}
}

// safe offers a repair that loses nothing.
func (p problem) safe(fix string) problem {
	p.repair, p.fix = RepairSafe, fix
	return p
}

// ask offers one that somebody should agree to.
func (p problem) ask(fix string) problem {
	p.repair, p.fix = RepairAsk, fix
	return p
}

func (p problem) finding(drive string, block uint64) Finding {
	return Finding{Severity: p.severity, Structure: p.structure, Drive: drive, Block: block, Message: p.message,
		Advice: p.advice, Repair: p.repair, Fix: p.fix}
}

// at reports a problem of a block of a drive. It says whether it will be repaired.
func (c *checker) at(d drive.Drive, block uint64, p problem) bool {
	return c.report(p.finding(d.Name(), block))
}

// volume reports a problem of no drive in particular.
func (c *checker) volume(p problem) bool { return c.report(p.finding("", NoBlock)) }

// must notes that nothing can be repaired unless a problem is: what would be written builds on it.
func (c *checker) must(repaired bool, obstacle string) bool {
	if !repaired && c.obstacle == "" {
		c.obstacle = obstacle
	}
	return repaired
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
