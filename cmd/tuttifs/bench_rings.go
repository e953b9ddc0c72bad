package main

import (
	"context"
	"errors"
)

func newBenchRings() *command {
	return &command{name: "bench rings", synopsis: "[FLAGS]", summary: "measure queues and drives", exits: &plainExits,
		flags: newFlags("bench rings"),
		run:   func(context.Context, *env, []string) error { return errors.New("not in this build") }}
}
