package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"tuttifs/gpufile"
	"tuttifs/wear"
)

// hostBuffer stands for the host memory of a session in which blocks that were not admitted are kept: by the same
// index. A nil one is empty.
type hostBuffer struct{ *wear.Kept[struct{}] }

func newHostBuffer(blocks int) *hostBuffer {
	if blocks == 0 {
		return nil
	}
	return &hostBuffer{wear.NewKept[struct{}](uint32(min(blocks, math.MaxUint32)))}
}

// has says whether a block is there, and counts that as a use.
func (b *hostBuffer) has(key gpufile.Key) bool {
	if b == nil {
		return false
	}
	block := b.Find(wear.KeptKey{Key: key})
	if block != nil {
		b.Use(block)
	}
	return block != nil
}

func (b *hostBuffer) put(key gpufile.Key) {
	if b != nil && !b.has(key) {
		b.Put(wear.KeptKey{Key: key}, struct{}{})
	}
}

func (b *hostBuffer) drop(key gpufile.Key) {
	if b == nil {
		return
	}
	if block := b.Find(wear.KeptKey{Key: key}); block != nil {
		b.Drop(block)
	}
}

// admissionResult is what one policy did to a trace.
type admissionResult struct {
	Policy        string            `json:"policy"`
	BufferBytes   uint64            `json:"host_buffer_bytes"`
	HitRate       float64           `json:"hit_rate"`
	HitRateTokens float64           `json:"hit_rate_tokens"`
	HitBlocks     uint64            `json:"hit_blocks"`
	BufferBlocks  uint64            `json:"buffer_hit_blocks"` // of those, served by the buffer
	StoredBlocks  uint64            `json:"stored_blocks"`
	Declined      uint64            `json:"declined_blocks"`
	Evictions     uint64            `json:"evictions"`
	BytesWritten  uint64            `json:"bytes_written"`
	Avoided       float64           `json:"writes_avoided"` // part of what storing everything writes
	HitsKept      float64           `json:"hits_kept"`      // part of the hits that storing everything has
	Expectation   *wear.Expectation `json:"expectation,omitempty"`
}

// admissionDocument is the comparison: the first result is that of storing everything.
type admissionDocument struct {
	OutputVersion int               `json:"output_version"`
	Requests      int               `json:"requests"`
	BlockBytes    uint64            `json:"block_bytes"`
	Results       []admissionResult `json:"results"`
}

// admissionRun is one line of the comparison.
type admissionRun struct {
	policy wear.Policy
	buffer uint64 // bytes
}

// runs lists what is compared: storing everything first, then each policy with each buffer.
func (o *replayOptions) runs() ([]admissionRun, error) {
	buffers := []uint64{}
	for _, text := range o.buffers {
		n, err := parseSize(text)
		if err != nil {
			return nil, usagef("--host-buffer: %v", err)
		}
		buffers = append(buffers, n)
	}
	if len(buffers) == 0 {
		buffers = append(buffers, 0)
	}
	runs := []admissionRun{{}}
	for _, name := range o.admissions {
		p, err := wear.ParsePolicy(name)
		if err != nil {
			return nil, usagef("--admission: %v", err)
		}
		if p == wear.All {
			continue
		}
		for _, b := range buffers {
			if run := (admissionRun{p, b}); !slices.Contains(runs, run) {
				runs = append(runs, run)
			}
		}
	}
	return runs, nil
}

// compare replays the trace once for each run.
func (o *replayOptions) compare(ctx context.Context, e *env, requests []traceRequest) error {
	runs, err := o.runs()
	if err != nil {
		return err
	}
	prices := wear.DefaultPrices()
	if o.prices != "" {
		if !slices.ContainsFunc(runs, func(r admissionRun) bool { return r.policy == wear.CostAware }) {
			return usagef("--prices is for --admission cost-aware")
		}
		if prices, err = readPrices(o.prices); err != nil {
			return err
		}
	}
	kv, err := o.kv()
	if err != nil {
		return err
	}
	geometry, err := kv.Geometry()
	if err != nil {
		return fmt.Errorf("geometry of %s: %w", o.model, err)
	}
	doc := admissionDocument{OutputVersion: outputVersion, Requests: len(requests),
		BlockBytes: uint64(geometry.FileBytes())}
	for _, run := range runs {
		gate := wear.GateOptions{Admissions: wear.Admissions{Default: run.policy}, Prices: prices,
			FileBytes: doc.BlockBytes}
		result, err := o.runAdmission(ctx, e, requests, run, gate)
		if err != nil {
			return err
		}
		doc.Results = append(doc.Results, result)
		all := &doc.Results[0]
		r := &doc.Results[len(doc.Results)-1]
		r.Avoided = 1 - ratio(r.StoredBlocks, all.StoredBlocks)
		r.HitsKept = ratio(r.HitBlocks, all.HitBlocks)
	}
	if o.json {
		return printJSON(e.stdout, doc)
	}
	doc.print(e)
	return nil
}

func (o *replayOptions) runAdmission(
	ctx context.Context, e *env, requests []traceRequest, run admissionRun, gate wear.GateOptions,
) (result admissionResult, err error) {
	target, err := openMetadataTarget(o, uniqueBlocks(requests), gate, int(run.buffer/gate.FileBytes))
	if err != nil {
		return result, err
	}
	defer func() { err = errors.Join(err, target.close()) }()
	r := &replay{target: target, speed: o.speed}
	bar := newProgress(e, "replay "+run.policy.String(), uint64(len(requests)))
	err = r.run(ctx, requests, bar)
	bar.finish()
	if err != nil {
		return result, err
	}
	t := &r.totals
	result = admissionResult{
		Policy: run.policy.String(), BufferBytes: run.buffer,
		HitRate: ratio(t.hitBlocks, t.blocks), HitRateTokens: ratio(t.hitTokens, t.tokens), HitBlocks: t.hitBlocks,
		BufferBlocks: t.bufferBlocks, StoredBlocks: t.storedBlocks, Declined: t.declinedBlocks,
		BytesWritten: t.storedBlocks * gate.FileBytes,
	}
	if x, ok := target.files.Expectation(); ok {
		result.Expectation = &x
	}
	result.Evictions, err = target.evictions()
	return result, err
}

func (d *admissionDocument) print(e *env) {
	w := table(e.stdout)
	fmt.Fprint(w, "ADMISSION\tHOST BUFFER\tHIT RATE\tOF TOKENS\tHITS KEPT\tBY BUFFER\tWRITTEN\tWRITES AVOIDED\tEVICTED\n")
	for i := range d.Results {
		r := &d.Results[i]
		fmt.Fprintf(w, "%s\t%s\t%.1f%%\t%.1f%%\t%.1f%%\t%.1f%%\t%s\t%.1f%%\t%d\n", r.Policy, humanBytes(r.BufferBytes),
			100*r.HitRate, 100*r.HitRateTokens, 100*r.HitsKept, 100*ratio(r.BufferBlocks, r.HitBlocks),
			humanBytes(r.BytesWritten), 100*r.Avoided, r.Evictions)
	}
	w.Flush()
	e.printf("%d requests, blocks of %s; hits kept and writes avoided are against storing everything\n", d.Requests,
		humanBytes(d.BlockBytes))
}
