package phase_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/phase"
)

// TestMoved: who counts much as one command is not taken for stuck while some of it ends.
func TestMoved(t *testing.T) {
	token, c := start(phase.Options{Stuck: time.Second, Patience: 10 * time.Millisecond})
	r, w := token.Holder(phase.Data), token.Holder(phase.Data)
	require.True(t, step(r, phase.Read, c.now))
	for range 5 {
		require.False(t, step(w, phase.Write, c.after(900*time.Millisecond)))
		r.Moved(phase.Read)
		r.Settle(c.now)
	}
	require.Zero(t, token.Stats(c.now).Stuck)
	require.True(t, step(w, phase.Write, c.after(1100*time.Millisecond)), "nothing of it ended")
	require.EqualValues(t, 1, token.Stats(c.now).Stuck)
}

// TestWriteShare: those who write at once have equal parts.
func TestWriteShare(t *testing.T) {
	token, c := start(phase.Options{Stuck: long})
	var all []*phase.Holder
	for n := 1; n <= 4; n++ {
		h := token.Holder(phase.Data)
		require.Equal(t, 8<<20/max(1, n-1), h.WriteShare())
		require.True(t, step(h, phase.Write, c.after(nap)))
		all = append(all, h)
	}
	for _, h := range all {
		require.Equal(t, 2<<20, h.WriteShare())
	}
}
