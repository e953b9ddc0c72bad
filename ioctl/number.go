package ioctl

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
)

// Sizes are part of the ABI: a change here does not compile.
const (
	_ = -(unsafe.Sizeof(Header{}) ^ 8)
)
