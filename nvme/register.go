package nvme

// Controller registers (Base 2.0 section 3.1.3): offsets in the first BAR.
const (
	RegCAP   = 0x00 // 8 bytes
	RegVS    = 0x08
	RegINTMS = 0x0c
	RegINTMC = 0x10
	RegCC    = 0x14
	RegCSTS  = 0x1c
	RegNSSR  = 0x20
	RegAQA   = 0x24
	RegASQ   = 0x28 // 8 bytes
	RegACQ   = 0x30 // 8 bytes

	// RegDoorbells is where doorbells start.
	RegDoorbells = 0x1000
)

// Version20 is the value of VS for revision 2.0.
const Version20 = 0x00020000

// SQTailDoorbell is the offset of queue id's submission tail doorbell for a CAP.DSTRD of stride (the distance between
// doorbells is 4 << stride bytes).
func SQTailDoorbell(id uint16, stride uint8) uint32 { return RegDoorbells + 2*uint32(id)*(4<<stride) }

// CQHeadDoorbell is the offset of queue id's completion head doorbell.
func CQHeadDoorbell(id uint16, stride uint8) uint32 {
	return RegDoorbells + (2*uint32(id)+1)*(4<<stride)
}

// CAP is the Controller Capabilities register (Base 2.0 figure 36).
type CAP uint64

// Command sets in CAP.CSS.
const (
	CSSNVM     = 1 << 0
	CSSIOSets  = 1 << 6
	CSSNoIOSet = 1 << 7
)

// MakeCAP composes the register. entries is the most entries of a queue, timeout is in units of 500 ms.
func MakeCAP(entries uint32, contiguous bool, timeout uint8, css uint8) CAP {
	c := CAP(entries-1) & 0xffff
	if contiguous {
		c |= 1 << 16
	}
	return c | CAP(timeout)<<24 | CAP(css)<<37
}

// Entries is MQES as a count (the register is zero-based).
func (c CAP) Entries() uint32 { return uint32(c&0xffff) + 1 }

// ContiguousQueues is CQR.
func (c CAP) ContiguousQueues() bool { return c>>16&1 != 0 }

// TimeoutMillis is TO in milliseconds.
func (c CAP) TimeoutMillis() int { return int(c>>24&0xff) * 500 }

// Stride is DSTRD: doorbells are 4 << Stride bytes apart.
func (c CAP) Stride() uint8 { return uint8(c >> 32 & 0xf) }

// CSS is the set of command sets.
func (c CAP) CSS() uint8 { return uint8(c >> 37) }

// PageMinShift and PageMaxShift are the smallest and largest memory page as powers of two.
func (c CAP) PageMinShift() uint { return 12 + uint(c>>48&0xf) }

// PageMaxShift is the largest memory page size as a power of two.
func (c CAP) PageMaxShift() uint { return 12 + uint(c>>52&0xf) }

// CC is the Controller Configuration register (Base 2.0 figure 46).
type CC uint32

// Bits and fields of CC.
const (
	CCEnable       CC = 1 << 0
	CCShutdownMask CC = 3 << 14
	CCShutdown     CC = 1 << 14 // normal
	CCAbrupt       CC = 2 << 14
)

// MakeCC composes the register: NVM command set, round robin, pages of 1 << pageShift, 64- and 16-byte entries.
func MakeCC(enable bool, pageShift uint) CC {
	c := CC(pageShift-12)<<7 | 6<<16 | 4<<20
	if enable {
		c |= CCEnable
	}
	return c
}

// Enabled is EN.
func (c CC) Enabled() bool { return c&CCEnable != 0 }

// CommandSet is CSS.
func (c CC) CommandSet() uint8 { return uint8(c >> 4 & 7) }

// PageShift is the memory page size as a power of two.
func (c CC) PageShift() uint { return 12 + uint(c>>7&0xf) }

// Arbitration is AMS.
func (c CC) Arbitration() uint8 { return uint8(c >> 11 & 7) }

// ShutdownNotification is SHN.
func (c CC) ShutdownNotification() uint8 { return uint8(c >> 14 & 3) }

// SQEShift and CQEShift are the entry sizes as powers of two.
func (c CC) SQEShift() uint { return uint(c >> 16 & 0xf) }

// CQEShift is the size of a completion entry as a power of two.
func (c CC) CQEShift() uint { return uint(c >> 20 & 0xf) }

// Bits of CSTS (Base 2.0 figure 47).
const (
	CSTSReady            = 1 << 0
	CSTSFatal            = 1 << 1
	CSTSShutdownMask     = 3 << 2
	CSTSShutdownActive   = 1 << 2
	CSTSShutdownComplete = 2 << 2
)

// MakeAQA composes the Admin Queue Attributes (Base 2.0 figure 49) from the numbers of entries.
func MakeAQA(sqEntries, cqEntries uint32) uint32 {
	return (sqEntries-1)&0xfff | (cqEntries-1)&0xfff<<16
}

// AQAEntries is the reverse of MakeAQA.
func AQAEntries(aqa uint32) (sqEntries, cqEntries uint32) { return aqa&0xfff + 1, aqa>>16&0xfff + 1 }
