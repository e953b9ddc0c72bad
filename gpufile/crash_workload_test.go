package gpufile

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/checksum"
	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/extentmap/maptest"
	"tuttifs/extentmap/ondisk"
)

// allowed is what may be true of a file after a power cut.
type allowed uint8

const (
	absent allowed = iota
	either
	present
)

// change of what is allowed for a file, from a mark in the log on.
type change struct {
	mark, file int
	to         allowed
}

// crashFile is one file that the workload ever tried to store.
type crashFile struct {
	pool       *Pool
	poolID     extentmap.PoolID
	slot       uint32
	generation uint64
	key        Key
	last       int // mark of its last change
	now        allowed
}

// crashWorld drives a store on recording drives in every way and notes, with marks in the drives' log, what a mount may
// find after a cut at any moment.
type crashWorld struct {
	t   *testing.T
	rng *rand.Rand
	set *maptest.Set

	v      *extentmap.Volume
	s      *Store
	m      *Member
	groups []*Group

	marks   int
	seen    int // mark before the last look at all files
	files   []crashFile
	byGen   map[uint64]int
	changes []change
	chains  []Key // tips
	nextKey uint64
	broken  int   // drive whose writes fail, or -1
	lost    []int // by mark: drive that is out of use, or -1
	members int   // drives that were ever used
	done    map[string]int
}

func (w *crashWorld) mark() int {
	w.marks++
	w.set.Mark(w.marks)
	return w.marks
}

// allow notes a change for a file.
func (w *crashWorld) allow(file, mark int, to allowed) {
	f := &w.files[file]
	f.last, f.now = max(f.last, mark), to
	w.changes = append(w.changes, change{f.last, file, to})
}

const crashDriveBytes = 2 << 20

// newCrashWorld makes a volume of three small drives and keeps a fourth one empty. Space for a handful of rows: every
// workload evicts, reuses and hands rows over.
func newCrashWorld(t *testing.T, seed uint64) *crashWorld {
	w := &crashWorld{t: t, rng: rand.New(rand.NewPCG(seed, 3)), byGen: map[uint64]int{}, broken: -1, members: 3,
		done: map[string]int{}}
	w.set = maptest.NewSet(crashDriveBytes, crashDriveBytes, crashDriveBytes, crashDriveBytes)
	_, err := extentmap.Format(w.set.Drives()[:3], extentmap.FormatOptions{Width: 2, JournalBytes: 64 << 10})
	require.NoError(t, err)
	return w
}

func crashOptions() extentmap.Options {
	off := false
	return extentmap.Options{DriveTimeout: -1, Discard: &off, CheckpointSeconds: 1 << 20}
}

// labelled are the drives that a mount would find: those with a label.
func labelled(drives []drive.Drive) (out []drive.Drive) {
	b := make([]byte, ondisk.BlockBytes)
	for _, d := range drives {
		for _, unit := range []uint64{0, uint64(d.Size())/ondisk.BlockBytes - 1} {
			if d.ReadAt(b, int64(unit)*ondisk.BlockBytes) == nil {
				if _, err := ondisk.DecodeLabel(b, unit); err == nil {
					out = append(out, d)
					break
				}
			}
		}
	}
	return out
}

// newestLabel is the label that counts.
func newestLabel(drives []drive.Drive) (newest *ondisk.Label) {
	b := make([]byte, ondisk.BlockBytes)
	for _, d := range drives {
		for _, unit := range []uint64{0, uint64(d.Size())/ondisk.BlockBytes - 1} {
			if d.ReadAt(b, int64(unit)*ondisk.BlockBytes) != nil {
				continue
			}
			l, err := ondisk.DecodeLabel(b, unit)
			if err == nil && (newest == nil || l.Epoch > newest.Epoch ||
				l.Epoch == newest.Epoch && l.Sequence > newest.Sequence) {
				newest = l
			}
		}
	}
	return newest
}

func (w *crashWorld) open() {
	var err error
	w.v, err = extentmap.OpenDrives(labelled(w.set.Drives()), crashOptions())
	require.NoError(w.t, err)
	w.s, err = Open(w.v, Options{})
	require.NoError(w.t, err)
	w.groups = nil
	for i := range w.files {
		w.files[i].pool = w.s.PoolByID(w.files[i].poolID)
	}
	w.m, err = w.s.NewSession(1000)
	require.NoError(w.t, err)
	w.done["mount"]++
}

// kill drops everything as a dying daemon does.
func (w *crashWorld) kill() {
	w.s.mu.Lock()
	w.s.closed = true
	w.s.mu.Unlock()
	close(w.s.quit)
	w.s.workers.Wait()
	w.v.Abandon()
	w.s.closePools()
}

func (w *crashWorld) begin() {
	w.open()
	w.pool("a", "hybrid", 1)
	w.pool("b", "hybrid", 3)
	w.pool("c", "", 2)
}

// run changes the volume in every way: with many stores, and everything else at random places among them. Drives are
// lost and come back, are added and forgotten in this order.
func (w *crashWorld) run() {
	w.begin()
	inOrder := []func(){w.lose, w.rejoin, w.add, w.lose, w.rejoin, w.forget, w.lose, w.rejoin}
	anywhere := []func(){w.unlink, w.unlink, w.unlink, w.evict, w.evict, w.checkpoint, w.checkpoint, w.pins, w.pins,
		w.pins, w.unmount, w.killed, w.killed, w.another}
	for range 24 {
		anywhere = append(anywhere, w.store)
	}
	w.rng.Shuffle(len(anywhere), func(i, j int) { anywhere[i], anywhere[j] = anywhere[j], anywhere[i] })
	steps := anywhere
	at := 0
	for i, f := range inOrder {
		at += w.rng.IntN(max(1, (len(steps)-at)/(len(inOrder)-i)*2))
		steps = slices.Insert(steps, min(at, len(steps)), f)
		at++
	}
	for _, step := range steps {
		step()
		w.look()
	}
	w.kill()
}

// log is what happened up to the last look. Behind it the store's workers went on, and no change says which files they
// evicted to give another pool a row.
func (w *crashWorld) log() []maptest.Op {
	log := w.set.Log()
	for len(log) > 0 && log[len(log)-1].Kind != maptest.Mark {
		log = log[:len(log)-1]
	}
	return log
}

func (w *crashWorld) checkpoint() {
	w.done["checkpoint"]++
	w.must(w.v.Checkpoint())
}

func (w *crashWorld) unmount() {
	w.done["unmount"]++
	w.s.Close()
	w.must(w.v.Close())
	w.open()
}

func (w *crashWorld) killed() {
	w.done["kill"]++
	w.kill()
	w.open()
}

func (w *crashWorld) another() { w.pool("d", "", 1) }

// must accepts what drives that fail may do to a verb.
func (w *crashWorld) must(err error) {
	if w.broken < 0 {
		require.NoError(w.t, err)
	}
}

func (w *crashWorld) pool(name, family string, objects int) {
	spec := extentmap.PoolSpec{Name: name, Geometry: testGeometry(1, objects), ChecksumAlg: 1, Family: family}
	p, ticket, err := w.s.OpenPool(testIdentity(name), spec)
	require.NoError(w.t, err)
	require.NoError(w.t, wait(w.t, ticket))
	w.done["pool "+name]++
	_ = p
}

// groupList are the pools and families that files go to.
func (w *crashWorld) groupList() []*Group {
	var out []*Group
	for _, p := range w.s.Pools() {
		if p.m.FamilyID() == 0 {
			out = append(out, w.s.GroupOfPool(p.ID()))
		}
	}
	return append(out, w.s.GroupOfFamily(1))
}

// store commits a chain of a few files: a new one, one that goes on from an older one, or the same keys again.
func (w *crashWorld) store() {
	list := w.groupList()
	g := list[w.rng.IntN(len(list))]
	var parent Key
	if len(w.chains) > 0 && w.rng.IntN(2) == 0 {
		parent = w.chains[w.rng.IntN(len(w.chains))]
	}
	var items []ReserveItem
	for i := range 1 + w.rng.IntN(4) {
		w.nextKey++
		items = append(items, ReserveItem{Key: testKey(w.nextKey, 1), Parent: parent, Tokens: 64, Position: uint32(i)})
		parent = items[i].Key
	}
	if len(w.files) > 0 && w.rng.IntN(4) == 0 {
		items = items[:1]
		items[0].Key, items[0].Parent = w.files[w.rng.IntN(len(w.files))].key, Key{}
		parent = items[0].Key
	}
	w.nextKey++
	id := w.nextKey
	grants, err := reserve(w.t, w.m, g, 0, id, items)
	if err != nil {
		require.ErrorIs(w.t, err, ErrNoSpace)
		w.done["no space"]++
		return
	}
	start := w.mark()
	var mine []int
	whole := true
	for at, gr := range grants {
		if gr.Status != GrantNew {
			continue
		}
		p := g.pools[at%len(g.pools)]
		w.byGen[gr.Generation] = len(w.files)
		mine = append(mine, len(w.files))
		w.files = append(w.files, crashFile{pool: p, poolID: p.ID(), slot: gr.Slot, generation: gr.Generation,
			key: items[at/len(g.pools)].Key, last: start})
		w.allow(len(w.files)-1, start, either)
		whole = whole && w.write(p, gr)
		if whole {
			require.NoError(w.t, w.m.MarkWritten(p, gr.Slot))
		}
	}
	var ticket *extentmap.Ticket
	if whole && len(mine) > 0 && w.rng.IntN(20) > 0 {
		ticket, err = w.m.Commit(g, id, 0)
		for errors.Is(err, ErrAgain) {
			ticket, err = w.m.Commit(g, id, 0)
		}
		if err == nil {
			err = wait(w.t, ticket)
		}
	} else {
		err = errors.Join(ErrIncomplete, w.m.Abort(g, id))
		w.done["abort"]++
	}
	end := w.mark()
	for _, f := range mine {
		if err == nil {
			w.allow(f, end, present)
		} else {
			w.allow(f, end, absent)
		}
	}
	if err != nil {
		return
	}
	w.done["store"]++
	w.chains = append(w.chains, parent)
}

// write fills a slot as an engine does: objects, then the trailer.
func (w *crashWorld) write(p *Pool, gr Grant) bool {
	l := p.m.Layout()
	objects := l.RankObjects(0)
	sums := make([]uint64, len(objects))
	put := func(object uint16, b []byte) bool {
		index, unit, _, _ := p.m.Extent(gr.Slot, object)
		d := w.v.Drive(index)
		return d != nil && d.WriteAt(b, int64(unit)*ondisk.BlockBytes) == nil
	}
	for i, o := range objects {
		b := make([]byte, ondisk.BlockBytes)
		for k := range b {
			b[k] = byte(gr.Generation) + byte(o) + byte(k/64)
		}
		sums[i] = checksum.Sum(gr.Seed, 0, o, b)
		if !put(o, b) {
			return false
		}
	}
	b := make([]byte, ondisk.BlockBytes)
	t := l.TrailerObject(0)
	checksum.PutTrailer(b[:checksum.TrailerBytes(len(sums))], gr.Seed, 0, t, sums)
	return put(t, b)
}

func (w *crashWorld) unlink() {
	if len(w.files) == 0 {
		return
	}
	f := &w.files[w.rng.IntN(len(w.files))]
	if err := f.pool.Unlink(&f.key); err == nil {
		w.done["unlink"]++
	}
}

func (w *crashWorld) evict() {
	pools := w.s.Pools()
	n, err := pools[w.rng.IntN(len(pools))].EvictCount(1 + w.rng.IntN(3))
	require.NoError(w.t, err)
	w.done["evict"] += n
}

// pins holds a file for a while, so that unlinking dooms it; earlier pins end.
func (w *crashWorld) pins() {
	for _, g := range w.groupList() {
		_ = w.m.Release(g, 1) // there may be none
	}
	if len(w.files) == 0 {
		return
	}
	f := &w.files[w.rng.IntN(len(w.files))]
	if f.pool.m.FamilyID() != 0 {
		return
	}
	n, err := w.m.Pin(w.s.GroupOfPool(f.poolID), 0, 1, []Key{f.key}, make([]Grant, 1))
	require.NoError(w.t, err)
	w.done["pin"] += n
}

// lose makes a drive fail: at once and all of it, or at its next write.
func (w *crashWorld) lose() {
	info := w.v.Info()
	if info.Degraded || len(info.Drives) < 3 {
		return
	}
	index := info.Drives[w.rng.IntN(len(info.Drives))].Index
	w.broken = int(index)
	w.set.FailWith(func(op maptest.Op) error {
		if op.Drive == int(index) && op.Kind != maptest.Mark {
			return errBroken
		}
		return nil
	})
	if w.rng.IntN(2) == 0 {
		require.NoError(w.t, w.v.LoseDrive(index, errBroken))
	}
	w.done["lose"]++
}

// rejoin mends the drive that fails and takes it in again.
func (w *crashWorld) rejoin() {
	if w.broken < 0 {
		return
	}
	index := uint16(w.broken)
	w.set.FailWith(nil)
	w.broken = -1
	for _, d := range w.v.Info().Drives {
		if d.Index == index && d.State == extentmap.DriveLost {
			_, err := w.v.AddDrive(w.set.Drives()[index], extentmap.AddOptions{})
			require.NoError(w.t, err)
			w.done["rejoin"]++
		}
	}
	w.settle()
}

// settle waits until the store has followed the volume.
func (w *crashWorld) settle() { w.s.reviewRows() }

// add makes the spare drive a member.
func (w *crashWorld) add() {
	if w.members == 4 || w.broken >= 0 {
		return
	}
	_, err := w.v.AddDrive(w.set.Drives()[3], extentmap.AddOptions{Force: true})
	require.NoError(w.t, err)
	w.members = 4
	w.done["add"]++
}

// forget takes a drive out for good, once.
func (w *crashWorld) forget() {
	info := w.v.Info()
	if w.members < 4 || len(info.Drives) < 4 || w.broken >= 0 && w.rng.IntN(2) == 0 {
		return
	}
	for _, g := range w.groupList() {
		_ = w.m.Release(g, 1)
	}
	index := info.Drives[w.rng.IntN(len(info.Drives))].Index
	if w.broken >= 0 && w.broken != int(index) {
		return // its loss might leave the metadata on what is forgotten
	}
	require.NoError(w.t, w.s.ForgetDrive(w.t.Context(), index))
	w.done["forget"]++
}

// look finds out which files are gone since the last look: what was seen then may have been on its way since.
func (w *crashWorld) look() {
	w.settle()
	before := w.mark()
	quiet := map[extentmap.PoolID]bool{}
	for _, p := range w.s.Pools() {
		p.mu.Lock()
		_, freeing, _ := p.m.Counts()
		quiet[p.ID()] = len(p.toFree) == 0 && freeing == 0 && p.doomed == 0 && len(p.awayRows) == 0
		p.mu.Unlock()
	}
	after := w.mark()
	for i := range w.files {
		f := &w.files[i]
		if f.now == absent {
			continue
		}
		f.pool.mu.Lock()
		here := false
		if int(f.slot) < len(f.pool.nodes.s) && f.pool.nodes.s[f.slot].is(flagVisible|flagAway) {
			here = f.pool.m.Record(f.slot).Generation == f.generation
		}
		f.pool.mu.Unlock()
		switch {
		case here && f.now == either:
			w.allow(i, after, present) // a removal that a kill undid
		case !here && f.now == present:
			w.allow(i, w.seen, either)
		case !here && f.now == either && quiet[f.poolID]:
			w.allow(i, after, absent)
		}
	}
	w.seen = before
	for len(w.lost) <= after {
		w.lost = append(w.lost, -1)
	}
	for _, d := range w.v.Info().Drives {
		if d.State == extentmap.DriveLost {
			w.lost[after] = int(d.Index)
		}
	}
}
