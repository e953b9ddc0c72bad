package gpufile

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"tuttifs/strictjson"
)

// Identity is everything that decides whether two blocks of equal keys are interchangeable. Every field must be
// known: empty, "auto" and "unknown" are refused. The data-parallel rank is not part of it.
type Identity struct {
	Model        string `json:"model"`
	Revision     string `json:"revision"`
	WeightsEpoch uint64 `json:"weights_epoch"`
	DType        string `json:"dtype"`
	Quantisation string `json:"quantisation"` // "none" if none
	ScaleFormat  string `json:"scale_format"` // "none" if none
	Layout       string `json:"layout"`       // e.g. "NHD"
	PageBytes    uint64 `json:"page_bytes"`
	BlockTokens  uint32 `json:"block_tokens"` // the engine's block
	FileTokens   uint32 `json:"file_tokens"`  // B, a multiple of it
	TP           uint16 `json:"tp"`
	PP           uint16 `json:"pp"`
	CP           uint16 `json:"cp"`
	Group        string `json:"group"` // which pool of a hybrid model, "full" for plain attention
}

// IdentityTextMax bounds each text field of an identity, in bytes.
const IdentityTextMax = 512

// identityField is one field: its JSON name, and where it is.
type identityField struct {
	name string
	text *string
	num  any  // *uint16, *uint32 or *uint64
	zero bool // zero is a value, not an absence
}

func (i *Identity) fields() []identityField {
	return []identityField{
		{name: "model", text: &i.Model},
		{name: "revision", text: &i.Revision},
		{name: "weights_epoch", num: &i.WeightsEpoch, zero: true},
		{name: "dtype", text: &i.DType},
		{name: "quantisation", text: &i.Quantisation},
		{name: "scale_format", text: &i.ScaleFormat},
		{name: "layout", text: &i.Layout},
		{name: "page_bytes", num: &i.PageBytes},
		{name: "block_tokens", num: &i.BlockTokens},
		{name: "file_tokens", num: &i.FileTokens},
		{name: "tp", num: &i.TP},
		{name: "pp", num: &i.PP},
		{name: "cp", num: &i.CP},
		{name: "group", text: &i.Group},
	}
}

// Validate reports every field that is unknown or cannot be, all of them at once.
func (i *Identity) Validate() error {
	var bad []error
	for _, f := range i.fields() {
		if f.text != nil {
			if err := knownText(*f.text); err != nil {
				bad = append(bad, fmt.Errorf("%s %q: %w", f.name, *f.text, err))
			}
			continue
		}
		if !f.zero && isZero(f.num) {
			bad = append(bad, fmt.Errorf("%s is 0, which means that it is not known", f.name))
		}
	}
	if i.BlockTokens != 0 && i.FileTokens%i.BlockTokens != 0 {
		bad = append(bad, fmt.Errorf("file_tokens %d is no multiple of block_tokens %d", i.FileTokens, i.BlockTokens))
	}
	if len(bad) > 0 {
		return fmt.Errorf("%w: %w", ErrIdentity, errors.Join(bad...))
	}
	return nil
}

func knownText(s string) error {
	switch t := strings.ToLower(strings.TrimSpace(s)); {
	case t == "":
		return errors.New("is empty")
	case t == "auto", t == "unknown":
		return errors.New("must be what was chosen, not how")
	case t != strings.ToLower(s):
		return errors.New("has white space around it")
	case len(s) > IdentityTextMax:
		return fmt.Errorf("is longer than %d bytes", IdentityTextMax)
	case !utf8.ValidString(s):
		return errors.New("is not UTF-8")
	case strings.ContainsFunc(s, unicode.IsControl):
		return errors.New("holds control characters")
	}
	return nil
}

func isZero(num any) bool {
	switch v := num.(type) {
	case *uint16:
		return *v == 0
	case *uint32:
		return *v == 0
	case *uint64:
		return *v == 0
	}
	return false
}

// Canonical is the identity as JSON with sorted names, no white space and no escapes beyond JSON's own needs: the
// text that is hashed and stored.
func (i *Identity) Canonical() []byte {
	m := make(map[string]any)
	for _, f := range i.fields() {
		if f.text != nil {
			m[f.name] = *f.text
		} else {
			m[f.name] = f.num
		}
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(m); err != nil {
		// Texts and numbers always encode.
		return nil
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// Digest is the SHA-256 of Canonical.
func (i *Identity) Digest() [32]byte { return sha256.Sum256(i.Canonical()) }

// ParseIdentity reads an identity in JSON that we did not write, in any order and spacing, but strictly: every field
// exactly once under its exact name, no other, nothing behind; and it validates it.
func ParseIdentity(b []byte) (Identity, error) {
	var id Identity
	if err := id.parse(b); err != nil {
		return Identity{}, fmt.Errorf("%w: %w", ErrIdentity, err)
	}
	if err := id.Validate(); err != nil {
		return Identity{}, err
	}
	return id, nil
}

func (i *Identity) parse(b []byte) error {
	var given map[string]json.RawMessage
	if err := strictjson.Decode(b, &given); err != nil {
		return err
	}
	for _, f := range i.fields() {
		raw, ok := given[f.name]
		if !ok {
			return fmt.Errorf("field %q is missing", f.name)
		}
		delete(given, f.name)
		to := f.num
		if f.text != nil {
			to = f.text
		}
		if err := json.Unmarshal(raw, to); err != nil {
			return fmt.Errorf("field %q: %w", f.name, err)
		}
	}
	for name := range given {
		return fmt.Errorf("field %q is unknown", name)
	}
	return nil
}
