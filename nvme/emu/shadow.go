package emu

import (
	"sync/atomic"
	"unsafe"

	"tuttifs/nvme"
)

// setShadows is Doorbell Buffer Config: doorbells of I/O queues are read from memory from now on, and the registers
// only wake the poller. Queues that there are already go on from what their registers held.
func (a *admin) setShadows(e *nvme.SQE) nvme.Status {
	if !a.c.cfg.DoorbellBuffer {
		return nvme.InvalidOpcode | dnr
	}
	if (e.DPTR[0]|e.DPTR[1])%PageBytes != 0 {
		return nvme.InvalidField | dnr
	}
	shadows, events := translate(a.mem, e.DPTR[0], nvme.ShadowBytes), translate(a.mem, e.DPTR[1], nvme.ShadowBytes)
	if shadows == nil || events == nil {
		return nvme.DataTransferError | dnr
	}
	a.shadows, a.events = shadows, events
	for id, q := range a.sqs {
		if id != 0 {
			a.shadowTail(q)
			q.tailBell.store(q.tail)
		}
	}
	for id, cq := range a.cqs {
		if id != 0 {
			a.shadowHead(cq)
			cq.headBell.store(cq.head)
		}
	}
	return nvme.Success
}

// shadowTail and shadowHead have a queue look at its shadow doorbell, if there are any. Those of queues beyond the page
// stay registers.
func (a *admin) shadowTail(q *Queue)            { a.shadow(&q.tailBell, 2*int(q.id)) }
func (a *admin) shadowHead(cq *completionQueue) { a.shadow(&cq.headBell, 2*int(cq.id)+1) }

func (a *admin) shadow(b *bell, index int) {
	at := 4 * index
	if a.shadows == nil || at+4 > len(a.shadows) {
		return
	}
	b.value = (*uint32)(unsafe.Pointer(&a.shadows[at]))
	b.event = (*uint32)(unsafe.Pointer(&a.events[at]))
}

// bell is a doorbell as the controller sees it.
type bell struct {
	value *uint32
	event *uint32 // where the controller says for which value it is to be told; nil: it is always told
}

func (b bell) store(v uint32) { atomic.StoreUint32(b.value, v) }

// looksMax bounds the looks at a doorbell that moves all the while. Whoever finds one that has moved looks again
// anyway.
const looksMax = 8

// read takes the value and asks for nothing.
func (b bell) read() uint32 { return atomic.LoadUint32(b.value) }

// ask says beyond which value the executor is to tell of it.
func (b bell) ask(v uint32) {
	if b.event != nil && atomic.LoadUint32(b.event) != v {
		atomic.StoreUint32(b.event, v)
	}
}

// load takes the value. With a doorbell buffer the executor is asked to tell of anything beyond it, and looked at once
// more: it may have moved before it saw that.
func (b bell) load() uint32 {
	v := atomic.LoadUint32(b.value)
	for i := 0; i < looksMax && b.event != nil && atomic.LoadUint32(b.event) != v; i++ {
		atomic.StoreUint32(b.event, v)
		v = atomic.LoadUint32(b.value)
	}
	return v
}
