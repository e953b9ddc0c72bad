package daemon

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"tuttifs/checksum"
	"tuttifs/drive"
	"tuttifs/extentmap"
	"tuttifs/fs"
	"tuttifs/gpufile"
	"tuttifs/phase"
	"tuttifs/stripe"
)

// checksumAlgorithm is the number of the payload checksum in the format.
const checksumAlgorithm = 1

// transfersMax bounds the reads and writes of one drive by the mount's own readers and writers that are on their way:
// each takes a thread, programs that use the mount decide how many there are, and the Go runtime ends a process that
// has ten thousand. A drive that does not answer keeps nobody from the others.
const transfersMax = 128

var (
	// errDamaged: bytes on a drive are not what was stored.
	errDamaged = errors.New("daemon: checksum mismatch")
	// errDrive: a drive did not do what it was asked for, or is not there.
	errDrive = errors.New("daemon: drive error")
)

// payload is the way of the mount's own readers and writers (cat, cp) to the drives. Engines do not come here: their
// bytes go by queue pairs.
type payload struct {
	volume   *extentmap.Volume
	patience time.Duration // for one transfer
	kind     phase.Kind
	on       *[extentmap.MaxDrives]chan struct{}
	written  *[extentmap.MaxDrives]atomic.Uint64 // bytes of writes that succeeded
}

// NewPayload serves the files of one volume to a mount of it.
func NewPayload(v *extentmap.Volume) fs.Payload { return newPayload(v, 30*time.Second) }

func newPayload(v *extentmap.Volume, patience time.Duration) payload {
	y := payload{v, patience, phase.Data, new([extentmap.MaxDrives]chan struct{}), new([extentmap.MaxDrives]atomic.Uint64)}
	for i := range y.on {
		y.on[i] = make(chan struct{}, transfersMax)
	}
	return y
}

// transfer runs one read or write of a drive, bounded in number and time. One that is given up goes on by itself, in
// memory of its own: f gets a buffer, filled with data for a write, and into gets its content after a read.
func (y payload) transfer(index uint16, write bool, n int, data, into []byte, f func(b []byte) error) error {
	timer := time.NewTimer(y.patience)
	defer timer.Stop()
	select {
	case y.on[index] <- struct{}{}:
	case <-timer.C:
		return fmt.Errorf("%w: drive %d: %d transfers wait for it", errDrive, index, transfersMax)
	}
	b := takeBuffer()[:n]
	if write {
		clear(b[copy(b, data):])
	}
	done := make(chan error, 1)
	go func() {
		err := f(b)
		<-y.on[index]
		done <- err
	}()
	select {
	case err := <-done:
		switch {
		case err != nil:
		case write:
			y.written[index].Add(uint64(n))
		default:
			copy(into, b)
		}
		giveBuffer(b)
		if err != nil {
			y.volume.CountError(index, write)
			return fmt.Errorf("%w: %w", errDrive, err)
		}
		return nil
	case <-timer.C:
		y.volume.CountError(index, write)
		return fmt.Errorf("%w: drive %d does not answer for %v", errDrive, index, y.patience)
	}
}

// idleBuffers are the buffers of transfers that are over, for the next ones. Each has room for the largest object.
var idleBuffers = make(chan []byte, 64)

func takeBuffer() []byte {
	select {
	case b := <-idleBuffers:
		return b
	default:
		return drive.AlignedBuffer(stripe.MaxObjectBytes)
	}
}

func giveBuffer(b []byte) {
	b = b[:stripe.MaxObjectBytes]
	select {
	case idleBuffers <- b:
	default:
		drive.FreeBuffer(b)
	}
}

// OpenFile reads a file that the caller holds. Its seed makes a slot that was reused meanwhile read as damaged, never
// as wrong bytes.
func (y payload) OpenFile(p *gpufile.Pool, info gpufile.FileInfo) (fs.FileReader, error) {
	return y.reader(p, info.Slot, p.Seed(&info)), nil
}

func (y payload) reader(p *gpufile.Pool, slot uint32, seed checksum.Seed) *fileReader {
	f := file{y, p.Map(), p.Map().Layout(), slot, seed}
	return &fileReader{f, make([]rankSums, f.layout.Ranks())}
}

// CreateFile writes a slot that the caller has reserved.
func (y payload) CreateFile(p *gpufile.Pool, grant gpufile.Grant) (fs.FileWriter, error) {
	f := file{y, p.Map(), p.Map().Layout(), grant.Slot, grant.Seed}
	w := &fileWriter{file: f, sums: make([][]uint64, f.layout.Ranks()), left: map[uint16]bool{}}
	for rank := range w.sums {
		objects := f.layout.RankObjects(uint16(rank))
		w.sums[rank] = make([]uint64, len(objects))
		for _, o := range objects {
			w.left[o] = true
		}
	}
	return w, nil
}

// verify rereads a slot and judges its bytes: what engines report as bad is judged here. A drive that does not give
// them says nothing about them. Engines wait for nothing here, so their stores go first.
func (y payload) verify(p *gpufile.Pool, slot uint32, seed checksum.Seed) gpufile.Verdict {
	y.kind = phase.Background
	r := y.reader(p, slot, seed)
	defer r.Close()
	buf := drive.AlignedBuffer(stripe.MaxObjectBytes)
	defer drive.FreeBuffer(buf)
	for rank := range r.ranks {
		for _, o := range r.layout.RankObjects(uint16(rank)) {
			err := r.ReadObject(o, buf[:r.layout.Geometry().Objects[o].Bytes()])
			switch {
			case errors.Is(err, errDrive):
				return gpufile.Unreadable
			case err != nil:
				return gpufile.Damaged
			}
		}
	}
	return gpufile.Intact
}

// file is one slot's place on the drives.
type file struct {
	payload
	pool   *extentmap.Pool
	layout *stripe.Layout
	slot   uint32
	seed   checksum.Seed
}

// locate returns an object's drive, byte offset and bytes allocated.
func (f *file) locate(object uint16) (index uint16, d drive.Drive, off, room int64, err error) {
	index, unit, units, ok := f.pool.Extent(f.slot, object)
	if !ok {
		return 0, nil, 0, 0, fmt.Errorf("daemon: slot %d object %d is on no drive", f.slot, object)
	}
	if d = f.volume.Drive(index); d == nil {
		return 0, nil, 0, 0, fmt.Errorf("%w: slot %d object %d is on drive %d, which is lost", errDrive, f.slot, object,
			index)
	}
	return index, d, int64(unit) * drive.UnitBytes, int64(units) * drive.UnitBytes, nil
}

// read reads an object, in whole units.
func (f *file) read(object uint16, buf []byte) error {
	index, d, off, room, err := f.locate(object)
	switch {
	case err != nil:
		return err
	case int64(len(buf)) > room:
		return fmt.Errorf("daemon: object %d is shorter than %d bytes", object, len(buf))
	}
	n := (len(buf) + drive.UnitBytes - 1) &^ (drive.UnitBytes - 1)
	return f.transfer(index, false, n, nil, buf, func(b []byte) error { return readAs(f.kind, d, b, off) })
}

// write pads with zeroes to whole units: nothing of an earlier tenant stays behind the payload.
func (f *file) write(object uint16, payload []byte) error {
	index, d, off, room, err := f.locate(object)
	if err != nil {
		return err
	}
	if int64(len(payload)) > room {
		return fmt.Errorf("daemon: object %d is shorter than %d bytes", object, len(payload))
	}
	return f.transfer(index, true, int(room), payload, nil, func(b []byte) error { return writeAs(f.kind, d, b, off) })
}

// rankSums are one rank's checksums, read from its trailer at first use.
type rankSums struct {
	once sync.Once
	sums []uint64
	err  error
}

// fileReader verifies every object that it returns.
type fileReader struct {
	file
	ranks []rankSums
}

func (r *fileReader) trailer(rank uint16) ([]uint64, error) {
	s := &r.ranks[rank]
	s.once.Do(func() {
		sums := make([]uint64, len(r.layout.RankObjects(rank)))
		object := r.layout.TrailerObject(rank)
		size := checksum.TrailerBytes(len(sums))
		buf := drive.AlignedBuffer((size + drive.UnitBytes - 1) &^ (drive.UnitBytes - 1))[:size]
		defer drive.FreeBuffer(buf)
		if s.err = r.read(object, buf); s.err != nil {
			return
		}
		if !checksum.ParseTrailer(buf, r.seed, rank, object, sums) {
			s.err = fmt.Errorf("slot %d, trailer of rank %d: %w", r.slot, rank, errDamaged)
			return
		}
		s.sums = sums
	})
	return s.sums, s.err
}

// ReadObject fills buf, which has the object's payload length. On any error buf is zeroed.
func (r *fileReader) ReadObject(object uint16, buf []byte) (err error) {
	defer func() {
		if err != nil {
			clear(buf)
		}
	}()
	o := &r.layout.Geometry().Objects[object]
	if o.IsTrailer() || len(buf) != int(o.Bytes()) {
		return fmt.Errorf("daemon: object %d is not one of %d bytes", object, len(buf))
	}
	sums, err := r.trailer(o.Rank)
	if err != nil {
		return err
	}
	if err := r.read(object, buf); err != nil {
		return err
	}
	if checksum.Sum(r.seed, o.Rank, object, buf) != sums[r.layout.OrdinalInRank(object)] {
		return fmt.Errorf("slot %d, object %d: %w", r.slot, object, errDamaged)
	}
	return nil
}

// Checksum names the algorithm and digests the sums of all ranks' objects, in the order of ranks and object numbers.
func (r *fileReader) Checksum() (string, error) {
	h := sha256.New()
	for rank := range r.ranks {
		sums, err := r.trailer(uint16(rank))
		if err != nil {
			return "", err
		}
		for _, s := range sums {
			var b [8]byte
			binary.LittleEndian.PutUint64(b[:], s)
			h.Write(b[:])
		}
	}
	return fmt.Sprintf("sums-%d:%x", checksumAlgorithm, h.Sum(nil)[:16]), nil
}

// Close has nothing to give back: the slot is held by who opened the file.
func (r *fileReader) Close() {}

// fileWriter collects sums while objects are written.
type fileWriter struct {
	file
	mu   sync.Mutex
	sums [][]uint64      // guarded by mu
	left map[uint16]bool // guarded by mu: objects not written yet
}

func (w *fileWriter) WriteObject(object uint16, payload []byte) error {
	o := &w.layout.Geometry().Objects[object]
	if o.IsTrailer() || len(payload) != int(o.Bytes()) {
		return fmt.Errorf("daemon: object %d is not one of %d bytes", object, len(payload))
	}
	if err := w.write(object, payload); err != nil {
		return err
	}
	sum := checksum.Sum(w.seed, o.Rank, object, payload)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sums[o.Rank][w.layout.OrdinalInRank(object)] = sum
	delete(w.left, object)
	return nil
}

// Finish writes the trailers.
func (w *fileWriter) Finish() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.left) > 0 {
		return fmt.Errorf("daemon: %d objects were not written", len(w.left))
	}
	for rank, sums := range w.sums {
		object := w.layout.TrailerObject(uint16(rank))
		buf := make([]byte, checksum.TrailerBytes(len(sums)))
		checksum.PutTrailer(buf, w.seed, uint16(rank), object, sums)
		if err := w.write(object, buf); err != nil {
			return err
		}
	}
	return nil
}

// Close has nothing to give back: a slot that was not finished is aborted by who reserved it.
func (w *fileWriter) Close() {}
