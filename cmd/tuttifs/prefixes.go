package main

import (
	"context"
	"errors"
)

func newPrefixes() *command {
	return &command{name: "prefixes", synopsis: "", summary: "", exits: &plainExits, flags: newFlags("prefixes"),
		run: func(context.Context, *env, []string) error { return errors.New("not in this build") }}
}
