//go:build cgo

package main

// #include "shim.h"
import "C"

import (
	"fmt"
	"unsafe"

	"tuttifs/contentkey"
	"tuttifs/engine"
)

// bytesOf are a caller's bytes.
func bytesOf(p *C.uint8_t, n C.uint64_t, what string) ([]byte, error) {
	return array((*byte)(unsafe.Pointer(p)), n, what)
}

// promptOf is a caller's prompt. Its bytes stay the caller's.
func promptOf(c *C.struct_tuttifs_prompt) (p contentkey.Prompt, err error) {
	if c == nil {
		return p, null("prompt")
	}
	if err := sized(unsafe.Pointer(c), c.size, unsafe.Sizeof(*c), "tuttifs_prompt"); err != nil {
		return p, err
	}
	if c.reserved0 != 0 || c.reserved != [4]C.uint64_t{} {
		return p, fmt.Errorf("%w: reserved fields of tuttifs_prompt", engine.ErrInvalid)
	}
	p = contentkey.Prompt{TokensPerFile: uint32(c.tokens_per_file), Tenant: uint32(c.tenant)}
	if p.Adapter, err = bytesOf(c.adapter, c.adapter_bytes, "bytes of an adapter"); err != nil {
		return p, err
	}
	if p.Salt, err = bytesOf(c.salt, c.salt_bytes, "bytes of a salt"); err != nil {
		return p, err
	}
	media, err := array(c.media, c.media_count, "media items")
	if err != nil {
		return p, err
	}
	p.Media = make([]contentkey.Media, len(media))
	for i := range media {
		m := &media[i]
		p.Media[i] = contentkey.Media{Start: uint64(m.start), Tokens: uint64(m.tokens)}
		if p.Media[i].ID, err = bytesOf(m.id, m.id_bytes, "bytes of a media item's id"); err != nil {
			return p, err
		}
	}
	return p, nil
}

// keysOfPrompt begins a prompt's chain, or continues it.
func keysOfPrompt(p *contentkey.Prompt, c *C.struct_tuttifs_prompt, tokens []uint32) ([]contentkey.Key, error) {
	switch {
	case c.last != nil:
		return p.Continue(nil, *(*contentkey.Key)(unsafe.Pointer(c.last)), uint64(c.files), tokens)
	case c.files != 0:
		return nil, fmt.Errorf("%w: %d files before the tokens, without the last one's key", engine.ErrInvalid,
			uint64(c.files))
	}
	return p.Keys(nil, tokens)
}

//export goKeys
func goKeys(prompt *C.struct_tuttifs_prompt, tokens *C.uint32_t, n C.uint64_t, keys *C.uint8_t, files *C.uint64_t,
	text *C.char) C.int {
	return call(text, func() error {
		p, err := promptOf(prompt)
		if err != nil {
			return err
		}
		ids, err := array((*uint32)(unsafe.Pointer(tokens)), n, "tokens")
		if err != nil {
			return err
		}
		if files == nil {
			return null("files")
		}
		list, err := keysOfPrompt(&p, prompt, ids)
		if err != nil {
			return err
		}
		out, err := keysOf(keys, C.uint64_t(len(list)))
		if err != nil {
			return err
		}
		copy(out, list)
		*files = C.uint64_t(len(list))
		return nil
	})
}
