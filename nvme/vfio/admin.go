package vfio

import (
	"bytes"
	"errors"
	"fmt"
	"math/bits"
	"time"

	"tuttifs/nvme"
)

// Admin runs any admin command to its end. Its data, if it has any, are in memory of Alloc or MapMemory. Commands that
// make or delete queues, or reset the controller, are behind the driver's back.
func (c *Controller) Admin(e nvme.SQE) (uint64, error) { return c.admin.Do(e) }

// AdminQueue is the admin queue, for commands that wait for something: Asynchronous Event Request.
func (c *Controller) AdminQueue() *Queue { return c.admin }

// adminFor is Admin for commands that take long.
func (c *Controller) adminFor(e nvme.SQE, timeout time.Duration) (uint64, error) {
	t, err := c.admin.submit(e, timeout)
	if err != nil {
		return 0, err
	}
	return c.admin.Wait(t)
}

// read runs a command whose data come into the page, at most one page, and returns a copy. build gets the page's
// address.
func (c *Controller) read(n int, build func(iova uint64) nvme.SQE) ([]byte, error) {
	c.pageMu.Lock()
	defer c.pageMu.Unlock()
	if err := c.Err(); err != nil {
		return nil, err // the page may be gone
	}
	clear(c.page.Bytes[:PageBytes])
	if _, err := c.admin.Do(build(c.page.IOVA)); err != nil {
		return nil, err
	}
	return bytes.Clone(c.page.Bytes[:n]), nil
}

// IdentifyPage reads an Identify structure.
func (c *Controller) IdentifyPage(nsid uint32, cns uint8) ([]byte, error) {
	b, err := c.read(nvme.IdentifyBytes, func(iova uint64) (e nvme.SQE) {
		nvme.BuildIdentify(&e, 0, nsid, cns, iova)
		return e
	})
	if err != nil {
		return nil, fmt.Errorf("identify %02xh of namespace %d: %w", cns, nsid, err)
	}
	return b, nil
}

// Namespaces lists the identifiers of the active namespaces.
func (c *Controller) Namespaces() ([]uint32, error) {
	var out []uint32
	for after := uint32(0); ; {
		b, err := c.IdentifyPage(after, nvme.CNSActiveNamespaces)
		if err != nil {
			return nil, err
		}
		ids, err := nvme.ParseNamespaceList(b)
		if err != nil {
			return nil, c.errorf("%w", err)
		}
		if len(ids) > 0 && ids[0] <= after {
			return nil, c.errorf("namespace list after %d begins with %d: %w", after, ids[0], ErrUnsuitable)
		}
		out = append(out, ids...)
		if len(ids) < nvme.IdentifyBytes/4 {
			return out, nil
		}
		after = ids[len(ids)-1]
	}
}

// Namespace is what the driver knows of a namespace.
type Namespace struct {
	ID       uint32
	Blocks   uint64
	LBAShift uint8
	ReadOnly bool
	Group    uint16 // endurance group, 0 if there are none
	Names    nvme.NamespaceNames
	Identity nvme.IdentifyNamespace
}

// LBABytes is the size of a block.
func (n *Namespace) LBABytes() int { return 1 << n.LBAShift }

// Bytes is the size of the namespace.
func (n *Namespace) Bytes() int64 { return int64(n.Blocks << n.LBAShift) }

// Namespace identifies one namespace. ErrUnsuitable says that there is none of that number, or none that can be used:
// metadata, another command set, odd block sizes.
func (c *Controller) Namespace(nsid uint32) (*Namespace, error) {
	b, err := c.IdentifyPage(nsid, nvme.CNSNamespace)
	if err != nil {
		return nil, err
	}
	n := &Namespace{ID: nsid}
	if err := n.Identity.UnmarshalBinary(b); err != nil {
		return nil, c.errorf("namespace %d: %w: %w", nsid, ErrUnsuitable, err)
	}
	if n.Identity.NSZE == 0 {
		return nil, c.errorf("namespace %d is not active: %w", nsid, ErrUnsuitable)
	}
	n.Blocks, n.LBAShift, n.Group = n.Identity.NSZE, n.Identity.Format().LBADS, n.Identity.ENDGID
	n.ReadOnly = n.Identity.NSATTR&nvme.NSWriteProtect != 0
	// Descriptors came with revision 1.3: an older controller refuses, and has the NVM command set only.
	b, err = c.IdentifyPage(nsid, nvme.CNSNSDescriptors)
	var st nvme.Status
	switch {
	case errors.As(err, &st):
		return n, nil
	case err != nil:
		return nil, err
	}
	if n.Names, err = nvme.ParseNamespaceNames(b); err != nil {
		return nil, c.errorf("namespace %d: %w: %w", nsid, ErrUnsuitable, err)
	}
	if n.Names.CommandSet != 0 {
		return nil, c.errorf("namespace %d has command set %d, not NVM's: %w", nsid, n.Names.CommandSet, ErrUnsuitable)
	}
	return n, nil
}

// ReadLog fills p, whose length is a multiple of 4, with a log page, a page of memory at a time. nsid is
// nvme.NSIDBroadcast for the controller's own, specific what CDW11 bits 31:16 say, for logs of endurance groups. Events
// stay unacknowledged.
func (c *Controller) ReadLog(page uint8, nsid uint32, specific uint16, p []byte) error {
	if len(p) == 0 || len(p)%4 != 0 {
		return c.errorf("log page %02xh of %d bytes, want a multiple of 4: %w", page, len(p), ErrUnsuitable)
	}
	if id := c.Identity(); len(p) > PageBytes && id.LPA&nvme.LPAExtended == 0 {
		return c.errorf("log page %02xh of %d bytes: it reads no more than %d: %w", page, len(p), PageBytes, ErrUnsuitable)
	}
	for off := 0; off < len(p); off += PageBytes {
		n := min(PageBytes, len(p)-off)
		b, err := c.read(n, func(iova uint64) (e nvme.SQE) {
			nvme.BuildGetLog(&e, 0, nsid, page, uint64(off), uint32(n))
			e.CDW11 |= uint32(specific) << 16
			e.DPTR[0] = iova
			return e
		})
		if err != nil {
			return fmt.Errorf("log page %02xh: %w", page, err)
		}
		copy(p[off:], b)
	}
	return nil
}

// SMART reads the SMART / Health Information log of the controller.
func (c *Controller) SMART() (nvme.SMARTLog, error) {
	b := make([]byte, nvme.SMARTLogBytes)
	if err := c.ReadLog(nvme.LogSMART, nvme.NSIDBroadcast, 0, b); err != nil {
		return nvme.SMARTLog{}, err
	}
	return nvme.ParseSMARTLog(b)
}

// Errors reads the Error Information log, the newest entry first.
func (c *Controller) Errors() ([]nvme.ErrorLogEntry, error) {
	id := c.Identity()
	n := (int(id.ELPE) + 1) * nvme.ErrorLogEntryBytes
	if id.LPA&nvme.LPAExtended == 0 {
		n = min(n, PageBytes)
	}
	b := make([]byte, n)
	if err := c.ReadLog(nvme.LogError, nvme.NSIDBroadcast, 0, b); err != nil {
		return nil, err
	}
	return nvme.ParseErrorLog(b)
}

// HasFDP says whether the controller can place data flexibly.
func (c *Controller) HasFDP() bool {
	id := c.Identity()
	return id.CTRATT&nvme.CTRATTFDP != 0
}

// FDPState is the feature of Flexible Data Placement (Base 2.1 figure 421) of an endurance group.
type FDPState struct {
	Enabled bool
	Config  uint8 // index of the configuration
}

// FDPFeature reads whether an endurance group's Flexible Data Placement is on.
func (c *Controller) FDPFeature(group uint16) (FDPState, error) {
	var e nvme.SQE
	nvme.BuildGetFeature(&e, 0, 0, nvme.FeatureFDP)
	e.CDW11 = uint32(group)
	v, err := c.admin.Do(e)
	return FDPState{Enabled: v&1 != 0, Config: uint8(v >> 8)}, err
}

// FDPStats reads the statistics of an endurance group whose Flexible Data Placement is on.
func (c *Controller) FDPStats(group uint16) (nvme.FDPStats, error) {
	b := make([]byte, nvme.FDPStatsBytes)
	if err := c.ReadLog(nvme.LogFDPStats, 0, group, b); err != nil {
		return nvme.FDPStats{}, err
	}
	return nvme.ParseFDPStats(b)
}

// fdpConfigsMax is the longest list of configurations that is read.
const fdpConfigsMax = 1 << 20

// FDPConfigs reads the configurations that an endurance group can have.
func (c *Controller) FDPConfigs(group uint16) ([]nvme.FDPConfig, error) {
	b := make([]byte, PageBytes)
	if err := c.ReadLog(nvme.LogFDPConfig, 0, group, b); err != nil {
		return nil, err
	}
	if n := nvme.FDPConfigsBytes(b); n > len(b) && n <= fdpConfigsMax {
		b = make([]byte, (n+3)&^3)
		if err := c.ReadLog(nvme.LogFDPConfig, 0, group, b); err != nil {
			return nil, err
		}
	}
	return nvme.ParseFDPConfigs(b)
}

// Feature reads the current value of a feature.
func (c *Controller) Feature(nsid uint32, feature uint8) (uint32, error) {
	var e nvme.SQE
	nvme.BuildGetFeature(&e, 0, nsid, feature)
	r, err := c.admin.Do(e)
	return uint32(r), err
}

// SetFeature sets it until the next reset.
func (c *Controller) SetFeature(nsid uint32, feature uint8, value uint32) error {
	var e nvme.SQE
	nvme.BuildSetFeature(&e, 0, nsid, feature, value)
	_, err := c.admin.Do(e)
	return err
}

// Abort asks for the end of a command that was submitted to q. It is true if the command was aborted; its Wait returns
// ErrAborted then.
func (c *Controller) Abort(q *Queue, t Ticket) (bool, error) {
	var e nvme.SQE
	nvme.BuildAbort(&e, 0, q.pair.ID, t.cid)
	r, err := c.admin.Do(e)
	return err == nil && r&1 == 0, err
}

// Format gives a namespace blocks of lbaBytes, without metadata, in the format that performs best. Everything on it is
// lost. Nobody may be using it, and who knew it identifies it again. Controllers that can only format all of their
// namespaces at once are refused if they have several.
func (c *Controller) Format(nsid uint32, lbaBytes int) error {
	id := c.Identity()
	if id.OACS&nvme.OACSFormat == 0 {
		return c.errorf("it has no Format NVM: %w", ErrUnsuitable)
	}
	if lbaBytes != 512 && lbaBytes != 4096 {
		return c.errorf("format with blocks of %d bytes, want 512 or 4096: %w", lbaBytes, ErrUnsuitable)
	}
	ids, err := c.Namespaces()
	if err != nil {
		return err
	}
	if id.FNA&nvme.FNAFormatAll != 0 && len(ids) > 1 {
		return c.errorf("it formats all of its %d namespaces at once: %w", len(ids), ErrUnsuitable)
	}
	b, err := c.IdentifyPage(nsid, nvme.CNSNamespace)
	if err != nil {
		return err
	}
	var n nvme.IdentifyNamespace
	// What is wrong with its present format is no reason against another one.
	if err := n.UnmarshalBinary(b); err != nil && n.NLBAF == 0 {
		return c.errorf("namespace %d: %w: %w", nsid, ErrUnsuitable, err)
	}
	index, ok := n.FormatOf(uint8(bits.TrailingZeros(uint(lbaBytes))))
	if !ok {
		return c.errorf("namespace %d has no format with blocks of %d bytes and no metadata: %w", nsid, lbaBytes,
			ErrUnsuitable)
	}
	var e nvme.SQE
	nvme.BuildFormat(&e, 0, nsid, index)
	if _, err := c.adminFor(e, c.o.FormatTimeout); err != nil {
		return fmt.Errorf("format namespace %d: %w", nsid, err)
	}
	return nil
}
