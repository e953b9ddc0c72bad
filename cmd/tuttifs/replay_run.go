package main

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"time"

	"tuttifs/engine"
	"tuttifs/gpufile"
)

// replay is one run over a trace.
type replay struct {
	target replayTarget
	speed  float64
	totals struct {
		requests, blocks, hitBlocks, storedBlocks uint64
		bufferBlocks, declinedBlocks, notStored   uint64
		tokens, hitTokens                         uint64
		bytesRead, bytesWritten                   uint64
		failures, evictions                       uint64
	}
	wall, reading, writing time.Duration
	lookup, layer          histogram
	kept                   engine.KeepStats // of a host buffer that is used
}

// chainKeys extends the keys of a request: block i's key hashes its parent's key and its id.
func chainKeys(keys []gpufile.Key, ids []uint64) []gpufile.Key {
	var in [40]byte
	for _, id := range ids {
		binary.LittleEndian.PutUint64(in[32:], id)
		key := sha256.Sum256(in[:])
		keys = append(keys, key)
		copy(in[:], key[:])
	}
	return keys
}

func (r *replay) run(ctx context.Context, requests []traceRequest, bar *progress) error {
	start := time.Now()
	defer func() { r.wall = time.Since(start) }()
	var keys []gpufile.Key
	for i := range requests {
		req := &requests[i]
		if err := r.waitUntil(ctx, start, req.Timestamp-requests[0].Timestamp); err != nil {
			return err
		}
		keys = chainKeys(keys[:0], req.HashIDs)
		if err := r.request(req, keys); err != nil {
			return fmt.Errorf("request %d: %w", i+1, err)
		}
		bar.set(uint64(i+1), fmt.Sprintf("hit %.1f %%", 100*ratio(r.totals.hitBlocks, r.totals.blocks)))
	}
	return nil
}

// waitUntil follows the trace's clock, in milliseconds.
func (r *replay) waitUntil(ctx context.Context, start time.Time, ms float64) error {
	if r.speed > 0 {
		if d := time.Until(start.Add(time.Duration(min(ms/r.speed*1e6, replayWaitMax)))); d > 0 {
			t := time.NewTimer(d)
			defer t.Stop()
			select {
			case <-t.C:
			case <-ctx.Done():
			}
		}
	}
	return ctx.Err()
}

// request restores the prefix that is there and stores the rest. The prefix stays pinned until the end, so that its
// blocks cannot be evicted to make room for their own children.
func (r *replay) request(req *traceRequest, keys []gpufile.Key) error {
	t := &r.totals
	start := time.Now()
	hit, buffered, err := r.target.pin(keys)
	if err != nil {
		return fmt.Errorf("lookup: %w", err)
	}
	r.lookup.add(time.Since(start))
	t.requests++
	t.blocks += uint64(len(keys))
	t.tokens += req.InputLength
	t.hitBlocks += uint64(hit + buffered)
	t.bufferBlocks += uint64(buffered)
	t.hitTokens += min(uint64(hit+buffered)*traceBlockTokens, req.InputLength)
	if hit > 0 {
		start = time.Now()
		n, failed, err := r.target.restore(keys[:hit], r.layer.add)
		if err != nil {
			return fmt.Errorf("retrieving: %w", err)
		}
		r.reading += time.Since(start)
		t.bytesRead += n
		t.failures += uint64(failed)
	}
	if hit < len(keys) {
		start = time.Now()
		// What the buffer has is stored, too: it was asked for again.
		s, err := r.target.store(missing(req, keys, hit))
		if err != nil {
			return fmt.Errorf("storing: %w", err)
		}
		r.writing += time.Since(start)
		t.storedBlocks += uint64(s.stored)
		t.declinedBlocks += uint64(s.declined)
		t.notStored += uint64(len(keys) - hit - s.stored)
		t.bytesWritten += s.bytes
	}
	if err := r.target.release(); err != nil {
		return fmt.Errorf("releasing: %w", err)
	}
	return nil
}

// missing lists the blocks of a request from the first that was not hit.
func missing(req *traceRequest, keys []gpufile.Key, hit int) []replayItem {
	items := make([]replayItem, 0, len(keys)-hit)
	for i := hit; i < len(keys); i++ {
		item := replayItem{key: keys[i], tokens: req.tokens(i), position: uint32(i)}
		if i > 0 {
			item.parent = keys[i-1]
		}
		items = append(items, item)
	}
	return items
}

func ratio(a, b uint64) float64 {
	if b == 0 {
		return 0
	}
	return float64(a) / float64(b)
}

func gbPerSecond(bytes uint64, d time.Duration) float64 {
	if d <= 0 {
		return 0
	}
	return float64(bytes) / float64(d.Nanoseconds())
}

type replayDocument struct {
	OutputVersion    int             `json:"output_version"`
	Requests         uint64          `json:"requests"`
	Blocks           uint64          `json:"blocks"`
	HitBlocks        uint64          `json:"hit_blocks"`
	HitRate          float64         `json:"hit_rate"`
	Tokens           uint64          `json:"tokens"`
	HitTokens        uint64          `json:"hit_tokens"`
	HitRateTokens    float64         `json:"hit_rate_tokens"`
	StoredBlocks     uint64          `json:"stored_blocks"`
	NotStoredBlocks  uint64          `json:"not_stored_blocks"`
	DeclinedBlocks   uint64          `json:"declined_blocks"` // of those, by the admission policy
	BytesRead        uint64          `json:"bytes_read"`
	BytesWritten     uint64          `json:"bytes_written"`
	ReadGBPerSecond  float64         `json:"read_gb_per_second"`
	WriteGBPerSecond float64         `json:"write_gb_per_second"`
	Seconds          float64         `json:"seconds"`
	ReadSeconds      float64         `json:"read_seconds"`
	WriteSeconds     float64         `json:"write_seconds"`
	Lookup           latencyDocument `json:"lookup_latency"`
	Layer            latencyDocument `json:"layer_latency"`
	VerifyFailures   uint64          `json:"verify_failures"`
	Evictions        uint64          `json:"evictions"`
	HostBuffer       *keptDocument   `json:"host_buffer,omitempty"`
}

// keptDocument is what a session kept of blocks that the mount declined.
type keptDocument struct {
	Blocks   uint64 `json:"room_blocks"`
	Declined uint64 `json:"declined_blocks"`
	Kept     uint64 `json:"kept_blocks"`
	Hit      uint64 `json:"hit_blocks"`
	Written  uint64 `json:"written_blocks"` // brought to the drives when they were hit
	Refused  uint64 `json:"refused_blocks"` // declined once more then
	Evicted  uint64 `json:"evicted_blocks"`
	Bad      uint64 `json:"bad_blocks"`
	Failed   uint64 `json:"failed_blocks"` // could not be brought to the drives
	Spared   uint64 `json:"bytes_spared"`  // declined, and not written since
}

// keptDocument is nil where there was no host buffer.
func (r *replay) keptDocument() *keptDocument {
	k := &r.kept
	if k.Slots == 0 {
		return nil
	}
	return &keptDocument{Blocks: k.Slots, Declined: k.Declined, Kept: k.Kept, Hit: k.Hits, Written: k.Written,
		Refused: k.Refused, Evicted: k.Evicted, Bad: k.Bad, Failed: k.Failed, Spared: k.Spared()}
}

func (r *replay) document() replayDocument {
	t := &r.totals
	return replayDocument{
		OutputVersion: outputVersion, Requests: t.requests, Blocks: t.blocks, HitBlocks: t.hitBlocks,
		HitRate: ratio(t.hitBlocks, t.blocks),
		Tokens:  t.tokens, HitTokens: t.hitTokens, HitRateTokens: ratio(t.hitTokens, t.tokens),
		StoredBlocks: t.storedBlocks, NotStoredBlocks: t.notStored, DeclinedBlocks: t.declinedBlocks,
		BytesRead: t.bytesRead, BytesWritten: t.bytesWritten,
		ReadGBPerSecond: gbPerSecond(t.bytesRead, r.reading), WriteGBPerSecond: gbPerSecond(t.bytesWritten, r.writing),
		Seconds: r.wall.Seconds(), ReadSeconds: r.reading.Seconds(), WriteSeconds: r.writing.Seconds(),
		Lookup: r.lookup.document(), Layer: r.layer.document(), VerifyFailures: t.failures, Evictions: t.evictions,
		HostBuffer: r.keptDocument(),
	}
}

func (r *replay) print(out io.Writer) {
	d := r.document()
	w := table(out)
	row := func(name, format string, args ...any) { fmt.Fprintf(w, "%s\t%s\n", name, fmt.Sprintf(format, args...)) }
	row("requests", "%d in %.1f s", d.Requests, d.Seconds)
	row("blocks", "%d, of which %d hit, %d stored, %d not stored", d.Blocks, d.HitBlocks, d.StoredBlocks,
		d.NotStoredBlocks)
	if d.DeclinedBlocks > 0 {
		row("not admitted", "%d of those that were not stored", d.DeclinedBlocks)
	}
	row("hit rate", "%.1f %% of blocks, %.1f %% of tokens", 100*d.HitRate, 100*d.HitRateTokens)
	moved := d.BytesRead+d.BytesWritten > 0 // none with --metadata-only
	if moved {
		row("read", "%s at %.2f GB/s, verified", humanBytes(d.BytesRead), d.ReadGBPerSecond)
		row("written", "%s at %.2f GB/s, committed", humanBytes(d.BytesWritten), d.WriteGBPerSecond)
	}
	latency := func(name string, h *histogram) {
		row(name, "p50 %v, p90 %v, p99 %v, max %v", round3(h.quantile(0.5)), round3(h.quantile(0.9)),
			round3(h.quantile(0.99)), round3(h.max))
	}
	latency("lookup", &r.lookup)
	if moved {
		latency("layer", &r.layer)
		row("verify failures", "%d", d.VerifyFailures)
	}
	row("evictions", "%d", d.Evictions)
	if k := d.HostBuffer; k != nil {
		row("host buffer", "room for %d blocks; of %d declined %d were kept, %d hit, %d written then, %d pushed out",
			k.Blocks, k.Declined, k.Kept, k.Hit, k.Written, k.Evicted)
		row("writes spared", "%s", humanBytes(k.Spared))
	}
	w.Flush()
}

// round3 keeps three digits.
func round3(d time.Duration) time.Duration {
	unit := time.Duration(1)
	for d/unit >= 1000 {
		unit *= 10
	}
	return d.Round(unit)
}
