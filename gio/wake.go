package gio

import "golang.org/x/sys/unix"

// osYield lets another thread have this core.
func osYield() { _, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

// napNanoseconds is how long a nap lasts.
const napNanoseconds = 20_000

// nap sleeps in the kernel. time.Sleep would cost several times as much: the runtime parks the goroutine, and wakes
// another thread to watch the timer. The thread's timer slack of 50 us would more than double the nap, so it is taken
// away meanwhile; 0 restores the default.
func nap() {
	_, _, _ = unix.RawSyscall(unix.SYS_PRCTL, unix.PR_SET_TIMERSLACK, 1, 0)
	t := unix.Timespec{Nsec: napNanoseconds}
	_ = unix.Nanosleep(&t, nil)
	_, _, _ = unix.RawSyscall(unix.SYS_PRCTL, unix.PR_SET_TIMERSLACK, 0, 0)
}
