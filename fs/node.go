package fs

import (
	"encoding/hex"
	"fmt"
	"strconv"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"

	"tuttifs/gpufile"
)

// nodeID is computed, never handed out, so that a million entries cost nothing to know:
//
//	bits 61..63  kind
//	bits 51..60  pool: its number in this mount
//	bits 32..50  the low 19 bits of the file's generation
//	bits  0..31  slot, or which of the fixed nodes
//
// A node id whose generation bits differ from those of the slot's present file is stale (ESTALE), never that other
// file. Generations count up over the whole volume, so to be mistaken for its successor a node id would have to be kept
// while exactly a multiple of 524,288 files are stored; the kernel asks again by name after the entry timeout, and an
// open file holds its slot.
type nodeID uint64

type nodeKind uint8

const (
	kindFixed  nodeKind = iota // the root, /.tuttifs and its files, files being copied in
	kindPool                   // a pool's directories and identity.json
	kindBlock                  // blocks/<hh>/<key>
	kindPrefix                 // prefixes/<key>/
	kindLink                   // prefixes/<key>/<nnnnn>_<key>: of the file it points to, so chains share it
)

const (
	genBits  = 19
	genMask  = 1<<genBits - 1
	poolsMax = 1 << 10

	nodeRoot   = nodeID(fuse.FUSE_ROOT_ID)
	nodeStatus = nodeID(2)       // /.tuttifs
	nodeText   = nodeID(1 << 16) // + i: /.tuttifs/<i-th file>; the one after the last is control
	nodeUpload = nodeID(1 << 40) // + n: the n-th file being copied in

	// Of kindPool, in the place of a slot.
	poolTop      = 0
	poolBlocks   = 1
	poolPrefixes = 2
	poolIdentity = 3
	poolShard    = 256 // + hh: blocks/<hh>
)

func makeNode(kind nodeKind, pool int, generation uint64, slot uint32) nodeID {
	return nodeID(kind)<<61 | nodeID(pool)<<51 | nodeID(generation&genMask)<<32 | nodeID(slot)
}

func (n nodeID) kind() nodeKind     { return nodeKind(n >> 61) }
func (n nodeID) pool() int          { return int(n >> 51 & (poolsMax - 1)) }
func (n nodeID) generation() uint64 { return uint64(n >> 32 & genMask) }
func (n nodeID) slot() uint32       { return uint32(n) }

// upload says whether n is a file being copied in.
func (n nodeID) upload() bool { return n.kind() == kindFixed && n >= nodeUpload }

// dir says whether n is a directory.
func (n nodeID) dir() bool {
	switch n.kind() {
	case kindFixed:
		return n == nodeRoot || n == nodeStatus
	case kindPool:
		return n.slot() <= poolPrefixes || n.slot() >= poolShard && n.slot() < poolShard+256
	}
	return n.kind() == kindPrefix
}

const (
	keyChars  = 2 * len(gpufile.Key{})
	hexDigits = "0123456789abcdef"
)

// parseKey reads a key's name: 64 lower-case hexadecimal digits. Anything else is not a key.
func parseKey(name string) (key gpufile.Key, ok bool) {
	if len(name) != keyChars {
		return key, false
	}
	for i := range key {
		hi, lo := nibble(name[2*i]), nibble(name[2*i+1])
		if hi|lo > 15 {
			return key, false
		}
		key[i] = hi<<4 | lo
	}
	return key, true
}

func nibble(c byte) byte {
	switch {
	case c >= '0' && c <= '9':
		return c - '0'
	case c >= 'a' && c <= 'f':
		return c - 'a' + 10
	}
	return 0xff
}

// parseShard reads the name of a directory of blocks: two lower-case hexadecimal digits.
func parseShard(name string) (hh byte, ok bool) {
	if len(name) != 2 {
		return 0, false
	}
	hi, lo := nibble(name[0]), nibble(name[1])
	return hi<<4 | lo, hi|lo <= 15
}

func shardName(hh byte) string { return string([]byte{hexDigits[hh>>4], hexDigits[hh&15]}) }

func keyName(key *gpufile.Key) string { return hex.EncodeToString(key[:]) }

// keyText writes a key's name into b and returns it as a string that is valid until b is written again.
func keyText(b *[keyChars]byte, key *gpufile.Key) string {
	hex.Encode(b[:], key[:])
	return unsafe.String(&b[0], len(b))
}

// linkName is the i-th name of a chain.
func linkName(i int, key *gpufile.Key) string { return fmt.Sprintf("%05d_%x", i, key[:]) }

// parseLink is linkName's inverse and accepts nothing that linkName does not make.
func parseLink(name string) (i int, key gpufile.Key, ok bool) {
	digits := len(name) - keyChars - 1
	if digits < 5 || digits > 9 || name[digits] != '_' {
		return 0, key, false
	}
	for _, c := range []byte(name[:digits]) {
		if c < '0' || c > '9' {
			return 0, key, false
		}
	}
	i, err := strconv.Atoi(name[:digits])
	if err != nil || digits > 5 && name[0] == '0' {
		return 0, key, false
	}
	key, ok = parseKey(name[digits+1:])
	return i, key, ok
}

// linkTarget is what such a name points to, relative to its directory.
func linkTarget(key *gpufile.Key) string {
	name := keyName(key)
	return "../../blocks/" + name[:2] + "/" + name
}
