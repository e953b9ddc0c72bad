package main

import (
	"context"
	"errors"
)

func newLs() *command {
	return &command{name: "ls", synopsis: "", summary: "", exits: &plainExits, flags: newFlags("ls"),
		run: func(context.Context, *env, []string) error { return errors.New("not in this build") }}
}
