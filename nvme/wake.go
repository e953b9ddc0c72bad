package nvme

import (
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

// A poller that finds nothing to do stores its number in its wake word, looks at everything once more, and sleeps on
// the word for as long as it holds that. An executor that has work makes it visible first (armed count, doorbell) and
// then calls Wake. Either the poller's second look sees the work, or the executor sees the number: no wake-up is lost.
// Pollers that share a word have numbers of their own: a 0 that one has not seen yet must not look to it as if nothing
// had happened when another one goes to sleep. The words lie in memory shared by processes, so the futexes are not
// private.
const (
	futexWait = 0
	futexWake = 1
)

// Wake wakes the pollers that sleep on word, if any does; otherwise it costs one atomic exchange and no system call.
func Wake(word *uint32) {
	if atomic.SwapUint32(word, 0) != 0 {
		FutexWake(word)
	}
}

// FutexWake wakes everybody who sleeps on word, whatever its value.
func FutexWake(word *uint32) {
	const everybody = 1<<31 - 1
	// The only possible errors are those of a bad address.
	syscall.RawSyscall6(syscall.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWake, everybody, 0, 0, 0)
}

// FutexWait sleeps while *word is value: until FutexWake, a signal, or the timeout (0 is none), which it reports.
// Callers look again.
func FutexWait(word *uint32, value uint32, timeout time.Duration) (timedOut bool) {
	var ts *syscall.Timespec
	if timeout > 0 {
		t := syscall.NsecToTimespec(int64(timeout))
		ts = &t
	}
	_, _, errno := syscall.Syscall6(syscall.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWait, uintptr(value),
		uintptr(unsafe.Pointer(ts)), 0, 0)
	return errno == syscall.ETIMEDOUT
}

// FutexNap is FutexWait of which the runtime is not told: the thread keeps its processor, so it must be short.
func FutexNap(word *uint32, value uint32, timeout time.Duration) {
	ts := syscall.NsecToTimespec(int64(timeout))
	syscall.RawSyscall6(syscall.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWait, uintptr(value),
		uintptr(unsafe.Pointer(&ts)), 0, 0)
}
