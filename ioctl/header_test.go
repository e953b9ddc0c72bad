package ioctl

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write include/tuttifs.h")

const headerPath = "../include/tuttifs.h"

func TestHeaderIsGenerated(t *testing.T) {
	want, err := cHeader()
	require.NoError(t, err)
	if *update {
		require.NoError(t, os.MkdirAll(filepath.Dir(headerPath), 0o755))
		require.NoError(t, os.WriteFile(headerPath, want, 0o644))
	}
	got, err := os.ReadFile(headerPath)
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, got), "include/tuttifs.h is stale: run go generate ./ioctl")
}

// TestHeaderMatchesGo compiles a program that prints every size, offset and number as the C and C++ compilers see them.
func TestHeaderMatchesGo(t *testing.T) {
	for _, c := range []struct {
		compiler, suffix string
		flags            []string
	}{
		{"cc", "c", []string{"-std=c11"}},
		{"c++", "cc", []string{"-std=c++11"}},
	} {
		t.Run(c.compiler, func(t *testing.T) {
			path, err := exec.LookPath(c.compiler)
			if err != nil {
				t.Skipf("no %s here", c.compiler)
			}
			dir := t.TempDir()
			source, want := layoutProgram()
			file := filepath.Join(dir, "layout."+c.suffix)
			require.NoError(t, os.WriteFile(file, []byte(source), 0o644))
			include, err := filepath.Abs("../include")
			require.NoError(t, err)
			args := append(c.flags, "-Wall", "-Wextra", "-Werror", "-I"+include, "-o", filepath.Join(dir, "layout"), file)
			out, err := exec.Command(path, args...).CombinedOutput()
			require.NoError(t, err, "%s", out)
			out, err = exec.Command(filepath.Join(dir, "layout")).CombinedOutput()
			require.NoError(t, err)
			require.Equal(t, want, string(out))
		})
	}
}

// layoutProgram is a C program and what it must print.
func layoutProgram() (source, want string) {
	var src, out strings.Builder
	src.WriteString("#include <stddef.h>\n#include <stdio.h>\n#include <tuttifs.h>\nint main(void) {\n")
	for _, s := range abiStructs() {
		c := "tuttifs_" + snake(s.Name())
		fmt.Fprintf(&src, "\tprintf(\"%s %%zu\\n\", sizeof(struct %s));\n", c, c)
		fmt.Fprintf(&out, "%s %d\n", c, s.Size())
		for i := range s.NumField() {
			if f := s.Field(i); f.Name != "_" {
				fmt.Fprintf(&src, "\tprintf(\"%s.%s %%zu %%zu\\n\", offsetof(struct %s, %s), sizeof(((struct %s *)0)->%s));\n",
					c, snake(f.Name), c, snake(f.Name), c, snake(f.Name))
				fmt.Fprintf(&out, "%s.%s %d %d\n", c, snake(f.Name), f.Offset, f.Type.Size())
			}
		}
	}
	for nr := 1; nr < nrEnd; nr++ {
		v := &verbs[nr]
		fmt.Fprintf(&src, "\tprintf(\"%s %%lx\\n\", (unsigned long)TUTTIFS_IOC_%s);\n", v.name, v.name)
		fmt.Fprintf(&out, "%s %x\n", v.name, iocBase|v.typ.Size()<<iocSizeShift|uintptr(nr))
	}
	src.WriteString("\treturn 0;\n}\n")
	return src.String(), out.String()
}

// TestStructsHaveNoHiddenPadding: every byte of every struct belongs to a field, so nothing of the daemon's memory
// leaks and all compilers agree.
func TestStructsHaveNoHiddenPadding(t *testing.T) {
	for _, s := range abiStructs() {
		var at uintptr
		for i := range s.NumField() {
			f := s.Field(i)
			require.Equal(t, at, f.Offset, "%s.%s", s.Name(), f.Name)
			at += f.Type.Size()
			requireFixed(t, s.Name()+"."+f.Name, f.Type)
		}
		require.Equal(t, at, s.Size(), s.Name())
		require.Zero(t, s.Size()%8, s.Name())
		require.LessOrEqual(t, s.Size(), uintptr(StructBytes), s.Name())
	}
}

func requireFixed(t *testing.T, name string, typ reflect.Type) {
	t.Helper()
	switch typ.Kind() {
	case reflect.Array:
		requireFixed(t, name, typ.Elem())
	case reflect.Struct, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64, reflect.Int32:
	default:
		t.Errorf("%s is a %s: only fixed-width kinds are in the ABI", name, typ)
	}
}

// TestNumbers pins the numbers that binaries in the field were compiled with.
func TestNumbers(t *testing.T) {
	require.Equal(t, uint32(0xc0d85401), CmdHello)
	require.Equal(t, uint32(0xc050540c), CmdPin)
	require.Equal(t, uint32(0xc0285417), CmdTicket)
	for nr := 1; nr < nrEnd; nr++ {
		require.NotNil(t, verbs[nr].call, "verb %d", nr)
	}
}
