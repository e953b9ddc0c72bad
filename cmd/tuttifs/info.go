package main

import (
	"context"
	"errors"
)

func newInfo() *command {
	return &command{name: "info", synopsis: "", summary: "", exits: &plainExits, flags: newFlags("info"),
		run: func(context.Context, *env, []string) error { return errors.New("not in this build") }}
}
