package emu

import (
	"sync/atomic"
	"syscall"
	"unsafe"

	"tuttifs/nvme"
)

// SGLDescriptorsMax is the most descriptors of one command, all segments together.
const SGLDescriptorsMax = 1024

// dnr is in the status of everything that would fail again.
const dnr = nvme.StatusDNR

// segments is a command's data buffer as memory of this process: what PRPs or SGLs said once, translated. A segment
// without a base is a bit bucket: that many bytes are thrown away.
type segments struct {
	list   []syscall.Iovec
	total  uint64
	bucket bool
	// A run of contiguous I/O addresses that is not translated yet.
	runAddr, runLen uint64
}

func (s *segments) reset() { *s = segments{list: s.list[:0]} }

// bytesAt is segment i as a slice; nil for a bit bucket.
func (s *segments) bytesAt(i int) []byte {
	v := &s.list[i]
	return unsafe.Slice(v.Base, v.Len)
}

func (s *segments) appendBytes(b []byte) {
	base := unsafe.SliceData(b)
	if n := len(s.list); n > 0 {
		last := &s.list[n-1]
		end := uintptr(unsafe.Pointer(last.Base)) + uintptr(last.Len)
		if last.Base != nil && end == uintptr(unsafe.Pointer(base)) {
			last.Len += uint64(len(b))
			return
		}
	}
	s.list = append(s.list, syscall.Iovec{Base: base, Len: uint64(len(b))})
}

// add appends n bytes at an I/O address; runs of contiguous addresses are translated in one piece.
func (s *segments) add(m Memory, addr, n uint64) nvme.Status {
	s.total += n
	if s.runLen > 0 && s.runAddr+s.runLen == addr {
		s.runLen += n
		return nvme.Success
	}
	st := s.flushRun(m)
	s.runAddr, s.runLen = addr, n
	return st
}

// flushRun translates the run. Where the whole is not mapped, its pages may be, in regions that touch.
func (s *segments) flushRun(m Memory) nvme.Status {
	addr, n := s.runAddr, s.runLen
	s.runLen = 0
	if n == 0 {
		return nvme.Success
	}
	if addr+n < addr {
		return nvme.DataTransferError | dnr
	}
	if b := translate(m, addr, uint32(n)); b != nil {
		s.appendBytes(b)
		return nvme.Success
	}
	for n > 0 {
		k := min(n, PageBytes-addr%PageBytes)
		b := translate(m, addr, uint32(k))
		if b == nil {
			return nvme.DataTransferError | dnr
		}
		s.appendBytes(b)
		addr, n = addr+k, n-k
	}
	return nvme.Success
}

func (s *segments) addBucket(m Memory, n uint64) nvme.Status {
	if st := s.flushRun(m); !st.OK() {
		return st
	}
	s.total += n
	s.bucket = true
	s.list = append(s.list, syscall.Iovec{Len: n})
	return nvme.Success
}

// translate asks the memory and does not believe its length.
func translate(m Memory, addr uint64, n uint32) []byte {
	b := m.Translate(addr, n)
	if uint64(len(b)) < uint64(n) || n == 0 {
		return nil
	}
	return b[:n]
}

// truncate keeps the first n bytes.
func (s *segments) truncate(n uint64) {
	s.total = min(s.total, n)
	for i := range s.list {
		v := &s.list[i]
		if v.Len >= n {
			v.Len = n
			s.list = s.list[:i+1]
			return
		}
		n -= v.Len
	}
}

// aligned says whether direct I/O takes every segment as it is.
func (s *segments) aligned(align uintptr) bool {
	for i := range s.list {
		v := &s.list[i]
		if (uintptr(unsafe.Pointer(v.Base))|uintptr(v.Len))&(align-1) != 0 {
			return false
		}
	}
	return true
}

// loadWord reads eight bytes of memory that may change at any time, once.
func loadWord(b []byte) uint64 {
	return atomic.LoadUint64((*uint64)(unsafe.Pointer(unsafe.SliceData(b))))
}

// parse fills s from the command's data pointer: exactly length bytes.
func (s *segments) parse(m Memory, e *nvme.SQE, length uint32, sgl, toHost bool) nvme.Status {
	s.reset()
	switch e.Flags & nvme.FlagPSDTMask {
	case nvme.FlagPSDTPRP:
		if st := s.parsePRP(m, e.DPTR[0], e.DPTR[1], uint64(length)); !st.OK() {
			return st
		}
	case nvme.FlagPSDTSGL:
		if !sgl {
			return nvme.InvalidField | dnr
		}
		if st := s.parseSGL(m, nvme.SGLFromWords(e.DPTR[0], e.DPTR[1]), uint64(length), toHost); !st.OK() {
			return st
		}
	default:
		return nvme.InvalidField | dnr
	}
	return s.flushRun(m)
}

// parsePRP follows Base 2.0 section 4.1.1. Every list word is loaded once.
func (s *segments) parsePRP(m Memory, prp1, prp2, length uint64) nvme.Status {
	if prp1%4 != 0 {
		return nvme.PRPOffsetInvalid | dnr
	}
	first := min(length, PageBytes-prp1%PageBytes)
	if st := s.add(m, prp1, first); !st.OK() {
		return st
	}
	left := length - first
	if left == 0 {
		return nvme.Success
	}
	if left <= PageBytes {
		if prp2%PageBytes != 0 {
			return nvme.PRPOffsetInvalid | dnr
		}
		return s.add(m, prp2, left)
	}
	return s.parsePRPList(m, prp2, left)
}

func (s *segments) parsePRPList(m Memory, list, left uint64) nvme.Status {
	if list%8 != 0 {
		return nvme.PRPOffsetInvalid | dnr
	}
	for {
		// Only the words that are needed have to be mapped.
		room := (PageBytes - list%PageBytes) / 8
		need := (left + PageBytes - 1) / PageBytes
		words := min(room, need)
		b := translate(m, list, uint32(words*8))
		if b == nil || uintptr(unsafe.Pointer(unsafe.SliceData(b)))%8 != 0 {
			return nvme.DataTransferError | dnr
		}
		chained := need > room
		for i := range words {
			w := loadWord(b[i*8:])
			if w%PageBytes != 0 {
				return nvme.PRPOffsetInvalid | dnr
			}
			if chained && i == words-1 {
				list = w
				break
			}
			n := min(left, PageBytes)
			if st := s.add(m, w, n); !st.OK() {
				return st
			}
			left -= n
		}
		if !chained {
			return nvme.Success
		}
	}
}

// parseSGL follows Base 2.0 section 4.1.2: the descriptor in the command is a data block or starts a list of segments,
// of which each is copied a descriptor at a time.
func (s *segments) parseSGL(m Memory, d nvme.SGLDescriptor, length uint64, toHost bool) nvme.Status {
	count := 1
	for d.Type() == nvme.SGLSegment || d.Type() == nvme.SGLLastSegment {
		if st := checkSegment(&d); !st.OK() {
			return st
		}
		n := int(d.Length / nvme.SGLDescriptorBytes)
		if count += n; count > SGLDescriptorsMax {
			return nvme.SGLCountInvalid | dnr
		}
		b := translate(m, d.Addr, d.Length)
		if b == nil || uintptr(unsafe.Pointer(unsafe.SliceData(b)))%8 != 0 {
			return nvme.DataTransferError | dnr
		}
		last := d.Type() == nvme.SGLLastSegment
		var next nvme.SGLDescriptor
		for i := range n {
			e := nvme.SGLFromWords(loadWord(b[i*16:]), loadWord(b[i*16+8:]))
			pointer := e.Type() == nvme.SGLSegment || e.Type() == nvme.SGLLastSegment
			if pointer != (!last && i == n-1) { // a pointer ends every segment but the last, and stands nowhere else
				return nvme.SGLSegmentInvalid | dnr
			}
			if pointer {
				next = e
				break
			}
			if st := s.addDescriptor(m, &e, length, toHost); !st.OK() {
				return st
			}
		}
		if last {
			return s.checkLength(length)
		}
		d = next
	}
	if st := s.addDescriptor(m, &d, length, toHost); !st.OK() {
		return st
	}
	return s.checkLength(length)
}

func checkSegment(d *nvme.SGLDescriptor) nvme.Status {
	switch {
	case d.SubType() != nvme.SGLAddress:
		return nvme.SGLTypeInvalid | dnr
	case d.Reserved() != 0 || d.Length == 0 || d.Length%nvme.SGLDescriptorBytes != 0:
		return nvme.SGLSegmentInvalid | dnr
	case d.Addr%8 != 0:
		return nvme.SGLOffsetInvalid | dnr
	}
	return nvme.Success
}

func (s *segments) checkLength(length uint64) nvme.Status {
	if s.total != length {
		return nvme.SGLLengthInvalid | dnr
	}
	return nvme.Success
}

func (s *segments) addDescriptor(m Memory, d *nvme.SGLDescriptor, length uint64, toHost bool) nvme.Status {
	kind := d.Type()
	if d.SubType() != nvme.SGLAddress || kind != nvme.SGLDataBlock && kind != nvme.SGLBitBucket {
		return nvme.SGLTypeInvalid | dnr
	}
	if d.Reserved() != 0 {
		return nvme.InvalidField | dnr
	}
	if kind == nvme.SGLBitBucket && !toHost {
		return nvme.Success // nothing is taken from a bit bucket
	}
	if s.total+uint64(d.Length) > length {
		return nvme.SGLLengthInvalid | dnr
	}
	switch {
	case d.Length == 0:
		return nvme.Success
	case kind == nvme.SGLBitBucket:
		return s.addBucket(m, uint64(d.Length))
	}
	return s.add(m, d.Addr, uint64(d.Length))
}
