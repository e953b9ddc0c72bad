package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/drivemodel"
	"tuttifs/extentmap"
	"tuttifs/nvme"
	"tuttifs/wholefile"
)

type profileDriveOptions struct {
	write    bool
	force    bool
	size     sizeFlag
	limit    time.Duration // 0: profileTime, or profileTimeFio
	name     string
	output   string
	fio      bool
	json     bool
	shortest time.Duration // measurement of one step
}

func newProfileDrive() *command {
	o := &profileDriveOptions{size: 4 << 30, shortest: 300 * time.Millisecond}
	f := newFlags("profile drive")
	f.BoolVar(&o.write, "write", false, "measure writes too, which OVERWRITES the first --size bytes of each PATH")
	f.BoolVarP(&o.force, "force", "f", false, "with --write: even if PATH holds something known")
	f.Var(&o.size, "size", "bytes of PATH that are used at most, and the size of a scratch file; from 16m")
	f.DurationVar(&o.limit, "time", o.limit,
		"how long all measurements of one PATH may take together, `TIME` like 90s; from 10s (default 45s, with --fio 5m)")
	f.StringVar(&o.name, "name", "", "`NAME` of the profile (default: that of PATH)")
	f.StringVarP(&o.output, "output", "o", "", "write the profile to this `FILE`, for mount -o drive_profile=FILE")
	f.BoolVar(&o.fio, "fio", false, "measure every rate with fio as well, in turns, and compare")
	f.BoolVar(&o.json, "json", false, "print profiles and measurements as JSON")
	return &command{
		name: "profile drive", synopsis: "[FLAGS] PATH...", summary: "measure how fast a drive is",
		exits: &plainExits, flags: f,
		long: `
Measures drives, one after the other, and makes a profile of each: bandwidths of reads, writes and
mixtures of both, commands a second, and latencies. Commands go the way that a mount's go, by direct
I/O, at the sizes of objects, one to 256 at a time.

PATH is a directory: a scratch file is made there, of --size or half of what is free, written, measured and gone
  when the command ends, however it ends. Nothing else is touched. This is the safe way to measure writes.
PATH is a block device or a file: it is only read. A drive that was never written to answers reads without looking;
  such figures mean nothing, and the command says so. With --write its first --size bytes are overwritten; what is
  mounted, in use or holds a known signature is refused, and --force overrides the last.

A profile that was only read for has no limit for writes. Drives slow down when they are full, hot or have been written
to for long: a minute does not show that.`,
		example: `
tuttifs profile drive /var/lib/tuttifs -o disk.json
tuttifs profile drive /dev/nvme1n1
tuttifs profile drive --write --size 64g --time 10m /dev/nvme1n1 -o nvme.json`,
		run: o.run,
	}
}

// profileDocument is the command's document.
type profileDocument struct {
	OutputVersion int              `json:"output_version"`
	Drives        []*measuredDrive `json:"drives"`
}

// measuredDrive is one PATH.
type measuredDrive struct {
	Path      string              `json:"path"`
	Kind      string              `json:"kind"`
	Bytes     uint64              `json:"bytes"`
	AreaBytes uint64              `json:"area_bytes"` // where commands lay
	Written   bool                `json:"written"`
	Backend   string              `json:"backend"`
	Profile   *drivemodel.Profile `json:"profile"`
	Rows      []measuredRow       `json:"rows"`
	Fio       *fioComparison      `json:"fio,omitempty"`
	Notes     []string            `json:"notes,omitempty"`
}

// measuredRow is one measurement, what the profile's model makes of it, and what fio measured right beside it.
type measuredRow struct {
	drivemodel.Measured
	minUS               float64
	wanted              int      // percent written
	ModelBytesPerSecond float64  `json:"model_bytes_per_second"`
	FioBytesPerSecond   *float64 `json:"fio_bytes_per_second,omitempty"`
	FioRatio            *float64 `json:"fio_ratio,omitempty"`
	FioWritePercent     *float64 `json:"fio_write_percent,omitempty"`
}

// Bounds of the flags.
const (
	profileSizeMin = 16 << 20
	profileTime    = 45 * time.Second // where none is given
	profileTimeFio = 5 * time.Minute  // likewise, with --fio
	profileTimeMin = 10 * time.Second
	profileTimeMax = 24 * time.Hour
)

func (o *profileDriveOptions) run(ctx context.Context, e *env, args []string) error {
	if o.limit == 0 {
		if o.limit = profileTime; o.fio {
			o.limit = profileTimeFio
		}
	}
	switch {
	case len(args) == 0:
		return usagef("name a directory, a file or a block device")
	case o.output != "" && len(args) > 1:
		return usagef("-o takes one profile: name one PATH")
	case o.name != "" && len(args) > 1:
		return usagef("--name is of one profile: name one PATH")
	case o.force && !o.write:
		return usagef("--force is for --write")
	case o.size < profileSizeMin || o.size > 1<<50:
		return usagef("--size is %d, want 16m to 1p", uint64(o.size))
	case o.limit < profileTimeMin || o.limit > profileTimeMax:
		return usagef("--time is %v, want %v to %v", o.limit, profileTimeMin, profileTimeMax)
	}
	if o.name != "" && !drivemodel.ValidName(o.name) {
		return usagef("--name %q: want 1 to 64 lower-case letters, digits and underscores", o.name)
	}
	if err := checkOutput(o.output); err != nil {
		return err
	}
	fio := ""
	if o.fio {
		var err error
		if fio, err = exec.LookPath("fio"); err != nil {
			return systemError{errors.New("fio is not installed: Debian has it in the package fio (apt-get install fio)")}
		}
	}
	return o.measureAll(ctx, e, args, fio)
}

// measureAll measures one PATH after the other. What was measured is printed, whatever fails afterwards.
func (o *profileDriveOptions) measureAll(ctx context.Context, e *env, paths []string, fio string) error {
	doc := &profileDocument{OutputVersion: outputVersion}
	var failed error
	for _, path := range paths {
		m, err := o.measure(ctx, e, path, fio)
		if err != nil {
			failed = err
			break
		}
		doc.Drives = append(doc.Drives, m)
		if !o.json {
			m.print(e)
		}
	}
	if o.json && len(doc.Drives) > 0 {
		failed = errors.Join(failed, printJSON(e.stdout, doc))
	}
	if failed != nil || o.output == "" {
		return failed
	}
	return o.save(e, doc.Drives[0].Profile)
}

// save writes the profile to the file of -o. One that cannot be written is printed, since it took long to measure.
func (o *profileDriveOptions) save(e *env, p *drivemodel.Profile) error {
	b, err := p.Encode()
	if err != nil {
		return err
	}
	if err := wholefile.Write(o.output, b, 0o644); err != nil {
		if !o.json { // its document has the profile
			e.printf("\n%s", b)
		}
		return fmt.Errorf("the profile, which is printed, could not be written: %w", err)
	}
	return nil
}

// measure opens one PATH, measures it and makes the profile.
func (o *profileDriveOptions) measure(ctx context.Context, e *env, path, fio string) (m *measuredDrive, err error) {
	d, write, err := o.open(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	if !d.Direct() {
		return nil, fmt.Errorf("%s allows no direct I/O: it is memory that would be measured", path)
	}
	kind := map[drive.Kind]string{drive.File: "file", drive.Block: "block"}[d.Kind()]
	m = &measuredDrive{Path: path, Kind: kind, Bytes: uint64(d.Size()), Written: write}
	area := min(d.Size(), int64(o.size)) &^ (loadCommandMax - 1)
	if area < profileSizeMin {
		return nil, fmt.Errorf("%s has %d bytes; at least %s are needed", path, d.Size(), humanBytes(profileSizeMin))
	}
	l, err := newDriveLoad(d, area, write)
	if err != nil {
		return nil, err
	}
	defer l.close()
	backend, _ := l.queue.Backend()
	m.Backend = string(backend)
	s := &driveSweep{load: l, drive: m, fio: fio, started: time.Now(), limit: o.limit, shortest: o.shortest,
		bar: newProgress(e, path, uint64(o.limit))}
	defer s.bar.finish()
	if write {
		err := s.fill(ctx)
		if errors.Is(err, nvme.CapacityExceeded) {
			err = fmt.Errorf("no space is left there: make room, or give a smaller --size: %w", err)
		}
		if err != nil {
			return nil, fmt.Errorf("writing %s: %w", path, err)
		}
	}
	m.AreaBytes = uint64(l.area)
	if err := s.run(ctx, write); err != nil {
		return nil, err
	}
	m.Profile = s.profile(o.profileName(path), describeDrive(d, path))
	if err := m.Profile.Validate(); err != nil {
		return nil, err
	}
	s.compare()
	m.Fio = compareFio(m)
	return m, nil
}

// loadCommandMax is the largest command of the sweep.
const loadCommandMax = 2 << 20

// open opens what PATH says and tells whether it may be written to.
func (o *profileDriveOptions) open(path string) (d drive.Drive, write bool, err error) {
	st, err := os.Stat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, false, fmt.Errorf("%w: name a directory to measure a scratch file in it", err)
	case err != nil:
		return nil, false, err
	case st.IsDir() && isMount(path):
		return nil, false, fmt.Errorf("%s is a tuttifs mount, which takes no scratch files: name a directory on the drive, "+
			"or the drive while it is not mounted", path)
	case st.IsDir():
		d, err := o.scratch(path)
		return d, true, err
	case !o.write:
		d, err = drive.Open(path, drive.Options{ReadOnly: true})
		if errors.Is(err, drive.ErrBusy) {
			err = fmt.Errorf("%s is in use, and either would slow the other: %w", path, err)
		}
		return d, false, err
	}
	if err := refuseMounted(path); err != nil {
		return nil, false, err
	}
	if d, err = drive.Open(path, drive.Options{}); err != nil {
		return nil, false, err
	}
	what, err := extentmap.FindSignature(d)
	if err == nil && what != "" && !o.force {
		err = fmt.Errorf("%s holds %s, which --write would destroy; --force does it all the same", path, what)
	}
	if err != nil {
		return nil, false, errors.Join(err, d.Close())
	}
	return d, true, nil
}

// scratch makes a file that has lost its name already: it is gone when the process is.
func (o *profileDriveOptions) scratch(dir string) (drive.Drive, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return nil, fmt.Errorf("%s: %w", dir, err)
	}
	size := min(int64(o.size), int64(fs.Bavail)*fs.Bsize/2) &^ (loadCommandMax - 1)
	if size < profileSizeMin {
		return nil, fmt.Errorf("%s: half of the free space is less than %s", dir, humanBytes(profileSizeMin))
	}
	path := filepath.Join(dir, fmt.Sprintf(".tuttifs-profile-%d", os.Getpid()))
	if err := drive.Create(path, size); err != nil {
		return nil, err
	}
	d, err := drive.Open(path, drive.Options{})
	if err := errors.Join(err, os.Remove(path)); err != nil {
		if d != nil {
			err = errors.Join(err, d.Close())
		}
		return nil, err
	}
	return d, nil
}

// profileName is what a profile may be called, from what the user or the path calls it.
func (o *profileDriveOptions) profileName(path string) string {
	if o.name != "" {
		return o.name
	}
	if abs, err := filepath.Abs(path); err == nil {
		path = abs
	}
	clean := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '_' {
			return r
		}
		return '_'
	}, strings.ToLower(filepath.Base(path)))
	return clean[:min(len(clean), 64)]
}

// describeDrive says which drive it is: its model where the kernel knows one.
func describeDrive(d drive.Drive, path string) string {
	text := fmt.Sprintf("%s of %s", path, humanBytes(uint64(d.Size())))
	var st unix.Stat_t
	if unix.Fstat(d.Fd(), &st) != nil {
		return text
	}
	number := st.Dev // of the filesystem that a file lies on
	if d.Kind() == drive.Block {
		number = st.Rdev
	} else {
		text = "a file in " + text
	}
	sys := fmt.Sprintf("/sys/dev/block/%d:%d/", unix.Major(number), unix.Minor(number))
	for _, file := range []string{"device/model", "../device/model"} {
		if b, err := os.ReadFile(sys + file); err == nil && len(b) < 100 {
			text += " (" + strings.ToValidUTF8(strings.TrimSpace(string(b)), "?") + ")"
			break
		}
	}
	return text[:min(len(text), 500)]
}

func (m *measuredDrive) print(e *env) {
	touched := "read only"
	if m.Written {
		touched = "read and written"
	}
	e.printf("%s: %s, %s in its first %s, by %s\n", m.Path, m.Profile.Of, touched, humanBytes(m.AreaBytes), m.Backend)
	t := table(e.stdout)
	fmt.Fprintf(t, "  verb\twritten\tcommand\tdepth\tGB/s\tcommands/s\tp50 us\tp90\tp99\tp99.9\tmax\tmodel GB/s")
	if m.Fio != nil {
		fmt.Fprintf(t, "\tfio GB/s\tits written\tratio")
	}
	fmt.Fprintln(t)
	for _, r := range m.Rows {
		fmt.Fprintf(t, "  %s\t%.0f%%\t%s\t%d\t%.3f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.3f", r.Verb, r.WritePercent,
			humanBytes(uint64(r.CommandBytes)), r.Depth, r.BytesPerSecond/1e9, r.BytesPerSecond/float64(r.CommandBytes),
			r.P50US, r.P90US, r.P99US, r.P999US, r.MaxUS, r.ModelBytesPerSecond/1e9)
		if r.FioRatio != nil {
			fmt.Fprintf(t, "\t%.3f\t%.0f%%\t%.3f", *r.FioBytesPerSecond/1e9, *r.FioWritePercent, *r.FioRatio)
		}
		fmt.Fprintln(t)
	}
	t.Flush()
	e.printf("  profile  %s\n", m.Profile.Summary())
	if f := m.Fio; f != nil {
		e.printf("  to fio   ")
		for _, verb := range []string{"read", "write", "mixed"} {
			if ratio, ok := f.Bandwidth[verb]; ok {
				e.printf("%s %.3f, ", verb, ratio)
			}
		}
		e.printf("wanted 0.90 to 1.10; of all rows %.3f in the middle, %.3f at worst\n", f.Middle, f.Worst)
	}
	for _, n := range m.Notes {
		e.warnf("%s: %s", m.Path, n)
	}
}

// fioComparison is how the measurements stand to fio's.
type fioComparison struct {
	// Bandwidth is of the figures that the profile has: the best of all reads, that of all writes, each way's best, and
	// mixed half and half.
	Bandwidth map[string]float64 `json:"bandwidth_ratio"`
	Middle    float64            `json:"ratio_median"`   // of all rows
	Worst     float64            `json:"ratio_at_worst"` // the one that is furthest from 1
}

// halfMixed is the row of mixtures that a profile's figures are compared by.
const halfMixed = 50

// compareFio returns nil where fio did not measure.
func compareFio(m *measuredDrive) *fioComparison {
	var ratios []float64
	mine, fios := map[string]float64{}, map[string]float64{}
	f := &fioComparison{Bandwidth: map[string]float64{}, Worst: 1}
	for _, r := range m.Rows {
		if r.FioRatio == nil {
			return nil
		}
		ratios = append(ratios, *r.FioRatio)
		if math.Abs(math.Log(*r.FioRatio)) > math.Abs(math.Log(f.Worst)) {
			f.Worst = *r.FioRatio
		}
		switch {
		case r.Verb != "mixed":
			mine[r.Verb] = max(mine[r.Verb], r.BytesPerSecond)
			fios[r.Verb] = max(fios[r.Verb], *r.FioBytesPerSecond)
		case r.wanted == halfMixed:
			f.Bandwidth[r.Verb] = *r.FioRatio // one row: its pairs say more than its sums
		}
	}
	for verb, rate := range mine {
		f.Bandwidth[verb] = rate / fios[verb]
	}
	f.Middle = median(ratios)
	return f
}
