package fs_test

import (
	"errors"
	"fmt"
	"time"

	"tuttifs/checksum"
	"tuttifs/daemon"
	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/fs"
	"tuttifs/gpufile"
	"tuttifs/stripe"
)

func init() { fs.SetOpenReal(openReal) }

// real is a store on four drives in memory.
type real struct {
	volume *extentmap.Volume
	store  *gpufile.Store
	pool   *gpufile.Pool // "llama"
}

func openReal(s fs.Scene) (*gpufile.Store, fs.Payload, fs.Pools, func() error, error) {
	r := &real{}
	if err := r.open(s); err != nil {
		return nil, nil, nil, nil, err
	}
	payload := daemon.NewPayload(r.volume)
	r.store.SetVerifier(func(p *gpufile.Pool, slot uint32, seed checksum.Seed) gpufile.Verdict {
		if verify(payload, p, slot) {
			return gpufile.Intact
		}
		return gpufile.Damaged
	})
	if s.Big {
		if err := r.storeBig(payload); err != nil {
			return nil, nil, nil, nil, err
		}
	}
	if s.Files > 0 {
		if err := r.storeMany(s.Files); err != nil {
			return nil, nil, nil, nil, err
		}
	}
	return r.store, payload, r, func() error {
		r.store.Close()
		return r.volume.Close()
	}, nil
}

func (r *real) open(s fs.Scene) (err error) {
	size := int64(256 << 20)
	if s.Files > 0 {
		size = 4 << 30 // of addresses: only what is written takes memory
	}
	drives := make([]drive.Drive, 4)
	for i := range drives {
		if drives[i], err = drive.NewMemory(fmt.Sprint("memory", i), size); err != nil {
			return err
		}
	}
	if _, err = extentmap.Format(drives, extentmap.FormatOptions{}); err != nil {
		return err
	}
	if r.volume, err = extentmap.OpenDrives(drives, extentmap.Options{}); err != nil {
		return err
	}
	if r.store, err = gpufile.Open(r.volume, gpufile.Options{}); err != nil {
		return err
	}
	r.pool, err = r.openPool("llama", fs.SmallGeometry(), uint32(s.Limit))
	return err
}

func (r *real) openPool(name string, g stripe.Geometry, limit uint32) (*gpufile.Pool, error) {
	id := gpufile.Identity{Model: name, Revision: "1", DType: "bf16", Quantisation: "none", ScaleFormat: "none",
		Layout:    "NHD",
		PageBytes: 4096, BlockTokens: 16, FileTokens: 64, TP: 1, PP: 1, CP: 1, Group: "full"}
	p, ticket, err := r.store.OpenPool(id, extentmap.PoolSpec{Name: name, Geometry: g, TokensPerFile: 64,
		MaxSlots:    limit,
		ChecksumAlg: 1})
	if err != nil {
		return nil, err
	}
	if ticket != nil {
		<-ticket.Done()
		err = ticket.Err()
	}
	return p, err
}

// commit stores a batch of files; write fills each.
func (r *real) commit(p *gpufile.Pool, items []gpufile.ReserveItem, write func(gpufile.Grant) error) error {
	m, err := r.store.NewSession(0)
	if err != nil {
		return err
	}
	defer m.Close()
	g := r.store.GroupOfPool(p.ID())
	grants := make([]gpufile.Grant, len(items))
	for {
		_, err := m.Reserve(g, 0, 1, items, false, grants)
		if err == nil {
			break
		}
		if !errors.Is(err, gpufile.ErrAgain) {
			return err
		}
		time.Sleep(time.Millisecond)
	}
	for _, grant := range grants {
		if err := write(grant); err != nil {
			return err
		}
		if err := m.MarkWritten(p, grant.Slot); err != nil {
			return err
		}
	}
	var ticket *extentmap.Ticket
	for rank := range p.Map().Layout().Ranks() {
		if ticket, err = m.Commit(g, 1, uint16(rank)); err != nil {
			return err
		}
	}
	<-ticket.Done()
	return ticket.Err()
}

func (r *real) storeBig(payload fs.Payload) error {
	p, err := r.openPool("big", fs.BigGeometry(), 0)
	if err != nil {
		return err
	}
	bytes := fs.TestPayload(fs.BigFile, 1)
	return r.commit(p, []gpufile.ReserveItem{{Key: fs.TestKey(0, 0), Tokens: 64}}, func(grant gpufile.Grant) error {
		w, err := payload.CreateFile(p, grant)
		if err != nil {
			return err
		}
		defer w.Close()
		const object = 128 << 10
		for o := range fs.BigFile / object {
			if err := w.WriteObject(uint16(o), bytes[o*object:(o+1)*object]); err != nil {
				return err
			}
		}
		return w.Finish()
	})
}

func (r *real) storeMany(files int) error {
	p, err := r.openPool("many", fs.TinyGeometry(), 0)
	if err != nil {
		return err
	}
	const batch = 4096
	for i := 0; i < files; i += batch {
		var items []gpufile.ReserveItem
		for j := i; j < min(i+batch, files); j++ {
			items = append(items, gpufile.ReserveItem{Key: fs.TestKey(byte(j), j), Tokens: 64})
		}
		if err := r.commit(p, items, func(gpufile.Grant) error { return nil }); err != nil {
			return err
		}
	}
	return r.volume.Checkpoint()
}

// verify rereads a file.
func verify(payload fs.Payload, p *gpufile.Pool, slot uint32) bool {
	info, ok := p.Stat(slot, 0, 0)
	if !ok {
		return false
	}
	f, err := payload.OpenFile(p, info)
	if err != nil {
		return false
	}
	defer f.Close()
	objects := p.Map().Layout().Geometry().Objects
	for o := range objects {
		if !objects[o].IsTrailer() && f.ReadObject(uint16(o), make([]byte, objects[o].Bytes())) != nil {
			return false
		}
	}
	return true
}

func (r *real) Do(word string, key gpufile.Key) any {
	slot, _, ok := r.pool.Find(&key)
	switch {
	case word == "reported":
		return r.pool.Stats().Bad
	case word == "pins":
		return r.pool.Stats().FilesPinned
	case !ok:
		return gpufile.ErrNotFound
	case word == "unlink":
		return r.pool.Unlink(&key)
	case word == "damage":
		index, unit, _, ok := r.pool.Map().Extent(slot, 4)
		if !ok {
			return gpufile.ErrNotFound
		}
		r.volume.Drive(index).Bytes()[unit*stripe.UnitBytes+100] ^= 1
	}
	return nil
}
