package cudatest

import (
	"os"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/cuda"
)

// What ring.cu says of its structs, which its compiler checks, must be true of params.go.
func TestLayout(t *testing.T) {
	types := map[string]reflect.Type{
		"Ioctx": reflect.TypeFor[cuda.KernelIOCTX](), "Object": reflect.TypeFor[cuda.KernelObject](),
		"Region": reflect.TypeFor[cuda.KernelRegion](), "Run": reflect.TypeFor[cuda.KernelRun](),
		"Tables": reflect.TypeFor[cuda.KernelTables](), "Cells": reflect.TypeFor[cuda.KernelCells](),
		"Chunk": reflect.TypeFor[cuda.KernelChunk](), "Queue": reflect.TypeFor[cuda.KernelQueue](),
		"Count":       reflect.TypeFor[cuda.KernelCount](),
		"BuildParams": reflect.TypeFor[cuda.BuildParams](), "Sums": reflect.TypeFor[cuda.SumsParams](),
		"MoveParams": reflect.TypeFor[cuda.HarvestParams](), "Strided": reflect.TypeFor[cuda.StridedRun](),
		"RegisterParams": reflect.TypeFor[cuda.RegisterParams](), "PollParams": reflect.TypeFor[cuda.PollParams](),
	}
	source, err := os.ReadFile("../ring.cu")
	require.NoError(t, err)
	sized := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^SIZE\((\w+), (\d+)\)$`).FindAllSubmatch(source, -1) {
		name := string(m[1])
		require.Contains(t, types, name)
		require.Equal(t, string(m[2]), strconv.Itoa(int(types[name].Size())), name)
		sized[name] = true
	}
	require.Len(t, sized, len(types), "every struct has its size asserted")
	places := regexp.MustCompile(`(?m)^PLACE\((\w+), (\w+), (\d+)\)$`).FindAllSubmatch(source, -1)
	require.Greater(t, len(places), len(types))
	for _, m := range places {
		field, ok := types[string(m[1])].FieldByNameFunc(func(name string) bool {
			return strings.EqualFold(name, string(m[2]))
		})
		require.True(t, ok, "%s.%s", m[1], m[2])
		require.Equal(t, string(m[3]), strconv.Itoa(int(field.Offset)), "%s.%s", m[1], m[2])
	}
	outcomes := regexp.MustCompile(`enum Outcome : u8 \{([^}]*)\}`).FindSubmatch(source)
	require.NotNil(t, outcomes)
	names := strings.FieldsFunc(string(outcomes[1]), func(r rune) bool { return strings.ContainsRune(", \n\t", r) })
	require.Equal(t, "OutcomePending", names[cuda.OutcomePending])
	require.Equal(t, "OutcomeFailed", names[cuda.OutcomeFailed])
	require.Len(t, names, int(cuda.OutcomePending)+1)
}
