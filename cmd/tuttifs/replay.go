package main

import (
	"context"
	"errors"
)

func newReplay() *command {
	return &command{name: "replay", synopsis: "", summary: "", exits: &plainExits, flags: newFlags("replay"),
		run: func(context.Context, *env, []string) error { return errors.New("not in this build") }}
}
