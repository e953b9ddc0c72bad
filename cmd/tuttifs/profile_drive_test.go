package main

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/drive"
	"tuttifs/drivemodel"
	"tuttifs/extentmap/ondisk"
)

// directDir is a directory whose filesystem allows direct I/O.
func directDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	path := filepath.Join(dir, "probe")
	require.NoError(t, drive.Create(path, 1<<20))
	d, err := drive.Open(path, drive.Options{})
	require.NoError(t, err)
	require.NoError(t, d.Close())
	require.NoError(t, os.Remove(path))
	if !d.Direct() {
		t.Skip("no direct I/O in " + dir)
	}
	return dir
}

// profiled measures with little time, and returns the document and, as people see it, what it says.
func profiled(t *testing.T, o *profileDriveOptions, path string) (*measuredDrive, string) {
	t.Helper()
	o.size, o.limit, o.shortest = 32<<20, time.Second, 20*time.Millisecond
	var out bytes.Buffer
	m, err := o.measure(t.Context(), &env{stdout: &out, stderr: &out}, path, "")
	require.NoError(t, err)
	m.print(&env{stdout: &out, stderr: &out})
	return m, out.String()
}

// A directory gets a scratch file, of which nothing is left; the profile is whole, can be read back, and its model's
// figures are there. How fast the drive is, is not a test's business.
func TestProfileDriveInADirectory(t *testing.T) {
	dir := directDir(t)
	m, out := profiled(t, &profileDriveOptions{}, dir)
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
	require.True(t, m.Written)
	require.Len(t, m.Rows, 2*len(sweepSteps)+len(sweepMixtures))
	for _, r := range m.Rows {
		require.Positive(t, r.BytesPerSecond)
		require.Positive(t, r.ModelBytesPerSecond)
		require.LessOrEqual(t, r.minUS, r.P50US)
		require.LessOrEqual(t, r.P50US, r.P999US)
		require.Nil(t, r.FioRatio)
	}
	b, err := m.Profile.Encode()
	require.NoError(t, err)
	again, err := drivemodel.Parse(b)
	require.NoError(t, err)
	require.Equal(t, m.Profile, again)
	require.NotNil(t, again.Read)
	require.NotNil(t, again.Write)
	require.NotNil(t, again.Mixed)
	require.Len(t, again.Measured, len(m.Rows))
	require.Contains(t, out, "read and written")
	require.Contains(t, out, m.Profile.Summary())
}

// A file is only read; its bytes stay as they are, and a file of holes is not mistaken for a fast drive.
func TestProfileDriveOnlyReads(t *testing.T) {
	path := filepath.Join(directDir(t), "d0")
	require.NoError(t, drive.Create(path, 32<<20))
	m, _ := profiled(t, &profileDriveOptions{}, path)
	require.False(t, m.Written)
	require.Len(t, m.Rows, len(sweepSteps))
	require.Nil(t, m.Profile.Write)
	require.Nil(t, m.Profile.Mixed)
	require.Contains(t, m.Notes[0], "nothing but zeroes")

	content := bytes.Repeat([]byte("no zeroes here. "), 2<<20)
	require.NoError(t, os.WriteFile(path, content, 0o600))
	m, _ = profiled(t, &profileDriveOptions{}, path)
	require.Empty(t, m.Notes)
	after, err := os.ReadFile(path)
	require.NoError(t, err)
	require.True(t, bytes.Equal(content, after))
}

// What was measured is printed, even if its profile cannot be written or the next drive cannot be measured.
func TestProfileDriveLosesNothing(t *testing.T) {
	if _, err := os.Stat("/dev/full"); err != nil {
		t.Skip("no /dev/full: ", err)
	}
	path := filepath.Join(directDir(t), "d0")
	require.NoError(t, drive.Create(path, 32<<20))
	measured := func(o *profileDriveOptions, paths ...string) (string, error) {
		o.size, o.limit, o.shortest = 32<<20, 100*time.Millisecond, 5*time.Millisecond
		var out bytes.Buffer
		err := o.measureAll(t.Context(), &env{stdout: &out, stderr: io.Discard}, paths, "")
		return out.String(), err
	}
	out, err := measured(&profileDriveOptions{output: "/dev/full"}, path)
	require.ErrorIs(t, err, unix.ENOSPC)
	_, document, found := strings.Cut(out, "\n{")
	require.True(t, found, out)
	p, err := drivemodel.Parse([]byte("{" + document))
	require.NoError(t, err)
	require.Contains(t, out, p.Summary())

	var doc profileDocument
	out, err = measured(&profileDriveOptions{output: "/dev/full", json: true}, path)
	require.ErrorIs(t, err, unix.ENOSPC)
	require.NoError(t, json.Unmarshal([]byte(out), &doc))
	require.Len(t, doc.Drives, 1)

	out, err = measured(&profileDriveOptions{}, path, path+"-none", path)
	require.ErrorIs(t, err, os.ErrNotExist)
	require.Equal(t, 1, strings.Count(out, "  profile  "))
	out, err = measured(&profileDriveOptions{json: true}, path, path+"-none")
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NoError(t, json.Unmarshal([]byte(out), &doc))
	require.Len(t, doc.Drives, 1)

	output := filepath.Join(t.TempDir(), "p.json")
	_, err = measured(&profileDriveOptions{output: output}, path)
	require.NoError(t, err)
	_, err = loadProfile(output)
	require.NoError(t, err)
}

// Of an area that there is no time to write, all that is used was written.
func TestProfileDriveUsesWhatWasWritten(t *testing.T) {
	const size = 256 << 20
	path := filepath.Join(directDir(t), "d0")
	require.NoError(t, drive.Create(path, size))
	d, err := drive.Open(path, drive.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	l, err := newDriveLoad(d, size, true)
	require.NoError(t, err)
	t.Cleanup(l.close)
	m := &measuredDrive{Path: path}
	s := &driveSweep{load: l, drive: m, limit: fillShare * time.Microsecond, bar: &progress{}}
	require.NoError(t, s.fill(t.Context()))
	require.GreaterOrEqual(t, l.area, int64(profileSizeMin))
	require.Less(t, l.area, int64(size))
	require.Len(t, m.Notes, 1)
	f, err := os.Open(path)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	block := make([]byte, 4096)
	for at := int64(0); at < l.area; at += int64(len(block)) {
		_, err := f.ReadAt(block, at)
		require.NoError(t, err)
		require.False(t, zeroes(block), "at %d of %d", at, l.area)
	}
}

// Nothing that is known is overwritten, and nothing that is in use is measured.
func TestProfileDriveRefuses(t *testing.T) {
	paths := formatted(t, 1, "64m")
	before, err := os.ReadFile(paths[0])
	require.NoError(t, err)
	refused(t, 1, "holds a tuttifs drive", "profile", "drive", "--write", paths[0])
	after, err := os.ReadFile(paths[0])
	require.NoError(t, err)
	require.True(t, bytes.Equal(before, after))
	held, err := drive.Open(paths[0], drive.Options{})
	require.NoError(t, err)
	refused(t, 1, "in use", "profile", "drive", paths[0])
	require.NoError(t, held.Close())
	refused(t, 1, "name a directory", "profile", "drive", paths[0]+"-none")
	refused(t, 2, "--force is for --write", "profile", "drive", "-f", paths[0])
	refused(t, 2, "--name", "profile", "drive", "--name", "a b", paths[0])
	refused(t, 1, "its directory", "profile", "drive", "-o", filepath.Join(paths[0]+"-none", "x.json"), paths[0])
	refused(t, 1, "its directory", "profile", "drive", "-o", filepath.Dir(paths[0])+"/none/../x.json", paths[0])
	refused(t, 1, "is a directory", "profile", "drive", "-o", filepath.Dir(paths[0]), paths[0])
	refused(t, 2, "--time", "profile", "drive", "--time", "1s", paths[0])
	refused(t, 2, "--size", "profile", "drive", "--size", "1m", paths[0])
	refused(t, 2, "one PATH", "profile", "drive", "-o", "x", paths[0], paths[0])
	small := filepath.Join(t.TempDir(), "small")
	require.NoError(t, os.WriteFile(small, make([]byte, 1<<20), 0o600))
	refused(t, 1, "at least", "profile", "drive", small)
}

// What --force allows: overwriting a volume that is given up.
func TestProfileDriveForce(t *testing.T) {
	dir := directDir(t)
	path := filepath.Join(dir, "d0")
	tuttifs(t, "mkfs", "-q", "--size", "64m", path)
	m, _ := profiled(t, &profileDriveOptions{write: true, force: true, name: "given_up"}, path)
	require.True(t, m.Written)
	require.Equal(t, "given_up", m.Profile.Name)
	after, err := os.ReadFile(path)
	require.NoError(t, err)
	require.False(t, bytes.HasPrefix(after, []byte(ondisk.LabelMagic)))
}

// fio measures the scratch file, which has no name any more, in the same ways.
func TestProfileDriveBesideFio(t *testing.T) {
	fio, err := exec.LookPath("fio")
	if err != nil {
		t.Skip("fio is not installed")
	}
	d, err := (&profileDriveOptions{size: 32 << 20}).scratch(directDir(t))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	l, err := newDriveLoad(d, 32<<20, true)
	require.NoError(t, err)
	t.Cleanup(l.close)
	m := &measuredDrive{Path: "x"}
	s := &driveSweep{load: l, drive: m, fio: fio, started: time.Now(), limit: time.Second, bar: &progress{}}
	require.NoError(t, s.fill(t.Context()))
	require.NoError(t, s.step(t.Context(), loadWork{bytes: 64 << 10, depth: 16, writePercent: halfMixed,
		duration: 100 * time.Millisecond}))
	require.Len(t, m.Rows, 1)
	r := m.Rows[0]
	require.Positive(t, *r.FioBytesPerSecond)
	require.Positive(t, *r.FioRatio)
	require.InDelta(t, halfMixed, *r.FioWritePercent, 45, "a mixture")
	require.Positive(t, s.rest)
	require.True(t, s.short)
	f := compareFio(m)
	require.Len(t, f.Bandwidth, 1)
	require.Positive(t, f.Middle)
}

// The model of a drive that behaves as models do is that model: measured rows come out of it again.
func TestProfileOfAModel(t *testing.T) {
	s := &driveSweep{drive: &measuredDrive{Path: "x"}, started: time.Now()}
	row := func(verb string, bytes, depth int, percent, rate, us float64) {
		s.drive.Rows = append(s.drive.Rows, measuredRow{Measured: drivemodel.Measured{Verb: verb, CommandBytes: bytes,
			Depth: depth, WritePercent: percent, Seconds: 1, BytesPerSecond: rate, P50US: us, P90US: us, P99US: us,
			P999US: us, MaxUS: us}, minUS: us})
	}
	const single = 65536 / 165.536e-6 // 100 us, and 65.536 us at 1 GB/s
	row("read", 4096, 128, 0, 400e6, 1300)
	row("read", 65536, 1, 0, single, 165.536)
	row("read", 65536, 64, 0, 1e9, 4000)
	row("write", 4096, 128, 100, 400e6, 1300)
	row("write", 65536, 1, 100, single, 165.536)
	row("write", 65536, 64, 100, 1e9, 4000)
	row("mixed", 65536, 64, 50, 250e6, 16000)
	row("mixed", 65536, 64, 50, 240e6, 16000) // not at a higher share: passed over
	p := s.profile("x", "a model")
	require.NoError(t, p.Validate())
	require.EqualValues(t, 1e9, p.Read.BytesPerSecond)
	require.InDelta(t, 400e6/4096, p.Write.CommandsPerSecond, 1)
	require.InDelta(t, 100, p.Read.Latency.P50US, 0.01)
	require.Equal(t, []drivemodel.MixedPoint{{WritePercent: 50, BytesPerSecond: 250e6}}, p.Mixed.Points)
	s.drive.Profile = p
	s.compare()
	for _, r := range s.drive.Rows[:7] {
		require.InEpsilon(t, r.BytesPerSecond, r.ModelBytesPerSecond, 0.05, "%+v", r.Measured)
	}
	require.Nil(t, compareFio(s.drive))
	for i, rate := range []float64{800e6, 400e6, 500e6, 800e6, 400e6, 2e9, 250e6, 240e6} {
		r := &s.drive.Rows[i]
		ratio := r.BytesPerSecond / rate
		r.FioBytesPerSecond, r.FioRatio, r.wanted = &rate, &ratio, int(r.WritePercent)
	}
	f := compareFio(s.drive)
	require.Equal(t, map[string]float64{"read": 1.25, "write": 0.5, "mixed": 250. / 250}, f.Bandwidth, "of the best")
	require.InDelta(t, 2, max(f.Worst, 1/f.Worst), 0.03)
}

func TestFioRate(t *testing.T) {
	r, err := parseFio([]byte(`note: x {"jobs":[{"read":{"io_bytes":2000,"runtime":1000},"write":{"io_bytes":500,
		"runtime":990}}]}`)[8:])
	require.NoError(t, err)
	require.InDelta(t, 2500, r.bytesPerSecond(), 1e-9, "both ways, over the time of the longer one")
	require.InDelta(t, 0.2, r.writeShare(), 1e-9)
	for _, bad := range []string{"", "{}", `{"jobs":[{}]}`, "no"} {
		_, err := parseFio([]byte(bad))
		require.Error(t, err, bad)
	}
}

func TestProfileNames(t *testing.T) {
	for path, want := range map[string]string{"/dev/nvme1n1": "nvme1n1", "/srv/Drive-A.img": "drive_a_img"} {
		require.Equal(t, want, (&profileDriveOptions{}).profileName(path))
	}
	b, err := json.Marshal(&measuredDrive{})
	require.NoError(t, err)
	require.NotContains(t, string(b), "fio")
}
