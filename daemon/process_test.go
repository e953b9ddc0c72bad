package daemon

import (
	"os"
	"os/exec"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestProcessIsSeenToEnd(t *testing.T) {
	cmd := exec.Command("sleep", "600")
	require.NoError(t, cmd.Start())
	p, err := watchProcess(uint32(cmd.Process.Pid))
	require.NoError(t, err)
	defer p.close()
	require.Equal(t, uint32(cmd.Process.Pid), p.pid)
	gone := make(chan bool, 1)
	go func() { gone <- p.wait() }()
	require.NoError(t, cmd.Process.Kill())
	require.True(t, <-gone)
	_ = cmd.Wait()
	_, err = watchProcess(uint32(cmd.Process.Pid))
	require.ErrorIs(t, err, unix.ESRCH)
}

// TestProcessOfThread: FUSE names threads, not processes.
func TestProcessOfThread(t *testing.T) {
	tids := make(chan int)
	quit := make(chan struct{})
	defer close(quit)
	go func() {
		runtime.LockOSThread() // a thread of its own, not the main one
		tids <- unix.Gettid()
		<-quit
	}()
	p, err := watchProcess(uint32(<-tids))
	require.NoError(t, err)
	require.Equal(t, uint32(os.Getpid()), p.pid)
	gone := make(chan bool, 1)
	go func() { gone <- p.wait() }()
	p.close()
	require.False(t, <-gone)

	none, err := watchProcess(0)
	require.NoError(t, err)
	require.Nil(t, none)
	none.close()
}
