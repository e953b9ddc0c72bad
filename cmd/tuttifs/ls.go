package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"tuttifs/daemon"
)

type lsOptions struct {
	json  bool
	limit uint
}

func newLs() *command {
	o := &lsOptions{}
	f := newFlags("ls")
	f.BoolVar(&o.json, "json", false, "print as JSON; files as one object a line")
	f.UintVar(&o.limit, "limit", 0, "list at most so many files (default all)")
	return &command{
		name: "ls", synopsis: "[FLAGS] MOUNT [POOL]", summary: "list pools, or a pool's files, with sizes",
		exits: &plainExits, flags: f,
		long: `
Without POOL, lists the pools of a mount with their files and space. With POOL, lists its files:
key, size, commit time and last hit. Everything here is in the mount's tree too, for ls(1), find(1)
and getfattr(1).`,
		example: `
tuttifs ls /mnt/kv
tuttifs ls --json /mnt/kv replay-llama3-8b`,
		run: o.run,
	}
}

func (o *lsOptions) run(ctx context.Context, e *env, args []string) error {
	switch len(args) {
	case 1:
		return o.pools(e, args[0])
	case 2:
		return o.files(ctx, e, args[0], args[1])
	}
	return usagef("name a mount point, and perhaps a pool")
}

type lsPool struct {
	Name     string           `json:"name"`
	FileSize int64            `json:"file_bytes"`
	Stats    daemon.PoolStats `json:"stats"`
}

func (o *lsOptions) pools(e *env, dir string) error {
	info, err := mountInfo(dir)
	if err != nil {
		return err
	}
	pools := []lsPool{}
	for _, p := range info.Pools {
		pools = append(pools, lsPool{p.Name, p.FileBytes, info.Stats[p.Name]})
	}
	if o.json {
		return printJSON(e.stdout, struct {
			OutputVersion int      `json:"output_version"`
			Pools         []lsPool `json:"pools"`
		}{outputVersion, pools})
	}
	w := table(e.stdout)
	fmt.Fprintf(w, "POOL\tFILES\tPINNED\tFILE\tUSED\tCAPACITY\n")
	for _, p := range pools {
		fmt.Fprintf(w, "%s\t%d\t%d\t%s\t%s\t%s\n", p.Name, p.Stats.Files, p.Stats.FilesPinned, humanBytes(uint64(p.FileSize)),
			humanBytes(p.Stats.BytesUsed), humanBytes(p.Stats.BytesCapacity))
	}
	return w.Flush()
}

// lsFile is one line of ls --json.
type lsFile struct {
	OutputVersion  int       `json:"output_version"`
	Key            string    `json:"key"`
	Bytes          int64     `json:"bytes"`
	AllocatedBytes int64     `json:"allocated_bytes"`
	Committed      time.Time `json:"committed"`
	LastHit        time.Time `json:"last_hit"`
}

// errEnough ends a walk at the limit.
var errEnough = errors.New("enough")

func (o *lsOptions) files(ctx context.Context, e *env, mount, pool string) error {
	root := filepath.Join(mount, pool, "blocks")
	out := bufio.NewWriter(e.stdout)
	enc, n := json.NewEncoder(out), uint(0)
	err := walkFiles(ctx, root, func(f lsFile) error {
		if n++; o.limit > 0 && n > o.limit {
			return errEnough
		}
		if o.json {
			return enc.Encode(f)
		}
		_, err := fmt.Fprintf(out, "%s %10s  %s  %s\n", f.Key, humanBytes(uint64(f.Bytes)), f.Committed.Format(time.DateTime),
			f.LastHit.Format(time.DateTime))
		return err
	})
	if errors.Is(err, errEnough) {
		err = nil
	}
	if errors.Is(err, fs.ErrNotExist) {
		return noPool(mount, pool)
	}
	return errors.Join(explainDead(mount, err), out.Flush())
}

// walkPage is the number of directory entries read at a time.
const walkPage = 1024

// walkFiles calls f for the files of blocks/<hh>/. Files that go meanwhile are left out.
func walkFiles(ctx context.Context, root string, f func(lsFile) error) error {
	shards, err := os.ReadDir(root)
	if err != nil {
		return err
	}
	for _, shard := range shards {
		if err := walkShard(ctx, filepath.Join(root, shard.Name()), f); err != nil {
			return err
		}
	}
	return nil
}

func walkShard(ctx context.Context, dir string, f func(lsFile) error) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		names, err := d.Readdirnames(walkPage)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, name := range names {
			var st unix.Stat_t
			switch err := unix.Fstatat(int(d.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); {
			case errors.Is(err, unix.ENOENT):
				continue
			case err != nil:
				return fmt.Errorf("%s/%s: %w", dir, name, err)
			}
			file := lsFile{outputVersion, name, st.Size, st.Blocks * 512, time.Unix(st.Mtim.Unix()), time.Unix(st.Atim.Unix())}
			if err := f(file); err != nil {
				return err
			}
		}
	}
}
