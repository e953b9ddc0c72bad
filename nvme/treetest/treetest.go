// Package treetest makes what /sys, /proc and /dev of some machine look like, for tests of what reads them.
package treetest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Make makes files of their contents by path, below a folder of the test's own, which it returns. "-> PATH" makes a
// link to that path of the tree, "/" a folder.
func Make(t *testing.T, tree map[string]string) (root string) {
	t.Helper()
	root = t.TempDir()
	for path, content := range tree {
		path = filepath.Join(root, path)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		target, link := strings.CutPrefix(content, "-> ")
		switch {
		case link:
			require.NoError(t, os.Symlink(filepath.Join(root, target), path))
		case content == "/":
			require.NoError(t, os.MkdirAll(path, 0o755))
		default:
			require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
		}
	}
	return root
}
