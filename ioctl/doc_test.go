package ioctl

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	docPath  = "../docs/abi.md"
	docBegin = "<!-- generated from package ioctl: begin -->\n"
	docEnd   = "<!-- generated from package ioctl: end -->\n"
)

// TestDocTables keeps the tables of docs/abi.md equal to the structs.
func TestDocTables(t *testing.T) {
	text, err := os.ReadFile(docPath)
	require.NoError(t, err)
	before, rest, ok := bytes.Cut(text, []byte(docBegin))
	require.True(t, ok)
	got, after, ok := bytes.Cut(rest, []byte(docEnd))
	require.True(t, ok)
	want := docTables(t)
	if *update {
		all := string(before) + docBegin + want + docEnd + string(after)
		require.NoError(t, os.WriteFile(docPath, []byte(all), 0o644))
		return
	}
	require.Equal(t, want, string(got), "docs/abi.md is stale: run go generate ./ioctl")
}

// docTables is one Markdown table a struct.
func docTables(t *testing.T) string {
	structs := map[string]reflect.Type{}
	for _, s := range abiStructs() {
		structs[s.Name()] = s
	}
	var b strings.Builder
	for _, file := range []string{"abi.go", "attach.go"} {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments)
		require.NoError(t, err)
		for _, d := range f.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.TYPE {
				continue
			}
			spec := g.Specs[0].(*ast.TypeSpec)
			if typ, ok := structs[spec.Name.Name]; ok {
				docTable(&b, typ, spec.Type.(*ast.StructType), commentText(g.Doc))
			}
		}
	}
	return b.String()
}

func docTable(b *strings.Builder, typ reflect.Type, st *ast.StructType, about string) {
	fmt.Fprintf(b, "\n#### `struct tuttifs_%s`, %d bytes\n\n%s\n\n", snake(typ.Name()), typ.Size(), about)
	b.WriteString("| offset | bytes | field | way | meaning |\n| --- | --- | --- | --- | --- |\n")
	i := 0
	for _, f := range st.Fields.List {
		for range f.Names {
			field := typ.Field(i)
			i++
			if field.Name == "_" {
				continue
			}
			way := ""
			if field.Tag.Get("abi") == "out" {
				way = "out"
			}
			note := strings.ReplaceAll(commentText(f.Comment), "|", "\\|")
			if strings.HasPrefix(field.Name, "Reserved") && note == "" {
				note = "zero"
			}
			fmt.Fprintf(b, "| %d | %d | `%s` | %s | %s |\n", field.Offset, field.Type.Size(), snake(field.Name), way, note)
		}
	}
}

// TestDocNamesEverything: every verb and every errno has its place in the prose.
func TestDocNamesEverything(t *testing.T) {
	text, err := os.ReadFile(docPath)
	require.NoError(t, err)
	prose, _, _ := strings.Cut(string(text), docBegin)
	for nr := 1; nr < nrEnd; nr++ {
		require.Contains(t, prose, fmt.Sprintf("| %d | `%s` |", nr, verbs[nr].name))
	}
	source, err := os.ReadFile("errno.go")
	require.NoError(t, err)
	for _, m := range regexp.MustCompile(`(?m)^\t(E[A-Z]+) +=`).FindAllStringSubmatch(string(source), -1) {
		require.Contains(t, prose, "`"+m[1]+"`")
	}
}

// TestDocExampleCompiles: the worked example is a program.
func TestDocExampleCompiles(t *testing.T) {
	if *update {
		t.Skip("the header is being written")
	}
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler here")
	}
	text, err := os.ReadFile(docPath)
	require.NoError(t, err)
	_, rest, ok := strings.Cut(string(text), "```c\n")
	require.True(t, ok)
	program, _, ok := strings.Cut(rest, "```\n")
	require.True(t, ok)
	file := filepath.Join(t.TempDir(), "example.c")
	require.NoError(t, os.WriteFile(file, []byte(program), 0o644))
	flags := []string{"-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I../include"}
	out, err := exec.Command(cc, append(flags, file)...).CombinedOutput()
	require.NoError(t, err, "%s", out)
}
