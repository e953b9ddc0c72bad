package nvme

import (
	"errors"
	"fmt"
)

// PageBytes is the memory page that executors build PRPs for (CC.MPS 0).
const PageBytes = 4096

var (
	// ErrPRPList: the list given to SetPRP is too small or misaligned.
	ErrPRPList = errors.New("nvme: PRP list memory")
	// ErrAddress: a data address or length that no PRP or SGL can express.
	ErrAddress = errors.New("nvme: data address or length")
)

// PRP entries (Base 2.0 section 4.1.1): PRP1 may have an offset in its page, which must be a multiple of 4; all further
// entries point at whole pages. With two pages PRP2 is the second; with more it points at a list, whose address must be
// a multiple of 8. A list ends at its page's end; if more entries are needed there, the last one points at the next
// list page.

// PRPPages is the number of PRP entries that describe length bytes from addr.
func PRPPages(addr uint64, length uint32) int {
	if length == 0 {
		return 0
	}
	return int((addr%PageBytes + uint64(length) + PageBytes - 1) / PageBytes)
}

// PRPListEntries is the number of list words that SetPRP needs for length bytes from addr when the list lies at
// listAddr, chain pointers included. Zero when PRP1 and PRP2 suffice.
func PRPListEntries(addr uint64, length uint32, listAddr uint64) int {
	need := PRPPages(addr, length) - 1
	if need <= 1 {
		return 0
	}
	words, room := 0, PRPListRoom(listAddr)
	for need > room {
		words += room
		need -= room - 1 // the last word of the page is the pointer
		room = PageBytes / 8
	}
	return words + need
}

// PRPListRoom is how many words a list at addr holds up to the end of its page.
func PRPListRoom(addr uint64) int { return int(PageBytes-addr%PageBytes) / 8 }

// SetPRP points the command at length contiguous bytes of I/O addresses by PRPs. Where a list is needed, it is written
// into list, the memory that controllers reach at listAddr.
func (e *SQE) SetPRP(addr uint64, length uint32, list []uint64, listAddr uint64) error {
	if length == 0 || addr%4 != 0 || addr+uint64(length) < addr {
		return fmt.Errorf("%w: %d bytes at %#x", ErrAddress, length, addr)
	}
	e.Flags &^= FlagPSDTMask
	e.DPTR = [2]uint64{addr, 0}
	pages := PRPPages(addr, length)
	next := addr - addr%PageBytes + PageBytes
	if pages <= 2 {
		if pages == 2 {
			e.DPTR[1] = next
		}
		return nil
	}
	words := PRPListEntries(addr, length, listAddr)
	if words > len(list) || listAddr%8 != 0 {
		return fmt.Errorf("%w: %d words at %#x, %d needed, address a multiple of 8",
			ErrPRPList, len(list), listAddr, words)
	}
	e.DPTR[1] = listAddr
	for i := range words {
		here := listAddr + uint64(i)*8
		if here%PageBytes == PageBytes-8 && i+1 < words {
			list[i] = here + 8
			continue
		}
		list[i] = next
		next += PageBytes
	}
	return nil
}
