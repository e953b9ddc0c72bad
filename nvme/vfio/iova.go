package vfio

import (
	"fmt"
	"math"
	"os"
	"slices"
	"sync"
)

// span is a range of I/O addresses, its last one included: a range may end with the address space.
type span struct{ first, last uint64 }

// iovas hands out addresses of an IOMMU's address space, which has holes.
type iovas struct {
	mu   sync.Mutex
	free []span // sorted, apart from each other, of whole pages
}

// largeBytes is the alignment of what is as large: the IOMMU can map it by large pages then.
const largeBytes = 2 << 20

// newIOVAs takes the ranges that the kernel names, in any order. The first MiB is left out: a zero address is a mistake
// that should not work.
func newIOVAs(ranges []span) (*iovas, error) {
	v := &iovas{}
	for _, r := range ranges {
		r.first = (max(r.first, 1<<20) + PageBytes - 1) &^ (PageBytes - 1)
		if r.last < PageBytes-1 {
			continue
		}
		if r.last != math.MaxUint64 {
			r.last -= (r.last + 1) % PageBytes // the last page is whole, or not there
		}
		if r.first < r.last {
			v.free = append(v.free, r)
		}
	}
	slices.SortFunc(v.free, func(a, b span) int {
		if a.first < b.first {
			return -1
		}
		return 1
	})
	for i := 1; i < len(v.free); i++ {
		if v.free[i].first <= v.free[i-1].last {
			return nil, fmt.Errorf("vfio: I/O address ranges overlap at %#x: %w", v.free[i].first, ErrUnsuitable)
		}
	}
	if len(v.free) == 0 {
		return nil, fmt.Errorf("vfio: the IOMMU offers no I/O addresses: %w", ErrUnsuitable)
	}
	return v, nil
}

// alloc takes n bytes, a multiple of pages, at the lowest address that fits.
func (v *iovas) alloc(n uint64) (uint64, error) {
	align := uint64(os.Getpagesize())
	if n >= largeBytes {
		align = largeBytes
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	for i, s := range v.free {
		at := (s.first + align - 1) &^ (align - 1)
		if n == 0 || at < s.first || at > s.last || n-1 > s.last-at {
			continue
		}
		v.cut(i, at, n)
		return at, nil
	}
	return 0, fmt.Errorf("vfio: no room for %d bytes among the I/O addresses: %w", n, ErrUnsuitable)
}

// take takes n bytes at an address, if all of them are free.
func (v *iovas) take(at, n uint64) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	for i, s := range v.free {
		if n > 0 && at >= s.first && at <= s.last && n-1 <= s.last-at {
			v.cut(i, at, n)
			return true
		}
	}
	return false
}

// cut takes n bytes at an address out of the i-th free range, which has them. The caller holds mu.
func (v *iovas) cut(i int, at, n uint64) {
	s := v.free[i]
	var rest []span
	if at > s.first {
		rest = append(rest, span{s.first, at - 1})
	}
	if end := at + n - 1; end < s.last {
		rest = append(rest, span{end + 1, s.last})
	}
	v.free = slices.Replace(v.free, i, i+1, rest...)
}

// release gives back what alloc or take took.
func (v *iovas) release(at, n uint64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	i, _ := slices.BinarySearchFunc(v.free, at, func(s span, at uint64) int {
		if s.first < at {
			return -1
		}
		return 1
	})
	v.free = slices.Insert(v.free, i, span{at, at + n - 1})
	if i+1 < len(v.free) && v.free[i].last+1 == v.free[i+1].first {
		v.free[i].last = v.free[i+1].last
		v.free = slices.Delete(v.free, i+1, i+2)
	}
	if i > 0 && v.free[i-1].last+1 == v.free[i].first {
		v.free[i-1].last = v.free[i].last
		v.free = slices.Delete(v.free, i, i+1)
	}
}
