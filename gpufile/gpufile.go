// Package gpufile is the pool as its users see it: reserve -> commit -> lookup, pin -> evict; prefix chains; sessions
// and leases. It knows nothing of queues and never touches KV bytes.
//
// One KV block's life: Reserve gives it a slot, under a key that nobody can look up yet; the engine writes the slot's
// objects, each command checked by Authorize against the session's lease; when all ranks have committed, one record
// is journaled, and only when that is durable is the key found. Pin finds and leases the longest prefix of a
// request's keys; leases outlive reads. A block goes by policy, leaf first and never while pinned, or is unlinked:
// then it is a miss at once, and its slot is freed after the last pin and the last command in flight. A freed slot is
// handed out again when its freeing is durable, under a new generation.
//
// What is kept of ten million files lies in anonymous memory without pointers: an index entry (index.go) and a node
// (node.go), about 37 bytes a file. Keys, parents and tenants are read from the volume's own record table.
//
// Invariants: a visible file is in the index, in its parent's children if it has a visible parent, and in exactly one
// of the policy and the orphans. Only leaves leave by policy. files + reserved never exceeds the pool's cap; what is
// out of the index and not free is doomed (pinned), in toFree, or with the journal.
//
// Lock order: Store.opening; a session's mutex; the mutexes of pools, by ID; Store.quotaMu; Store.mu; the volume's
// own. The gate's is a leaf, taken under pools' mutexes. Callbacks of the volume take a session's and its pools'
// mutexes, so the volume must hold none of its own then. Authorize and Complete take none, but for the last command
// of a lease that has ended.
package gpufile

import "errors"

// Key names a block's content.
type Key = [32]byte

var (
	ErrNotFound   = errors.New("gpufile: no such file")
	ErrPending    = errors.New("gpufile: another engine is storing this key")
	ErrNoSpace    = errors.New("gpufile: no space")
	ErrAgain      = errors.New("gpufile: space is being freed, try again")
	ErrQuota      = errors.New("gpufile: tenant is over its quota")
	ErrReadOnly   = errors.New("gpufile: volume is mounted read-only")
	ErrSession    = errors.New("gpufile: session is gone")
	ErrLease      = errors.New("gpufile: not leased to this session")
	ErrIncomplete = errors.New("gpufile: not all objects were written")
	ErrIdentity   = errors.New("gpufile: identity is unknown or differs")
	ErrInvalid    = errors.New("gpufile: invalid argument")
)
