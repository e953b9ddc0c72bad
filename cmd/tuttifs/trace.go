package main

import (
	"context"
	"errors"
)

func newTrace() *command {
	return &command{name: "trace", synopsis: "", summary: "", exits: &plainExits, flags: newFlags("trace"),
		run: func(context.Context, *env, []string) error { return errors.New("not in this build") }}
}
