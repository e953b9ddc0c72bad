package main

import (
	"context"
	"errors"
)

func newEvict() *command {
	return &command{name: "evict", synopsis: "", summary: "", exits: &plainExits, flags: newFlags("evict"),
		run: func(context.Context, *env, []string) error { return errors.New("not in this build") }}
}
