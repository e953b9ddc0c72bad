package main

import (
	"context"
	"errors"
)

func newStatus() *command {
	return &command{name: "status", synopsis: "", summary: "", exits: &plainExits, flags: newFlags("status"),
		run: func(context.Context, *env, []string) error { return errors.New("not in this build") }}
}
