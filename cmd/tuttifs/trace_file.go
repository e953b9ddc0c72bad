package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
)

// Limits of a trace: beyond them a line is refused rather than believed.
const (
	traceBlockTokens = 512     // tokens of one hash id
	traceLineMax     = 8 << 20 // bytes
	traceBlocksMax   = 1 << 18 // blocks of one request
)

// traceRequest is one line of a trace in the Mooncake format: one prompt, named by the chained hashes of its 512-token
// blocks, of which the last may be partial.
type traceRequest struct {
	Timestamp    float64  `json:"timestamp"` // milliseconds from the start
	InputLength  uint64   `json:"input_length"`
	OutputLength uint64   `json:"output_length"`
	HashIDs      []uint64 `json:"hash_ids"`
}

// tokens of block i: fewer than traceBlockTokens in the tail.
func (r *traceRequest) tokens(i int) uint32 {
	return uint32(min(r.InputLength-uint64(i)*traceBlockTokens, traceBlockTokens))
}

// parseTraceLine decodes and checks one line. Fields that we do not know are ignored: traces of this format carry
// others.
func parseTraceLine(line []byte) (r traceRequest, err error) {
	var in struct {
		Timestamp    *float64  `json:"timestamp"`
		InputLength  *uint64   `json:"input_length"`
		OutputLength uint64    `json:"output_length"`
		HashIDs      *[]uint64 `json:"hash_ids"`
	}
	if err := json.Unmarshal(line, &in); err != nil {
		return r, traceJSONError(err)
	}
	switch {
	case in.Timestamp == nil:
		return r, errors.New("timestamp is missing")
	case in.InputLength == nil:
		return r, errors.New("input_length is missing")
	case in.HashIDs == nil:
		return r, errors.New("hash_ids is missing")
	case *in.Timestamp < 0 || math.IsInf(*in.Timestamp, 0):
		return r, fmt.Errorf("timestamp %v is not a time", *in.Timestamp)
	case len(*in.HashIDs) > traceBlocksMax || *in.InputLength > traceBlocksMax*traceBlockTokens:
		return r, fmt.Errorf("more than %d blocks in one request", traceBlocksMax)
	}
	want := (*in.InputLength + traceBlockTokens - 1) / traceBlockTokens
	if uint64(len(*in.HashIDs)) != want {
		return r, fmt.Errorf("%d hash_ids for %d tokens; there is one for every %d tokens", len(*in.HashIDs), *in.InputLength,
			traceBlockTokens)
	}
	return traceRequest{*in.Timestamp, *in.InputLength, in.OutputLength, *in.HashIDs}, nil
}

// traceJSONError says in the format's words what JSON's decoder did not like.
func traceJSONError(err error) error {
	var kind *json.UnmarshalTypeError
	if !errors.As(err, &kind) {
		return fmt.Errorf("not a JSON object: %w", err)
	}
	wants := map[string]string{"timestamp": "a number of milliseconds", "input_length": "a number of tokens",
		"output_length": "a number of tokens", "hash_ids": "a list of numbers that are not negative"}
	if want := wants[kind.Field]; want != "" {
		return fmt.Errorf("%s is %s here, and must be %s", kind.Field, kind.Value, want)
	}
	return fmt.Errorf("not an object but a JSON %s", kind.Value)
}

// readTrace decodes a trace of at most limit requests (0: all). Timestamps must not decrease. Errors name the line.
func readTrace(r io.Reader, name string, limit int) ([]traceRequest, error) {
	var out []traceRequest
	s := bufio.NewScanner(r)
	s.Buffer(make([]byte, 0, 64<<10), traceLineMax)
	n := 0
	for s.Scan() {
		n++
		line := bytes.TrimSpace(s.Bytes())
		if len(line) == 0 {
			continue
		}
		req, err := parseTraceLine(line)
		if err == nil && len(out) > 0 && req.Timestamp < out[len(out)-1].Timestamp {
			err = errors.New("timestamp is before that of the line above")
		}
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %w", name, n, err)
		}
		if out = append(out, req); len(out) == limit {
			return out, nil
		}
	}
	switch err := s.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return nil, fmt.Errorf("%s:%d: a line of more than %s", name, n+1, humanBytes(traceLineMax))
	case err != nil:
		return nil, fmt.Errorf("%s:%d: %w", name, n+1, err)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%s: no requests in it", name)
	}
	return out, nil
}
