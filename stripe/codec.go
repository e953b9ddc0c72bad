package stripe

import (
	"encoding/binary"
	"fmt"
	"slices"
)

// The canonical encoding, little-endian, version 1:
//
//	offset  bytes  field
//	     0      4  magic "TGEO"
//	     4      2  version, 1
//	     6      2  zero
//	     8      4  length of the whole encoding
//	    12      2  shapes: distinct run lists, in the order of their first use
//	    14      2  objects
//	    16         the shapes: u16 number of runs, u16 zero, then per run u32 bytes | kind << 24
//	               the objects: u16 layer, u16 rank, u16 shape
//	               zeroes up to a multiple of 8
//
// A run is at most MaxObjectBytes (2^21), so its length leaves the top byte to its kind. One geometry has exactly one
// encoding: the parser refuses unused, repeated or disordered shapes, and whatever is not zero where zero belongs.
const (
	codecMagic       = 0x4f454754 // "TGEO"
	codecVersion     = 1
	codecHeaderBytes = 16
	codecObjectBytes = 6
	codecShapeBytes  = 4 // and as much for each of its runs
	codecAlign       = 8
	runKindShift     = 24
)

// MaxGeometryBytes bounds what ParseGeometry accepts. Real geometries have a handful of shapes and stay far below.
const MaxGeometryBytes = 1 << 20

// MarshalBinary encodes the geometry: the canonical form that is hashed, stored and sent over the ABI. Only a valid
// geometry has one.
func (g Geometry) MarshalBinary() ([]byte, error) {
	if err := g.Validate(); err != nil {
		return nil, err
	}
	var shapes, objects []byte
	numbers := make(map[string]uint16)
	var shape []byte
	for i := range g.Objects {
		o := &g.Objects[i]
		shape = appendShape(shape[:0], o.Runs)
		number, known := numbers[string(shape)]
		if !known {
			number = uint16(len(numbers))
			numbers[string(shape)] = number
			shapes = append(shapes, shape...)
		}
		objects = binary.LittleEndian.AppendUint16(objects, o.Layer)
		objects = binary.LittleEndian.AppendUint16(objects, o.Rank)
		objects = binary.LittleEndian.AppendUint16(objects, number)
	}
	length := alignUp(codecHeaderBytes + len(shapes) + len(objects))
	if length > MaxGeometryBytes {
		return nil, fmt.Errorf("%w: %d bytes when encoded, want at most %d: use fewer distinct objects",
			ErrGeometry, length, MaxGeometryBytes)
	}
	b := make([]byte, 0, length)
	b = binary.LittleEndian.AppendUint32(b, codecMagic)
	b = binary.LittleEndian.AppendUint16(b, codecVersion)
	b = binary.LittleEndian.AppendUint16(b, 0)
	b = binary.LittleEndian.AppendUint32(b, uint32(length))
	b = binary.LittleEndian.AppendUint16(b, uint16(len(numbers)))
	b = binary.LittleEndian.AppendUint16(b, uint16(len(g.Objects)))
	b = append(b, shapes...)
	b = append(b, objects...)
	return b[:length], nil
}

func appendShape(b []byte, runs []Run) []byte {
	b = binary.LittleEndian.AppendUint16(b, uint16(len(runs)))
	b = binary.LittleEndian.AppendUint16(b, 0)
	for _, r := range runs {
		b = binary.LittleEndian.AppendUint32(b, r.Bytes|uint32(r.Kind)<<runKindShift)
	}
	return b
}

func alignUp(n int) int { return (n + codecAlign - 1) &^ (codecAlign - 1) }

// ParseGeometry decodes and validates bytes that we did not write.
func ParseGeometry(b []byte) (Geometry, error) {
	c := cursor{rest: b}
	shapes, objects, err := c.header(len(b))
	if err != nil {
		return Geometry{}, err
	}
	runs, err := c.shapes(shapes)
	if err != nil {
		return Geometry{}, err
	}
	g, err := c.objects(objects, runs)
	if err != nil {
		return Geometry{}, err
	}
	if len(c.rest) >= codecAlign {
		return Geometry{}, fmt.Errorf("%w: %d bytes too many", ErrGeometry, len(c.rest))
	}
	if slices.ContainsFunc(c.rest, func(x byte) bool { return x != 0 }) {
		return Geometry{}, fmt.Errorf("%w: bytes after the objects are not zero", ErrGeometry)
	}
	if err := g.Validate(); err != nil {
		return Geometry{}, err
	}
	return g, nil
}

// cursor reads an encoding from its front.
type cursor struct{ rest []byte }

// take is the next n bytes, or nil if there are fewer.
func (c *cursor) take(n int) []byte {
	if n > len(c.rest) {
		return nil
	}
	b := c.rest[:n]
	c.rest = c.rest[n:]
	return b
}

func truncated(what string) error { return fmt.Errorf("%w: %s: truncated", ErrGeometry, what) }

func (c *cursor) header(length int) (shapes, objects int, err error) {
	if length > MaxGeometryBytes || length%codecAlign != 0 {
		return 0, 0, fmt.Errorf("%w: %d bytes, want a multiple of %d up to %d", ErrGeometry, length, codecAlign,
			MaxGeometryBytes)
	}
	h := c.take(codecHeaderBytes)
	if h == nil {
		return 0, 0, truncated("header")
	}
	if magic := binary.LittleEndian.Uint32(h); magic != codecMagic {
		return 0, 0, fmt.Errorf("%w: magic %#08x, want %#08x", ErrGeometry, magic, codecMagic)
	}
	if version := binary.LittleEndian.Uint16(h[4:]); version != codecVersion {
		return 0, 0, fmt.Errorf("%w: version %d, this program knows %d", ErrGeometry, version, codecVersion)
	}
	if binary.LittleEndian.Uint16(h[6:]) != 0 {
		return 0, 0, fmt.Errorf("%w: reserved field of the header is not zero", ErrGeometry)
	}
	if n := binary.LittleEndian.Uint32(h[8:]); uint64(n) != uint64(length) {
		return 0, 0, fmt.Errorf("%w: %d bytes, the header says %d", ErrGeometry, length, n)
	}
	return int(binary.LittleEndian.Uint16(h[12:])), int(binary.LittleEndian.Uint16(h[14:])), nil
}

// shapes reads n run lists and refuses one that comes twice.
func (c *cursor) shapes(n int) ([][]Run, error) {
	if n*codecShapeBytes > len(c.rest) {
		return nil, truncated("shapes")
	}
	shapes := make([][]Run, n)
	seen := make(map[string]bool, n)
	for i := range shapes {
		start := c.rest
		h := c.take(codecShapeBytes)
		if h == nil {
			return nil, truncated("shapes")
		}
		runs := int(binary.LittleEndian.Uint16(h))
		if runs == 0 || runs > MaxRuns || binary.LittleEndian.Uint16(h[2:]) != 0 {
			return nil, fmt.Errorf("%w: shape %d: bad header", ErrGeometry, i)
		}
		b := c.take(4 * runs)
		if b == nil {
			return nil, truncated("runs")
		}
		whole := string(start[:codecShapeBytes+4*runs])
		if seen[whole] {
			return nil, fmt.Errorf("%w: shape %d repeats an earlier one", ErrGeometry, i)
		}
		seen[whole] = true
		shapes[i] = make([]Run, runs)
		for j := range shapes[i] {
			word := binary.LittleEndian.Uint32(b[4*j:])
			shapes[i][j] = Run{Kind: RunKind(word >> runKindShift), Bytes: word & (1<<runKindShift - 1)}
		}
	}
	return shapes, nil
}

// objects reads n objects. Shapes must come up for the first time in their own order, all of them. Objects of one
// shape share its runs.
func (c *cursor) objects(n int, shapes [][]Run) (Geometry, error) {
	b := c.take(n * codecObjectBytes)
	if b == nil {
		return Geometry{}, truncated("objects")
	}
	objects := make([]Object, n)
	used := 0
	for i := range objects {
		e := b[i*codecObjectBytes:]
		shape := int(binary.LittleEndian.Uint16(e[4:]))
		if shape > used || shape >= len(shapes) {
			return Geometry{}, fmt.Errorf("%w: object %d: shape %d out of order", ErrGeometry, i, shape)
		}
		used = max(used, shape+1)
		objects[i] = Object{
			Layer: binary.LittleEndian.Uint16(e),
			Rank:  binary.LittleEndian.Uint16(e[2:]),
			Runs:  shapes[shape],
		}
	}
	if used != len(shapes) {
		return Geometry{}, fmt.Errorf("%w: %d of %d shapes unused", ErrGeometry, len(shapes)-used, len(shapes))
	}
	return Geometry{Objects: objects}, nil
}
