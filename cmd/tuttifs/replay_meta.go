package main

import (
	"errors"
	"fmt"
	"time"

	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/gpufile"
	"tuttifs/stripe"
	"tuttifs/wear"
)

// metadataTarget is a store over a volume in memory. Slots are as small as they can be and nothing is ever written to
// them, so that only the metadata takes memory.
type metadataTarget struct {
	drives  []drive.Drive
	volume  *extentmap.Volume
	files   *gpufile.Store
	pool    *gpufile.Pool
	group   *gpufile.Group
	member  *gpufile.Member
	request uint64 // id of the last pin or reservation
	pinned  uint64 // id of the pin to release, 0 for none
	grants  []gpufile.Grant
	buffer  *hostBuffer
}

// reserveBatch is the number of blocks reserved and committed at a time.
const reserveBatch = 256

// metadataSpare is the space of the metadata volume beyond its slots: labels, journal, and rows that round up.
const metadataSpare = 1 << 30

// openMetadataTarget makes the store, with a host buffer for so many blocks beside it.
func openMetadataTarget(
	o *replayOptions, unique int, admission wear.GateOptions, buffered int,
) (t *metadataTarget, err error) {
	t = &metadataTarget{grants: make([]gpufile.Grant, reserveBatch), buffer: newHostBuffer(buffered)}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.close())
		}
	}()
	geometry := stripe.Geometry{Objects: []stripe.Object{{Runs: []stripe.Run{{Kind: stripe.RunKV,
		Bytes: 1}}}}}.WithTrailers()
	layout, err := stripe.NewLayout(geometry, 1)
	if err != nil {
		return t, err
	}
	slots := uint64(unique)
	if o.capacity > 0 {
		slots = uint64(o.capacity)
	}
	size := slots*layout.SlotUnits()*stripe.UnitBytes*9/8 + metadataSpare
	d, err := drive.NewMemory("memory", int64(size)&^(drive.UnitBytes-1))
	if err != nil {
		return t, err
	}
	t.drives = []drive.Drive{d}
	if _, err = extentmap.Format(t.drives, extentmap.FormatOptions{}); err != nil {
		return t, err
	}
	if t.volume, err = extentmap.OpenDrives(t.drives, extentmap.Options{}); err != nil {
		return t, err
	}
	options := gpufile.Options{Policy: o.policy, NoIO: true, Admission: admission}
	if t.files, err = gpufile.Open(t.volume, options); err != nil {
		return t, err
	}
	kv, err := o.kv()
	if err != nil {
		return t, err
	}
	spec := extentmap.PoolSpec{Name: o.poolName(), Geometry: geometry, TokensPerFile: traceBlockTokens,
		MaxSlots: o.capacity, ChecksumAlg: 1}
	pool, ticket, err := t.files.OpenPool(o.identity(kv), spec)
	if err != nil {
		return t, err
	}
	if err = waitTicket(ticket); err != nil {
		return t, err
	}
	t.pool, t.group = pool, t.files.GroupOfPool(pool.ID())
	t.member, err = t.files.NewSession(0)
	return t, err
}

// waitTicket blocks until a change is durable. A nil ticket is one that was durable already.
func waitTicket(t *extentmap.Ticket) error {
	if t == nil {
		return nil
	}
	<-t.Done()
	return t.Err()
}

func (t *metadataTarget) pin(keys []gpufile.Key) (hit, buffered int, err error) {
	if len(keys) > len(t.grants) {
		t.grants = make([]gpufile.Grant, len(keys))
	}
	t.request++
	if hit, err = t.member.Pin(t.group, 0, t.request, keys, t.grants); hit > 0 {
		t.pinned = t.request
	}
	for _, key := range keys[hit:] {
		if !t.buffer.has(key) {
			break
		}
		buffered++
	}
	return hit, buffered, err
}

func (t *metadataTarget) restore([]gpufile.Key, func(time.Duration)) (uint64, int, error) {
	return 0, 0, nil
}

func (t *metadataTarget) store(items []replayItem) (s replayStored, err error) {
	list := make([]gpufile.ReserveItem, 0, reserveBatch)
	for len(items) > 0 {
		list = list[:0]
		for _, item := range items[:min(len(items), reserveBatch)] {
			list = append(list, gpufile.ReserveItem{Key: item.key, Parent: item.parent, Tokens: item.tokens,
				Position: item.position})
		}
		n, err := t.reserve(list)
		if errors.Is(err, gpufile.ErrNoSpace) || err == nil && n == 0 {
			return s, nil
		}
		if err != nil {
			return s, err
		}
		ticket, err := t.member.Commit(t.group, t.request, 0)
		if err != nil {
			return s, fmt.Errorf("commit: %w", err)
		}
		if err := waitTicket(ticket); err != nil {
			return s, fmt.Errorf("commit: %w", err)
		}
		for i := range n {
			switch t.grants[i].Status {
			case gpufile.GrantNew:
				s.stored++
				t.buffer.drop(list[i].Key)
			case gpufile.GrantDeclined:
				s.declined++
				t.buffer.put(list[i].Key)
			}
		}
		items = items[n:]
	}
	return s, nil
}

// reserve waits while space is being freed: bounded, because freeing ends with a journal write.
func (t *metadataTarget) reserve(list []gpufile.ReserveItem) (int, error) {
	const patience = 30 * time.Second
	t.request++
	for start, nap := time.Now(), 20*time.Microsecond; ; nap = min(2*nap, 5*time.Millisecond) {
		n, err := t.member.Reserve(t.group, 0, t.request, list, true, t.grants)
		if !errors.Is(err, gpufile.ErrAgain) || time.Since(start) > patience {
			return n, err
		}
		time.Sleep(nap)
	}
}

func (t *metadataTarget) release() error {
	if t.pinned == 0 {
		return nil
	}
	id := t.pinned
	t.pinned = 0
	return t.member.Release(t.group, id)
}

func (t *metadataTarget) evictions() (uint64, error) { return t.pool.Stats().Evicted, nil }

func (t *metadataTarget) close() (err error) {
	if t.member != nil {
		t.member.Close()
	}
	if t.files != nil {
		t.files.Close()
	}
	if t.volume != nil {
		err = t.volume.Close()
	}
	for _, d := range t.drives {
		err = errors.Join(err, d.Close())
	}
	return err
}
