package gio_test

import (
	"testing"

	"tuttifs/gio"
	"tuttifs/gio/giotest"
)

func TestRing(t *testing.T) {
	giotest.Run(t, func(c gio.RingConfig) (gio.Executor, error) { return gio.NewRing(c) })
}
