package gio

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/nvme"
)

// walk follows a command's PRPs as a controller does (Base 2.0 section 4.1.1) and lists the pages it is led to.
func walk(t testing.TB, sqe *nvme.SQE, n uint32, lists []byte, listBase uint64) []uint64 {
	t.Helper()
	first := sqe.DPTR[0]
	pages := []uint64{first}
	left := int64(n) - int64(pageBytes-first%pageBytes)
	if left <= 0 {
		require.Zero(t, sqe.DPTR[1], "no second PRP for one page")
		return pages
	}
	if left <= pageBytes {
		return append(pages, sqe.DPTR[1])
	}
	at := sqe.DPTR[1]
	require.Zero(t, at%8)
	for left > 0 {
		if at < listBase || at+8 > listBase+uint64(len(lists)) {
			t.Fatalf("led to %#x, which is no list", at)
		}
		entry := binary.LittleEndian.Uint64(lists[at-listBase:])
		if entry%pageBytes != 0 {
			t.Fatalf("entry %#x of a list has an offset", entry)
		}
		if at%pageBytes == pageBytes-8 && left > pageBytes {
			at = entry // the list goes on
			continue
		}
		pages = append(pages, entry)
		left -= pageBytes
		at += 8
	}
	return pages
}

func TestPRPListsLeadToEveryPage(t *testing.T) {
	const dma = 0x7f00_0000_0000
	for _, size := range []int{pageBytes, 3 << 20, 16<<20 + 5*pageBytes} {
		lists := make([]byte, prpTableBytes(size))
		base := uint64(dma + 1<<32)
		table := newPRPTable(lists, base, dma, size)
		check := func(offset uint64, n uint32) {
			var sqe nvme.SQE
			table.put(&sqe, dma+offset, n)
			pages := walk(t, &sqe, n, lists, base)
			require.Len(t, pages, nvme.PRPPages(dma+offset, n))
			require.Equal(t, dma+offset, pages[0])
			for i := 1; i < len(pages); i++ {
				if want := (dma+offset)&^(pageBytes-1) + uint64(i)*pageBytes; pages[i] != want {
					t.Fatalf("offset %#x length %d: page %d is %#x, want %#x", offset, n, i, pages[i], want)
				}
			}
		}
		total := size / pageBytes
		for _, pages := range []int{1, 2, 3, 32, 33, 255, 256, 257, 258, 511, 512} {
			for start := 0; start+pages <= total; start += 1 + rand.IntN(5) {
				check(uint64(start)*pageBytes, uint32(pages)*pageBytes)
			}
		}
		for range 2000 {
			offset := uint64(rand.IntN(size/4)) * 4
			check(offset, uint32(1+rand.IntN(min(2<<20, size-int(offset)))))
		}
	}
}

func TestPRPTableIsSmall(t *testing.T) {
	require.LessOrEqual(t, prpTableBytes(1<<30), 1<<30/240)
}
