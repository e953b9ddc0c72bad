package emu

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"

	"tuttifs/nvme"
)

// identify answers CNS 00h to 03h, and 05h and 06h for the NVM command set.
func (a *admin) identify(c *command) nvme.Status {
	e := &c.sqe
	clear(a.page[:])
	out := a.page[:0]
	csi := e.CDW11 >> 24
	switch cns := uint8(e.CDW10); cns {
	case nvme.CNSController:
		id := a.c.identifyController()
		out, _ = id.AppendBinary(out)
	case nvme.CNSNamespace, nvme.CNSNSDescriptors, nvme.CNSNamespaceIOCS:
		if e.NSID != 1 {
			return nvme.InvalidNamespace | dnr
		}
		switch {
		case cns == nvme.CNSNamespace:
			id := a.c.identifyNamespace()
			out, _ = id.AppendBinary(out)
		case cns == nvme.CNSNSDescriptors:
			a.c.describe(a.page[:])
		case csi != 0:
			return nvme.InvalidField | dnr
		}
	case nvme.CNSActiveNamespaces:
		if e.NSID >= nvme.NSIDBroadcast-1 {
			return nvme.InvalidNamespace | dnr
		}
		if e.NSID == 0 {
			a.page[0] = 1
		}
	case nvme.CNSControllerIOCS:
		if csi != 0 {
			return nvme.InvalidField | dnr
		}
		a.c.cfg.DSM.Put(a.page[:])
	default:
		return nvme.InvalidField | dnr
	}
	return a.send(c, a.page[:])
}

// digest identifies the namespace for as long as its serial number and index stay.
func (c *Controller) digest() [sha256.Size]byte {
	return sha256.Sum256(fmt.Appendf(nil, "tuttifs namespace %s %d", c.serial(), c.cfg.Index))
}

func (c *Controller) serial() string {
	if c.cfg.Serial != "" {
		return c.cfg.Serial
	}
	return fmt.Sprintf("TUTTIFS-%05d", c.cfg.Index)
}

func (c *Controller) identifyController() nvme.IdentifyController {
	id := nvme.IdentifyController{
		MDTS: c.cfg.MDTS, CNTLID: c.cfg.Index, VER: nvme.Version20, CNTRLTYPE: nvme.ControllerIO,
		ACL: abortsMax - 1, AERL: asyncMax - 1, ELPE: errorsMax - 1, FRMW: 1<<1 | 1, LPA: 1<<2 | 1,
		WCTEMP: 343, CCTEMP: 353,
		SQES: 6<<4 | 6, CQES: 4<<4 | 4, MAXCMD: uint16(min(c.cfg.QueueEntries, 0xffff)), NN: 1, MNAN: 0,
		ONCS: nvme.ONCSDSM | nvme.ONCSWriteZeroes, VWC: nvme.VWCPresent | nvme.VWCFlushNSID,
	}
	if c.cfg.SGL {
		id.SGLS = nvme.SGLSSupported | nvme.SGLSBitBucket
	}
	if c.cfg.Formats {
		id.OACS |= nvme.OACSFormat
	}
	if c.cfg.DoorbellBuffer {
		id.OACS |= nvme.OACSDoorbellBuffer
	}
	if c.flash != nil {
		id.CTRATT, id.ENDGIDMAX = nvme.CTRATTGroups|nvme.CTRATTFDP, fdpGroup
	}
	nvme.PadASCII(id.SN[:], c.serial())
	nvme.PadASCII(id.MN[:], "tuttifs virtual controller")
	nvme.PadASCII(id.FR[:], "1")
	size := uint64(c.drive.Size())
	for i := range 8 {
		id.TNVMCAP[i] = byte(size >> (8 * i))
	}
	d := c.digest()
	u := hex.EncodeToString(d[:16])
	copy(id.SUBNQN[:], fmt.Sprintf("nqn.2014-08.org.nvmexpress:uuid:%s-%s-%s-%s-%s",
		u[:8], u[8:12], u[12:16], u[16:20], u[20:]))
	return id
}

func (c *Controller) identifyNamespace() nvme.IdentifyNamespace {
	shift := c.shift()
	blocks := uint64(c.drive.Size()) >> shift
	id := nvme.IdentifyNamespace{NSZE: blocks, NCAP: blocks, NUSE: blocks}
	formats := c.formats()
	id.SetFormats(slices.Index(formats, shift), formats...)
	size := uint64(c.drive.Size())
	for i := range 8 {
		id.NVMCAP[i] = byte(size >> (8 * i))
	}
	if c.cfg.ReadOnly {
		id.NSATTR = nvme.NSWriteProtect
	}
	if c.flash != nil {
		id.ENDGID = fdpGroup
	}
	// Preferred write granularity: an allocation unit, in blocks, zero-based; NSFEAT bit 4 says that it is given.
	id.NSFEAT = 1 << 4
	id.NPWG = uint16(PageBytes>>shift) - 1
	id.NPDG = id.NPWG
	d := c.digest()
	copy(id.NGUID[:], d[16:])
	copy(id.EUI64[:], d[8:16])
	return id
}

// describe fills the namespace identification descriptors: NGUID, EUI-64 and the command set.
func (c *Controller) describe(b []byte) {
	d := c.digest()
	add := func(kind uint8, id []byte) {
		b[0], b[1] = kind, uint8(len(id))
		b = b[4+copy(b[4:], id):]
	}
	add(nvme.NIDTNGUID, d[16:])
	add(nvme.NIDTEUI64, d[8:16])
	add(nvme.NIDTCSI, []byte{0})
}
