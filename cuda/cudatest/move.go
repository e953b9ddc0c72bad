package cudatest

import (
	"encoding/binary"
	"sync/atomic"
	"unsafe"

	"tuttifs/checksum"
	"tuttifs/cuda"
)

// summer finds a slot's seed and the place of an object's sum.
type summer struct{ p *cuda.SumsParams }

// sum is the payload's sum, and where the expected one stands or the sum belongs.
func (s summer) sum(i uint32, object uint16, payload []byte) (sum uint64, place *uint64) {
	slot := i / s.p.PerSlot
	if s.p.Active != 0 {
		slot = *at[uint32](s.p.Active, uint64(slot))
	}
	ordinal := uint64(*at[uint16](s.p.Ordinals, uint64(i%s.p.PerSlot)))
	var seed checksum.Seed
	binary.LittleEndian.PutUint64(seed[:8], *at[uint64](s.p.Seeds, 2*uint64(slot)))
	binary.LittleEndian.PutUint64(seed[8:], *at[uint64](s.p.Seeds, 2*uint64(slot)+1))
	place = at[uint64](s.p.Sums, uint64(slot)*uint64(s.p.RankObjs)+ordinal)
	return checksum.Sum(seed, uint16(s.p.Rank), object, payload), place
}

// scatter copies a payload to the runs, which may be registered memory of Go's.
func (m *memory) scatter(payload []byte) {
	for i := range m.runs {
		r := m.run(i)
		n := min(uint64(r.bytes), uint64(len(payload)))
		moveBytes(pointer(r.address), unsafe.Pointer(unsafe.SliceData(payload)), n)
		payload = payload[n:]
	}
}

// gather copies a payload from the runs.
func (m *memory) gather(payload []byte) []byte {
	rest := payload
	for i := range m.runs {
		r := m.run(i)
		n := min(uint64(r.bytes), uint64(len(rest)))
		moveBytes(unsafe.Pointer(unsafe.SliceData(rest)), pointer(r.address), n)
		rest = rest[n:]
	}
	return payload[:len(payload)-len(rest)]
}

// zero clears the runs of a payload of n bytes.
func (m *memory) zero(n uint32) { m.scatter(make([]byte, n)) }

// move is harvest, or gather.
func move(p *cuda.HarvestParams, grid uint32, gather bool) {
	for c := range p.ChunkCount {
		chunk := at[cuda.KernelChunk](p.Chunks, uint64(c))
		for k := range chunk.Count {
			cell := uint64(0)
			if chunk.Cells != 0 {
				cell = chunk.Cells + cellOffset(&p.Cells, k)
			}
			i := chunk.First + k
			outcome := at[uint8](p.Outcomes, uint64(i))
			if gather && *outcome == cuda.OutcomeOK {
				*outcome = gatherObject(&p.Tables, &p.Sums, at[cuda.KernelIOCTX](p.IOCTXs, uint64(i)), i, cell)
			} else if !gather {
				*outcome = harvestObject(&p.Tables, &p.Sums, at[cuda.KernelIOCTX](p.IOCTXs, uint64(i)), i, cell, *outcome)
			}
		}
	}
	atomic.AddUint32(at[uint32](p.Done, 0), grid)
}

// payloadOf is an object's payload and whole units, 0 for one that the layout does not have.
func payloadOf(t *cuda.KernelTables, object uint16) (payload, bytes uint32) {
	if uint32(object) >= t.ObjectCount {
		return 0, 0
	}
	o := at[cuda.KernelObject](t.Objects, uint64(object))
	return o.Bytes, uint32(o.Units) * unitBytes
}

// harvestObject brings one object to its runs, or zeroes them. It returns the outcome.
func harvestObject(t *cuda.KernelTables, sums *cuda.SumsParams, ctx *cuda.KernelIOCTX, i uint32, cell uint64,
	outcome uint8) uint8 {

	payload, _ := payloadOf(t, ctx.Object)
	m, ok := lookup(t, ctx.Desc, payload)
	if !ok {
		if outcome == cuda.OutcomeOK {
			outcome = cuda.OutcomeMemory
		}
		return outcome
	}
	if outcome == cuda.OutcomeOK {
		b := []byte(nil)
		if cell != 0 {
			b = bytesAt(cell, payload)
			m.scatter(b)
		} else if sums.Seeds != 0 {
			b = m.gather(make([]byte, payload))
		}
		if sums.Seeds != 0 {
			if sum, want := (summer{sums}).sum(i, ctx.Object, b); sum != *want {
				outcome = cuda.OutcomeChecksum
			}
		}
	}
	if outcome != cuda.OutcomeOK {
		m.zero(payload)
	}
	return outcome
}

// gatherObject brings one object to its cell and writes its sum. It returns the outcome.
func gatherObject(t *cuda.KernelTables, sums *cuda.SumsParams, ctx *cuda.KernelIOCTX, i uint32, cell uint64) uint8 {
	if ctx.Flags != 0 {
		return cuda.OutcomeOK // nothing to move
	}
	payload, bytes := payloadOf(t, ctx.Object)
	m, ok := lookup(t, ctx.Desc, payload)
	if !ok || bytes == 0 {
		return cuda.OutcomeMemory
	}
	b := []byte(nil)
	if cell != 0 {
		b = m.gather(bytesAt(cell, bytes)[:payload])
		clear(bytesAt(cell, bytes)[payload:])
	} else if sums.Seeds != 0 {
		b = m.gather(make([]byte, payload))
	}
	if sums.Seeds != 0 {
		sum, place := (summer{sums}).sum(i, ctx.Object, b)
		*place = sum
	}
	return cuda.OutcomeOK
}
