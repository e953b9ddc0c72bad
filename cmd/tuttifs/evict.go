package main

import (
	"context"
	"encoding/hex"
	"errors"
	"math"

	"github.com/spf13/pflag"

	"tuttifs/gpufile"
	"tuttifs/ioctl"
)

type evictOptions struct {
	count  uint32
	all    bool
	prefix bool
	json   bool
	flags  *pflag.FlagSet
}

func newEvict() *command {
	o := &evictOptions{}
	f := newFlags("evict")
	o.flags = f
	f.Uint32Var(&o.count, "count", 0, "evict up to so many files, by the policy's choice")
	f.BoolVar(&o.all, "all", false, "evict everything that is not pinned")
	f.BoolVar(&o.prefix, "prefix", false,
		"evict the named files and their ancestors up to the first that another chain shares")
	f.BoolVar(&o.json, "json", false, "print as JSON")
	return &command{
		name: "evict", synopsis: "[FLAGS] MOUNT POOL [KEY...]", summary: "evict files of a pool, leaf first",
		exits: &plainExits, flags: f,
		long: `
Evicts files by key, by prefix or by number, and returns when their freeing is durable. Pinned files
are never torn away from their readers: a named one is a miss at once and is freed at its last
unpin; --count and --all pass it over.`,
		example: `
tuttifs evict /mnt/kv replay-llama3-8b --count 1000
tuttifs evict /mnt/kv replay-llama3-8b --prefix 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08`,
		run: o.run,
	}
}

// check returns the verb's flag and the keys.
func (o *evictOptions) check(args []string) (flag uint16, keys []gpufile.Key, err error) {
	if len(args) < 2 {
		return 0, nil, usagef("name a mount point and a pool")
	}
	for _, text := range args[2:] {
		b, err := hex.DecodeString(text)
		if err != nil || len(b) != ioctl.KeyBytes {
			return 0, nil, usagef("%q is not a key: %d hexadecimal digits", text, 2*ioctl.KeyBytes)
		}
		keys = append(keys, gpufile.Key(b))
	}
	ways := 0
	for _, chosen := range []bool{o.flags.Changed("count"), o.all, len(keys) > 0} {
		if chosen {
			ways++
		}
	}
	switch {
	case ways != 1:
		return 0, nil, usagef("choose one of --count, --all and keys")
	case o.count == 0 && o.flags.Changed("count"):
		return 0, nil, usagef("--count must be at least 1")
	case o.prefix && len(keys) == 0:
		return 0, nil, usagef("--prefix needs keys")
	case o.prefix:
		return ioctl.EvictPrefix, keys, nil
	case len(keys) > 0:
		return ioctl.EvictKeys, keys, nil
	}
	if o.all {
		o.count = math.MaxUint32
	}
	return ioctl.EvictCount, nil, nil
}

func (o *evictOptions) run(ctx context.Context, e *env, args []string) error {
	flag, keys, err := o.check(args)
	if err != nil {
		return err
	}
	n, err := o.evict(ctx, args[0], args[1], flag, keys)
	if err != nil {
		return explainDead(args[0], err)
	}
	if o.json {
		return printJSON(e.stdout, struct {
			OutputVersion int    `json:"output_version"`
			Evicted       uint64 `json:"evicted"`
		}{outputVersion, n})
	}
	e.printf("%d files evicted\n", n)
	return nil
}

// evict speaks the ABI as an engine does: a session with an arena and no queues.
func (o *evictOptions) evict(ctx context.Context, mount, pool string, flag uint16, keys []gpufile.Key) (
	total uint64, err error) {
	c, err := ioctl.Open(mount, false)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	info := ioctl.PoolInfo{}
	if !ioctl.PutName(info.Name[:], pool) {
		return 0, usagef("%q is not a pool's name", pool)
	}
	if err := c.PoolInfo(&info, ioctl.PoolByName); errors.Is(err, ioctl.ENOENT) {
		return 0, noPool(mount, pool)
	} else if err != nil {
		return 0, err
	}
	var s ioctl.Session
	if err := c.SessionCreate(&s); err != nil {
		return 0, err
	}
	a, err := s.Attach(ioctl.AttachOptions{})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, a.Close()) }()
	for first := true; first || len(keys) > 0; first = false {
		verb := ioctl.Evict{Target: info.Target, Count: o.count}
		if n := min(len(keys), len(a.Arena)/ioctl.KeyBytes, ioctl.BatchMax); n > 0 {
			verb.Keys = ioctl.Span{Bytes: uint64(n) * ioctl.KeyBytes}
			copy(ioctl.View[[ioctl.KeyBytes]byte](a.Arena, verb.Keys), keys[:n])
			keys = keys[n:]
		}
		if err := c.Evict(&verb, flag); err != nil {
			return total, err
		}
		n, err := c.WaitTicket(ctx, a, verb.Ticket)
		if err != nil {
			return total, err
		}
		total += n
	}
	return total, nil
}
