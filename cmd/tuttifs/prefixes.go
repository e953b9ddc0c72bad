package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

type prefixesOptions struct {
	json  bool
	limit uint
}

func newPrefixes() *command {
	o := &prefixesOptions{}
	f := newFlags("prefixes")
	f.BoolVar(&o.json, "json", false, "print as JSON")
	f.UintVar(&o.limit, "limit", 0, "list at most so many tips (default all)")
	return &command{
		name: "prefixes", synopsis: "[FLAGS] MOUNT POOL [KEY]", summary: "list the tips of prefix chains, or one chain",
		exits: &plainExits,
		flags: f,
		long: `
Without KEY, lists the blocks that no other block continues: the ends of all cached prefixes. With
KEY, lists the chain that ends with it, root first, with the tokens of each block.`,
		example: `
tuttifs prefixes /mnt/kv replay-llama3-8b --limit 10
tuttifs prefixes /mnt/kv replay-llama3-8b 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08`,
		run: o.run,
	}
}

type chainBlock struct {
	Key      string  `json:"key"`
	Tokens   *uint64 `json:"tokens,omitempty"` // nil on a mount without extended attributes
	Position uint64  `json:"position"`
}

func (o *prefixesOptions) run(ctx context.Context, e *env, args []string) error {
	if len(args) != 2 && len(args) != 3 {
		return usagef("name a mount point, a pool and perhaps a key")
	}
	root := filepath.Join(args[0], args[1], "prefixes")
	var err error
	if len(args) == 3 {
		err = o.chain(e, root, args[2])
	} else {
		err = o.tips(ctx, e, root)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return explainDead(args[0], err)
	}
	if _, poolErr := os.Stat(root); poolErr != nil {
		return noPool(args[0], args[1])
	}
	return fmt.Errorf("pool %s has no block %s", args[1], args[2])
}

func (o *prefixesOptions) tips(ctx context.Context, e *env, root string) error {
	d, err := os.Open(root)
	if err != nil {
		return err
	}
	defer d.Close()
	tips := []string{}
	out := bufio.NewWriter(e.stdout)
	for n := uint(0); ; {
		if err := ctx.Err(); err != nil {
			return err
		}
		names, err := d.Readdirnames(walkPage)
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		for _, name := range names {
			if n++; o.limit > 0 && n > o.limit {
				break
			}
			if o.json {
				tips = append(tips, name)
			} else {
				fmt.Fprintln(out, name)
			}
		}
		if len(names) == 0 || o.limit > 0 && n >= o.limit {
			break
		}
	}
	if o.json {
		return printJSON(e.stdout, struct {
			OutputVersion int      `json:"output_version"`
			Tips          []string `json:"tips"`
		}{outputVersion, tips})
	}
	return out.Flush()
}

func (o *prefixesOptions) chain(e *env, root, key string) error {
	d, err := os.Open(filepath.Join(root, key))
	if err != nil {
		return err
	}
	defer d.Close()
	links, err := d.Readdirnames(-1) // in the chain's order, which sorting by name might not keep
	if err != nil {
		return err
	}
	blocks := []chainBlock{}
	for _, link := range links {
		path := filepath.Join(root, key, link)
		target, err := os.Readlink(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue // gone meanwhile
		}
		if err != nil {
			return err
		}
		block := chainBlock{Key: filepath.Base(target)}
		position, _, _ := strings.Cut(link, "_")
		if block.Position, err = strconv.ParseUint(position, 10, 64); err != nil {
			return fmt.Errorf("%s: not a link of a chain: %w", path, err)
		}
		if tokens, err := strconv.ParseUint(xattr(path, "tokens"), 10, 64); err == nil {
			block.Tokens = &tokens
		}
		blocks = append(blocks, block)
	}
	if o.json {
		return printJSON(e.stdout, struct {
			OutputVersion int          `json:"output_version"`
			Chain         []chainBlock `json:"chain"`
		}{outputVersion, blocks})
	}
	w := table(e.stdout)
	for _, b := range blocks {
		tokens := "-"
		if b.Tokens != nil {
			tokens = strconv.FormatUint(*b.Tokens, 10)
		}
		fmt.Fprintf(w, "%d\t%s\t%s tokens\n", b.Position, b.Key, tokens)
	}
	return w.Flush()
}

// xattr reads a short attribute of the file that path leads to; "" if the mount shows none.
func xattr(path, name string) string {
	var b [256]byte
	n, err := unix.Getxattr(path, "user.tuttifs."+name, b[:])
	if err != nil {
		return ""
	}
	return string(b[:n])
}
