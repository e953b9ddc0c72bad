package gio

import (
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// osYield lets another thread have this core.
func osYield() { _, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

// napNanoseconds is how long a nap lasts.
const napNanoseconds = 20_000

// napping counts threads that nap without giving their processor back to Go's scheduler. It is of the whole process
// because the processors are.
var napping atomic.Int32

// nap sleeps in the kernel. time.Sleep would cost several times as much: the runtime parks the goroutine, and wakes
// another thread to watch the timer. The thread's timer slack of 50 us would more than double the nap and is taken away
// meanwhile; 0 restores the default.
func nap(processors int) {
	setSlack(1)
	sleep(napNanoseconds, processors)
	setSlack(0)
}

// setSlack sets the calling thread's timer slack.
func setSlack(nanoseconds uintptr) {
	_, _, _ = unix.RawSyscall(unix.SYS_PRCTL, unix.PR_SET_TIMERSLACK, nanoseconds, 0)
}

// sleep is the nap itself. Even a system call that the runtime knows of costs more than the nap, since it gives the
// thread's processor to another one, which looks for work and finds none; so as long as other processors are left, the
// runtime is not told.
func sleep(nanoseconds int64, processors int) {
	t := unix.Timespec{Nsec: nanoseconds}
	if int(napping.Add(1)) < processors {
		_, _, _ = unix.RawSyscall(unix.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&t)), 0, 0)
	} else {
		_ = unix.Nanosleep(&t, nil)
	}
	napping.Add(-1)
}
