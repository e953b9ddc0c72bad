// Package contentkey names KV blocks by what they were computed from: a SHA-256 chain over a prompt's tokens, its
// adapter, salt, tenant and media. docs/keys.md defines it byte by byte; testdata/keys.json are examples for every
// implementation.
package contentkey

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
)

// Key names a file: the content of B tokens behind everything that stands before them.
type Key = [sha256.Size]byte

// ErrPrompt is a prompt that has no keys: it breaks a rule of docs/keys.md.
var ErrPrompt = errors.New("content keys")

const (
	// BytesMax bounds an adapter, a salt and an item's id, in bytes.
	BytesMax = 1 << 16
	// MediaMax bounds the media items of a prompt.
	MediaMax = 1 << 16
	// PositionMax bounds positions in a prompt and lengths of it, in tokens.
	PositionMax = 1 << 40
	// TokensPerFileMax bounds B.
	TokensPerFileMax = 1 << 20
)

// The first bytes of what is hashed for the root and for a file. They differ, so that neither is ever the other.
const (
	rootTag = "tuttifs prompt 1"
	fileTag = "tuttifs kvfile 1"
)

// Media is what the engine computes in place of some tokens: an image, sound, a prompt's embeddings.
type Media struct {
	Start  uint64 // position of its first token in the prompt
	Tokens uint64 // that it takes the place of
	ID     []byte // its content's digest
}

// Prompt is everything but the tokens. Media are sorted by start, then tokens, then id, and no two are equal; they may
// overlap. Adapter and Salt are empty where there is none.
type Prompt struct {
	TokensPerFile uint32
	Tenant        uint32
	Adapter       []byte
	Salt          []byte
	Media         []Media
}

// check reports the first rule that the prompt breaks.
func (p *Prompt) check() error {
	switch {
	case p.TokensPerFile == 0 || p.TokensPerFile > TokensPerFileMax:
		return fmt.Errorf("%w: %d tokens a file, 1 to %d are possible", ErrPrompt, p.TokensPerFile, TokensPerFileMax)
	case len(p.Adapter) > BytesMax || len(p.Salt) > BytesMax:
		return fmt.Errorf("%w: an adapter of %d bytes and a salt of %d, at most %d are possible: give a digest", ErrPrompt,
			len(p.Adapter), len(p.Salt), BytesMax)
	case len(p.Media) > MediaMax:
		return fmt.Errorf("%w: %d media items, at most %d are possible", ErrPrompt, len(p.Media), MediaMax)
	}
	for i := range p.Media {
		m := &p.Media[i]
		switch {
		case m.Start > PositionMax || m.Tokens == 0 || m.Tokens > PositionMax:
			return fmt.Errorf("%w: media item %d has %d tokens from %d on", ErrPrompt, i, m.Tokens, m.Start)
		case len(m.ID) == 0 || len(m.ID) > BytesMax:
			return fmt.Errorf("%w: media item %d has an id of %d bytes, 1 to %d are possible: give its content's digest",
				ErrPrompt, i, len(m.ID), BytesMax)
		case i > 0 && compare(&p.Media[i-1], m) >= 0:
			return fmt.Errorf("%w: media item %d does not stand behind the one before it: sort by start, tokens and id",
				ErrPrompt, i)
		}
	}
	return nil
}

// compare is the order of media items.
func compare(a, b *Media) int {
	return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(a.Tokens, b.Tokens), bytes.Compare(a.ID, b.ID))
}

// Root is what stands in the place of a previous key for the first file. It is itself no key of a file.
func (p *Prompt) Root() (root Key, err error) {
	if err := p.check(); err != nil {
		return root, err
	}
	return sha256.Sum256(p.appendRoot(nil)), nil
}

// appendRoot appends what the root is the hash of.
func (p *Prompt) appendRoot(b []byte) []byte {
	le := binary.LittleEndian
	b = append(b, rootTag...)
	b = le.AppendUint32(b, p.TokensPerFile)
	b = le.AppendUint32(b, p.Tenant)
	b = le.AppendUint64(b, uint64(len(p.Adapter)))
	b = le.AppendUint64(b, uint64(len(p.Salt)))
	b = append(b, p.Adapter...)
	return append(b, p.Salt...)
}

// Keys appends the keys of a prompt's whole files, root first, to dst. Tokens behind the last whole file have none.
func (p *Prompt) Keys(dst []Key, tokens []uint32) ([]Key, error) {
	root, err := p.Root()
	if err != nil {
		return dst, err
	}
	return p.chain(dst, root, 0, tokens)
}

// Continue is Keys for tokens that stand behind a number of files of the same prompt, the last of which has the given
// key.
func (p *Prompt) Continue(dst []Key, last Key, files uint64, tokens []uint32) ([]Key, error) {
	if err := p.check(); err != nil {
		return dst, err
	}
	if files == 0 || files > PositionMax/uint64(p.TokensPerFile) {
		return dst, fmt.Errorf("%w: to be continued behind %d files: 1 to %d are possible", ErrPrompt, files,
			PositionMax/uint64(p.TokensPerFile))
	}
	return p.chain(dst, last, files, tokens)
}

// chain appends the keys of files number first and so on.
func (p *Prompt) chain(dst []Key, previous Key, first uint64, tokens []uint32) ([]Key, error) {
	per := uint64(p.TokensPerFile)
	if uint64(len(tokens)) > PositionMax-first*per {
		return dst, fmt.Errorf("%w: %d tokens behind %d files of %d", ErrPrompt, len(tokens), first, per)
	}
	c := chain{hash: sha256.New(), media: p.Media}
	for ; uint64(len(tokens)) >= per; tokens = tokens[per:] {
		c.encode(previous, first*per, tokens[:per])
		c.hash.Reset()
		c.hash.Write(c.buffer)
		c.hash.Sum(previous[:0])
		dst = append(dst, previous)
		first++
	}
	return dst, nil
}

// chain is the state of a walk along a prompt's files.
type chain struct {
	hash   hash.Hash
	media  []Media // those in front are over before the next file begins
	buffer []byte
}

// encode puts what a file's key is the hash of into the buffer. begin is the position of its first token.
func (c *chain) encode(previous Key, begin uint64, tokens []uint32) {
	le := binary.LittleEndian
	b := append(c.buffer[:0], fileTag...)
	b = append(b, previous[:]...)
	b = le.AppendUint32(b, uint32(len(tokens)))
	count := len(b)
	b = le.AppendUint32(b, 0)
	for _, t := range tokens {
		b = le.AppendUint32(b, t)
	}
	for len(c.media) > 0 && c.media[0].Start+c.media[0].Tokens <= begin {
		c.media = c.media[1:]
	}
	items := uint32(0)
	for i := range c.media {
		m := &c.media[i]
		if m.Start >= begin+uint64(len(tokens)) {
			break // and so do all behind it
		}
		if m.Start+m.Tokens <= begin {
			continue
		}
		b = le.AppendUint64(b, m.Start)
		b = le.AppendUint64(b, m.Tokens)
		b = le.AppendUint64(b, uint64(len(m.ID)))
		b = append(b, m.ID...)
		items++
	}
	le.PutUint32(b[count:], items)
	c.buffer = b
}
