package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"tuttifs/daemon"
	"tuttifs/engine"
	"tuttifs/gio"
	"tuttifs/gpufile"
	"tuttifs/ioctl"
	"tuttifs/nvme"
	"tuttifs/stripe"
)

// mountTarget is an engine on a mount: metadata by ioctl, bytes by queue pairs in shared memory.
type mountTarget struct {
	dir      string
	poolName string
	mount    *engine.Mount
	session  *engine.Session
	pool     *engine.Pool
	memory   *gio.Memory
	dma      []byte
	// half is the size of the two halves of dma: one layer is in flight in one while the other is filled or compared.
	half    int
	window  int // slots whose widest layer fits a half
	request uint64
	pinned  []uint64 // ids of pins to release
	grants  []engine.Grant
	keeps   bool   // the session keeps what the mount declines
	evicted uint64 // at the start
	descs   []uint64
}

// pinBatch is the number of keys looked up by one call.
const pinBatch = 1024

func openMountTarget(o *replayOptions) (t *mountTarget, err error) {
	t = &mountTarget{dir: o.mount, poolName: o.poolName()}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.close())
		}
	}()
	kv, err := o.kv()
	if err != nil {
		return t, err
	}
	geometry, err := kv.Geometry()
	if err != nil {
		return t, fmt.Errorf("geometry of %s: %w", o.model, err)
	}
	if t.mount, err = engine.Open(o.mount); err != nil {
		return t, err
	}
	bounce, kept := bounceBytes(&geometry), 0
	if len(o.buffers) > 0 {
		n, err := parseSize(o.buffers[0])
		if err != nil {
			return t, usagef("--host-buffer: %v", err)
		}
		kept, bounce = int(n)&^(stripe.UnitBytes-1), bounceCells
	}
	t.keeps = kept > 0
	options := engine.SessionOptions{DMABytes: int(o.dmaBytes)&^(stripe.UnitBytes-1) + bounce, BounceBytes: bounce,
		Lanes: o.lanes, Real: o.real, KeepBytes: kept}
	if t.session, err = t.mount.NewSession(options); err != nil {
		return t, explainSession(o.mount, err)
	}
	id := o.identity(kv)
	t.pool, err = t.session.OpenPool(engine.PoolSpec{
		Name: t.poolName, Identity: id.Canonical(), Geometry: geometry, TokensPerFile: traceBlockTokens, MaxSlots: o.capacity,
	})
	if errors.Is(err, engine.ErrExists) {
		return t, fmt.Errorf("pool %s was made with another --model, --scale or geometry: use those, or another --pool: %w",
			t.poolName, err)
	}
	if err != nil {
		return t, err
	}
	t.dma = t.session.DMA()
	if t.memory, err = t.session.Ring().Register(t.dma); err != nil {
		return t, err
	}
	if err = t.divideMemory(); err != nil {
		return t, err
	}
	t.evicted, err = t.evictedNow()
	return t, err
}

// explainSession says why a mount gives no session that may write.
func explainSession(dir string, err error) error {
	control := filepath.Join(dir, ioctl.ControlPath)
	if errors.Is(err, engine.ErrReadOnly) && errors.Is(unix.Access(control, unix.W_OK), unix.EACCES) {
		return fmt.Errorf("%s may not be written by this user: replay as the mount's owner, who is chosen by -o uid= and "+
			"gid= of mount", control)
	}
	return err
}

// explainReplay adds what to do to failures of a replay on a mount. When the daemon is gone, everything fails after the
// first error, and only that is worth reading.
func explainReplay(dir string, err error) error {
	switch {
	case errors.Is(err, engine.ErrGone) || errors.Is(err, unix.ENOTCONN):
		first, _, _ := strings.Cut(err.Error(), "\n")
		return fmt.Errorf("%s; the daemon of %s was stopped or has died: unmount it if it is still "+
			"there, and mount the volume again", first, dir)
	case errors.Is(err, nvme.CapacityExceeded):
		return fmt.Errorf("%w; the filesystem that a drive file lies on is full: make room there", err)
	}
	return err
}

// bounceCells is the memory for commands whose object ends within a unit: a drive transfers whole units, and what lies
// behind the object in KV memory is not the drive's to overwrite.
const bounceCells = 32 << 20

func bounceBytes(g *stripe.Geometry) int {
	for i := range g.Objects {
		if o := &g.Objects[i]; !o.IsTrailer() && o.Bytes()%stripe.UnitBytes != 0 {
			return bounceCells
		}
	}
	return 0
}

// divideMemory fits as many slots' widest layer into a half as there is room for.
func (t *mountTarget) divideMemory() error {
	l := t.pool.Layout()
	widest, most := 0, 1
	for rank := range l.Ranks() {
		for layer := range l.Layers() {
			objects := l.LayerObjects(uint16(layer), uint16(rank))
			widest, most = max(widest, layerBytes(l, objects)), max(most, len(objects))
		}
	}
	t.half = len(t.dma) / 2 &^ (stripe.UnitBytes - 1)
	if t.window = min(t.half/widest, gio.BatchMax/most); t.window < 1 {
		return fmt.Errorf("one layer of one block takes %s and %s are there for it: raise --memory or --scale",
			humanBytes(uint64(widest)), humanBytes(uint64(t.half)))
	}
	return nil
}

// layerBytes is the memory of one slot's objects of a layer: every object begins on a unit, as commands want it.
func layerBytes(l *stripe.Layout, objects []uint16) int {
	n := 0
	for _, o := range objects {
		n += int(l.Geometry().Objects[o].Units()) * stripe.UnitBytes
	}
	return n
}

func (t *mountTarget) pin(keys []gpufile.Key) (hit, buffered int, err error) {
	if len(keys) > len(t.grants) {
		t.grants = make([]engine.Grant, max(len(keys), reserveBatch))
	}
	for hit < len(keys) {
		batch := keys[hit:min(hit+pinBatch, len(keys))]
		t.request++
		n, err := t.pool.Pin(0, t.request, batch, t.grants[hit:])
		if err != nil {
			return hit, 0, err
		}
		if n > 0 {
			t.pinned = append(t.pinned, t.request)
		}
		if hit += n; n < len(batch) {
			break
		}
	}
	return hit, 0, nil
}

func (t *mountTarget) release() (err error) {
	for _, id := range t.pinned {
		err = errors.Join(err, t.pool.Release(id))
	}
	t.pinned = t.pinned[:0]
	return err
}

func (t *mountTarget) restore(keys []gpufile.Key, layer func(time.Duration)) (bytes uint64, failed int, err error) {
	for from := 0; from < len(keys); from += t.window {
		to := min(from+t.window, len(keys))
		grants := t.grants[from:to]
		bad := make([]bool, len(grants))
		for rank := range t.pool.Layout().Ranks() {
			n, err := t.restoreRank(uint16(rank), keys[from:to], grants, bad, layer)
			if err != nil {
				return bytes, failed, err
			}
			bytes += n
		}
		for i, b := range bad {
			if !b {
				continue
			}
			failed++
			// Not found: the daemon knows already, for the whole drive is lost.
			err := t.pool.ReportBad(grants[i].Slot, grants[i].Generation)
			if err != nil && !errors.Is(err, engine.ErrNotFound) {
				return bytes, failed, fmt.Errorf("reporting damage: %w", err)
			}
		}
	}
	return bytes, failed, nil
}

// slotIO lists the slots of grants.
func slotIO(grants []engine.Grant) []gio.SlotIO {
	out := make([]gio.SlotIO, len(grants))
	for i := range grants {
		out[i] = gio.SlotIO{Slot: grants[i].Slot, Seed: grants[i].Seed}
	}
	return out
}

// restoreRank retrieves one rank's layers: while one is compared, the next is in flight. bad is set for blocks that
// came back wrong.
func (t *mountTarget) restoreRank(rank uint16, keys []gpufile.Key, grants []engine.Grant, bad []bool,
	took func(time.Duration)) (
	bytes uint64, err error) {
	layers, err := t.session.Ring().OpenLayers(t.pool.Map(), rank, slotIO(grants))
	if err != nil {
		return 0, err
	}
	defer layers.Close()
	type flight struct {
		ticket  gio.LayerTicket
		start   time.Time
		objects []uint16
		at      int
	}
	var flying *flight
	land := func(next *flight) error {
		done := flying
		flying = next
		if done == nil {
			return nil
		}
		if err := done.ticket.Wait(); err != nil && !slotFailure(err) {
			return err
		}
		took(time.Since(done.start))
		bytes += t.compare(done.at, done.objects, keys, bad)
		return nil
	}
	l := t.pool.Layout()
	for layer := range l.Layers() {
		objects := l.LayerObjects(uint16(layer), rank)
		if len(objects) == 0 {
			continue
		}
		at := layer % 2 * t.half
		f := &flight{start: time.Now(), objects: objects, at: at}
		if f.ticket, err = layers.RetrieveLayer(uint16(layer), t.targets(at, objects, len(grants))); err != nil {
			return bytes, errors.Join(err, land(nil))
		}
		if err := land(f); err != nil {
			return bytes, errors.Join(err, land(nil))
		}
	}
	if err := land(nil); err != nil {
		return bytes, err
	}
	for i, err := range layers.Failed() {
		bad[i] = bad[i] || err != nil
	}
	return bytes, nil
}

// slotFailure says that some slots of a batch came back damaged, which Failed tells apart, rather than that the ring is
// broken.
func slotFailure(err error) bool {
	return errors.Is(err, gio.ErrChecksum) || errors.Is(err, gio.ErrStatus)
}

// targets lays out the objects of a layer of n slots in memory from at, and returns their descriptors.
func (t *mountTarget) targets(at int, objects []uint16, n int) []uint64 {
	l := t.pool.Layout()
	descs := make([]uint64, 0, n*len(objects))
	for range n {
		for _, o := range objects {
			descs = append(descs, t.memory.Desc(at))
			at += int(l.Geometry().Objects[o].Units()) * stripe.UnitBytes
		}
	}
	return descs
}

// payloads calls f for every object of a layer in the order of targets.
func (t *mountTarget) payloads(at int, objects []uint16, n int, f func(slot int, object uint16, payload []byte)) {
	l := t.pool.Layout()
	for i := range n {
		for _, o := range objects {
			object := &l.Geometry().Objects[o]
			f(i, o, t.dma[at:at+int(object.Bytes())])
			at += int(object.Units()) * stripe.UnitBytes
		}
	}
}

func (t *mountTarget) compare(at int, objects []uint16, keys []gpufile.Key, bad []bool) (bytes uint64) {
	t.payloads(at, objects, len(keys), func(i int, object uint16, payload []byte) {
		bytes += uint64(len(payload))
		if !checkContent(payload, &keys[i], object) {
			bad[i] = true
		}
	})
	return bytes
}

func (t *mountTarget) store(items []replayItem) (s replayStored, err error) {
	grants := make([]engine.Grant, reserveBatch)
	list := make([]engine.Item, 0, reserveBatch)
	for len(items) > 0 {
		list = list[:0]
		for _, item := range items[:min(len(items), reserveBatch, t.window)] {
			list = append(list, engine.Item{Key: item.key, Parent: item.parent, Tokens: item.tokens, Position: item.position})
		}
		t.request++
		n, err := t.pool.Reserve(0, t.request, list, true, grants)
		if errors.Is(err, ioctl.ENOSPC) || err == nil && n == 0 {
			return s, nil
		}
		if err != nil {
			return s, fmt.Errorf("reserve: %w", err)
		}
		written, err := t.storeReserved(list[:n], grants[:n])
		if err != nil {
			return s, errors.Join(err, t.pool.Abort(t.request))
		}
		s.bytes += written
		for i := range n {
			switch grants[i].Status {
			case ioctl.GrantNew:
				s.stored++
			case ioctl.GrantDeclined:
				s.declined++
			}
		}
		items = items[n:]
	}
	return s, nil
}

// storeReserved writes all ranks of the slots that are new and commits them.
func (t *mountTarget) storeReserved(list []engine.Item, grants []engine.Grant) (bytes uint64, err error) {
	var keys []gpufile.Key
	var fresh []engine.Grant
	for i := range grants {
		if grants[i].Status == ioctl.GrantNew {
			keys, fresh = append(keys, list[i].Key), append(fresh, grants[i])
		}
	}
	var ranks []uint16
	for rank := range uint16(t.pool.Layout().Ranks()) {
		ranks = append(ranks, rank)
		if len(fresh) == 0 {
			continue
		}
		n, err := t.storeRank(rank, keys, fresh)
		if err != nil {
			return bytes, err
		}
		bytes += n
	}
	if err := t.pool.CommitRanks(t.request, ranks...); err != nil {
		return bytes, fmt.Errorf("commit: %w", err)
	}
	return bytes, nil
}

// storeRank stores one rank's layers: while one is written, the next is made.
func (t *mountTarget) storeRank(rank uint16, keys []gpufile.Key, grants []engine.Grant) (bytes uint64, err error) {
	layers, err := t.session.Ring().CreateLayers(t.pool.Map(), rank, slotIO(grants))
	if err != nil {
		return 0, err
	}
	defer layers.Close()
	var flying [2]gio.LayerTicket
	land := func(half int) error {
		ticket := flying[half]
		if flying[half] = nil; ticket == nil {
			return nil
		}
		return ticket.Wait()
	}
	l := t.pool.Layout()
	for layer := range l.Layers() {
		objects, half := l.LayerObjects(uint16(layer), rank), layer%2
		if err := land(half); err != nil {
			return bytes, errors.Join(err, land(1-half))
		}
		if len(objects) == 0 {
			continue
		}
		t.payloads(half*t.half, objects, len(keys), func(i int, object uint16, payload []byte) {
			fillContent(payload, &keys[i], object)
			bytes += uint64(len(payload))
		})
		flying[half], err = layers.StoreLayer(uint16(layer), t.targets(half*t.half, objects, len(keys)))
		if err != nil {
			return bytes, errors.Join(err, land(1-half))
		}
	}
	if err := errors.Join(land(0), land(1)); err != nil {
		return bytes, err
	}
	return bytes, layers.Finish()
}

func (t *mountTarget) evictions() (uint64, error) {
	now, err := t.evictedNow()
	return now - t.evicted, err
}

func (t *mountTarget) evictedNow() (uint64, error) {
	var stats daemon.StatsDocument
	if err := readStatus(t.dir, "stats", &stats); err != nil {
		return 0, err
	}
	return stats.Pools[t.poolName].Evicted, nil
}

func (t *mountTarget) close() (err error) {
	if t.memory != nil {
		err = errors.Join(err, t.release(), t.session.Ring().Unregister(t.memory))
	}
	if t.session != nil {
		err = errors.Join(err, t.session.Close())
	}
	if t.mount != nil {
		err = errors.Join(err, t.mount.Close())
	}
	return err
}
