package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"time"

	"tuttifs/gpufile"
)

// ScrubReply tells how far a scrub is. The last one has Done, or Error.
type ScrubReply struct {
	Error      string `json:"error,omitempty"`
	Done       bool   `json:"done"`
	Total      uint64 `json:"total"` // files at the start
	Files      uint64 `json:"files"` // verified or not to be had
	Bytes      uint64 `json:"bytes"`
	Damaged    uint64 `json:"damaged"`
	Unreadable uint64 `json:"unreadable"`
}

func newScrubReply(n gpufile.ScrubCounts) *ScrubReply {
	return &ScrubReply{Total: n.Total, Files: n.Files, Bytes: n.Bytes, Damaged: n.Damaged, Unreadable: n.Unreadable}
}

// errScrubbing: one scrub is enough.
var errScrubbing = errors.New("daemon: a scrub is under way")

// scrub verifies all files for as long as somebody listens.
func (s *drives) scrub(conn *net.UnixConn, rate uint64) {
	out := json.NewEncoder(conn)
	if !s.scrubs.TryLock() {
		_ = out.Encode(&ScrubReply{Error: errScrubbing.Error()})
		return
	}
	defer s.scrubs.Unlock()
	ctx, stop := context.WithCancel(s.context)
	defer stop()
	_ = conn.SetReadDeadline(time.Time{})
	s.workers.Go(func() {
		_, _ = conn.Read(make([]byte, 1)) // nothing comes any more but the end
		stop()
	})
	log := s.d.options.Log
	log.Info("scrub begins", "bytes_per_second", rate)
	counts, err := s.d.store.Scrub(ctx, rate, func(n gpufile.ScrubCounts) {
		if out.Encode(newScrubReply(n)) != nil {
			stop()
		}
	})
	log.Info("scrub ends", "files", counts.Files, "of", counts.Total, "damaged", counts.Damaged, "unreadable",
		counts.Unreadable, "error", err)
	last := newScrubReply(counts)
	if last.Done = err == nil; err != nil {
		last.Error = err.Error()
	}
	_ = out.Encode(last) // whoever does not wait for the answer does not get it
}
