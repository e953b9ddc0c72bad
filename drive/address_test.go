package drive

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestIsAddress(t *testing.T) {
	for _, name := range []string{"0000:3b:00.0", "0000:3b:00.7/1", "10000:01:00.0/4294967295"} {
		require.True(t, IsAddress(name), name)
	}
	for _, name := range []string{"", "./0000:3b:00.0", "/dev/nvme0n1", "3b:00.0", "0000:3b:00.8", "0000:3B:00.0",
		"0000:3b:00.0/", "0000:3b:00.0/x", "0000:3b:00.0/12345678901", "0000:3b:00.0\n"} {
		require.False(t, IsAddress(name), name)
	}
}

func TestOpenAddress(t *testing.T) {
	require.Nil(t, OpenAddress, "nobody has a driver in this package")
	_, err := Open("0000:3b:00.0", Options{})
	require.ErrorIs(t, err, ErrNotSupported)
	t.Cleanup(func() { OpenAddress = nil })
	OpenAddress = func(name string, o Options) (Drive, error) {
		require.Equal(t, "0000:3b:00.0/2", name)
		require.True(t, o.ReadOnly)
		return NewMemory(name, UnitBytes)
	}
	d, err := Open("0000:3b:00.0/2", Options{ReadOnly: true})
	require.NoError(t, err)
	require.Equal(t, "0000:3b:00.0/2", d.Name())
	require.NoError(t, d.Close())
}
