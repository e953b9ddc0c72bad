package slack

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode"
)

// ErrFingerprint: a table is of another model or machine.
var ErrFingerprint = errors.New("slack: the table is of another model or machine")

// Shape is what a layer computes.
type Shape struct {
	Heads    int    `json:"heads"`     // of queries
	KVHeads  int    `json:"kv_heads"`  // 0 for latents
	HeadSize int    `json:"head_size"` // elements; 0 for latents
	Hidden   int    `json:"hidden"`
	FFN      int    `json:"ffn"` // 0 for mixtures of experts
	DType    string `json:"dtype"`
}

// Model is what an engine knows of its model.
type Model struct {
	Name   string `json:"name"`
	Layers int    `json:"layers"`
	Shape
	TensorParallel int `json:"tensor_parallel"`
	BlockTokens    int `json:"block_tokens"` // of one GPU file
}

// Machine is what windows and rates depend on beside the model.
type Machine struct {
	GPU    string   `json:"gpu"`
	Driver string   `json:"driver"`
	PCIe   string   `json:"pcie_link"` // as in "32.0 GT/s x16"
	CPU    string   `json:"cpu"`
	Drives []string `json:"drive_profiles"` // their names, one for each drive; none for drives without limits
}

// Fingerprint is what two processes must agree about to use one table.
type Fingerprint struct {
	Model   Model   `json:"model"`
	Machine Machine `json:"machine"`
}

// Key is 32 hexadecimal digits of the fingerprint's digest.
func (f *Fingerprint) Key() string {
	g := *f
	g.Machine.Drives = append([]string{}, f.Machine.Drives...) // none and nil are the same
	b, err := json.Marshal(&g)
	if err != nil {
		panic(err) // strings and numbers
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:16])
}

// check returns an error that names all that differs.
func (f *Fingerprint) check(want *Fingerprint) error {
	pairs := append(f.Model.Shape.pairs(&want.Model.Shape), []pair{
		{"model", f.Model.Name, want.Model.Name}, {"layers", f.Model.Layers, want.Model.Layers},
		{"tensor-parallel degree", f.Model.TensorParallel, want.Model.TensorParallel},
		{"block tokens", f.Model.BlockTokens, want.Model.BlockTokens},
		{"GPU", f.Machine.GPU, want.Machine.GPU}, {"driver", f.Machine.Driver, want.Machine.Driver},
		{"PCIe link", f.Machine.PCIe, want.Machine.PCIe}, {"CPU", f.Machine.CPU, want.Machine.CPU},
		{"drive profiles", strings.Join(f.Machine.Drives, ","), strings.Join(want.Machine.Drives, ",")},
	}...)
	return differ(pairs)
}

// CheckMachine refuses, by ErrFingerprint, a table of another machine than this one, which has so many drives. What
// this one does not tell ("") is not compared, nor are drives where the table has no profiles.
func (f *Fingerprint) CheckMachine(here *Machine, drives int) error {
	var pairs []pair
	for _, p := range []struct{ what, has, want string }{
		{"GPU", f.Machine.GPU, here.GPU}, {"driver", f.Machine.Driver, here.Driver},
		{"PCIe link", f.Machine.PCIe, here.PCIe}, {"CPU", f.Machine.CPU, here.CPU},
	} {
		if p.want != "" {
			pairs = append(pairs, pair{p.what, p.has, p.want})
		}
	}
	if n := len(f.Machine.Drives); n > 0 {
		pairs = append(pairs, pair{"drives", n, drives})
	}
	return differ(pairs)
}

// Cache is what a cache's shape tells of its model.
type Cache struct {
	TensorParallel int   // 0: not known
	BlockTokens    int   // of one GPU file
	Layers         int   // of one rank; 0: not all that the model has
	BytesPerToken  int64 // of one layer and rank; 0: layers differ
}

// CheckCache refuses, by ErrFingerprint, a table of a model that has another cache. Two models whose caches are alike
// are not told apart.
func (t *Table) CheckCache(c *Cache) error {
	m := &t.Fingerprint.Model
	pairs := []pair{{"block tokens", m.BlockTokens, c.BlockTokens}}
	if c.TensorParallel > 0 {
		pairs = append(pairs, pair{"tensor-parallel degree", m.TensorParallel, c.TensorParallel})
	}
	if c.Layers > 0 {
		pairs = append(pairs, pair{"layers", m.Layers, c.Layers})
	}
	if c.BytesPerToken > 0 {
		pairs = append(pairs, pair{"bytes of a token in a layer", t.IO.BytesPerToken, c.BytesPerToken})
	}
	return differ(pairs)
}

// pair is one thing that two fingerprints have in common or not.
type pair struct {
	what      string
	has, want any
}

// differ is the error that names all that is not in common, nil if there is nothing.
func differ(pairs []pair) error {
	var texts []string
	for _, p := range pairs {
		if p.has != p.want {
			texts = append(texts, fmt.Sprintf("%s %#v, not %#v", p.what, p.has, p.want))
		}
	}
	if texts == nil {
		return nil
	}
	return fmt.Errorf("%w: %s; profile this one", ErrFingerprint, strings.Join(texts, "; "))
}

func (s *Shape) pairs(want *Shape) []pair {
	return []pair{
		{"heads", s.Heads, want.Heads}, {"kv heads", s.KVHeads, want.KVHeads}, {"head size", s.HeadSize, want.HeadSize},
		{"hidden", s.Hidden, want.Hidden}, {"ffn", s.FFN, want.FFN}, {"dtype", s.DType, want.DType},
	}
}

// Bounds of a fingerprint.
const (
	textBytesMax = 256
	numberMax    = 1 << 24
)

// Validate returns all problems.
func (f *Fingerprint) Validate() error {
	var errs []error
	m := &f.Model
	for _, n := range []struct {
		what         string
		value, least int
	}{
		{"layers", m.Layers, 1}, {"heads", m.Heads, 0}, {"kv_heads", m.KVHeads, 0}, {"head_size", m.HeadSize, 0},
		{"hidden", m.Hidden, 0}, {"ffn", m.FFN, 0}, {"tensor_parallel", m.TensorParallel, 1},
		{"block_tokens", m.BlockTokens, 1},
	} {
		if n.value < n.least || n.value > numberMax {
			errs = append(errs, fmt.Errorf("%w: %s %d, want %d to %d", ErrTable, n.what, n.value, n.least, numberMax))
		}
	}
	if !isFileName(m.Name) {
		errs = append(errs, fmt.Errorf("%w: model %.80q: want letters, digits, dots, dashes and underscores, no dot first",
			ErrTable, m.Name))
	}
	if len(f.Machine.Drives) > DrivesMax {
		errs = append(errs, fmt.Errorf("%w: %d drives, at most %d", ErrTable, len(f.Machine.Drives), DrivesMax))
	}
	if slices.ContainsFunc(f.Machine.Drives, func(name string) bool { return strings.Contains(name, ",") }) {
		errs = append(errs, fmt.Errorf("%w: a drive profile's name has a comma", ErrTable))
	}
	texts := append([]string{m.DType, f.Machine.GPU, f.Machine.Driver, f.Machine.PCIe, f.Machine.CPU}, f.Machine.Drives...)
	for _, text := range texts {
		if text == "" || len(text) > textBytesMax || strings.ContainsFunc(text, unicode.IsControl) {
			errs = append(errs, fmt.Errorf("%w: a text of the fingerprint is %.80q: want 1 to %d bytes", ErrTable, text,
				textBytesMax))
		}
	}
	return errors.Join(errs...)
}

// isFileName: the name is part of a file's.
func isFileName(s string) bool {
	ok := func(c rune) bool {
		return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.ContainsRune("._-", c)
	}
	return s != "" && len(s) <= 64 && s[0] != '.' && !slices.ContainsFunc([]rune(s), func(c rune) bool { return !ok(c) })
}
