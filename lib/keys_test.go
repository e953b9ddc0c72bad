//go:build cgo

package main

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// cBytes is an array in C of bytes given in hexadecimal; there is always one more, since C has no empty arrays.
func cBytes(t *testing.T, text string) string {
	b, err := hex.DecodeString(text)
	require.NoError(t, err)
	var s strings.Builder
	for _, c := range b {
		fmt.Fprintf(&s, "%d,", c)
	}
	return "(const uint8_t[]){" + s.String() + "0}"
}

// vectorsInC writes the golden vectors of content keys as a C header, and returns how many there are.
func vectorsInC(t *testing.T, path string) int {
	text, err := os.ReadFile("../contentkey/testdata/keys.json")
	require.NoError(t, err)
	var vectors []struct {
		Name          string   `json:"name"`
		TokensPerFile uint32   `json:"tokens_per_file"`
		Tenant        uint32   `json:"tenant"`
		Adapter       string   `json:"adapter"`
		Salt          string   `json:"salt"`
		Tokens        []uint32 `json:"tokens"`
		Media         []struct {
			Start, Tokens uint64
			ID            string
		} `json:"media"`
		Refused bool     `json:"refused"`
		Keys    []string `json:"keys"`
	}
	require.NoError(t, json.Unmarshal(text, &vectors))
	var s strings.Builder
	s.WriteString("static const struct vector vectors[] = {\n")
	for _, v := range vectors {
		var media, tokens strings.Builder
		for _, m := range v.Media {
			fmt.Fprintf(&media, "{%d, %d, %s, %d},", m.Start, m.Tokens, cBytes(t, m.ID), len(m.ID)/2)
		}
		for _, id := range v.Tokens {
			fmt.Fprintf(&tokens, "%du,", id)
		}
		fmt.Fprintf(&s, "{%q, {.size = sizeof(struct tuttifs_prompt), .tokens_per_file = %d, .tenant = %du,\n", v.Name,
			v.TokensPerFile, v.Tenant)
		fmt.Fprintf(&s, ".adapter = %s, .adapter_bytes = %d,\n", cBytes(t, v.Adapter), len(v.Adapter)/2)
		if v.Salt != "" {
			fmt.Fprintf(&s, ".salt = %s, .salt_bytes = %d,\n", cBytes(t, v.Salt), len(v.Salt)/2)
		}
		if len(v.Media) > 0 {
			fmt.Fprintf(&s, ".media = (const struct tuttifs_media[]){%s}, .media_count = %d,\n", media.String(), len(v.Media))
		}
		fmt.Fprintf(&s, "}, (const uint32_t[]){%s0}, %d, %t, %s, %d},\n", tokens.String(), len(v.Tokens), v.Refused,
			cBytes(t, strings.Join(v.Keys, "")), len(v.Keys))
	}
	s.WriteString("};\n")
	text = []byte(strings.NewReplacer(", true,", ", 1,", ", false,", ", 0,").Replace(s.String()))
	require.NoError(t, os.WriteFile(path, text, 0o600))
	return len(vectors)
}

// TestKeys: the library's content keys are those of the vectors.
func TestKeys(t *testing.T) {
	gcc := compiler(t, "gcc")
	dir := t.TempDir()
	n := vectorsInC(t, filepath.Join(dir, "vectors.h"))
	run(t, "../scripts/lib.sh", "go", dir)
	program := filepath.Join(dir, "keys")
	run(t, gcc, "-std=c11", "-Wall", "-Wextra", "-Werror", "-I../include", "-I"+dir, "-o", program, "testdata/keys.c",
		"-L"+dir, "-ltuttifs", "-Wl,-rpath,"+dir)
	out, err := exec.Command(program).CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Equal(t, fmt.Sprintf("%d\n", n), string(out), "all of them were compared")
}
