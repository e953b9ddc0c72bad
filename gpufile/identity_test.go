package gpufile

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestIdentityFieldsCount is invariant (c): each field changed alone gives another digest.
func TestIdentityFieldsCount(t *testing.T) {
	base := testIdentity("full")
	require.NoError(t, base.Validate())
	seen := map[[32]byte]string{base.Digest(): "base"}
	v := reflect.TypeOf(base)
	require.Len(t, base.fields(), v.NumField(), "every field is in the canonical form")
	for i := range v.NumField() {
		id := base
		switch f := reflect.ValueOf(&id).Elem().Field(i); f.Kind() {
		case reflect.String:
			f.SetString(f.String() + "x")
		default:
			f.SetUint(f.Uint() * 2)
			if f.Uint() == 0 {
				f.SetUint(1)
			}
		}
		if id.BlockTokens != base.BlockTokens {
			require.NoError(t, id.Validate())
		}
		require.Empty(t, seen[id.Digest()], v.Field(i).Name)
		seen[id.Digest()] = v.Field(i).Name
		require.Contains(t, string(id.Canonical()), `"`+v.Field(i).Tag.Get("json")+`":`)
	}
}

func TestIdentityUnknownIsRefused(t *testing.T) {
	v := reflect.TypeOf(Identity{})
	for i := range v.NumField() {
		name := v.Field(i).Tag.Get("json")
		bad := []string{"", "auto", "Auto", "unknown", " UNKNOWN ", " x", "a\nb", "\xff", strings.Repeat("x", 513)}
		for _, text := range bad {
			id := testIdentity("full")
			f := reflect.ValueOf(&id).Elem().Field(i)
			if f.Kind() != reflect.String {
				if f.SetUint(0); name == "weights_epoch" {
					require.NoError(t, id.Validate(), "epoch 0 is an epoch")
					continue
				}
			} else {
				f.SetString(text)
			}
			err := id.Validate()
			require.ErrorIs(t, err, ErrIdentity, "%s %q", name, text)
			require.ErrorContains(t, err, name)
		}
	}
	id := testIdentity("full")
	id.FileTokens = id.BlockTokens + 1
	require.ErrorIs(t, id.Validate(), ErrIdentity)
	require.Len(t, strings.Split((&Identity{}).Validate().Error(), "\n"), v.NumField()-1, "all problems at once")
}

func TestParseIdentityIsStrict(t *testing.T) {
	id := testIdentity("full")
	text := string(id.Canonical())
	got, err := ParseIdentity([]byte(text))
	require.NoError(t, err)
	require.Equal(t, id, got)
	var spaced bytes.Buffer
	require.NoError(t, json.Indent(&spaced, []byte(text), " ", "\t"))
	got, err = ParseIdentity(spaced.Bytes())
	require.NoError(t, err)
	require.Equal(t, id.Digest(), got.Digest())
	for name, bad := range map[string]string{
		"unknown field":  strings.Replace(text, `{`, `{"dp_rank":1,`, 1),
		"missing field":  strings.Replace(text, `"cp":1,`, ``, 1),
		"twice":          strings.Replace(text, `"cp":1,`, `"cp":1,"cp":1,`, 1),
		"other case":     strings.Replace(text, `"cp"`, `"CP"`, 1),
		"null":           strings.Replace(text, `"cp":1`, `"cp":null`, 1),
		"text as number": strings.Replace(text, `"cp":1`, `"cp":"1"`, 1),
		"too large":      strings.Replace(text, `"cp":1`, `"cp":65536`, 1),
		"negative":       strings.Replace(text, `"cp":1`, `"cp":-1`, 1),
		"fraction":       strings.Replace(text, `"cp":1`, `"cp":1.5`, 1),
		"more behind":    text + "{}",
		"not closed":     strings.TrimSuffix(text, "}"),
		"no object":      "[]",
		"empty":          "",
		"not UTF-8":      strings.Replace(text, "test", "te\xffst", 1),
		"auto":           strings.Replace(text, `"bf16"`, `"auto"`, 1),
	} {
		_, err := ParseIdentity([]byte(bad))
		require.ErrorIs(t, err, ErrIdentity, name)
	}
}

// TestCanonicalIsStable fixes the bytes that digests of existing pools were made of.
func TestCanonicalIsStable(t *testing.T) {
	id := testIdentity("full")
	id.Model = "org/<model>&é"
	require.Equal(t, `{"block_tokens":16,"cp":1,"dtype":"bf16","file_tokens":64,"group":"full","layout":"NHD",`+
		`"model":"org/<model>&é","page_bytes":4096,"pp":1,"quantisation":"none","revision":"r1",`+
		`"scale_format":"none","tp":1,"weights_epoch":0}`, string(id.Canonical()))
}

func FuzzParseIdentity(f *testing.F) {
	id := testIdentity("full")
	f.Add(id.Canonical())
	f.Add([]byte(`{"model":"m"}`))
	f.Add([]byte(`{"model":"\ud800","cp":1e0}`))
	f.Add([]byte(`{`))
	f.Fuzz(func(t *testing.T, b []byte) {
		id, err := ParseIdentity(b)
		if err != nil {
			require.ErrorIs(t, err, ErrIdentity)
			require.Equal(t, Identity{}, id)
			return
		}
		again, err := ParseIdentity(id.Canonical())
		require.NoError(t, err)
		require.Equal(t, id, again)
		require.Equal(t, id.Digest(), again.Digest())
	})
}
