package gio

import (
	"encoding/binary"

	"tuttifs/nvme"
)

// PRP lists (Base 2.0 section 4.1.1) are written once, for the whole DMA memory, and every command points into them.
//
// A list is one page of 512 entries. Window j names the 511 pages from windowStart(j) on, and its last entry chains to
// window j+2, which begins with the page that follows. Windows overlap by half, so that a transfer that would end
// exactly in a window's last entry, where the chain stands and data would be needed, is served by the window before.
// A transfer of any start and up to 513 pages finds its list with a division, at 16 bytes of list a page of memory,
// where lists of their own for every start would cost 256 and more.
const (
	pageBytes   = 4096
	pageShift   = 12
	prpPerPage  = pageBytes / 8
	windowPages = prpPerPage - 1
	// windowHalf is the distance from an even window to the odd one that follows it.
	windowHalf = windowPages / 2
)

// prpTable is the windows in DMA memory. Pages are numbered from the start of the DMA memory; windows 1.. exist, so
// that the window before that of page 0 does.
type prpTable struct {
	base uint64 // I/O address of window 1
	dma  uint64 // I/O address of page 0
}

// prpTableBytes is the room that a table for n bytes of DMA memory takes.
func prpTableBytes(n int) int {
	return prpWindows(n) * pageBytes
}

// prpWindows counts the windows of which some entry names a page of n bytes, and the two that they may chain to.
func prpWindows(n int) int {
	return 2*(n/pageBytes/windowPages+1) + 3
}

// windowStart is the page that window j's first entry names; negative for the first windows, whose first entries are
// never used.
func windowStart(j int) int {
	return (j/2-1)*windowPages + j%2*windowHalf
}

// newPRPTable writes the windows of a DMA memory of n bytes at I/O address dma into b, whose I/O address is base.
func newPRPTable(b []byte, base, dma uint64, n int) prpTable {
	for w := range prpWindows(n) {
		page := b[w*pageBytes : (w+1)*pageBytes]
		start := windowStart(w + 1)
		for i := range windowPages {
			address := uint64(0)
			if p := start + i; p >= 0 && p < n/pageBytes {
				address = dma + uint64(p)<<pageShift
			}
			binary.LittleEndian.PutUint64(page[i*8:], address)
		}
		chain := uint64(0)
		if w+2 < prpWindows(n) {
			chain = base + uint64(w+2)*pageBytes
		}
		binary.LittleEndian.PutUint64(page[windowPages*8:], chain)
	}
	return prpTable{base: base, dma: dma}
}

// put fills a command's data pointer for n bytes at address, which lie in the DMA memory.
func (t *prpTable) put(sqe *nvme.SQE, address uint64, n uint32) {
	sqe.DPTR[0] = address
	pages := (uint32(address)&(pageBytes-1) + n + pageBytes - 1) >> pageShift
	switch {
	case pages <= 1:
		sqe.DPTR[1] = 0
	case pages == 2:
		sqe.DPTR[1] = address&^(pageBytes-1) + pageBytes
	default:
		sqe.DPTR[1] = t.list(uint32((address-t.dma)>>pageShift)+1, pages-1)
	}
}

// list is the address of a list of n entries, the first of which names the given page.
func (t *prpTable) list(page, n uint32) uint64 {
	block, within := page/windowPages+1, page%windowPages
	j, at := 2*block, within
	if within >= windowHalf {
		j, at = j+1, within-windowHalf
	}
	if at+n == prpPerPage {
		j--
		at += windowHalf + (j & 1)
	}
	return t.base + uint64(j-1)*pageBytes + uint64(at)*8
}
