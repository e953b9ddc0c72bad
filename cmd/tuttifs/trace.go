package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"strconv"
	"strings"

	"tuttifs/wholefile"
)

type traceOptions struct {
	requests int
	seed     uint64
	output   string
}

func newTrace() *command {
	o := &traceOptions{}
	f := newFlags("trace")
	f.IntVar(&o.requests, "requests", 1000, "requests to make")
	f.Uint64Var(&o.seed, "seed", 1, "equal seeds make equal traces")
	f.StringVarP(&o.output, "output", "o", "-", "`FILE` to write, - for standard output")
	return &command{
		name: "trace", synopsis: flagsOnly, summary: "make a synthetic trace for replay", exits: &plainExits, flags: f,
		long: `
Writes a trace in the Mooncake format: conversations that begin with one of a few system prompts,
popular ones much more often than others, and grow turn by turn, so that later requests share
prefixes with earlier ones. It is for demonstrations and tests; it models no real service.`,
		example: `tuttifs trace --requests 200 --seed 7 -o small.jsonl`,
		run:     o.run,
	}
}

func (o *traceOptions) run(ctx context.Context, e *env, _ []string) error {
	if o.requests < 1 {
		return usagef("--requests must be at least 1")
	}
	if o.output == "-" {
		return generateTrace(ctx, e.stdout, o.requests, o.seed)
	}
	if err := checkOutput(o.output); err != nil {
		return err
	}
	var b bytes.Buffer
	if err := generateTrace(ctx, &b, o.requests, o.seed); err != nil {
		return err
	}
	return wholefile.Write(o.output, b.Bytes(), 0o644)
}

// conversation is a chain of full blocks that later turns extend.
type conversation struct{ ids []uint64 }

// generateTrace writes n requests. Every id has one parent, ids are consecutive in the order in which they are first
// seen, and a partial tail is never extended: the next turn has a new block in its place.
func generateTrace(ctx context.Context, w io.Writer, n int, seed uint64) error {
	const (
		systemPrompts = 8
		recentMax     = 64 // conversations that may go on
		blocksMax     = 96 // a conversation that is longer ends
	)
	rng := rand.New(rand.NewPCG(seed, 0x7475747469667321))
	popularity := rand.NewZipf(rng, 1.3, 1, systemPrompts-1)
	age := rand.NewZipf(rng, 1.1, 4, recentMax-1)
	next := uint64(0)
	grow := func(ids []uint64, count int) []uint64 {
		for range count {
			ids, next = append(ids, next), next+1
		}
		return ids
	}
	var system [systemPrompts][]uint64
	var recent []*conversation // the newest last
	buf, now := bufio.NewWriter(w), 0
	for range n {
		if err := ctx.Err(); err != nil {
			return err
		}
		now += rng.IntN(600)
		var c *conversation
		if i := len(recent) - 1 - int(age.Uint64()); i >= 0 && rng.IntN(10) < 7 {
			c = recent[i]
			recent = append(append(recent[:i:i], recent[i+1:]...), c)
		} else {
			s := popularity.Uint64()
			if system[s] == nil {
				system[s] = grow(nil, 1+rng.IntN(6))
			}
			c = &conversation{append([]uint64(nil), system[s]...)}
			recent = append(recent, c)
		}
		c.ids = grow(c.ids, 1+rng.IntN(8))
		ids := grow(c.ids[:len(c.ids):len(c.ids)], 1)
		tail := 1 + rng.IntN(traceBlockTokens)
		_, err := fmt.Fprintf(buf, `{"timestamp": %d, "input_length": %d, "output_length": %d, "hash_ids": [%s]}`+"\n", now,
			(len(ids)-1)*traceBlockTokens+tail, 1+rng.IntN(800), joinIDs(ids))
		if err != nil {
			return err
		}
		if len(c.ids) > blocksMax {
			recent = recent[:len(recent)-1]
		}
		if len(recent) > recentMax {
			recent = recent[1:]
		}
	}
	return buf.Flush()
}

func joinIDs(ids []uint64) string {
	words := make([]string, len(ids))
	for i, id := range ids {
		words[i] = strconv.FormatUint(id, 10)
	}
	return strings.Join(words, ", ")
}
