package nvme

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"
	"structs"
	"unsafe"
)

// IdentifyBytes is the size of every Identify data structure.
const IdentifyBytes = 4096

// ErrIdentify: bytes that are no Identify structure, or name what this package does not support.
var ErrIdentify = errors.New("nvme: identify data")

// IdentifyController is the Identify Controller data structure (CNS 01h, Base 2.0 figure 275). Parts that tuttifs does
// not use are reserved here.
type IdentifyController struct {
	_         structs.HostLayout
	VID       uint16
	SSVID     uint16
	SN        [20]byte // ASCII, padded with spaces
	MN        [40]byte
	FR        [8]byte
	RAB       uint8
	IEEE      [3]byte
	CMIC      uint8
	MDTS      uint8 // power of two of the smallest page (CAP.MPSMIN); 0 is no limit
	CNTLID    uint16
	VER       uint32
	RTD3R     uint32
	RTD3E     uint32
	OAES      uint32
	CTRATT    uint32
	RRLS      uint16
	_         [9]byte
	CNTRLTYPE uint8 // 1 is an I/O controller
	FGUID     [16]byte
	CRDT      [3]uint16 // command retry delays in 100 ms
	_         [122]byte
	OACS      uint16
	ACL       uint8 // concurrent Aborts, zero-based
	AERL      uint8 // concurrent Asynchronous Event Requests, zero-based
	FRMW      uint8
	LPA       uint8
	ELPE      uint8 // error log entries, zero-based
	NPSS      uint8
	AVSCC     uint8
	APSTA     uint8
	WCTEMP    uint16 // kelvin
	CCTEMP    uint16
	_         [10]byte
	TNVMCAP   [16]byte // bytes, little-endian
	UNVMCAP   [16]byte
	_         [8]byte
	KAS       uint16
	_         [18]byte
	ENDGIDMAX uint16 // highest endurance group
	_         [170]byte
	SQES      uint8 // required in bits 3:0, maximum in 7:4, powers of two
	CQES      uint8
	MAXCMD    uint16
	NN        uint32
	ONCS      uint16
	FUSES     uint16
	FNA       uint8
	VWC       uint8 // bit 0: a volatile write cache is present
	AWUN      uint16
	AWUPF     uint16
	ICSVSCC   uint8
	NWPC      uint8
	ACWU      uint16
	CDFS      uint16
	SGLS      uint32 // bits 1:0: 1 is support without alignment demands
	MNAN      uint32
	_         [224]byte
	SUBNQN    [256]byte // UTF-8, padded with zeroes
	_         [1024]byte
	PSD       [32][32]byte
	_         [1024]byte
}

// Bits of CTRATT, OACS, LPA, FNA, ONCS, VWC and SGLS that are used.
const (
	CTRATTGroups = 1 << 4  // endurance groups
	CTRATTFDP    = 1 << 19 // Flexible Data Placement
	OACSFormat   = 1 << 1
	// OACSDoorbellBuffer: Doorbell Buffer Config.
	OACSDoorbellBuffer = 1 << 8
	LPASMARTPerNS      = 1 << 0
	LPAExtended        = 1 << 2 // Get Log Page takes an offset and 32 bits of length
	FNAFormatAll       = 1 << 0 // Format NVM is for all namespaces at once
	ONCSCompare        = 1 << 0
	ONCSDSM            = 1 << 2
	ONCSWriteZeroes    = 1 << 3
	VWCPresent         = 1 << 0
	VWCFlushNSID       = 3 << 1 // Flush supports the broadcast NSID
	SGLSMask           = 3 << 0 // 0 is no support
	SGLSSupported      = 1 << 0
	SGLSDwordAligned   = 2 << 0
	SGLSBitBucket      = 1 << 16
	ControllerIO       = 1
)

// LBAFormat is one LBA format of a namespace (NVM 1.0 figure 98).
type LBAFormat struct {
	_     structs.HostLayout
	MS    uint16 // metadata bytes
	LBADS uint8  // LBA bytes as a power of two; 0: there is no such format
	RP    uint8  // bits 1:0: relative performance, 0 is the best
}

// Bytes is the size of a block, without metadata. 0 says that the format is not there, or is none of this world.
func (f LBAFormat) Bytes() int {
	if f.LBADS == 0 || f.LBADS > 30 {
		return 0
	}
	return 1 << f.LBADS
}

// Performance names the relative performance.
func (f LBAFormat) Performance() string {
	return [...]string{"best", "better", "good", "degraded"}[f.RP&3]
}

// IdentifyNamespace is the Identify Namespace data structure of the NVM command set (CNS 00h, NVM 1.0 figure 97).
type IdentifyNamespace struct {
	_        structs.HostLayout
	NSZE     uint64 // blocks
	NCAP     uint64
	NUSE     uint64
	NSFEAT   uint8
	NLBAF    uint8 // zero-based
	FLBAS    uint8
	MC       uint8
	DPC      uint8
	DPS      uint8
	NMIC     uint8
	RESCAP   uint8
	FPI      uint8
	DLFEAT   uint8 // bits 2:0: what deallocated blocks read as; bit 3: Write Zeroes honours DEAC
	NAWUN    uint16
	NAWUPF   uint16
	NACWU    uint16
	NABSN    uint16
	NABO     uint16
	NABSPF   uint16
	NOIOB    uint16
	NVMCAP   [16]byte
	NPWG     uint16
	NPWA     uint16
	NPDG     uint16
	NPDA     uint16
	NOWS     uint16
	_        [18]byte
	ANAGRPID uint32
	_        [3]byte
	NSATTR   uint8 // bit 0: write protected
	NVMSETID uint16
	ENDGID   uint16
	NGUID    [16]byte
	EUI64    [8]byte
	LBAF     [64]LBAFormat
	_        [3712]byte
}

// Values of namespace fields that are used.
const (
	DLFEATZeroes      = 1      // of bits 2:0: deallocated blocks read as zeroes
	DLFEATWriteZeroes = 1 << 3 // Write Zeroes deallocates if it is asked to
	NSWriteProtect    = 1 << 0
)

var (
	_ = [1]struct{}{}[unsafe.Sizeof(IdentifyController{})-IdentifyBytes]
	_ = [1]struct{}{}[unsafe.Offsetof(IdentifyController{}.MDTS)-77]
	_ = [1]struct{}{}[unsafe.Offsetof(IdentifyController{}.CNTRLTYPE)-111]
	_ = [1]struct{}{}[unsafe.Offsetof(IdentifyController{}.OACS)-256]
	_ = [1]struct{}{}[unsafe.Offsetof(IdentifyController{}.TNVMCAP)-280]
	_ = [1]struct{}{}[unsafe.Offsetof(IdentifyController{}.KAS)-320]
	_ = [1]struct{}{}[unsafe.Offsetof(IdentifyController{}.ENDGIDMAX)-340]
	_ = [1]struct{}{}[unsafe.Offsetof(IdentifyController{}.SQES)-512]
	_ = [1]struct{}{}[unsafe.Offsetof(IdentifyController{}.VWC)-525]
	_ = [1]struct{}{}[unsafe.Offsetof(IdentifyController{}.SGLS)-536]
	_ = [1]struct{}{}[unsafe.Offsetof(IdentifyController{}.SUBNQN)-768]
	_ = [1]struct{}{}[unsafe.Offsetof(IdentifyController{}.PSD)-2048]
	_ = [1]struct{}{}[unsafe.Sizeof(IdentifyNamespace{})-IdentifyBytes]
	_ = [1]struct{}{}[unsafe.Offsetof(IdentifyNamespace{}.DLFEAT)-33]
	_ = [1]struct{}{}[unsafe.Offsetof(IdentifyNamespace{}.NVMCAP)-48]
	_ = [1]struct{}{}[unsafe.Offsetof(IdentifyNamespace{}.ANAGRPID)-92]
	_ = [1]struct{}{}[unsafe.Offsetof(IdentifyNamespace{}.NSATTR)-99]
	_ = [1]struct{}{}[unsafe.Offsetof(IdentifyNamespace{}.NGUID)-104]
	_ = [1]struct{}{}[unsafe.Offsetof(IdentifyNamespace{}.LBAF)-128]
)

// wire is the bytes of a wire struct, which must have neither pointers nor padding.
func wire[T any](v *T) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v)) }

// AppendBinary appends the structure's 4096 bytes.
func (c *IdentifyController) AppendBinary(b []byte) ([]byte, error) {
	return append(b, wire(c)...), nil
}

// AppendBinary appends the structure's 4096 bytes.
func (n *IdentifyNamespace) AppendBinary(b []byte) ([]byte, error) { return append(b, wire(n)...), nil }

// UnmarshalBinary takes the structure from exactly 4096 bytes and refuses queue entry sizes that are not NVMe's.
func (c *IdentifyController) UnmarshalBinary(b []byte) error {
	if len(b) != IdentifyBytes {
		return fmt.Errorf("%w: controller: %d bytes, want %d", ErrIdentify, len(b), IdentifyBytes)
	}
	copy(wire(c), b)
	if c.SQES&0xf > 6 || c.SQES>>4 < 6 || c.CQES&0xf > 4 || c.CQES>>4 < 4 {
		return fmt.Errorf("%w: controller: entry sizes SQES %#x, CQES %#x do not allow 64 and 16 bytes",
			ErrIdentify, c.SQES, c.CQES)
	}
	return nil
}

// Decode takes the structure from exactly 4096 bytes, whatever they say.
func (n *IdentifyNamespace) Decode(b []byte) error {
	if len(b) != IdentifyBytes {
		return fmt.Errorf("%w: namespace: %d bytes, want %d", ErrIdentify, len(b), IdentifyBytes)
	}
	copy(wire(n), b)
	return nil
}

// UnmarshalBinary is Decode that refuses formats with metadata or odd block sizes.
func (n *IdentifyNamespace) UnmarshalBinary(b []byte) error {
	if err := n.Decode(b); err != nil {
		return err
	}
	f := n.Format()
	if n.NSZE != 0 && (f.LBADS < 9 || f.LBADS > 12 || f.MS != 0) {
		return fmt.Errorf("%w: namespace: format of 1<<%d bytes with %d of metadata; want 512 to 4096 and none",
			ErrIdentify, f.LBADS, f.MS)
	}
	if n.NSZE != 0 && bits.Len64(n.NSZE)+int(f.LBADS) > 63 {
		return fmt.Errorf("%w: namespace: %d blocks of 1<<%d bytes are too many", ErrIdentify, n.NSZE, f.LBADS)
	}
	return nil
}

// DSMLimits are what one Dataset Management command may be about at most, as Identify Controller of the NVM command set
// says (CNS 06h, NVM 1.0 section 4.1.5.4). 0 is no limit.
type DSMLimits struct {
	Ranges      uint8  // DMRL
	RangeBlocks uint32 // DMRSL, of one range
	Blocks      uint64 // DMSL, of all ranges
}

// Where the limits are in that structure.
const (
	atDMRL  = 3
	atDMRSL = 4
	atDMSL  = 8
)

// ParseDSMLimits takes the limits from the structure's 4096 bytes.
func ParseDSMLimits(b []byte) (DSMLimits, error) {
	if len(b) != IdentifyBytes {
		return DSMLimits{}, fmt.Errorf("%w: controller of the command set: %d bytes, want %d", ErrIdentify, len(b),
			IdentifyBytes)
	}
	return DSMLimits{Ranges: b[atDMRL], RangeBlocks: binary.LittleEndian.Uint32(b[atDMRSL:]),
		Blocks: binary.LittleEndian.Uint64(b[atDMSL:])}, nil
}

// Put writes the limits into the structure, which has its 4096 bytes.
func (l *DSMLimits) Put(b []byte) {
	b[atDMRL] = l.Ranges
	binary.LittleEndian.PutUint32(b[atDMRSL:], l.RangeBlocks)
	binary.LittleEndian.PutUint64(b[atDMSL:], l.Blocks)
}

// Format is the namespace's formatted LBA format. Bits 6:5 and 3:0 of FLBAS are its index.
func (n *IdentifyNamespace) Format() LBAFormat { return n.LBAF[n.FLBAS&0xf|n.FLBAS>>5&3<<4] }

// Formats are the LBA formats that the namespace can have, and the index of the one that it has, or -1 if that is none
// of them.
func (n *IdentifyNamespace) Formats() (list []LBAFormat, current int) {
	list = slices.Clone(n.LBAF[:min(int(n.NLBAF)+1, len(n.LBAF))])
	if current = int(n.FLBAS&0xf | n.FLBAS>>5&3<<4); current >= len(list) {
		current = -1
	}
	return list, current
}

// FormatOf is the index of the LBA format of 1 << shift bytes without metadata that performs best.
func (n *IdentifyNamespace) FormatOf(shift uint8) (index uint8, ok bool) {
	best := uint8(math.MaxUint8)
	for i := range min(int(n.NLBAF)+1, len(n.LBAF)) {
		// RP is a rank: 0 is the best.
		if f := n.LBAF[i]; f.LBADS == shift && f.MS == 0 && f.RP&3 < best {
			index, best, ok = uint8(i), f.RP&3, true
		}
	}
	return index, ok
}

// SetFormats declares formats of 1 << shift bytes without metadata, from the best performing one on, and which of them
// the namespace has.
func (n *IdentifyNamespace) SetFormats(current int, shifts ...uint8) {
	n.NLBAF, n.FLBAS = uint8(len(shifts)-1), uint8(current&0xf|current>>4&3<<5)
	for i, s := range shifts {
		n.LBAF[i] = LBAFormat{LBADS: s, RP: uint8(min(i, 3))}
	}
}

// PadASCII fills dst with s and spaces, as serial and model numbers are. Other than printable characters become '?'.
func PadASCII(dst []byte, s string) {
	for i := range dst {
		switch {
		case i >= len(s):
			dst[i] = ' '
		case s[i] < 0x20 || s[i] > 0x7e:
			dst[i] = '?'
		default:
			dst[i] = s[i]
		}
	}
}

// ParseNamespaceList takes the identifiers of an active namespace list (CNS 02h, Base 2.0 section 5.17.2.3): ascending,
// ended by zero or by the page.
func ParseNamespaceList(b []byte) (ids []uint32, err error) {
	if len(b) != IdentifyBytes {
		return nil, fmt.Errorf("%w: namespace list: %d bytes, want %d", ErrIdentify, len(b), IdentifyBytes)
	}
	last := uint32(0)
	for ; len(b) > 0; b = b[4:] {
		id := binary.LittleEndian.Uint32(b)
		if id == 0 {
			break
		}
		if id <= last || id >= NSIDBroadcast-1 {
			return nil, fmt.Errorf("%w: namespace list: %#x after %#x", ErrIdentify, id, last)
		}
		ids, last = append(ids, id), id
	}
	return ids, nil
}

// NamespaceNames are what a namespace is known by for ever (CNS 03h, Base 2.0 figure 277). Zero where it has no such
// name.
type NamespaceNames struct {
	EUI64      [8]byte
	NGUID      [16]byte
	UUID       [16]byte
	CommandSet uint8 // 0 is NVM
}

// ParseNamespaceNames takes them from the list of descriptors. Types that are not known are skipped.
func ParseNamespaceNames(b []byte) (n NamespaceNames, err error) {
	if len(b) != IdentifyBytes {
		return n, fmt.Errorf("%w: namespace descriptors: %d bytes, want %d", ErrIdentify, len(b), IdentifyBytes)
	}
	for len(b) >= 4 && b[1] != 0 {
		kind, length := b[0], int(b[1])
		if length > len(b)-4 {
			return NamespaceNames{}, fmt.Errorf("%w: namespace descriptor %d of %d bytes crosses the page's end",
				ErrIdentify, kind, length)
		}
		value := b[4:][:length]
		want := map[uint8][]byte{NIDTEUI64: n.EUI64[:], NIDTNGUID: n.NGUID[:], NIDTUUID: n.UUID[:], NIDTCSI: {0}}[kind]
		if want != nil && len(want) != length {
			return NamespaceNames{}, fmt.Errorf("%w: namespace descriptor %d has %d bytes, want %d",
				ErrIdentify, kind, length, len(want))
		}
		if copy(want, value); kind == NIDTCSI {
			n.CommandSet = value[0]
		}
		b = b[4+length:]
	}
	return n, nil
}

// Text is a serial, model or firmware field as people read it: without padding, and without what a terminal obeys.
func Text(field []byte) string {
	return strings.Map(func(c rune) rune {
		if c < 0x20 || c > 0x7e {
			return '?'
		}
		return c
	}, strings.TrimRight(string(field), " \x00"))
}
