package nvme

import "sync/atomic"

// Shadow is a doorbell of a controller with a doorbell buffer (Base 2.0 section 5.8): what would be written to the
// register is written to memory first, and the register only when the controller says that it does not look there by
// itself. Emulated controllers, to which each register write is a trap, offer it. The zero value is none.
type Shadow struct {
	Doorbell *uint32 // the value, for the controller to read
	Event    *uint32 // written by the controller: it wants to be told when the value passes this one
}

// Set says whether there is one.
func (s Shadow) Set() bool { return s.Doorbell != nil }

// Advance gives the doorbell a value, and says whether the register has to be written too. What the value announces was
// written before.
//
// The controller stores the event and then looks at the doorbell once more; here the doorbell is stored and then the
// event looked at. Both are sequentially consistent, as atomic operations in Go are, with the barrier that a store
// before a load needs: so one of the two sees the other, and no value is overlooked.
func (s Shadow) Advance(value uint32) (ring bool) {
	old := atomic.SwapUint32(s.Doorbell, value)
	event := atomic.LoadUint32(s.Event)
	// Has the value passed the event? By how far it went, modulo the 16 bits of the field, which is more than a queue.
	return uint16(value-event-1) < uint16(value-old)
}

// ShadowBytes is the size of each of the two pages of a doorbell buffer: shadow doorbells, event indexes. Both are laid
// out as the registers are, from RegDoorbells on; the admin queue's are not used.
const ShadowBytes = PageBytes

// BuildDoorbellBuffer makes an admin Doorbell Buffer Config of two pages.
func BuildDoorbellBuffer(sqe *SQE, cid uint16, doorbells, events uint64) {
	*sqe = SQE{Opcode: AdminDoorbellBuf, CID: cid, DPTR: [2]uint64{doorbells, events}}
}
