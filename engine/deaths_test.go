package engine

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/daemon"
	"tuttifs/extentmap/check"
)

const (
	deathsVariable = "TUTTIFS_DEATHS" // how many; "" for few
	deathsShort    = 12
	deathsLeaders  = 2
	membersOf      = 3 // shared mappings of a member: arena, queues, DMA memory
	descriptorsOf  = 8 // that a member's socket, pidfd and pollers take
	threadsMost    = 150
	bytesMost      = int64(400 << 20)
	settleMax      = 30 * time.Second
)

// TestDeaths (invariants a, e, i) kills the daemon, engines, one process of a session, and forked children that hold
// an engine's descriptors, at random moments under load. After each death, the files are exactly those that were
// acknowledged, each byte of them is right, and nothing of the dead is left. Who has nothing to do with the dead
// notices nothing.
func TestDeaths(t *testing.T) {
	count := deathsShort
	if s := os.Getenv(deathsVariable); s != "" {
		var err error
		count, err = strconv.Atoi(s)
		require.NoError(t, err)
	}
	// Processes whose parent was killed are this one's to wait for.
	require.NoError(t, unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
	defer func() { require.NoError(t, unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)) }()
	d := &deaths{t: t, v: newVolume(t), random: rand.New(rand.NewPCG(uint64(count), 7)), files: map[Key]fileState{},
		tally: map[string]int{}}
	defer d.killEverybody()
	d.rested = d.holds()
	for i := range deathsLeaders {
		d.engines = append(d.engines, nil)
		d.hire(i)
	}
	d.resume()
	kinds := []func() string{d.killLeader, d.killFollower, d.killChild, d.killSession, d.killEverybody, d.killDaemon}
	for n := range count {
		time.Sleep(time.Duration(d.random.IntN(int(200 * time.Millisecond))))
		// The short form meets every kind.
		kind := kinds[n%len(kinds)]()
		d.tally[kind]++
		d.pause()
		d.settle(kind)
		d.verify(kind)
		d.resume()
	}
	d.killEverybody()
	d.settle("the end")
	d.v.stop()
	d.fsck("the end")
	sockets, err := os.ReadDir(filepath.Join(d.v.dir, "run"))
	require.NoError(t, err)
	require.Empty(t, sockets)
	require.Zero(t, d.mounts())
	t.Logf("%d deaths: %v; %d files verified, %d checks of the drives; at most %d descriptors, %d threads, %d MiB",
		count, d.tally, d.verified, d.checks, d.most.descriptors, d.most.threads, d.most.bytes>>20)
}

// fileState is what the journals say of a file.
type fileState int

const (
	fileMust  fileState = iota // acknowledged
	fileMaybe                  // in flight when somebody died
	fileGone                   // removed; it may come back when the daemon dies, who need not have written that yet
)

// deaths is the driver.
type deaths struct {
	t       *testing.T
	v       *volume
	random  *rand.Rand
	engines []*deathsEngine
	number  uint64
	files   map[Key]fileState
	rested  resources // of the daemon without engines
	most    resources
	excused bool // the daemon has died since the last check

	tally            map[string]int
	verified, checks int
}

// deathsEngine is a leader with what it has started.
type deathsEngine struct {
	number   uint64
	cmd      *exec.Cmd
	in       io.WriteCloser
	said     *bufio.Scanner
	excused  int // rounds in which it may hear of a death
	bereaved int // how many followers it has lost and not heard of: it hears of one when it asks it for something
	read     int // bytes of its journal
	chains   map[uint64][]Key
}

// resources of the daemon.
type resources struct {
	descriptors, shared, threads int
	bytes                        int64
}

func (d *deaths) hire(i int) {
	d.number++
	e := &deathsEngine{number: d.number, chains: map[uint64][]Key{}}
	var err error
	e.cmd, e.in, e.said, err = startRank("leader", d.v.dir, fmt.Sprint(e.number))
	require.NoError(d.t, err)
	d.engines[i] = e
}

// resume hires who is missing and lets everybody go on.
func (d *deaths) resume() {
	d.excused = false
	for i, e := range d.engines {
		if e == nil {
			d.hire(i)
		}
		d.engines[i].excused = max(0, d.engines[i].excused-1)
		_, err := fmt.Fprintln(d.engines[i].in, "go")
		require.NoError(d.t, err)
	}
}

// pause waits until the living have ended what they were doing.
func (d *deaths) pause() {
	for _, e := range d.engines {
		if e == nil {
			continue
		}
		if _, err := fmt.Fprintln(e.in, "stop"); err != nil {
			d.t.Fatalf("an engine has ended by itself; it said: %s", e.rest())
		}
	}
	for _, e := range d.engines {
		for e != nil {
			if !e.said.Scan() {
				d.t.Fatal("an engine has ended by itself")
			}
			text := e.said.Text()
			if text == "stopped" {
				break
			}
			e.hear(d.t, text)
		}
	}
}

func (e *deathsEngine) hear(t *testing.T, text string) {
	switch name, rest, _ := strings.Cut(text, " "); name {
	case "error":
		require.NotContains(t, rest, errWrong.Error())
		require.True(t, e.bereaved > 0 || e.excused > 0, "an engine that nobody has disturbed: %s", rest)
		e.bereaved = max(0, e.bereaved-1)
	case "---":
		t.Fatalf("an engine has failed: %s", e.rest())
	}
}

// rest is what an engine that has ended has said.
func (e *deathsEngine) rest() string {
	var lines []string
	for e.said.Scan() && e.said.Text() != "FAIL" {
		lines = append(lines, e.said.Text())
	}
	return strings.Join(lines, "\n")
}

// children calls f with each process that a process is the parent of, and the name of the program or thread that it is.
func children(t *testing.T, parent int, f func(pid int, name string)) {
	names, err := os.ReadDir("/proc")
	require.NoError(t, err)
	for _, name := range names {
		pid, err := strconv.Atoi(name.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		opening, closing := bytes.IndexByte(stat, '('), bytes.LastIndexByte(stat, ')')
		if err != nil || opening < 0 || closing < opening {
			continue
		}
		fields := strings.Fields(string(stat[closing+1:]))
		if len(fields) > 1 && fields[1] == strconv.Itoa(parent) {
			f(pid, string(stat[opening+1:closing]))
		}
	}
}

// relatives are the children of a leader, or what it has left to this process. A process that is being started and does
// not execute its program yet is neither kind.
func relatives(t *testing.T, parent int) (followers, forked []int) {
	children(t, parent, func(pid int, name string) {
		environ, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid)) // none of a process that has ended
		switch {
		case bytes.Contains(environ, []byte(rankVariable+"=follower|")):
			followers = append(followers, pid)
		case name == forkedName && len(environ) > 0:
			forked = append(forked, pid)
		}
	})
	return followers, forked
}

// end kills a process and waits until it is gone, if it is there and ours.
func (d *deaths) end(pid int) {
	_ = unix.Kill(pid, unix.SIGKILL)
	for end := time.Now().Add(settleMax); ; time.Sleep(time.Millisecond) {
		if n, err := unix.Wait4(pid, nil, unix.WNOHANG, nil); n == pid || err == unix.ECHILD {
			return
		}
		require.True(d.t, time.Now().Before(end), "process %d does not end", pid)
	}
}

// leader is the process of a random engine.
func (d *deaths) leader() (i, pid int) {
	i = d.random.IntN(len(d.engines))
	return i, d.engines[i].cmd.Process.Pid
}

// killLeader leaves the follower and a forked child, which keep the session and the descriptors.
func (d *deaths) killLeader() string {
	i, pid := d.leader()
	d.endEngine(i)
	require.Eventually(d.t, func() bool {
		return !slices.ContainsFunc(d.v.sessions().Processes, func(m daemon.MemberInfo) bool { return m.PID == uint32(pid) })
	}, settleMax, time.Millisecond, "the leader is gone, whoever holds its descriptors")
	d.endOrphans()
	return "a leader"
}

// killFollower costs a session the reservation that it is writing.
func (d *deaths) killFollower() string {
	i, pid := d.leader()
	followers, _ := relatives(d.t, pid)
	if len(followers) == 0 {
		return "nobody"
	}
	d.engines[i].bereaved++
	_ = unix.Kill(followers[0], unix.SIGKILL)
	return "a follower"
}

// killChild disturbs nobody.
func (d *deaths) killChild() string {
	for _, e := range d.engines {
		_, forked := relatives(d.t, e.cmd.Process.Pid)
		for _, pid := range forked {
			d.checkChild(pid)
			_ = unix.Kill(pid, unix.SIGKILL)
			return "a forked child"
		}
	}
	return "nobody"
}

// checkChild: a child has none of the session's memory, whatever else it holds.
func (d *deaths) checkChild(pid int) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil || bytes.Contains(b, []byte("memfd:tuttifs-")) {
		d.t.Errorf("a forked child keeps a session's memory (%v)", err)
	}
}

func (d *deaths) killSession() string {
	i, pid := d.leader()
	followers, _ := relatives(d.t, pid)
	for _, f := range followers {
		_ = unix.Kill(f, unix.SIGKILL)
	}
	d.endEngine(i)
	d.endOrphans()
	return "a session"
}

func (d *deaths) killEverybody() string {
	for i, e := range d.engines {
		if e != nil {
			d.endEngine(i)
		}
	}
	d.endOrphans()
	return "all engines"
}

// endEngine kills a leader. What it has said is of no interest any more, what it has written is.
func (d *deaths) endEngine(i int) {
	e := d.engines[i]
	d.engines[i] = nil
	_ = e.cmd.Process.Kill()
	_ = e.cmd.Wait()
	_ = e.in.Close()
	d.journal(e)
	_ = os.Remove(journalName(d.v.dir, e.number)) // there is none if it had not begun
}

// endOrphans kills what dead leaders have left: all children of this process that are neither the daemon nor leaders.
func (d *deaths) endOrphans() {
	_, forked := relatives(d.t, os.Getpid())
	for _, pid := range forked {
		d.checkChild(pid)
	}
	var orphans []int
	children(d.t, os.Getpid(), func(pid int, _ string) {
		living := func(e *deathsEngine) bool { return e != nil && e.cmd.Process.Pid == pid }
		if pid != d.v.cmd.Process.Pid && !slices.ContainsFunc(d.engines, living) {
			orphans = append(orphans, pid)
		}
	})
	for _, pid := range orphans {
		d.end(pid)
	}
}

func (d *deaths) killDaemon() string {
	for _, e := range d.engines {
		e.excused = 2
	}
	d.v.kill()
	d.fsck("the daemon")
	d.v.start()
	d.rested = d.holds()
	d.excused = true
	return "the daemon"
}

// fsck is 'fsck -n' on a volume that nobody has mounted.
func (d *deaths) fsck(when string) {
	d.t.Helper()
	m, err := check.Open([]string{filepath.Join(d.v.dir, "drive0")}, check.ReadBusy)
	require.NoError(d.t, err)
	var errs []string
	result, err := check.Run(context.Background(), m.Drives, check.Options{Data: true, Report: func(f check.Finding) {
		if f.Severity == check.Error {
			errs = append(errs, f.String())
		}
	}})
	require.NoError(d.t, err)
	require.NoError(d.t, m.Close())
	require.Zero(d.t, result.Errors, "after the death of %s: %s", when, strings.Join(errs, "\n"))
	d.checks++
}

// journal reads on in what an engine has begun and what was acknowledged.
func (d *deaths) journal(e *deathsEngine) {
	b, err := os.ReadFile(journalName(d.v.dir, e.number))
	if os.IsNotExist(err) {
		return
	}
	require.NoError(d.t, err)
	for line := range strings.Lines(string(b[e.read:])) {
		e.read += len(line)
		var verb string
		var seed uint64
		n := 0
		_, err := fmt.Sscan(line, &verb, &seed)
		require.NoError(d.t, err)
		if verb == "begin" {
			_, err := fmt.Sscan(line, &verb, &seed, &n)
			require.NoError(d.t, err)
			e.chains[seed], _ = chain(seed, n)
		}
		state := map[string]fileState{"begin": fileMaybe, "done": fileMust, "remove": fileMaybe, "removed": fileGone}[verb]
		for _, k := range e.chains[seed] {
			d.files[k] = state
		}
		if state == fileGone {
			delete(e.chains, seed)
		}
	}
}

// holds is what the daemon has open, mapped and in memory.
func (d *deaths) holds() (r resources) {
	r.descriptors, r.shared = d.v.holds()
	proc := fmt.Sprintf("/proc/%d/", d.v.cmd.Process.Pid)
	memory, err := os.ReadFile(proc + "maps")
	require.NoError(d.t, err)
	for line := range strings.Lines(string(memory)) {
		if !strings.Contains(line, os.TempDir()) { // drives may be files in memory
			require.NotContains(d.t, line, "/dev/shm/", "memory with a name outlives its users")
		}
	}
	tasks, err := os.ReadDir(proc + "task")
	require.NoError(d.t, err)
	r.threads = len(tasks)
	status, err := os.ReadFile(proc + "status")
	require.NoError(d.t, err)
	_, rest, _ := strings.Cut(string(status), "RssAnon:")
	_, err = fmt.Sscan(rest, &r.bytes)
	require.NoError(d.t, err)
	r.bytes <<= 10
	return r
}

// settle waits until the daemon has given back what the dead had, and no more than the living have is left.
func (d *deaths) settle(kind string) {
	d.t.Helper()
	var want, got []int
	var r resources
	settled := func() bool {
		want, got = nil, nil
		for _, e := range d.engines {
			if e != nil {
				pid := e.cmd.Process.Pid
				followers, _ := relatives(d.t, pid) // without the killed as soon as they have ended
				want = append(append(want, pid), followers...)
			}
		}
		slices.Sort(want)
		doc := d.v.sessions()
		for _, m := range doc.Processes {
			got = append(got, int(m.PID))
		}
		slices.Sort(got)
		// What the dead had with the journal is no lease of theirs any more, but is counted until its outcome.
		total := d.stats().Total
		leases := int(total.FilesPinned + total.FilesReserved)
		for _, s := range doc.Sessions {
			leases += s.Pins + s.Reserved
		}
		r = d.holds()
		living := slices.Equal(want, got)
		if d.excused { // who was beginning when the daemon died has found the next one; the others come later
			living = !slices.ContainsFunc(got, func(pid int) bool { return !slices.Contains(want, pid) })
		}
		return living && leases == 0 && r.shared == membersOf*len(got) &&
			r.descriptors <= d.rested.descriptors+descriptorsOf*len(got)
	}
	for end := time.Now().Add(settleMax); !settled(); time.Sleep(5 * time.Millisecond) {
		require.True(d.t, time.Now().Before(end), "after the death of %s: members %v, not %v; the daemon has %+v, had %+v",
			kind, got, want, r, d.rested)
	}
	require.Less(d.t, r.threads, threadsMost, "the daemon's threads")
	require.Less(d.t, r.bytes, bytesMost, "the daemon's memory")
	d.most.descriptors = max(d.most.descriptors, r.descriptors)
	d.most.threads = max(d.most.threads, r.threads)
	d.most.bytes = max(d.most.bytes, r.bytes)
	require.Equal(d.t, 1, d.mounts())
}

func (d *deaths) stats() (doc daemon.StatsDocument) {
	b, err := os.ReadFile(filepath.Join(d.v.mount(), ".tuttifs", "stats"))
	require.NoError(d.t, err)
	require.NoError(d.t, json.Unmarshal(b, &doc))
	return doc
}

// mounts counts the mounts on the volume's directory.
func (d *deaths) mounts() int {
	b, err := os.ReadFile("/proc/self/mountinfo")
	require.NoError(d.t, err)
	return strings.Count(string(b), " "+d.v.mount()+" ")
}

// verify compares the mount with the journals, and each file with its key's content. Then it clears away what nobody
// answers for, and what was in flight counts as what it has become.
func (d *deaths) verify(kind string) {
	d.t.Helper()
	kept := map[Key]bool{}
	for _, e := range d.engines {
		if e == nil {
			continue
		}
		d.journal(e)
		for _, keys := range e.chains {
			for _, k := range keys {
				kept[k] = true
			}
		}
	}
	there := d.list()
	for k, state := range d.files {
		if state == fileMust {
			require.True(d.t, there[k], "after the death of %s: %x was acknowledged and is gone", kind, k[:16])
		}
		if !there[k] && !(kept[k] && state == fileMaybe) {
			delete(d.files, k)
		}
	}
	for _, k := range slices.SortedFunc(maps.Keys(there), func(a, b Key) int { return bytes.Compare(a[:], b[:]) }) {
		state, known := d.files[k]
		gone := !known || state == fileGone
		require.True(d.t, d.excused || !gone, "after the death of %s: %x is there, but nobody has stored it", kind, k[:16])
		d.compare(&k)
		if gone || !kept[k] || state == fileMaybe {
			require.NoError(d.t, os.Remove(keyPath(d.v.dir, &k)))
			d.files[k] = fileGone
		}
	}
}

// list is the keys of all files.
func (d *deaths) list() map[Key]bool {
	there := map[Key]bool{}
	blocks := filepath.Join(d.v.mount(), "pool", "blocks")
	dirs, err := os.ReadDir(blocks)
	if os.IsNotExist(err) {
		return there // the pool itself was in flight
	}
	require.NoError(d.t, err)
	for _, dir := range dirs {
		names, err := os.ReadDir(filepath.Join(blocks, dir.Name()))
		require.NoError(d.t, err)
		for _, name := range names {
			b, err := hex.DecodeString(name.Name())
			require.NoError(d.t, err)
			there[Key(b)] = true
		}
	}
	return there
}

// compare reads a file, which verifies its checksums, and compares it with what belongs to its key.
func (d *deaths) compare(k *Key) {
	d.t.Helper()
	got, err := os.ReadFile(keyPath(d.v.dir, k))
	require.NoError(d.t, err)
	var want []byte
	spec := mountSpec()
	for i, o := range spec.Geometry.Objects {
		at := len(want)
		want = append(want, make([]byte, o.Bytes())...)
		content(want[at:], k, uint16(i))
	}
	require.True(d.t, bytes.Equal(want, got), "%x has other bytes", k[:16])
	d.verified++
}
