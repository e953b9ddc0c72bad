package main

import (
	"bytes"
	"context"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseTraceLine(t *testing.T) {
	r, err := parseTraceLine([]byte(`{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [7, 9],
		"type": "chat"}`))
	require.NoError(t, err)
	require.Equal(t, traceRequest{3000, 700, 5, []uint64{7, 9}}, r)
	require.EqualValues(t, 512, r.tokens(0))
	require.EqualValues(t, 188, r.tokens(1))

	for line, says := range map[string]string{
		``:  "unexpected end",
		`7`: "not an object but a JSON number",
		`{"timestamp": "x", "input_length": 512, "hash_ids": [1]}`: "must be a number of milliseconds",
		`[1]`:                                                                   "not an object but a JSON array",
		`{"input_length": 1, "hash_ids": [1]}`:                                  "timestamp is missing",
		`{"timestamp": 1, "hash_ids": [1]}`:                                     "input_length is missing",
		`{"timestamp": 1, "input_length": 1}`:                                   "hash_ids is missing",
		`{"timestamp": 1, "input_length": -1, "hash_ids": [1]}`:                 "input_length is number -1 here, and",
		`{"timestamp": -1, "input_length": 1, "hash_ids": [1]}`:                 "not a time",
		`{"timestamp": 1, "input_length": 513, "hash_ids": [1]}`:                "1 hash_ids for 513 tokens",
		`{"timestamp": 1, "input_length": 512, "hash_ids": [1, 2]}`:             "2 hash_ids for 512 tokens",
		`{"timestamp": 1, "input_length": 512, "hash_ids": [-1]}`:               "hash_ids is number -1 here, and must be",
		`{"timestamp": 1, "input_length": 18446744073709551615, "hash_ids":[]}`: "blocks in one request",
	} {
		_, err := parseTraceLine([]byte(line))
		require.ErrorContains(t, err, says, line)
	}
}

func TestReadTraceNamesTheLine(t *testing.T) {
	good := `{"timestamp": 5, "input_length": 1, "output_length": 1, "hash_ids": [1]}` + "\n"
	early := strings.Replace(good, "5", "4", 1)
	for text, says := range map[string]string{
		"":                       "x.jsonl: no requests in it",
		"\n\n":                   "x.jsonl: no requests in it",
		good + "\n" + good + "{": "x.jsonl:4: ",
		good + early:             "x.jsonl:2: timestamp is before",
		good + "[" + good:        "x.jsonl:2: ",
		good + strings.Repeat("x", traceLineMax+1): "x.jsonl:2: a line of more than 8.0 MiB",
	} {
		_, err := readTrace(strings.NewReader(text), "x.jsonl", 0)
		require.ErrorContains(t, err, says)
	}
	all, err := readTrace(strings.NewReader(good+good+good), "x.jsonl", 0)
	require.NoError(t, err)
	require.Len(t, all, 3)
	some, err := readTrace(strings.NewReader(good+good+"broken"), "x.jsonl", 2)
	require.NoError(t, err)
	require.Len(t, some, 2)
}

// A generated trace has the properties of a recorded one: a trie of ids, first seen in order, no repeats within a
// request.
func TestGeneratedTrace(t *testing.T) {
	var a, b bytes.Buffer
	require.NoError(t, generateTrace(t.Context(), &a, 500, 3))
	require.NoError(t, generateTrace(t.Context(), &b, 500, 3))
	require.Equal(t, a.String(), b.String(), "equal seeds")
	requests, err := readTrace(&a, "generated", 0)
	require.NoError(t, err)
	require.Len(t, requests, 500)
	parent, next, blocks := map[uint64]uint64{}, uint64(0), 0
	for _, r := range requests {
		last := ^uint64(0)
		for _, id := range r.HashIDs {
			if p, seen := parent[id]; seen {
				require.Equal(t, p, last, "one parent")
			} else {
				parent[id] = last
			}
			last = id
			blocks++
		}
	}
	for next = range uint64(len(parent)) {
		require.Contains(t, parent, next)
	}
	require.Less(t, 2*len(parent), blocks, "at least half of the blocks can hit")
}

func FuzzTraceLine(f *testing.F) {
	f.Add([]byte(`{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [7, 9]}`))
	f.Add([]byte(`{"timestamp": 1e308, "input_length": 0, "output_length": 0, "hash_ids": []}`))
	f.Add([]byte(`{"timestamp": 0, "input_length": 18446744073709551615, "hash_ids": [18446744073709551615]}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		r, err := parseTraceLine(line)
		if err != nil {
			return
		}
		total := uint64(0)
		for i := range r.HashIDs {
			n := r.tokens(i)
			if n < 1 || n > traceBlockTokens {
				t.Fatalf("block %d has %d tokens", i, n)
			}
			total += uint64(n)
		}
		if total != r.InputLength {
			t.Fatalf("blocks hold %d tokens of %d", total, r.InputLength)
		}
	})
}

// FuzzTrace: a trace that is read keeps its bounds, whatever the file holds.
func FuzzTrace(f *testing.F) {
	line := `{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [7, 9]}` + "\n"
	f.Add([]byte(line+"\n"+line), 0)
	f.Add([]byte(line+line+"broken"), 2)
	f.Add([]byte("\x00\r\n"), -1)
	f.Fuzz(func(t *testing.T, text []byte, limit int) {
		requests, err := readTrace(bytes.NewReader(text), "x", limit)
		if err != nil {
			require.Nil(t, requests)
			require.ErrorContains(t, err, "x:")
			return
		}
		require.NotEmpty(t, requests)
		require.True(t, limit <= 0 || len(requests) <= limit)
		last := 0.0
		for _, r := range requests {
			require.GreaterOrEqual(t, r.Timestamp, last)
			require.LessOrEqual(t, len(r.HashIDs), traceBlocksMax)
			last = r.Timestamp
		}
	})
}

func TestTraceIsInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, generateTrace(ctx, io.Discard, 1<<40, 3), context.Canceled)
}
