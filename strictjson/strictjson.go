// Package strictjson reads JSON objects that people and other programs wrote: profiles, tables, prices, identities.
// What encoding/json lets pass would be a setting that nobody meant.
package strictjson

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"unicode/utf8"
)

// Decode is strict where encoding/json is lenient: b is one object whose fields are all known, under their exact names,
// each given once and none null, and nothing is behind it. Names have lower-case letters, digits and underscores only.
func Decode(b []byte, into any) error {
	if err := checkKeys(b); err != nil {
		return cutOff(b, err)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	return d.Decode(into)
}

// cutOff says of a text that ends too early where it does.
func cutOff(b []byte, err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("is cut off at byte %d: %w", len(b), io.ErrUnexpectedEOF)
	}
	return err
}

// nestingMax is deeper than any file of ours.
const nestingMax = 8

// checkKeys finds what encoding/json lets pass: keys twice, keys in another case, nulls, and anything behind the end.
func checkKeys(b []byte) error {
	if !utf8.Valid(b) {
		return errors.New("is not UTF-8")
	}
	d := json.NewDecoder(bytes.NewReader(b))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return errors.New("is no JSON object")
	}
	open := []map[string]bool{{}} // keys of the objects that are open; nil for an array
	for len(open) > 0 {
		keys := open[len(open)-1]
		if keys != nil && d.More() {
			t, err := d.Token()
			if err != nil {
				return err
			}
			key, _ := t.(string)
			if keys[key] {
				return fmt.Errorf("field %q is given twice", key)
			}
			if !Name(key) {
				return fmt.Errorf("unknown field %q", key)
			}
			keys[key] = true
		}
		t, err := d.Token()
		switch {
		case err != nil:
			return err
		case t == nil:
			return errors.New("has a null")
		case t == json.Delim('{'):
			open = append(open, map[string]bool{})
		case t == json.Delim('['):
			open = append(open, nil)
		case t == json.Delim('}'), t == json.Delim(']'):
			open = open[:len(open)-1]
		}
		if len(open) > nestingMax {
			return errors.New("is nested too deeply")
		}
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("has something behind its end")
	}
	return nil
}

// Name says whether a key can be one of ours as it is written: encoding/json would take "READ" for "read".
func Name(key string) bool {
	for _, c := range []byte(key) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '_' {
			return false
		}
	}
	return true
}
