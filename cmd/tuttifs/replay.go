package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"tuttifs/gio"
	"tuttifs/gpufile"
	"tuttifs/stripe"
	"tuttifs/wear"
)

type replayOptions struct {
	mount        string
	metadataOnly bool
	policy       string
	admissions   []string
	buffers      []string
	prices       string
	capacity     uint32
	pool         string
	model        string
	geometry     stripe.KV
	scale        int
	speed        float64
	limit        int
	dmaBytes     sizeFlag
	lanes        int
	real         bool
	json         bool
}

func newReplay() *command {
	o := &replayOptions{}
	o.dmaBytes = 64 << 20
	f := newFlags("replay")
	f.StringVar(&o.mount, "mount", "", "mount point `DIR` to replay on (or name it behind the trace)")
	f.BoolVar(&o.metadataOnly, "metadata-only", false, "count hits only, on a volume in memory: no mount, no bytes")
	f.StringVar(&o.policy, "policy", "", "eviction `POLICY` with --metadata-only: lru, sieve or s3fifo (default lru)")
	f.StringSliceVar(&o.admissions, "admission", nil,
		"compare these admission `POLICIES` with --metadata-only: all, second-touch, cost-aware")
	f.StringSliceVar(&o.buffers, "host-buffer", nil,
		"and these `SIZES` of a simulated host buffer for blocks that were not admitted; on a mount, of one that is used")
	f.StringVar(&o.prices, "prices", "", "what cost-aware reckons with, a `FILE` as in 'tuttifs cost --prices'")
	f.Uint32Var(&o.capacity, "capacity-blocks", 0,
		"most blocks that the pool may hold (default: as many as there is space for)")
	f.StringVar(&o.pool, "pool", "", "`POOL` to replay into (default: replay-MODEL)")
	f.StringVar(&o.model, "model", "llama3-8b",
		"geometry of the cache of this `MODEL`, one of "+strings.Join(modelNames(), ", "))
	f.IntVar(&o.geometry.Layers, "layers", 0, "layers, instead of the model's")
	f.IntVar(&o.geometry.KVHeads, "kv-heads", 0, "KV heads over all ranks, instead of the model's")
	f.IntVar(&o.geometry.HeadDim, "head-dim", 0, "elements of a head, instead of the model's")
	f.IntVar(&o.geometry.DTypeBytes, "dtype-bytes", 0, "bytes of an element, instead of the model's")
	f.IntVar(&o.geometry.Tokens, "block-tokens", 0, "tokens whose KV is stored for a block of the trace (default 512)")
	f.IntVar(&o.geometry.Ranks, "ranks", 0, "tensor-parallel ranks (default 1)")
	f.BoolVar(&o.geometry.Split, "split", false, "K and V as objects of their own")
	f.IntVar(&o.scale, "scale", 1,
		"divide the bytes of a block by about this: first fewer layers, down to 4, then fewer tokens")
	f.Float64Var(&o.speed, "speed", 0, "1 follows the trace's clock, 10 ten times as fast; 0 as fast as possible")
	f.IntVar(&o.limit, "requests", 0, "replay only so many requests (default all)")
	f.Var(&o.dmaBytes, "memory", "memory for KV bytes in flight")
	f.IntVar(&o.lanes, "lanes", 0, "lanes of the session's ring (default 4)")
	f.BoolVar(&o.real, "real", false, "by queue pairs of the SSDs themselves, where the mount allows it (-o real)")
	f.BoolVar(&o.json, "json", false, "print the summary as JSON")
	return &command{
		name: "replay", synopsis: "[FLAGS] TRACE [MOUNT]", summary: "replay a trace of requests and verify every byte",
		exits: &plainExits, flags: f,
		long: `
Does what an inference engine does with the requests of a trace in the Mooncake format: for each it
looks up and pins the longest prefix that is there, retrieves the hit blocks layer by layer and
compares every byte with what was stored, stores the missing blocks, the partial tail included, and
commits them. The content of a block is derived from its key, so that a second replay verifies what
an earlier one stored. TRACE - reads standard input.

Blocks that are neither hit nor stored found no space, are being stored by another engine, or are
there already behind a block that is missing; or the mount's admission policy did not want them.

With --admission the trace is replayed once for each policy and size of the host buffer, and a table
shows what they do to hits and to bytes written, against storing everything. The buffer is simulated:
it holds the blocks that were not admitted last, and so serves their first reuse, when they are
admitted. On a mount, whose policy -o admission= has chosen, --host-buffer is memory of the session in
which it keeps such blocks. Bytes are those of the model's blocks. cost-aware draws its sample anew in
each run, so its figures differ a little. docs/wear.md describes the policies.

The exit status is 1 if any byte was wrong. hit_rate in JSON is a fraction of 1. GB are 10^9 bytes.`,
		example: `
tuttifs trace --requests 500 -o t.jsonl && tuttifs replay t.jsonl /mnt/kv --scale 1024
tuttifs replay t.jsonl --metadata-only --policy s3fifo --capacity-blocks 10000 --json
tuttifs replay t.jsonl --metadata-only --admission all,second-touch,cost-aware --host-buffer 0,256g`,
		run: o.run,
	}
}

const (
	replayMemoryMin = 64 << 10 // less than any layer needs, and enough for a session to be made
	replayScaleMax  = 1 << 30
	replayWaitMax   = 1 << 62 // nanoseconds: more than any trace is of
	replaySpeedMax  = 1e6     // a trace of days in a second, or the other way round
)

// poolNameForm is what a pool's name may be, as extentmap.PoolSpec says.
var poolNameForm = regexp.MustCompile(`^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$`)

// check validates flags and arguments and fills in defaults.
func (o *replayOptions) check(args []string) (trace string, err error) {
	switch len(args) {
	case 2:
		if o.mount != "" && o.mount != args[1] {
			return "", usagef("two mounts are named: %s and %s", o.mount, args[1])
		}
		o.mount = args[1]
	case 1:
	default:
		return "", usagef("name a trace file")
	}
	switch {
	case o.metadataOnly && o.mount != "":
		return "", usagef("--metadata-only needs no mount")
	case o.metadataOnly && o.real:
		return "", usagef("--real is for a mount, not for --metadata-only")
	case !o.metadataOnly && o.mount == "":
		return "", usagef("name the mount point behind the trace, or use --metadata-only")
	case !o.metadataOnly && o.policy != "":
		return "", usagef("the policy of a mount is chosen when it is mounted: -o policy=%s", o.policy)
	case o.policy != "" && !slices.Contains(policies, o.policy):
		return "", usagef("--policy %s: one of %s", o.policy, strings.Join(policies, ", "))
	case !o.metadataOnly && len(o.admissions) > 0:
		return "", usagef("the admission policy of a mount is chosen when it is mounted: -o admission=%s", o.admissions[0])
	case len(o.admissions) == 0 && o.prices != "":
		return "", usagef("--prices is for --admission")
	case len(o.admissions) == 0 && len(o.buffers) > 0 && o.metadataOnly:
		return "", usagef("--host-buffer is for --admission, or for a mount")
	case len(o.admissions) == 0 && len(o.buffers) > 1:
		return "", usagef("--host-buffer of a mount is one size")
	case !o.metadataOnly && o.dmaBytes < replayMemoryMin:
		return "", usagef("--memory %v: at least %s", &o.dmaBytes, humanBytes(replayMemoryMin))
	case o.pool != "" && !poolNameForm.MatchString(o.pool):
		return "", usagef("--pool %s: 1 to 64 letters, digits, dots, hyphens and underscores, no dot first", o.pool)
	case o.scale < 1 || o.scale > replayScaleMax:
		return "", usagef("--scale %d: 1 to %d", o.scale, replayScaleMax)
	case !(o.speed == 0 || o.speed >= 1/replaySpeedMax && o.speed <= replaySpeedMax):
		return "", usagef("--speed %v: 0, or %v to %v", o.speed, 1/replaySpeedMax, replaySpeedMax)
	case o.limit < 0:
		return "", usagef("--requests must not be negative")
	case o.lanes < 0 || o.lanes > gio.LanesMax:
		return "", usagef("--lanes %d: 1 to %d", o.lanes, gio.LanesMax)
	}
	if _, err := o.kv(); err != nil {
		return "", err
	}
	if _, err := o.runs(); err != nil {
		return "", err
	}
	return args[0], nil
}

func (o *replayOptions) run(ctx context.Context, e *env, args []string) (err error) {
	name, err := o.check(args)
	if err != nil {
		return err
	}
	requests, err := o.readTrace(e, name)
	if err != nil {
		return err
	}
	if len(o.admissions) > 0 {
		return o.compare(ctx, e, requests)
	}
	var target replayTarget
	if o.metadataOnly {
		target, err = openMetadataTarget(o, uniqueBlocks(requests), wear.GateOptions{}, 0)
	} else {
		target, err = openMountTarget(o)
	}
	if err != nil {
		return explainReplay(o.mount, err)
	}
	r := &replay{target: target, speed: o.speed}
	bar := newProgress(e, "replay", uint64(len(requests)))
	err = r.run(ctx, requests, bar)
	bar.finish()
	if evictions, statErr := target.evictions(); statErr == nil {
		r.totals.evictions = evictions
	} else {
		err = errors.Join(err, statErr)
	}
	if m, ok := target.(*mountTarget); ok && m.keeps {
		r.kept = m.pool.KeepStats()
	}
	if err = errors.Join(err, target.close()); err != nil {
		return explainReplay(o.mount, err)
	}
	if o.json {
		err = printJSON(e.stdout, r.document())
	} else {
		r.print(e.stdout)
	}
	if t := &r.totals; t.storedBlocks+t.declinedBlocks == 0 && t.hitBlocks < t.blocks {
		e.warnf("nothing was stored: no file fits, or everything is pinned, reserved or open")
	}
	if err == nil && r.totals.failures > 0 {
		e.warnf("%d blocks did not verify", r.totals.failures)
		return exitStatus(1)
	}
	return err
}

func (o *replayOptions) readTrace(e *env, name string) ([]traceRequest, error) {
	var in io.Reader = e.stdin
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		if st, err := f.Stat(); err == nil && st.IsDir() {
			return nil, usagef("%s is a directory: name the trace first, and the mount point behind it", name)
		}
		in = f
	}
	return readTrace(in, name, o.limit)
}

func uniqueBlocks(requests []traceRequest) int {
	seen := map[uint64]struct{}{}
	for i := range requests {
		for _, id := range requests[i].HashIDs {
			seen[id] = struct{}{}
		}
	}
	return len(seen)
}

func modelNames() (names []string) {
	for _, m := range stripe.Models {
		names = append(names, m.Name)
	}
	return names
}

// kv is the cache description that flags and scale ask for.
func (o *replayOptions) kv() (stripe.KV, error) {
	model, ok := stripe.FindModel(o.model)
	if !ok {
		return stripe.KV{}, usagef("unknown model %q: one of %s", o.model, strings.Join(modelNames(), ", "))
	}
	kv := model.KV(traceBlockTokens, 1)
	g := &o.geometry
	for _, f := range []struct{ flag, to *int }{
		{&g.Layers, &kv.Layers}, {&g.KVHeads, &kv.KVHeads}, {&g.HeadDim, &kv.HeadDim}, {&g.DTypeBytes, &kv.DTypeBytes},
		{&g.Tokens, &kv.Tokens}, {&g.Ranks, &kv.Ranks},
	} {
		if *f.flag != 0 {
			*f.to = *f.flag
		}
	}
	if kv.LatentRow != 0 && (g.KVHeads != 0 || g.HeadDim != 0 || g.DTypeBytes != 0) {
		return kv, usagef("%s keeps latents of %d bytes a token: it has no --kv-heads, --head-dim or --dtype-bytes", o.model,
			kv.LatentRow)
	}
	kv.Split = g.Split
	err := kv.Validate()
	if err == nil {
		kv = scaleKV(kv, o.scale)
		_, err = kv.Geometry()
	}
	if err != nil {
		return kv, usagef("geometry of %s: %v", o.model, err)
	}
	return kv, nil
}

// scaleKV divides the bytes of a file by about scale: layers first, but not below 4, because replay works layer by
// layer; then tokens.
func scaleKV(kv stripe.KV, scale int) stripe.KV {
	const layersMin = 4
	layers := kv.Layers
	kv.Layers = max(layers/scale, min(layers, layersMin))
	kv.Tokens = max(kv.Tokens*layers/(kv.Layers*scale), 1)
	return kv
}

func (o *replayOptions) poolName() string {
	if o.pool != "" {
		return o.pool
	}
	return "replay-" + o.model
}

// identity of the replay's pool. The weights are none, so their revision names what makes the content.
func (o *replayOptions) identity(kv stripe.KV) gpufile.Identity {
	rows := kv.LatentRow
	if rows == 0 {
		rows = 2 * kv.KVHeads / kv.Ranks * kv.HeadDim * kv.DTypeBytes
	}
	return gpufile.Identity{
		Model: o.model, Revision: "replay-content-1", WeightsEpoch: 1, DType: fmt.Sprintf("bytes%d", kv.DTypeBytes),
		Quantisation: "none", ScaleFormat: "none",
		Layout:    fmt.Sprintf("L%d-H%d-D%d-T%d", kv.Layers, kv.KVHeads, kv.HeadDim, kv.Tokens),
		PageBytes: uint64(rows * kv.Tokens), BlockTokens: traceBlockTokens, FileTokens: traceBlockTokens,
		TP: uint16(kv.Ranks), PP: 1, CP: 1, Group: "full",
	}
}

// replayTarget is where a trace is replayed: a mount, or a store in this process without bytes.
type replayTarget interface {
	// pin leases the longest prefix of keys that is on the drives until release, and says how many blocks behind it a
	// host buffer has.
	pin(keys []gpufile.Key) (hit, buffered int, err error)
	// restore retrieves the first n pinned blocks and verifies them; failed is the number of blocks with wrong or damaged
	// bytes. layer is told how long each layer of each batch took.
	restore(keys []gpufile.Key, layer func(time.Duration)) (bytes uint64, failed int, err error)
	// store stores and commits what is missing of items, in order. Fewer than all are stored when there is no space, when
	// others are storing them, or when the admission policy does not want them.
	store(items []replayItem) (replayStored, error)
	// release ends the leases of pin.
	release() error
	// evictions since the start.
	evictions() (uint64, error)
	close() error
}

// replayStored is what became of blocks to store.
type replayStored struct {
	stored, declined int
	bytes            uint64
}

// replayItem is one block to store.
type replayItem struct {
	key, parent gpufile.Key
	tokens      uint32
	position    uint32
}
