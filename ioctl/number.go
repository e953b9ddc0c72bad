package ioctl

//go:generate go test -run Header|Doc -update .

import "unsafe"

// Fields of an ioctl number as asm-generic/ioctl.h lays them out (amd64 and arm64 alike).
const (
	iocType  = 'T'
	iocWrite = 1
	iocRead  = 2

	iocTypeShift = 8
	iocSizeShift = 16
	iocDirShift  = 30
	iocSizeMask  = 1<<14 - 1

	iocBase = (iocRead|iocWrite)<<iocDirShift | iocType<<iocTypeShift
)

// Verb numbers.
const (
	nrHello = 1 + iota
	nrDrives
	nrSessionCreate
	nrSessionJoin
	nrArena
	nrPoolOpen
	nrPoolInfo
	nrLayout
	nrRows
	nrMapAck
	nrPeek
	nrPin
	nrRelease
	nrReserve
	nrCommit
	nrAbort
	nrReportBad
	nrEvict
	nrUnlink
	nrExtents
	nrStats
	nrEvents
	nrTicket
	nrChanges
	nrPresent
	nrEnd
)

// The ioctl commands.
const (
	CmdHello         = uint32(iocBase | unsafe.Sizeof(Hello{})<<iocSizeShift | nrHello)
	CmdDrives        = uint32(iocBase | unsafe.Sizeof(Drives{})<<iocSizeShift | nrDrives)
	CmdSessionCreate = uint32(iocBase | unsafe.Sizeof(Session{})<<iocSizeShift | nrSessionCreate)
	CmdSessionJoin   = uint32(iocBase | unsafe.Sizeof(Session{})<<iocSizeShift | nrSessionJoin)
	CmdArena         = uint32(iocBase | unsafe.Sizeof(Arena{})<<iocSizeShift | nrArena)
	CmdPoolOpen      = uint32(iocBase | unsafe.Sizeof(PoolOpen{})<<iocSizeShift | nrPoolOpen)
	CmdPoolInfo      = uint32(iocBase | unsafe.Sizeof(PoolInfo{})<<iocSizeShift | nrPoolInfo)
	CmdLayout        = uint32(iocBase | unsafe.Sizeof(Layout{})<<iocSizeShift | nrLayout)
	CmdRows          = uint32(iocBase | unsafe.Sizeof(Rows{})<<iocSizeShift | nrRows)
	CmdMapAck        = uint32(iocBase | unsafe.Sizeof(MapAck{})<<iocSizeShift | nrMapAck)
	CmdPeek          = uint32(iocBase | unsafe.Sizeof(Peek{})<<iocSizeShift | nrPeek)
	CmdPin           = uint32(iocBase | unsafe.Sizeof(Pin{})<<iocSizeShift | nrPin)
	CmdRelease       = uint32(iocBase | unsafe.Sizeof(Release{})<<iocSizeShift | nrRelease)
	CmdReserve       = uint32(iocBase | unsafe.Sizeof(Reserve{})<<iocSizeShift | nrReserve)
	CmdCommit        = uint32(iocBase | unsafe.Sizeof(Commit{})<<iocSizeShift | nrCommit)
	CmdAbort         = uint32(iocBase | unsafe.Sizeof(Abort{})<<iocSizeShift | nrAbort)
	CmdReportBad     = uint32(iocBase | unsafe.Sizeof(ReportBad{})<<iocSizeShift | nrReportBad)
	CmdEvict         = uint32(iocBase | unsafe.Sizeof(Evict{})<<iocSizeShift | nrEvict)
	CmdUnlink        = uint32(iocBase | unsafe.Sizeof(Unlink{})<<iocSizeShift | nrUnlink)
	CmdExtents       = uint32(iocBase | unsafe.Sizeof(Extents{})<<iocSizeShift | nrExtents)
	CmdStats         = uint32(iocBase | unsafe.Sizeof(Stats{})<<iocSizeShift | nrStats)
	CmdEvents        = uint32(iocBase | unsafe.Sizeof(Events{})<<iocSizeShift | nrEvents)
	CmdTicket        = uint32(iocBase | unsafe.Sizeof(Ticket{})<<iocSizeShift | nrTicket)
	CmdChanges       = uint32(iocBase | unsafe.Sizeof(Changes{})<<iocSizeShift | nrChanges)
	CmdPresent       = uint32(iocBase | unsafe.Sizeof(Present{})<<iocSizeShift | nrPresent)
)

// Sizes and offsets are part of the ABI: a change does not compile.
var (
	_ [8]byte    = [unsafe.Sizeof(Header{})]byte{}
	_ [8]byte    = [unsafe.Sizeof(Target{})]byte{}
	_ [16]byte   = [unsafe.Sizeof(Span{})]byte{}
	_ [216]byte  = [unsafe.Sizeof(Hello{})]byte{}
	_ [120]byte  = [unsafe.Sizeof(DriveEntry{})]byte{}
	_ [7704]byte = [unsafe.Sizeof(Drives{})]byte{}
	_ [168]byte  = [unsafe.Sizeof(Session{})]byte{}
	_ [96]byte   = [unsafe.Sizeof(Arena{})]byte{}
	_ [256]byte  = [unsafe.Sizeof(PoolOpen{})]byte{}
	_ [248]byte  = [unsafe.Sizeof(PoolInfo{})]byte{}
	_ [80]byte   = [unsafe.Sizeof(Layout{})]byte{}
	_ [16]byte   = [unsafe.Sizeof(RowEntry{})]byte{}
	_ [8]byte    = [unsafe.Sizeof(RowHead{})]byte{}
	_ [64]byte   = [unsafe.Sizeof(Rows{})]byte{}
	_ [32]byte   = [unsafe.Sizeof(MapAck{})]byte{}
	_ [48]byte   = [unsafe.Sizeof(Peek{})]byte{}
	_ [40]byte   = [unsafe.Sizeof(Grant{})]byte{}
	_ [80]byte   = [unsafe.Sizeof(Pin{})]byte{}
	_ [24]byte   = [unsafe.Sizeof(Release{})]byte{}
	_ [72]byte   = [unsafe.Sizeof(ReserveItem{})]byte{}
	_ [80]byte   = [unsafe.Sizeof(Reserve{})]byte{}
	_ [40]byte   = [unsafe.Sizeof(Commit{})]byte{}
	_ [24]byte   = [unsafe.Sizeof(Abort{})]byte{}
	_ [40]byte   = [unsafe.Sizeof(ReportBad{})]byte{}
	_ [48]byte   = [unsafe.Sizeof(Evict{})]byte{}
	_ [48]byte   = [unsafe.Sizeof(Unlink{})]byte{}
	_ [16]byte   = [unsafe.Sizeof(Extent{})]byte{}
	_ [56]byte   = [unsafe.Sizeof(Extents{})]byte{}
	_ [160]byte  = [unsafe.Sizeof(Stats{})]byte{}
	_ [48]byte   = [unsafe.Sizeof(Event{})]byte{}
	_ [3096]byte = [unsafe.Sizeof(Events{})]byte{}
	_ [40]byte   = [unsafe.Sizeof(Ticket{})]byte{}
	_ [40]byte   = [unsafe.Sizeof(Change{})]byte{}
	_ [64]byte   = [unsafe.Sizeof(Changes{})]byte{}
	_ [64]byte   = [unsafe.Sizeof(Present{})]byte{}
	_ [120]byte  = [unsafe.Sizeof(AttachRequest{})]byte{}
	_ [384]byte  = [unsafe.Sizeof(AttachReply{})]byte{}

	// Both fit the session page.
	_ [SessionPageBytes - TermsOffset]byte = [DrivesMax * unsafe.Sizeof(DriveTerms{})]byte{}
	_ [TermsOffset - BellsOffset]byte      = [DrivesMax * unsafe.Sizeof(DriveBells{})]byte{}

	_ [8]byte  = [unsafe.Offsetof(Hello{}.UUID)]byte{}
	_ [16]byte = [unsafe.Offsetof(Pin{}.Keys)]byte{}
	_ [32]byte = [unsafe.Offsetof(Pin{}.Grants)]byte{}
	_ [48]byte = [unsafe.Offsetof(Pin{}.Request)]byte{}
	_ [16]byte = [unsafe.Offsetof(Grant{}.Seed)]byte{}
	_ [32]byte = [unsafe.Offsetof(Grant{}.Status)]byte{}
	_ [40]byte = [unsafe.Offsetof(Session{}.SocketPath)]byte{}
	_ [40]byte = [unsafe.Offsetof(AttachRequest{}.Token)]byte{}
	_ [96]byte = [unsafe.Offsetof(AttachReply{}.DriveIndex)]byte{}
)
