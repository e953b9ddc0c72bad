package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"tuttifs/drivemodel"
)

// driveSweep is the measurements of one drive.
type driveSweep struct {
	load     *driveLoad
	drive    *measuredDrive
	fio      string
	started  time.Time
	limit    time.Duration
	shortest time.Duration // measurement of one step, even if the time is over
	bar      *progress
	zeroes   int           // steps of reads that found nothing but zeroes
	rest     time.Duration // that a drive had while fio started the last time
	short    bool          // some turn beside fio was shorter than fioTurn
}

// sweepObject is the size whose depths are swept, whose mixtures are measured and whose latency is the profile's.
const sweepObject = 64 << 10

// sweepSteps are measured for reads, and for writes where they are allowed.
var sweepSteps = []loadWork{
	{bytes: 4 << 10, depth: 128}, // for commands a second
	{bytes: sweepObject, depth: 1}, {bytes: sweepObject, depth: 4}, {bytes: sweepObject, depth: 16},
	{bytes: sweepObject, depth: 64}, {bytes: sweepObject, depth: 256},
	{bytes: 32 << 10, depth: 64}, {bytes: 128 << 10, depth: 64}, {bytes: loadCommandMax, depth: 16},
}

// sweepMixtures are measured at the middle depth.
var sweepMixtures = []int{10, 30, 50, 70, 90}

const sweepMixedDepth = 64

// fillShare is the part of the time that writing the area for the first time may take.
const fillShare = 4

// fill writes the area once, and makes it smaller if there is no time for all of it: what was never written is not what
// reads are about.
func (s *driveSweep) fill(ctx context.Context) error {
	s.bar.set(0, "writing")
	r, err := s.load.run(ctx, loadWork{bytes: loadCommandMax, depth: 16, writePercent: 100, inOrder: true,
		duration: s.limit / fillShare})
	if err != nil {
		return err
	}
	if r.filled < s.load.area {
		s.load.area = r.filled
		s.note("there was time to write only the first %s, and only they are used", humanBytes(uint64(r.filled)))
	}
	return s.load.d.Flush()
}

func (s *driveSweep) note(format string, args ...any) {
	s.drive.Notes = append(s.drive.Notes, fmt.Sprintf(format, args...))
}

// run measures all steps; each gets the same part of the time that is left.
func (s *driveSweep) run(ctx context.Context, write bool) error {
	var steps []loadWork
	for _, percent := range []int{0, 100} {
		for _, w := range sweepSteps {
			w.writePercent = percent
			if percent == 0 || write {
				steps = append(steps, w)
			}
		}
	}
	for _, percent := range sweepMixtures {
		if write {
			steps = append(steps, loadWork{bytes: sweepObject, depth: sweepMixedDepth, writePercent: percent})
		}
	}
	turns, beside := time.Duration(1), time.Duration(0) // beside is what a step takes besides measuring
	if s.fio != "" {
		turns, beside = 2, 2*fioRounds*fioStart
	}
	for i, w := range steps {
		left := (s.limit - time.Since(s.started)) / time.Duration(len(steps)-i)
		w.duration = max((left-beside)/turns, s.shortest)
		begin := time.Now()
		s.bar.set(uint64(min(time.Since(s.started), s.limit)), fmt.Sprintf("%s, %s, depth %d", verbOf(w.writePercent),
			humanBytes(uint64(w.bytes)), w.depth))
		if err := s.step(ctx, w); err != nil {
			return err
		}
		beside = (beside + max(time.Since(begin)-turns*w.duration, 0)) / 2
	}
	if s.zeroes > 0 {
		s.note("reads found nothing but zeroes: the drive may never have been written to, and then answers without " +
			"looking; these figures mean nothing unless it has (see --write)")
	}
	if s.short {
		s.note("turns beside fio were shorter than %v, and may have measured bursts: give it more --time", fioTurn)
	}
	return nil
}

func verbOf(writePercent int) string {
	switch writePercent {
	case 0:
		return "read"
	case 100:
		return "write"
	}
	return "mixed"
}

// fioRounds are the turns of a step: one of ours and one of fio's each, in alternating order. Starting fio takes about
// fioStart, for which the drive rests; before ours it rests as long, since who limits a drive lets it save up for
// bursts.
const (
	fioRounds = 5
	fioStart  = 400 * time.Millisecond
	// fioTurn is the least time of a turn with which figures are compared: shorter ones measure bursts.
	fioTurn = 500 * time.Millisecond
)

// step measures a step, in turns with fio if that is wanted.
func (s *driveSweep) step(ctx context.Context, w loadWork) error {
	all, fios := &loadResult{}, &loadResult{}
	mine := func() (float64, error) {
		time.Sleep(s.rest)
		r, err := s.load.run(ctx, w)
		for again := w; err == nil && r.latency.count == 0 && again.duration < loadPatience; {
			again.duration *= 4 // a slow drive, and much in flight
			r, err = s.load.run(ctx, again)
		}
		if err != nil {
			return 0, err
		}
		all.add(r)
		return r.bytesPerSecond(), nil
	}
	row := measuredRow{}
	w.ramp = s.fio == "" // fio would take seconds more for it
	if s.fio == "" {
		if _, err := mine(); err != nil {
			return err
		}
	} else {
		w.duration /= fioRounds
		_, _, ratio, err := pairs(ctx, fioRounds, mine, func() (float64, error) {
			begin := time.Now()
			r, err := s.runFio(ctx, w)
			if err != nil {
				return 0, err
			}
			s.rest = max(time.Since(begin)-time.Duration(r.seconds*1e9), 0)
			fios.add(r)
			return r.bytesPerSecond(), nil
		})
		if err != nil {
			return err
		}
		rate, share := math.Round(fios.bytesPerSecond()), math.Round(1000*fios.writeShare())/10
		row.FioBytesPerSecond, row.FioRatio, row.FioWritePercent = &rate, &ratio, &share
		if w.duration < fioTurn {
			s.short = true
		}
	}
	if all.latency.count == 0 {
		return fmt.Errorf("%s: not one command was completed in %v: give it more --time", s.drive.Path, w.duration)
	}
	if all.zeroes {
		s.zeroes++
	}
	us := func(q float64) float64 { return math.Round(float64(all.latency.quantile(q))/10) / 100 }
	row.minUS, row.wanted = us(0), w.writePercent
	row.Measured = drivemodel.Measured{Verb: verbOf(w.writePercent), CommandBytes: w.bytes, Depth: w.depth,
		WritePercent: math.Round(1000*all.writeShare()) / 10, Seconds: math.Round(1000*all.seconds) / 1000,
		BytesPerSecond: math.Round(all.bytesPerSecond()), P50US: us(0.5), P90US: us(0.9), P99US: us(0.99),
		P999US: us(0.999), MaxUS: us(1)}
	s.drive.Rows = append(s.drive.Rows, row)
	return nil
}

// profile fits the model to the measurements.
func (s *driveSweep) profile(name, of string) *drivemodel.Profile {
	p := &drivemodel.Profile{Version: drivemodel.Version, Name: name, Of: of,
		Source: fmt.Sprintf("measured by tuttifs %s on %s, by %s, in %.0f s", version, time.Now().UTC().Format(time.DateOnly),
			s.drive.Backend, time.Since(s.started).Seconds())}
	p.Read, p.Write = s.direction("read"), s.direction("write")
	for _, r := range s.drive.Rows {
		p.Measured = append(p.Measured, r.Measured)
		if r.Verb != "mixed" || p.Read == nil || p.Write == nil {
			continue
		}
		if p.Mixed == nil {
			p.Mixed = &drivemodel.Mixed{}
		}
		n := len(p.Mixed.Points)
		if r.WritePercent > 0 && r.WritePercent < 100 && (n == 0 || r.WritePercent > p.Mixed.Points[n-1].WritePercent) {
			p.Mixed.Points = append(p.Mixed.Points, drivemodel.MixedPoint{WritePercent: r.WritePercent,
				BytesPerSecond: rateOf(r.BytesPerSecond)})
		}
	}
	if p.Mixed != nil && len(p.Mixed.Points) == 0 {
		p.Mixed = nil
	}
	return p
}

// rateOf keeps a rate within what a profile may have.
func rateOf(bytesPerSecond float64) int64 {
	return int64(min(max(bytesPerSecond, drivemodel.BytesPerSecondMin), drivemodel.BytesPerSecondMax))
}

// direction is the best bandwidth of any size and depth, the most commands a second of any, and the latency of single
// objects without the time that their bytes take.
func (s *driveSweep) direction(verb string) *drivemodel.Direction {
	d := &drivemodel.Direction{}
	var single *measuredRow
	for i := range s.drive.Rows {
		r := &s.drive.Rows[i]
		if r.Verb != verb {
			continue
		}
		d.BytesPerSecond = max(d.BytesPerSecond, rateOf(r.BytesPerSecond))
		d.CommandsPerSecond = max(d.CommandsPerSecond, int64(r.BytesPerSecond/float64(r.CommandBytes))+1)
		if r.Depth == 1 {
			single = r
		}
	}
	if single == nil {
		return nil
	}
	transfer := 1e6 * max(float64(single.CommandBytes)/float64(d.BytesPerSecond), 1/float64(d.CommandsPerSecond))
	rest := func(us float64) float64 {
		return math.Round(100*min(max(us-transfer, 0), drivemodel.LatencyUSMax)) / 100
	}
	d.Latency = drivemodel.Latency{MinUS: rest(single.minUS), P50US: rest(single.P50US), P90US: rest(single.P90US),
		P99US: rest(single.P99US), P999US: rest(single.P999US), MaxUS: rest(single.MaxUS)}
	return d
}

// modelCommands is how many commands of a row are played on the model.
const modelCommands = 4000

// compare plays every row on the model, in virtual time.
func (s *driveSweep) compare() {
	for i := range s.drive.Rows {
		r := &s.drive.Rows[i]
		m := drivemodel.NewMedium(s.drive.Profile, 1)
		start := time.Unix(0, 0)
		next := make([]time.Time, r.Depth) // when each command in flight is replaced
		for k := range next {
			next[k] = start
		}
		written, last := 0.0, start
		for n := range modelCommands {
			first := 0
			for k := range next {
				if next[k].Before(next[first]) {
					first = k
				}
			}
			write := written+0.5 < float64(n+1)*r.WritePercent/100
			if write {
				written++
			}
			next[first] = m.Serve(next[first], write, uint32(r.CommandBytes))
			last = next[first]
		}
		for _, t := range next {
			if t.Before(last) {
				last = t // by then most are in
			}
		}
		r.ModelBytesPerSecond = float64(modelCommands-r.Depth) * float64(r.CommandBytes) / last.Sub(start).Seconds()
	}
}

// runFio measures the same with fio: the same descriptor's file, size of commands, depth of both ways together, mixture
// and time.
func (s *driveSweep) runFio(ctx context.Context, w loadWork) (*loadResult, error) {
	mode := map[string]string{"read": "randread", "write": "randwrite", "mixed": "randrw"}[verbOf(w.writePercent)]
	args := []string{"--name=tuttifs", "--ioengine=io_uring", "--direct=1", "--rw=" + mode,
		"--bs=" + strconv.Itoa(w.bytes), "--iodepth=" + strconv.Itoa(w.depth), "--randrepeat=0", "--norandommap=1",
		// The file may have no name any more.
		"--filename=/proc/" + strconv.Itoa(os.Getpid()) + "/fd/" + strconv.Itoa(s.load.d.Fd()),
		"--size=" + strconv.FormatInt(s.load.area, 10), "--time_based=1", "--allow_file_create=0",
		"--runtime=" + strconv.FormatInt(w.duration.Milliseconds(), 10) + "ms", "--output-format=json"}
	switch verbOf(w.writePercent) {
	case "read":
		args = append(args, "--readonly")
	case "mixed":
		args = append(args, "--rwmixwrite="+strconv.Itoa(w.writePercent))
	}
	cmd := exec.CommandContext(ctx, s.fio, args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("fio: %w: %s", err, strings.TrimSpace(string(out)))
	}
	return parseFio(out)
}

// parseFio has the bytes of fio's report, and the time of the longer way.
func parseFio(out []byte) (*loadResult, error) {
	if i := strings.IndexByte(string(out), '{'); i > 0 {
		out = out[i:] // warnings come before the document
	}
	var report fioReport
	if err := json.Unmarshal(out, &report); err != nil {
		return nil, fmt.Errorf("fio's report: %w", err)
	}
	r := &loadResult{}
	for _, j := range report.Jobs {
		r.read, r.written = r.read+int64(j.Read.Bytes), r.written+int64(j.Write.Bytes)
		r.seconds = max(r.seconds, j.Read.RuntimeMS/1e3, j.Write.RuntimeMS/1e3)
	}
	if r.read+r.written == 0 || r.seconds == 0 {
		return nil, errors.New("fio moved nothing")
	}
	return r, nil
}
