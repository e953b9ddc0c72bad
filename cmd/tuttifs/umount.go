package main

import (
	"context"
	"errors"
)

func newUmount() *command {
	return &command{name: "umount", synopsis: "", summary: "", exits: &plainExits, flags: newFlags("umount"),
		run: func(context.Context, *env, []string) error { return errors.New("not in this build") }}
}
