package ondisk

import (
	"encoding/binary"
	"fmt"
)

// EntryType names what an entry of the journal or the catalog holds. The catalog is a stream of pools, families,
// tenants and rows; the journal may hold all types.
type EntryType uint8

const (
	EntryPool    EntryType = 1 + iota // a new pool
	EntryLimits                       // a pool's new minimum, maximum and slot cap
	EntryFamily                       // a new family
	EntryTenant                       // a new or changed tenant
	EntryRow                          // a pool gets a row
	EntryDropRow                      // a pool gives a row back
	EntryPut                          // a slot is committed
	EntryFree                         // a slot is freed
)

// EntryHeaderBytes precede each entry's payload: type, three zero bytes, u32 payload length.
const EntryHeaderBytes = 8

// MaxEntryBytes bounds one entry's payload.
const MaxEntryBytes = PoolFixedBytes + MaxNameBytes + MaxIdentityBytes + MaxGeometryBytes

// Pool is a pool's durable description.
type Pool struct {
	ID            uint16
	Family        uint16 // 0 for none
	TokensPerFile uint32
	TrailingHit   uint32
	MaxSlots      uint32
	MinBytes      uint64
	MaxBytes      uint64
	CreationTime  int64
	SlotUnits     uint64
	EntryShift    uint8 // an entry is 2^k segments
	ChecksumAlg   uint8
	Digest        [32]byte
	Name          string
	Identity      []byte
	Geometry      []byte
}

// Limits changes a pool.
type Limits struct {
	Pool     uint16
	MaxSlots uint32
	MinBytes uint64
	MaxBytes uint64
}

// Family is a set of pools that hit together; pools name their family.
type Family struct {
	ID   uint16
	Name string
}

// Tenant is a quota holder.
type Tenant struct {
	ID    uint32
	Quota uint64
	Name  string
}

// Row is a row of a pool: its number, where its entries begin, and both copies of its record table.
type Row struct {
	Pool    uint16
	Number  uint32
	Tables  [2]Locator
	Entries []Locator // W
}

// DropRow gives a row back.
type DropRow struct {
	Pool   uint16
	Number uint32
}

// Put commits a slot. Record aliases the stream.
type Put struct {
	Pool   uint16
	Slot   uint32
	Record []byte
}

// Free frees a slot.
type Free struct {
	Pool uint16
	Slot uint32
}

const (
	PoolFixedBytes   = 104
	limitsBytes      = 24
	familyFixedBytes = 8
	tenantFixedBytes = 16
	rowFixedBytes    = 24
	slotBytes        = 8
	// PutBytes and FreeBytes are whole entries, header included.
	PutBytes  = EntryHeaderBytes + slotBytes + RecordBytes
	FreeBytes = EntryHeaderBytes + slotBytes
)

func pad8(n int) int { return (n + 7) &^ 7 }

// appendEntry adds header and zeroed payload, padded to 8 bytes, and returns the payload to be filled.
func appendEntry(b []byte, t EntryType, n int) (whole, payload []byte) {
	off := len(b)
	b = append(b, uint8(t), 0, 0, 0, 0, 0, 0, 0)
	binary.LittleEndian.PutUint32(b[off+4:], uint32(n))
	for range pad8(n) / 8 {
		b = append(b, 0, 0, 0, 0, 0, 0, 0, 0)
	}
	return b, b[off+EntryHeaderBytes : off+EntryHeaderBytes+n]
}

// EntrySize is the length of an entry with a payload of n bytes.
func EntrySize(n int) int { return EntryHeaderBytes + pad8(n) }

// Append encodes the pool.
func (p *Pool) Append(b []byte) []byte {
	b, d := appendEntry(b, EntryPool, PoolFixedBytes+len(p.Name)+len(p.Identity)+len(p.Geometry))
	le := binary.LittleEndian
	le.PutUint16(d[0:], p.ID)
	le.PutUint16(d[2:], p.Family)
	le.PutUint32(d[4:], p.TokensPerFile)
	le.PutUint32(d[8:], p.TrailingHit)
	le.PutUint32(d[12:], p.MaxSlots)
	le.PutUint64(d[16:], p.MinBytes)
	le.PutUint64(d[24:], p.MaxBytes)
	le.PutUint64(d[32:], uint64(p.CreationTime))
	le.PutUint64(d[40:], p.SlotUnits)
	d[48] = p.EntryShift
	d[49] = p.ChecksumAlg
	d[50] = uint8(len(p.Name))
	le.PutUint32(d[52:], uint32(len(p.Identity)))
	le.PutUint32(d[56:], uint32(len(p.Geometry)))
	copy(d[64:96], p.Digest[:])
	n := PoolFixedBytes + copy(d[PoolFixedBytes:], p.Name)
	n += copy(d[n:], p.Identity)
	copy(d[n:], p.Geometry)
	return b
}

func (p *Pool) decode(d []byte) error {
	if len(d) < PoolFixedBytes {
		return ErrShort
	}
	le := binary.LittleEndian
	nn, ni, ng := int(d[50]), uint64(le.Uint32(d[52:])), uint64(le.Uint32(d[56:]))
	if nn == 0 || nn > MaxNameBytes || ni > MaxIdentityBytes || ng > MaxGeometryBytes ||
		uint64(len(d)) != PoolFixedBytes+uint64(nn)+ni+ng {
		return fieldError("pool: lengths %d, %d, %d in an entry of %d bytes", nn, ni, ng, len(d))
	}
	if d[51] != 0 || le.Uint32(d[60:]) != 0 || le.Uint64(d[96:]) != 0 {
		return fieldError("pool: reserved bytes")
	}
	name := d[PoolFixedBytes : PoolFixedBytes+nn]
	*p = Pool{
		ID: le.Uint16(d), Family: le.Uint16(d[2:]), TokensPerFile: le.Uint32(d[4:]), TrailingHit: le.Uint32(d[8:]),
		MaxSlots: le.Uint32(d[12:]), MinBytes: le.Uint64(d[16:]), MaxBytes: le.Uint64(d[24:]),
		CreationTime: int64(le.Uint64(d[32:])), SlotUnits: le.Uint64(d[40:]), EntryShift: d[48], ChecksumAlg: d[49],
		Digest: [32]byte(d[64:]), Name: string(name),
		Identity: d[PoolFixedBytes+nn : PoolFixedBytes+nn+int(ni)], Geometry: d[PoolFixedBytes+nn+int(ni):],
	}
	if p.ID == 0 || p.SlotUnits == 0 || p.EntryShift > 31 || !validName(name) {
		return fieldError("pool %d: slot of %d units, entry shift %d or name", p.ID, p.SlotUnits, p.EntryShift)
	}
	return nil
}

// Append encodes the limits.
func (l *Limits) Append(b []byte) []byte {
	b, d := appendEntry(b, EntryLimits, limitsBytes)
	le := binary.LittleEndian
	le.PutUint16(d, l.Pool)
	le.PutUint32(d[4:], l.MaxSlots)
	le.PutUint64(d[8:], l.MinBytes)
	le.PutUint64(d[16:], l.MaxBytes)
	return b
}

func (l *Limits) decode(d []byte) error {
	if len(d) != limitsBytes {
		return ErrShort
	}
	le := binary.LittleEndian
	*l = Limits{Pool: le.Uint16(d), MaxSlots: le.Uint32(d[4:]), MinBytes: le.Uint64(d[8:]), MaxBytes: le.Uint64(d[16:])}
	if le.Uint16(d[2:]) != 0 {
		return fieldError("limits: reserved bytes")
	}
	return nil
}

// Append encodes the family.
func (f *Family) Append(b []byte) []byte {
	b, d := appendEntry(b, EntryFamily, familyFixedBytes+len(f.Name))
	binary.LittleEndian.PutUint16(d, f.ID)
	d[2] = uint8(len(f.Name))
	copy(d[familyFixedBytes:], f.Name)
	return b
}

func (f *Family) decode(d []byte) error {
	if len(d) < familyFixedBytes {
		return ErrShort
	}
	name := d[familyFixedBytes:]
	*f = Family{ID: binary.LittleEndian.Uint16(d), Name: string(name)}
	if f.ID == 0 || int(d[2]) != len(name) || len(name) == 0 || len(name) > MaxNameBytes || !allZero(d[3:8]) ||
		!validName(name) {
		return fieldError("family %d: name or reserved bytes", f.ID)
	}
	return nil
}

// Append encodes the tenant.
func (t *Tenant) Append(b []byte) []byte {
	b, d := appendEntry(b, EntryTenant, tenantFixedBytes+len(t.Name))
	le := binary.LittleEndian
	le.PutUint32(d, t.ID)
	d[4] = uint8(len(t.Name))
	le.PutUint64(d[8:], t.Quota)
	copy(d[tenantFixedBytes:], t.Name)
	return b
}

func (t *Tenant) decode(d []byte) error {
	if len(d) < tenantFixedBytes {
		return ErrShort
	}
	le := binary.LittleEndian
	name := d[tenantFixedBytes:]
	*t = Tenant{ID: le.Uint32(d), Quota: le.Uint64(d[8:]), Name: string(name)}
	if int(d[4]) != len(name) || len(name) > MaxNameBytes || !allZero(d[5:8]) || !validName(name) {
		return fieldError("tenant %d: name or reserved bytes", t.ID)
	}
	return nil
}

// RowEntrySize is the length of a row's entry in a volume of width w.
func RowEntrySize(w int) int { return EntrySize(rowFixedBytes + 8*w) }

// Append encodes the row.
func (r *Row) Append(b []byte) []byte {
	b, d := appendEntry(b, EntryRow, rowFixedBytes+8*len(r.Entries))
	le := binary.LittleEndian
	le.PutUint16(d, r.Pool)
	d[2] = uint8(len(r.Entries))
	le.PutUint32(d[4:], r.Number)
	le.PutUint64(d[8:], uint64(r.Tables[0]))
	le.PutUint64(d[16:], uint64(r.Tables[1]))
	for i, e := range r.Entries {
		le.PutUint64(d[rowFixedBytes+8*i:], uint64(e))
	}
	return b
}

func (r *Row) decode(d []byte) error {
	if len(d) < rowFixedBytes {
		return ErrShort
	}
	le := binary.LittleEndian
	w := int(d[2])
	if w == 0 || w > MaxWidth || len(d) != rowFixedBytes+8*w || d[3] != 0 {
		return fieldError("row: width %d in an entry of %d bytes", w, len(d))
	}
	*r = Row{
		Pool: le.Uint16(d), Number: le.Uint32(d[4:]),
		Tables:  [2]Locator{Locator(le.Uint64(d[8:])), Locator(le.Uint64(d[16:]))},
		Entries: make([]Locator, w),
	}
	for i := range r.Entries {
		r.Entries[i] = Locator(le.Uint64(d[rowFixedBytes+8*i:]))
	}
	return nil
}

// Append encodes the row's end.
func (r *DropRow) Append(b []byte) []byte {
	b, d := appendEntry(b, EntryDropRow, slotBytes)
	binary.LittleEndian.PutUint16(d, r.Pool)
	binary.LittleEndian.PutUint32(d[4:], r.Number)
	return b
}

// AppendPut encodes a commit.
func AppendPut(b []byte, pool uint16, slot uint32, r *Record) []byte {
	b, d := appendEntry(b, EntryPut, slotBytes+RecordBytes)
	binary.LittleEndian.PutUint16(d, pool)
	binary.LittleEndian.PutUint32(d[4:], slot)
	r.Encode(d[slotBytes:])
	return b
}

// AppendFree encodes a freeing.
func AppendFree(b []byte, pool uint16, slot uint32) []byte {
	b, d := appendEntry(b, EntryFree, slotBytes)
	binary.LittleEndian.PutUint16(d, pool)
	binary.LittleEndian.PutUint32(d[4:], slot)
	return b
}

// Visitor receives decoded entries. Byte slices alias the stream.
type Visitor interface {
	Pool(*Pool) error
	Limits(*Limits) error
	Family(*Family) error
	Tenant(*Tenant) error
	Row(*Row) error
	DropRow(DropRow) error
	Put(Put) error
	Free(Free) error
}

// VisitEntries decodes a stream of whole entries in order. It stops at the first error, the visitor's or its own.
func VisitEntries(b []byte, v Visitor) error {
	for len(b) > 0 {
		if len(b) < EntryHeaderBytes {
			return ErrShort
		}
		t := EntryType(b[0])
		n := uint64(binary.LittleEndian.Uint32(b[4:]))
		if !allZero(b[1:4]) || n > MaxEntryBytes {
			return fieldError("entry of type %d, %d bytes: header", t, n)
		}
		whole := EntrySize(int(n))
		if len(b) < whole {
			return ErrShort
		}
		if !allZero(b[EntryHeaderBytes+n : whole]) {
			return fieldError("entry of type %d: padding", t)
		}
		if err := visit(t, b[EntryHeaderBytes:EntryHeaderBytes+n], v); err != nil {
			return fmt.Errorf("entry of type %d: %w", t, err)
		}
		b = b[whole:]
	}
	return nil
}

// visitDecoded joins a decoder's verdict and the visitor's method.
func visitDecoded[T any](e *T, err error, f func(*T) error) error {
	if err != nil {
		return err
	}
	return f(e)
}

func visit(t EntryType, d []byte, v Visitor) error {
	switch t {
	case EntryPut:
		p, err := decodePut(d)
		if err != nil {
			return err
		}
		return v.Put(p)
	case EntryFree:
		pool, slot, err := decodeSlot(d)
		if err != nil {
			return err
		}
		return v.Free(Free{pool, slot})
	case EntryDropRow:
		pool, number, err := decodeSlot(d)
		if err != nil {
			return err
		}
		return v.DropRow(DropRow{pool, number})
	case EntryPool:
		e := new(Pool)
		return visitDecoded(e, e.decode(d), v.Pool)
	case EntryLimits:
		e := new(Limits)
		return visitDecoded(e, e.decode(d), v.Limits)
	case EntryFamily:
		e := new(Family)
		return visitDecoded(e, e.decode(d), v.Family)
	case EntryTenant:
		e := new(Tenant)
		return visitDecoded(e, e.decode(d), v.Tenant)
	case EntryRow:
		e := new(Row)
		return visitDecoded(e, e.decode(d), v.Row)
	}
	return fieldError("unknown entry type %d", t)
}

func decodePut(d []byte) (Put, error) {
	if len(d) != slotBytes+RecordBytes {
		return Put{}, ErrShort
	}
	pool, slot, err := decodeSlot(d[:slotBytes])
	r := d[slotBytes:]
	if err == nil && (State(r[RecordStateOff]) != StateCommitted || !ValidRecord(r)) {
		err = fieldError("put: record")
	}
	return Put{pool, slot, r}, err
}

func decodeSlot(d []byte) (pool uint16, slot uint32, err error) {
	if len(d) != slotBytes {
		return 0, 0, ErrShort
	}
	if d[2] != 0 || d[3] != 0 {
		return 0, 0, fieldError("reserved bytes")
	}
	return binary.LittleEndian.Uint16(d), binary.LittleEndian.Uint32(d[4:]), nil
}

// EachRowTables calls f with the places of the record tables of every row in a stream of whole entries, and writes back
// what f makes of them.
func EachRowTables(stream []byte, f func(pool uint16, number uint32, tables *[2]Locator)) {
	le := binary.LittleEndian
	for len(stream) >= EntryHeaderBytes {
		n := EntrySize(int(le.Uint32(stream[4:])))
		if n > len(stream) {
			return
		}
		if p := stream[EntryHeaderBytes:n]; EntryType(stream[0]) == EntryRow && len(p) >= rowTablesOff+16 {
			at := p[rowTablesOff:]
			tables := [2]Locator{Locator(le.Uint64(at)), Locator(le.Uint64(at[8:]))}
			f(le.Uint16(p), le.Uint32(p[4:]), &tables)
			le.PutUint64(at, uint64(tables[0]))
			le.PutUint64(at[8:], uint64(tables[1]))
		}
		stream = stream[n:]
	}
}

// rowTablesOff is where a row's entry names its record tables.
const rowTablesOff = 8
