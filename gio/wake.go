package gio

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"tuttifs/nvme"
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
	var nobody uint32
	sleep(&nobody, 0, napNanoseconds, processors)
	setSlack(0)
}

// setSlack sets the calling thread's timer slack.
func setSlack(nanoseconds uintptr) {
	_, _, _ = unix.RawSyscall(unix.SYS_PRCTL, unix.PR_SET_TIMERSLACK, nanoseconds, 0)
}

// sleep is the nap itself: as long as *word is value, until nvme.FutexWake, or until the time is over. Even a system
// call that the runtime knows of costs more than the nap, since it gives the thread's processor to another one, which
// looks for work and finds none; so as long as other processors are left, the runtime is not told.
func sleep(word *uint32, value uint32, nanoseconds int64, processors int) {
	timeout := time.Duration(nanoseconds)
	if int(napping.Add(1)) < processors {
		nvme.FutexNap(word, value, timeout)
	} else {
		nvme.FutexWait(word, value, timeout)
	}
	napping.Add(-1)
}
