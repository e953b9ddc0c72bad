// Package phase keeps reads and writes of one drive apart in time: flash serves both at once at a fraction of what it
// does for either alone.
//
// A Token is one drive's phase, shared by all who use the drive. Each of them has a Holder, and asks it once a step
// whether commands of one direction may begin (Enter), says what it begins and what has ended (Begin, End), and settles
// up at the end of the step (Settle). Goroutines that block until they may go on share a Gate.
//
// # Rules
//
//   - Reads first: a read enters as soon as no write is in flight. A write enters when no read is in flight or wanted,
//     and none was for Quiet, so that the gaps between the pieces of a restore are not taken for its end. Holders that
//     are in ask again each step, so that writes stop being begun as soon as a read is wanted.
//   - Never both: entering is one compare-and-swap of the word that counts readers, writers and who wants to be either.
//   - No starvation: a write that has waited for its holder's patience demands a turn. Reads do not begin then; when
//     those in flight have ended, writes have the drive for Turn. Reads go next, whatever waits.
//   - Metadata has short turns beside those, a tenth as long, in which no other write begins: a commit does not wait
//     for as long as a backlog of data has to.
//   - Reads lose little: the next turn of a kind is not demanded before 36 times as long as the last one cost them, and
//     67 times for short ones (but for Stuck at most), so that permanent writes of both kinds cost a permanent load of
//     reads at most 5 %. What it costs begins in the middle of the time that reads in flight take to end.
//   - Background reads (scrubbing) give way to both: they do not begin while a write waits, and are not wanted before
//     they have waited for their patience. Scrubbing for hours must not cost stores their bandwidth.
//
// # Liveness
//
// Nobody waits for ever, whatever others do:
//
//   - Enter and Settle never block. A Holder that is refused does its other work and asks again.
//   - Who is in has commands on the drive, and leaves at the first Settle without: it waits for the drive and for
//     nothing else. Commands that have not begun (delayed, held back, in a queue) hold nothing, nor do completions
//     that nobody reaps.
//   - Who is refused has a want in the token, which keeps others out. It is taken back by the first Settle of a step
//     that did not ask again, and by Close: wants of holders that have gone do not stay.
//   - A turn ends by the clock, or when nobody is there to use it, whoever asks next: it needs no act of who demanded
//     it.
//   - A direction of which no command has ended, or entered, for Stuck holds nobody up any more: a drive that has lost
//     commands, or does not answer, must not take its other direction along. It counts again when it moves. What is
//     mixed by that is counted like all mixing.
//
// So a write that is wanted enters after at most its patience, the pause between turns (at most Stuck), what reads
// in flight take, and Stuck; a read after at most what is left of a turn, what writes in flight take, and Stuck.
//
// # Counting
//
// Mixed traffic is counted apart from all of that, where commands begin: Begin looks at how many holders have commands
// of the other direction in flight, which the rules neither read nor write. With Options.Off nobody is refused, and
// mixing is counted all the same.
package phase

import (
	"fmt"
	"time"
)

// Direction of a command. What moves no data has none.
type Direction uint8

const (
	Read Direction = iota
	Write
)

func (d Direction) other() Direction { return 1 - d }

// Options of a drive's phase. Zero fields take the defaults.
type Options struct {
	Off      bool          // nobody waits; only mixed traffic is counted
	Patience time.Duration // of writes, and of background reads
	Metadata time.Duration // patience of the metadata's writes
	Turn     time.Duration // of writes that have lost patience
	Quiet    time.Duration // without reads, before writes begin
	Stuck    time.Duration // see the package's comment
}

// Defaults, and the ranges that Validate allows.
const (
	PatienceDefault = 200 * time.Millisecond
	MetadataDefault = 10 * time.Millisecond
	TurnDefault     = 5 * time.Millisecond
	QuietDefault    = 500 * time.Microsecond
	StuckDefault    = 5 * time.Second

	PatienceMin, PatienceMax = time.Millisecond, 2 * time.Second
	TurnMin, TurnMax         = 100 * time.Microsecond, time.Second
	QuietMin, QuietMax       = time.Microsecond, 100 * time.Millisecond
)

const (
	// readsShare is how many times as long as a turn cost them reads have the drive before the next one.
	readsShare = 36
	// shortReadsShare is the same of short turns, and shortShare by how much they are shorter.
	shortReadsShare = 67
	shortShare      = 10
	// lull is how long a turn goes on without writes: steps of a poller may be a nap apart.
	lull = int64(100 * time.Microsecond)
	// writeBytesMax is about how many bytes of writes all holders have in flight: enough for the bandwidth of fast drives,
	// and what reads may have to wait for.
	writeBytesMax = 8 << 20
)

// WithDefaults fills in what is zero.
func (o Options) WithDefaults() Options {
	for _, v := range [...]struct {
		to *time.Duration
		or time.Duration
	}{
		{&o.Patience, PatienceDefault}, {&o.Metadata, MetadataDefault}, {&o.Turn, TurnDefault},
		{&o.Quiet, QuietDefault}, {&o.Stuck, StuckDefault},
	} {
		if *v.to == 0 {
			*v.to = v.or
		}
	}
	return o
}

// Validate says what is out of range.
func (o Options) Validate() error {
	o = o.WithDefaults()
	for _, v := range [...]struct {
		name               string
		value, least, most time.Duration
	}{
		{"patience", o.Patience, PatienceMin, PatienceMax}, {"patience of metadata", o.Metadata, PatienceMin, PatienceMax},
		{"turn", o.Turn, TurnMin, TurnMax}, {"quiet time", o.Quiet, QuietMin, QuietMax},
	} {
		if v.value < v.least || v.value > v.most {
			return fmt.Errorf("phase: %s of %v is not of %v to %v", v.name, v.value, v.least, v.most)
		}
	}
	if most := o.Stuck / 2; max(o.Patience, o.Metadata) > most {
		return fmt.Errorf("phase: a patience of %v, but a drive that does not move is given up after %v: at most %v",
			max(o.Patience, o.Metadata), o.Stuck, most)
	}
	return nil
}
