package engine

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// The engines of TestDeaths. One is two processes of one session: the leader is rank 0, makes the session and decides
// what is done; the follower joins it and writes rank 1. Both are this binary again.

const (
	rankVariable = "TUTTIFS_TEST_DEATHS_RANK"
	liveChains   = 5 // that a leader keeps
	chainMost    = 3
	saidMost     = 100 // lines of a follower that has failed
)

var rankOptions = SessionOptions{Lanes: 2, Depth: 32, DMABytes: 4 << 20, BounceBytes: 512 << 10, ArenaBytes: 8192,
	Deadline: 10 * time.Second}

// TestDeathsRank is the body of both processes: "leader|DIR|NUMBER" or "follower|DIR|TOKEN". It ends with its input.
func TestDeathsRank(t *testing.T) {
	role := strings.Split(os.Getenv(rankVariable), "|")
	if len(role) != 3 {
		t.Skip("only run as an engine of other tests")
	}
	if role[0] == "leader" {
		leader(t, role[1], role[2])
	} else {
		follower(t, role[1], role[2])
	}
}

func startRank(role, dir, detail string) (*exec.Cmd, io.WriteCloser, *bufio.Scanner, error) {
	cmd := exec.Command(os.Args[0], "-test.run=^TestDeathsRank$", "-test.v")
	cmd.Env = append(os.Environ(), rankVariable+"="+role+"|"+dir+"|"+detail)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, nil, nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, nil, nil, err
	}
	if role == "follower" { // its leader reports what it has said
		cmd.Stderr = cmd.Stdout
	}
	return cmd, in, bufio.NewScanner(out), cmd.Start()
}

// openRank opens the mount as a member of a new session, or of the one with the token.
func openRank(t *testing.T, dir string, token *[16]byte) (*user, error) {
	m, err := Open(filepath.Join(dir, "mnt"))
	if err != nil {
		return nil, err
	}
	u := &user{t: t, mount: m}
	if token == nil {
		u.session, err = m.NewSession(rankOptions)
	} else {
		u.session, err = m.JoinSession(*token, rankOptions)
	}
	if err == nil {
		u.pool, err = u.session.OpenPool(mountSpec())
	}
	if err != nil {
		if u.session != nil {
			_ = u.session.Close()
		}
		return nil, errors.Join(err, m.Close())
	}
	return u, nil
}

// eachLayer runs f over registered memory for one layer after the other of n slots; of objects it gets the bytes.
func (u *user) eachLayer(rank uint16, n int, f func(layer uint16, desc []uint64, object func(i, j int) (uint16, []byte),
) error) error {
	l, m, ring := u.pool.Layout(), u.pool.Map(), u.session.Ring()
	for layer := range uint16(3) {
		objects := l.LayerObjects(layer, rank)
		var at []int
		size := 0
		for range n {
			for _, o := range objects {
				at = append(at, size)
				size += int(l.Geometry().Objects[o].Units()) * 4096
			}
		}
		buf := u.session.DMA()[:size]
		memory, err := ring.RegisterPadded(buf)
		if err != nil {
			return err
		}
		var desc []uint64
		for _, a := range at {
			desc = append(desc, memory.Desc(a))
		}
		err = f(layer, desc, func(i, j int) (uint16, []byte) {
			a := at[i*len(objects)+j]
			return objects[j], buf[a : a+int(m.ObjectBytes(objects[j]))]
		})
		if err := errors.Join(err, ring.Unregister(memory)); err != nil {
			return err
		}
	}
	return nil
}

// writeRank writes one rank's part of reserved files.
func (u *user) writeRank(rank uint16, keys []Key, grants []Grant) error {
	l, err := u.session.Ring().CreateLayers(u.pool.Map(), rank, slotsOf(grants))
	if err != nil {
		return err
	}
	defer l.Close()
	err = u.eachLayer(rank, len(keys), func(layer uint16, desc []uint64, object func(i, j int) (uint16, []byte)) error {
		for i := range keys {
			for j := range len(desc) / len(keys) {
				o, b := object(i, j)
				content(b, &keys[i], o)
			}
		}
		ticket, err := l.StoreLayer(layer, desc)
		if err != nil {
			return err
		}
		return ticket.Wait()
	})
	if err != nil {
		return err
	}
	return l.Finish()
}

// readRank reads one rank's part of pinned files and compares every byte.
func (u *user) readRank(rank uint16, keys []Key, grants []Grant) error {
	return u.readLayers(rank, keys, grants, func(uint16) {})
}

// readLayers is readRank with something to do before each layer.
func (u *user) readLayers(rank uint16, keys []Key, grants []Grant, before func(layer uint16)) error {
	l, err := u.session.Ring().OpenLayers(u.pool.Map(), rank, slotsOf(grants))
	if err != nil {
		return err
	}
	defer l.Close()
	return u.eachLayer(rank, len(keys), func(layer uint16, desc []uint64, object func(i, j int) (uint16, []byte)) error {
		before(layer)
		ticket, err := l.RetrieveLayer(layer, desc)
		if err != nil {
			return err
		}
		if err := errors.Join(ticket.Wait(), errors.Join(l.Failed()...)); err != nil {
			return err
		}
		for i := range keys {
			for j := range len(desc) / len(keys) {
				o, b := object(i, j)
				want := make([]byte, len(b))
				content(want, &keys[i], o)
				if !bytes.Equal(want, b) {
					return fmt.Errorf("%w: key %x, object %d", errWrong, keys[i][:16], o)
				}
			}
		}
		return nil
	})
}

// errWrong is what nothing excuses.
var errWrong = errors.New("WRONG")

// follower writes and commits rank 1 of what the leader has reserved, until its input ends.
func follower(t *testing.T, dir, detail string) {
	b, err := hex.DecodeString(detail)
	require.NoError(t, err)
	u, err := openRank(t, dir, (*[16]byte)(b))
	if err != nil {
		fmt.Println("error", err)
		return
	}
	fmt.Println("ready")
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		var reserve, seed uint64
		var n int
		_, err := fmt.Sscan(in.Text(), &reserve, &seed, &n)
		require.NoError(t, err)
		keys, items := chain(seed, n)
		grants := make([]Grant, n)
		if _, err = u.pool.Reserve(0, reserve, items, false, grants); err == nil {
			err = u.writeRank(1, keys, grants)
		}
		if err == nil {
			err = u.pool.Commit(reserve, 1)
		}
		if err != nil {
			fmt.Println("error", strings.ReplaceAll(err.Error(), "\n", "; "))
		} else {
			fmt.Println("ok")
		}
	}
}

// leaderState is the leader's: it says on its output what the driver has to know, and what it has begun and what was
// acknowledged in a journal, which outlives it.
type leaderState struct {
	t       *testing.T
	dir     string
	number  uint64
	next    uint64
	journal *os.File
	random  *rand.Rand
	u       *user // nil while the daemon is gone
	reserve uint64
	live    []stored

	rank1     *exec.Cmd
	rank1In   io.WriteCloser
	rank1Said *bufio.Scanner
}

type stored struct {
	seed uint64
	n    int
}

func leader(t *testing.T, dir, detail string) {
	l := &leaderState{t: t, dir: dir}
	_, err := fmt.Sscan(detail, &l.number)
	require.NoError(t, err)
	l.random = rand.New(rand.NewPCG(l.number, 1))
	l.journal, err = os.OpenFile(journalName(dir, l.number), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(t, err)
	commands := make(chan string)
	go func() {
		defer close(commands)
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			commands <- in.Text()
		}
	}()
	l.stopped(commands)
	for {
		select {
		case _, ok := <-commands:
			if !ok {
				return
			}
			fmt.Println("stopped")
			if !l.stopped(commands) {
				return
			}
		default:
		}
		if l.u == nil {
			if !l.wait(commands) {
				return
			}
			continue
		}
		if err := l.step(); err != nil {
			fmt.Println("error", strings.ReplaceAll(err.Error(), "\n", "; "))
			if !l.u.session.attach.Alive() {
				l.leave()
			}
		}
	}
}

// stopped waits for "go", and opens what is not open then. It is false at the end of the input.
func (l *leaderState) stopped(commands chan string) bool {
	if _, ok := <-commands; !ok {
		return false
	}
	if l.u != nil && !l.u.session.attach.Alive() {
		l.leave()
	}
	if l.u == nil {
		u, err := openRank(l.t, l.dir, nil)
		if err != nil {
			fmt.Println("error", strings.ReplaceAll(err.Error(), "\n", "; "))
			return true
		}
		l.u = u
		if l.random.IntN(2) == 0 {
			child, err := forkChild()
			require.NoError(l.t, err)
			go func() { _, _ = unix.Wait4(child, nil, 0, nil) }()
		}
	}
	return true
}

// wait is what a leader does whose daemon is gone.
func (l *leaderState) wait(commands chan string) bool {
	if _, ok := <-commands; !ok {
		return false
	}
	fmt.Println("stopped")
	return l.stopped(commands)
}

// leave forgets a session that is gone, the follower with it.
func (l *leaderState) leave() {
	l.u.close()
	l.u = nil
	l.forget()
}

// forget ends the follower, if there is one, and says how it has ended.
func (l *leaderState) forget() (end *os.ProcessState) {
	if l.rank1 != nil {
		_ = l.rank1.Process.Kill()
		_ = l.rank1In.Close()
		_ = l.rank1.Wait()
		end = l.rank1.ProcessState
		l.rank1 = nil
	}
	return end
}

func (l *leaderState) note(format string, args ...any) {
	_, err := fmt.Fprintf(l.journal, format+"\n", args...)
	require.NoError(l.t, err)
}

func (l *leaderState) step() error {
	if l.rank1 == nil {
		if err := l.hire(); err != nil {
			return err
		}
	}
	switch r := l.random.IntN(10); {
	case len(l.live) < 2 || r < 4 && len(l.live) < liveChains:
		return l.store()
	case r < 8:
		return l.restore()
	default:
		return l.remove()
	}
}

// hire starts a follower.
func (l *leaderState) hire() (err error) {
	begun := time.Now()
	l.rank1, l.rank1In, l.rank1Said, err = startRank("follower", l.dir, fmt.Sprintf("%x", l.u.session.Token()))
	require.NoError(l.t, err)
	var said []string
	for l.rank1Said.Scan() {
		text := l.rank1Said.Text()
		if text == "ready" {
			return nil
		}
		if len(said) < saidMost {
			said = append(said, text)
		}
	}
	took := time.Since(begun)
	end := l.forget()
	return fmt.Errorf("the follower, process %d, did not begin: %v after %v, having said %q", end.Pid(), end, took, said)
}

func (l *leaderState) store() error {
	l.next++
	l.reserve++
	c := stored{l.number<<32 | l.next, 1 + l.random.IntN(chainMost)}
	keys, items := chain(c.seed, c.n)
	grants := make([]Grant, c.n)
	l.note("begin %d %d", c.seed, c.n)
	if _, err := l.u.pool.Reserve(0, l.reserve, items, false, grants); err != nil {
		return err
	}
	if l.random.IntN(8) == 0 {
		return l.u.pool.Abort(l.reserve)
	}
	_, err := fmt.Fprintln(l.rank1In, l.reserve, c.seed, c.n)
	if err == nil {
		err = l.u.writeRank(0, keys, grants)
	}
	if err == nil {
		err = l.u.pool.Commit(l.reserve, 0)
	}
	if err == nil {
		l.note("done %d", c.seed)
		l.live = append(l.live, c)
	}
	heard := l.rank1Said.Scan()
	said := l.rank1Said.Text()
	if err != nil {
		_ = l.u.pool.Abort(l.reserve) // what is left of it; most often nothing is
	}
	if !heard {
		end := l.forget()
		return errors.Join(err, fmt.Errorf("the follower, process %d, is gone: %v", end.Pid(), end))
	}
	if said != "ok" {
		err = errors.Join(err, errors.New("follower: "+said))
	}
	return err
}

func (l *leaderState) restore() error {
	c := l.live[l.random.IntN(len(l.live))]
	keys, _ := chain(c.seed, c.n)
	grants := make([]Grant, c.n)
	l.reserve++
	n, err := l.u.pool.Pin(0, l.reserve, keys, grants)
	if err != nil {
		return err
	}
	if n != c.n {
		return fmt.Errorf("%w: %d of %d files of chain %d are there", errWrong, n, c.n, c.seed)
	}
	err = l.u.readRank(uint16(l.random.IntN(2)), keys, grants)
	return errors.Join(err, l.u.pool.Release(l.reserve))
}

func (l *leaderState) remove() error {
	i := l.random.IntN(len(l.live))
	c := l.live[i]
	l.live = append(l.live[:i], l.live[i+1:]...)
	l.note("remove %d", c.seed)
	keys, _ := chain(c.seed, c.n)
	for i := range keys {
		if err := os.Remove(keyPath(l.dir, &keys[i])); err != nil {
			return err
		}
	}
	l.note("removed %d", c.seed)
	return nil
}

func journalName(dir string, number uint64) string {
	return filepath.Join(dir, fmt.Sprintf("journal-%d", number))
}

func keyPath(dir string, k *Key) string {
	name := fmt.Sprintf("%x", k[:])
	return filepath.Join(dir, "mnt", "pool", "blocks", name[:2], name)
}

// forkedName is what a child of forkChild calls itself. A process that is being started looks like its parent as well
// until it executes its program; this name tells them apart.
const forkedName = "forked-child"

var forkedNameZ = []byte(forkedName + "\x00")

// forkChild is fork(2) without exec: the child has all of this process's descriptors, and the memory that is not kept
// from children. It does nothing, and none of this program's code runs in it but what is below.
//
//go:norace
//go:noinline
func forkChild() (int, error) {
	name := uintptr(unsafe.Pointer(&forkedNameZ[0]))
	pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if pid == 0 && errno == 0 {
		unix.RawSyscall6(unix.SYS_PRCTL, unix.PR_SET_NAME, name, 0, 0, 0, 0)
		for {
			unix.RawSyscall6(unix.SYS_PPOLL, 0, 0, 0, 0, 0, 0)
		}
	}
	if errno != 0 {
		return 0, errno
	}
	return int(pid), nil
}
