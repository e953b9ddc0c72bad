package fs

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/hanwen/go-fuse/v2/fuse"

	"tuttifs/gpufile"
)

const xattrPrefix = "user.tuttifs."

// xattrs of a stored file. What costs work to make is not listed; it is there for those who ask by name. settable ones
// describe the file wherever it is, and a copy takes them along; the others describe this moment of this store.
var xattrs = []struct {
	name             string
	listed, settable bool
	value            func(t *tree, p *poolNode, i *gpufile.FileInfo) (string, error)
}{
	{"key", true, false, text(func(i *gpufile.FileInfo) string { return keyName(&i.Key) })},
	{"parent", true, true, text(func(i *gpufile.FileInfo) string { return parentText(&i.Parent) })},
	{"tenant", true, true, number(func(i *gpufile.FileInfo) uint64 { return uint64(i.Tenant) })},
	{"tokens", true, true, number(func(i *gpufile.FileInfo) uint64 { return uint64(i.Tokens) })},
	{"position", true, true, number(func(i *gpufile.FileInfo) uint64 { return uint64(i.Position) })},
	{"slot", true, false, number(func(i *gpufile.FileInfo) uint64 { return uint64(i.Slot) })},
	{"generation", true, false, number(func(i *gpufile.FileInfo) uint64 { return i.Generation })},
	{"hits", true, false, number(func(i *gpufile.FileInfo) uint64 { return uint64(i.Hits) })},
	{"pins", true, false, number(func(i *gpufile.FileInfo) uint64 { return uint64(i.Pins) })},
	{"extents", false, false, (*tree).extents},
	{"checksum", false, false, (*tree).checksum},
}

func text(get func(i *gpufile.FileInfo) string) func(*tree, *poolNode, *gpufile.FileInfo) (string, error) {
	return func(_ *tree, _ *poolNode, i *gpufile.FileInfo) (string, error) { return get(i), nil }
}

func number(get func(i *gpufile.FileInfo) uint64) func(*tree, *poolNode, *gpufile.FileInfo) (string, error) {
	return func(_ *tree, _ *poolNode, i *gpufile.FileInfo) (string, error) {
		return strconv.FormatUint(get(i), 10), nil
	}
}

// parentText is "root" for a file without a parent.
func parentText(parent *gpufile.Key) string {
	if *parent == (gpufile.Key{}) {
		return "root"
	}
	return keyName(parent)
}

// xattrValueMax is the kernel's bound (XATTR_SIZE_MAX).
const xattrValueMax = 64 << 10

// extents lists where the objects lie, trailers too: "object drive unit units" a line, units of 4 KiB. A list longer
// than an xattr can be ends with a line "..."; the ioctl has no such bound.
func (t *tree) extents(p *poolNode, info *gpufile.FileInfo) (string, error) {
	const more = "...\n"
	var text []byte
	for object := range p.layout.Objects() {
		drive, unit, units, ok := t.b.extent(p.files, info.Slot, uint16(object))
		if !ok {
			return "", gpufile.ErrNotFound
		}
		line := fmt.Appendf(nil, "%d %d %d %d\n", object, drive, unit, units)
		if len(text)+len(line)+len(more) > xattrValueMax {
			return string(append(text, more...)), nil
		}
		text = append(text, line...)
	}
	return string(text), nil
}

// checksum reads the trailers.
func (t *tree) checksum(p *poolNode, info *gpufile.FileInfo) (string, error) {
	held, release, ok := p.HoldRead(info.Slot, info.Generation, 64)
	if !ok {
		return "", gpufile.ErrNotFound
	}
	defer release()
	r, err := t.b.open(p.files, held)
	if err != nil {
		return "", err
	}
	defer r.Close()
	return r.Checksum()
}

func (t *tree) GetXAttr(_ <-chan struct{}, header *fuse.InHeader, attr string, dest []byte) (uint32, fuse.Status) {
	name, ours := strings.CutPrefix(attr, xattrPrefix)
	n := nodeID(header.NodeId)
	if !ours || n.kind() != kindBlock && !n.upload() {
		return 0, fuse.ENODATA
	}
	if n.upload() {
		u := t.writes.byNode(n)
		if u == nil {
			return 0, eSTALE
		}
		u.mu.Lock()
		defer u.mu.Unlock()
		if value, ok := u.attrs.get(name); ok {
			return reply(dest, value)
		}
		return 0, fuse.ENODATA
	}
	for i := range xattrs {
		if xattrs[i].name != name {
			continue
		}
		p, info, st := t.stat(n)
		if st != fuse.OK {
			return 0, st
		}
		value, err := xattrs[i].value(t, p, &info)
		if err != nil {
			return 0, status(err)
		}
		return reply(dest, value)
	}
	return 0, fuse.ENODATA
}

func reply(dest []byte, value string) (uint32, fuse.Status) {
	if len(dest) < len(value) {
		return uint32(len(value)), fuse.ERANGE
	}
	return uint32(copy(dest, value)), fuse.OK
}

func (t *tree) ListXAttr(_ <-chan struct{}, header *fuse.InHeader, dest []byte) (uint32, fuse.Status) {
	n := nodeID(header.NodeId)
	var list []byte
	switch {
	case n.kind() == kindBlock:
		for i := range xattrs {
			if xattrs[i].listed {
				list = append(append(append(list, xattrPrefix...), xattrs[i].name...), 0)
			}
		}
	case n.upload():
		u := t.writes.byNode(n)
		if u == nil {
			return 0, eSTALE
		}
		u.mu.Lock()
		defer u.mu.Unlock()
		for i := range xattrs {
			if _, ok := u.attrs.get(xattrs[i].name); ok {
				list = append(append(append(list, xattrPrefix...), xattrs[i].name...), 0)
			}
		}
	}
	return reply(dest, string(list))
}

// SetXAttr describes a file being copied in. What describes a moment (slot, hits, ...) is taken without complaint and
// forgotten, because cp and rsync carry every xattr along. A stored file does not change; saying of it what is so is
// no error.
func (t *tree) SetXAttr(cancel <-chan struct{}, in *fuse.SetXAttrIn, attr string, data []byte) fuse.Status {
	name, ours := strings.CutPrefix(attr, xattrPrefix)
	n := nodeID(in.NodeId)
	if !ours || n.kind() != kindBlock && !n.upload() {
		return fuse.ENOTSUP
	}
	known, settable := false, false
	for i := range xattrs {
		if xattrs[i].name == name {
			known, settable = true, xattrs[i].settable
		}
	}
	if !known {
		return fuse.ENOTSUP
	}
	value := string(data[:min(len(data), int(in.Size))])
	if n.upload() {
		u := t.writes.byNode(n)
		if u == nil {
			return eSTALE
		}
		u.mu.Lock()
		defer u.mu.Unlock()
		if u.state != uploadOpen {
			return fuse.EPERM
		}
		if !settable {
			return fuse.OK
		}
		return status(u.attrs.set(name, value, u.p.tokens))
	}
	if !settable && name != "key" {
		return fuse.OK
	}
	var now [keyChars]byte
	size, st := t.GetXAttr(cancel, &in.InHeader, attr, now[:])
	if st == fuse.OK && string(now[:size]) != value {
		return fuse.EPERM
	}
	return st
}

func (t *tree) RemoveXAttr(_ <-chan struct{}, header *fuse.InHeader, attr string) fuse.Status {
	name, ours := strings.CutPrefix(attr, xattrPrefix)
	n := nodeID(header.NodeId)
	if !ours || n.kind() != kindBlock && !n.upload() {
		return fuse.ENODATA
	}
	if !n.upload() {
		return fuse.EPERM
	}
	u := t.writes.byNode(n)
	if u == nil {
		return eSTALE
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if _, ok := u.attrs.get(name); !ok {
		return fuse.ENODATA
	}
	if u.state != uploadOpen {
		return fuse.EPERM
	}
	u.attrs.clear(name)
	return fuse.OK
}

// field is where an attribute that is a number is kept, nil for others.
func (a *uploadAttrs) field(name string) **uint32 {
	switch name {
	case "tenant":
		return &a.tenant
	case "tokens":
		return &a.tokens
	case "position":
		return &a.position
	}
	return nil
}

// get is what was said of the file so far.
func (a *uploadAttrs) get(name string) (value string, ok bool) {
	if name == "parent" {
		return parentText(&a.parent), a.parent != gpufile.Key{}
	}
	if f := a.field(name); f != nil && *f != nil {
		return strconv.FormatUint(uint64(**f), 10), true
	}
	return "", false
}

// set understands "parent" (a key, or "root"), and "tenant", "tokens" and "position" (decimal).
func (a *uploadAttrs) set(name, value string, tokensMax uint32) error {
	if name == "parent" {
		if value == "root" {
			a.parent = gpufile.Key{}
			return nil
		}
		key, ok := parseKey(value)
		if !ok {
			return fmt.Errorf("fs: %sparent is neither a key nor root: %w", xattrPrefix, gpufile.ErrInvalid)
		}
		a.parent = key
		return nil
	}
	v, err := strconv.ParseUint(value, 10, 32)
	if err != nil || name == "tokens" && (v == 0 || v > uint64(tokensMax)) {
		return fmt.Errorf("fs: %s%s cannot be %.20q: %w", xattrPrefix, name, value, gpufile.ErrInvalid)
	}
	n := uint32(v)
	*a.field(name) = &n
	return nil
}

func (a *uploadAttrs) clear(name string) {
	if name == "parent" {
		a.parent = gpufile.Key{}
	} else if f := a.field(name); f != nil {
		*f = nil
	}
}
