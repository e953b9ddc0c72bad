package gpufile

import (
	"crypto/rand"
	"encoding/binary"
	"math/bits"
	"unsafe"

	"tuttifs/extentmap"
)

const (
	indexShards = 256
	tagBits     = 30
	// empty is above every entry, so that runs end there and comparisons need no second test.
	empty = ^uint64(0)
	// A table grows at loadMax to loadNew, and shrinks to loadNew below loadMin (all in 1/100).
	loadMax = 85
	loadNew = 60
	loadMin = 25
	// lookupStage is how many keys go through the stages of a batch together: enough to keep a core's outstanding
	// misses busy, few enough that what one stage loads is still in the first-level cache in the next.
	lookupStage = 64
)

// index finds slots by key. It is split by the key's first byte, as the mount's directories are. An entry is
// tag<<32 | slot, the tag a keyed hash of the key; the key itself is compared with the record, so the index holds none.
//
// A table is sorted: linear probing from a home that grows with the tag, runs kept in order. So a listing that resumes
// behind the last entry it gave meets every file that was there throughout exactly once, whatever was inserted, removed
// or rehashed meanwhile: entries have a place in an order, not a position in a table.
type index struct {
	m      *extentmap.Pool
	secret [5]uint64
	shards [indexShards]table
	arena  []byte // memory of the tables made at Open
}

// table is one shard. Its last word is always empty.
type table struct {
	b     []uint64
	size  uint64 // homes; b is longer, so that the last run has room
	count int
	raw   []byte // its own mapping; nil on the heap or in the arena
}

func newIndex(m *extentmap.Pool) *index {
	x := &index{m: m}
	var seed [40]byte
	_, _ = rand.Read(seed[:]) // never fails, by its contract
	for i := range x.secret {
		x.secret[i] = binary.LittleEndian.Uint64(seed[8*i:])
	}
	return x
}

// hash mixes a key with the mount's secret, so that nobody can choose keys that crowd one run.
func (x *index) hash(k *Key) uint64 {
	a := binary.LittleEndian.Uint64(k[0:]) ^ x.secret[0]
	b := binary.LittleEndian.Uint64(k[8:]) ^ x.secret[1]
	c := binary.LittleEndian.Uint64(k[16:]) ^ x.secret[2]
	d := binary.LittleEndian.Uint64(k[24:]) ^ x.secret[3]
	h1, l1 := bits.Mul64(a, b)
	h2, l2 := bits.Mul64(c, d)
	h3, l3 := bits.Mul64(h1^l1^x.secret[4], bits.RotateLeft64(h2^l2, 32)|1)
	return h3 ^ l3
}

func (x *index) tag(k *Key) uint64 { return x.hash(k) >> (64 - tagBits) }

// entry is the word of a key and its slot.
func (x *index) entry(k *Key, slot uint32) uint64 { return x.tag(k)<<32 | uint64(slot) }

func home(entry, size uint64) uint64 { return (entry >> 32) * size >> tagBits }

// find returns the slot of one key, or none.
func (x *index) find(k *Key) uint32 {
	t := &x.shards[k[0]]
	if t.count == 0 {
		return none
	}
	tag := x.tag(k)
	i := home(tag<<32, t.size)
	for t.b[i]>>32 < tag {
		i++
	}
	for ; t.b[i]>>32 == tag; i++ {
		if slot := uint32(t.b[i]); *x.m.RecordKey(slot) == *k {
			return slot
		}
	}
	return none
}

// lookup finds a batch: all hashes, then all buckets, then all keys, so that the misses of a stage overlap.
func (x *index) lookup(keys []Key, slots []uint32) {
	for len(keys) > 0 {
		n := min(len(keys), lookupStage)
		x.lookupStage(keys[:n], slots[:n])
		keys, slots = keys[n:], slots[n:]
	}
}

func (x *index) lookupStage(keys []Key, slots []uint32) {
	var (
		tags [lookupStage]uint64
		at   [lookupStage]*uint64 // first bucket to look at; nil in an empty shard
		key  [lookupStage]*Key    // of the record that was found
		warm uint64
	)
	for i := range keys {
		k := &keys[i]
		t := &x.shards[k[0]]
		tag := x.tag(k)
		tags[i], at[i] = tag, nil
		if t.count != 0 {
			at[i] = &t.b[home(tag<<32, t.size)]
		}
	}
	for i := range keys {
		if at[i] != nil {
			warm += *at[i]
		}
	}
	for i := range keys {
		slots[i] = none
		p := at[i]
		if p == nil {
			continue
		}
		// A run ends at an empty word, and the last word of a table is empty: the walk stays inside.
		for *p>>32 < tags[i] {
			p = (*uint64)(unsafe.Add(unsafe.Pointer(p), 8))
		}
		if *p>>32 == tags[i] {
			slots[i] = uint32(*p)
			key[i] = x.m.RecordKey(slots[i])
			warm += uint64(key[i][0])
		}
	}
	for i := range keys {
		if slots[i] != none && *key[i] != keys[i] {
			slots[i] = x.find(&keys[i]) // two keys of one tag: rare
		}
	}
	keep(warm)
}

// keep makes the compiler believe that the loads of a stage are used.
//
//go:noinline
func keep(uint64) {}

// insert adds a key that is not there.
func (x *index) insert(k *Key, slot uint32) {
	t := &x.shards[k[0]]
	if uint64(t.count+1)*100 > t.size*loadMax {
		t.resize(uint64(t.count+1)*100/loadNew + 8)
	}
	for !t.insert(x.entry(k, slot)) {
		t.resize(t.size + t.size/8 + 8) // the last run has reached the end
	}
}

func (t *table) insert(v uint64) bool {
	i := home(v, t.size)
	for t.b[i] < v {
		i++
	}
	j := i
	for t.b[j] != empty {
		j++
	}
	if int(j) >= len(t.b)-1 {
		return false
	}
	copy(t.b[i+1:j+1], t.b[i:j])
	t.b[i] = v
	t.count++
	return true
}

// remove takes a key's entry out; it must be there.
func (x *index) remove(k *Key, slot uint32) {
	t := &x.shards[k[0]]
	t.remove(x.entry(k, slot))
	if t.size > 512 && uint64(t.count)*100 < t.size*loadMin {
		t.resize(uint64(t.count)*100/loadNew + 8)
	}
}

func (t *table) remove(v uint64) {
	i := home(v, t.size)
	for t.b[i] < v {
		i++
	}
	j := i + 1
	for t.b[j] != empty && home(t.b[j], t.size) < j {
		j++
	}
	copy(t.b[i:j-1], t.b[i+1:j])
	t.b[j-1] = empty
	t.count--
}

// tableWords is the length of a table of size homes.
func tableWords(size uint64) int { return int(size + size/32 + 16) }

func (t *table) resize(size uint64) {
	for {
		b, raw := mapWords(tableWords(size))
		n := table{b: b, size: size, raw: raw}
		if n.place(t.b) {
			unmap(t.raw)
			*t = n
			return
		}
		unmap(raw)
		size += size/8 + 8
	}
}

// place fills an unused table with sorted entries, skipping empty words. It reports false when the last run has no
// room.
func (t *table) place(sorted []uint64) bool {
	fill(t.b)
	next := uint64(0)
	for _, v := range sorted {
		if v == empty {
			continue
		}
		at := max(home(v, t.size), next)
		if int(at) >= len(t.b)-1 {
			return false
		}
		t.b[at] = v
		next = at + 1
		t.count++
	}
	return true
}

func fill(b []uint64) {
	for i := range b {
		b[i] = empty
	}
}

// scan copies entries from (inclusive) in order into out.
func (t *table) scan(from uint64, out []uint64) int {
	if t.count == 0 {
		return 0
	}
	i := home(min(from, 1<<(32+tagBits)-1), t.size)
	n := 0
	for ; int(i) < len(t.b) && n < len(out); i++ {
		if v := t.b[i]; v >= from && v != empty {
			out[n] = v
			n++
		}
	}
	return n
}

// reserveArena makes all tables at once, unfilled, in one mapping that can have huge pages. ends has for each shard the
// number of entries up to its last.
func (x *index) reserveArena(ends *[indexShards]int) {
	total, before := 0, 0
	for i, end := range ends {
		t := &x.shards[i]
		t.size = uint64(end-before)*100/70 + 8
		total, before = total+tableWords(t.size), end
	}
	words, raw := mapWords(total)
	x.arena = raw
	for i := range x.shards {
		t := &x.shards[i]
		n := tableWords(t.size)
		t.b, words = words[:n:n], words[n:]
	}
}

func (x *index) close() {
	for i := range x.shards {
		unmap(x.shards[i].raw)
		x.shards[i] = table{}
	}
	unmap(x.arena)
	x.arena = nil
}

// bytes is the memory of the tables, for tests and benches.
func (x *index) bytes() int {
	n := 0
	for i := range x.shards {
		n += len(x.shards[i].b) * 8
	}
	return n
}
