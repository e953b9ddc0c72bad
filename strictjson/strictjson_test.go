package strictjson

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

type inner struct {
	X float64 `json:"x"`
}

type outer struct {
	Name  string  `json:"name"`
	Count int     `json:"count"`
	Rows  []inner `json:"rows"`
	One   *inner  `json:"one"`
}

func TestDecode(t *testing.T) {
	var o outer
	require.NoError(t, Decode([]byte(` {"name": "a", "count": 3, "rows": [{"x": 1}, {"x": 2}], "one": {"x": 3}} `), &o))
	require.Equal(t, outer{"a", 3, []inner{{1}, {2}}, &inner{3}}, o)
	o = outer{Name: "kept"}
	require.NoError(t, Decode([]byte(`{"count": 1}`), &o), "fields may be missing")
	require.Equal(t, outer{Name: "kept", Count: 1}, o)
}

func TestDecodeRefuses(t *testing.T) {
	for text, why := range map[string]string{
		``:                              "no JSON object",
		`[]`:                            "no JSON object",
		`1`:                             "no JSON object",
		`null`:                          "no JSON object",
		`{"name": "a"`:                  "cut off at byte 12",
		`{`:                             "cut off at byte 1",
		`{"na`:                          "cut off at byte 4",
		`{"name`:                        "cut off at byte 6",
		`{"name":`:                      "cut off at byte 8",
		`{"one": {"x": 1}`:              "cut off at byte 16",
		`{"one": tr`:                    "cut off at byte 10",
		`{"name": "a`:                   "cut off at byte 11",
		`{"rows": [`:                    "cut off at byte 10",
		`{"name": "a"} {}`:              "behind its end",
		`{"name": "a"} x`:               "behind its end",
		`{"name": "a", "name": "a"}`:    `"name" is given twice`,
		`{"rows": [{"x": 1, "x": 1}]}`:  `"x" is given twice`,
		`{"Name": "a"}`:                 `unknown field "Name"`,
		`{"one": {"X": 1}}`:             `unknown field "X"`,
		`{"other": 1}`:                  `unknown field "other"`,
		`{"one": {"y": 1}}`:             `unknown field "y"`,
		`{"name": null}`:                "null",
		`{"rows": [null]}`:              "null",
		`{"count": "1"}`:                "count",
		`{"count": 1.5}`:                "count",
		"{\"name\": \"\xff\"}":          "UTF-8",
		strings.Repeat(`{"one": `, 100): "nested",
	} {
		var o outer
		require.ErrorContains(t, Decode([]byte(text), &o), why, "%q", text)
	}
}

// FuzzDecode: no text makes it panic, and what it takes has the same meaning for encoding/json's rules.
func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"name": "a", "rows": [{"x": 1}]}`))
	f.Add([]byte(`{"a": {"b": [1, {"c": null}]}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var o outer
		if Decode(b, &o) == nil {
			var again map[string]any
			require.NoError(t, Decode(b, &again))
			for key := range again {
				require.True(t, Name(key))
			}
		}
	})
}
