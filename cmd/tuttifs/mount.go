package main

import (
	"context"
	"errors"
)

func newMount() *command {
	return &command{name: "mount", synopsis: "", summary: "", exits: &mountExits, flags: newFlags("mount"),
		run: func(context.Context, *env, []string) error { return errors.New("not in this build") }}
}
