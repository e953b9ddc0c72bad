package main

import (
	"context"
	"errors"
)

func newBenchMeta() *command {
	return &command{name: "bench meta", synopsis: "[FLAGS]", summary: "measure metadata at scale", exits: &plainExits,
		flags: newFlags("bench meta"),
		run:   func(context.Context, *env, []string) error { return errors.New("not in this build") }}
}
