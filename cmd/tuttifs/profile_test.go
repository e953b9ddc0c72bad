package main

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/daemon"
	"tuttifs/drivemodel"
)

// slowProfile is a file with a drive of so many bytes a second.
func slowProfile(t *testing.T, bytesPerSecond int64) string {
	t.Helper()
	d := &drivemodel.Direction{BytesPerSecond: bytesPerSecond}
	p := drivemodel.Profile{Version: drivemodel.Version, Name: "slow", Of: "a slow drive", Read: d, Write: d}
	b, err := p.Encode()
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "slow.json")
	require.NoError(t, os.WriteFile(path, b, 0o600))
	return path
}

// A modelled mount is as slow as its profile, for engines and for the mount's own readers, and says so everywhere.
func TestModelledMount(t *testing.T) {
	paths := formatted(t, 2, "128m")
	const rate = 20_000_000
	slow := slowProfile(t, rate)
	dir := mountPoint(t)
	log := filepath.Join(t.TempDir(), "log")
	refused(t, 1, "drive_profile", "mount", paths[0], dir, "-o", "drive_profile=nosuch")
	refused(t, 1, "a drive from 0 to 65535", "mount", paths[0], dir, "-o", "drive_profile=-1:cloud")
	refused(t, 1, "has no name", "mount", paths[0], dir, "-o", "drive_profile=1:")
	refused(t, 32, "drive 7, which the volume does not have", "mount", paths[0], dir, "-o", "drive_profile=7:paper",
		"-o", "sockets="+filepath.Dir(dir))

	r := execAs(t, "tuttifs", "mount", paths[0], dir, "-o", "drive_profile="+slow+",drive_profile=1:cloud", "--log", log,
		"-o", "io=pread,endurance=0.3dwpd,endurance=9:7tbw",
		"-o", "sockets="+filepath.Dir(dir))
	require.Zero(t, r.code, r.stderr)
	require.Contains(t, r.stderr, "MODELLED")
	doc := decode[infoDocument](t, tuttifs(t, "info", "--json", dir))
	require.Equal(t, "slow", doc.Drives[0].Modelled.Name)
	require.Equal(t, "cloud", doc.Drives[1].Modelled.Name)
	require.Contains(t, tuttifs(t, "info", dir), "drive 0 is held back to a profile: slow: 0.02 GB/s read")
	require.Contains(t, tuttifs(t, "status", dir), "MODELLED")
	require.Contains(t, tuttifs(t, "drive", "list", dir), "online, modelled")
	var options daemon.OptionsDocument
	require.NoError(t, readStatus(dir, "options", &options))
	require.Equal(t, map[string]string{"all": "slow", "1": "cloud"}, options.DriveProfiles)
	require.Equal(t, "pread", options.IO)
	require.Equal(t, map[string]string{"all": "0.3dwpd", "9": "7tbw"}, options.Endurance)
	refused(t, 1, "is a tuttifs mount", "profile", "drive", dir)
	refused(t, 1, "no drive 5", "info", "--wear", "--endurance", "5:1dwpd", dir)
	text, err := os.ReadFile(log)
	require.NoError(t, err)
	require.Contains(t, string(text), "a MODELLED drive")
	require.Contains(t, string(text), "a rating is given for a drive that the volume does not have")

	replay := replayed(t, smallTrace(t, 8), dir, "--scale", "64")
	require.NotZero(t, replay.BytesRead)
	require.Zero(t, replay.VerifyFailures)
	// Half of the bytes are on each drive, and the slow one takes its time for each of them.
	least := float64(replay.BytesRead+replay.BytesWritten) / 2 / rate
	require.Greater(t, replay.Seconds, 0.9*least)

	files, err := filepath.Glob(dir + "/*/blocks/*/*")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	begin, total := time.Now(), 0
	for _, f := range files[:min(len(files), 4)] {
		b, err := os.ReadFile(f)
		require.NoError(t, err)
		total += len(b)
	}
	require.Greater(t, time.Since(begin).Seconds(), 0.9*float64(total)/2/rate, fmt.Sprint(total))
}

func TestLoadProfile(t *testing.T) {
	p, err := loadProfile("paper")
	require.NoError(t, err)
	require.Equal(t, "paper", p.Name)
	p, err = loadProfile(slowProfile(t, 1_000_000))
	require.NoError(t, err)
	require.Equal(t, "slow", p.Name)
	_, err = loadProfile("nosuch")
	require.ErrorContains(t, err, "cloud, paper, pcie4")
	big := filepath.Join(t.TempDir(), "big")
	require.NoError(t, os.WriteFile(big, make([]byte, drivemodel.FileBytesMax+1), 0o600))
	for _, path := range []string{big, t.TempDir()} {
		_, err = loadProfile(path)
		require.Error(t, err, path)
	}
}

// Phases are on unless a mount says otherwise; the options that are in effect, and what came of them, are shown.
func TestPhasesOfAMount(t *testing.T) {
	paths := formatted(t, 2, "128m")
	dir := mountPoint(t)
	for _, bad := range []string{"phases=maybe", "phase_patience=3s", "phase_metadata=1us", "phase_turn=5",
		"phase_quiet=0"} {
		refused(t, 1, bad, "mount", paths[0], dir, "-o", bad)
	}
	for _, off := range []bool{false, true} {
		options := "phase_patience=50ms,phase_quiet=100us"
		if off {
			options += ",phases=off"
		}
		tuttifs(t, "mount", paths[0], dir, "-o", "sockets="+filepath.Dir(dir), "-o", options)
		replayed(t, smallTrace(t, 8), dir, "--scale", "64")
		doc := decode[infoDocument](t, tuttifs(t, "info", "--json", dir))
		require.Equal(t, daemon.PhaseOptions{On: !off, PatienceSeconds: .05, MetadataSeconds: .01, TurnSeconds: .005,
			QuietSeconds: .0001, StuckSeconds: 5}, *doc.PhaseOptions)
		require.Len(t, doc.Phases, 2)
		for _, p := range doc.Phases {
			require.Equal(t, off, p.Switches == 0)
			if !off {
				require.Zero(t, p.Mixed)
				require.Zero(t, p.Stuck)
			}
		}
		text := tuttifs(t, "info", dir)
		require.Contains(t, text, "SWITCHES")
		if off {
			require.Contains(t, text, "may mix")
		} else {
			require.Contains(t, text, "those that have waited 50ms (metadata 10ms) take a turn of 5ms")
		}
		tuttifs(t, "umount", dir)
	}
}
