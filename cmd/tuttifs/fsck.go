package main

import (
	"context"
	"errors"
)

func newFsck() *command {
	return &command{name: "fsck", synopsis: "[FLAGS] DRIVE...", summary: "check a volume", exits: &fsckExits,
		flags: newFlags("fsck"),
		run:   func(context.Context, *env, []string) error { return errors.New("not in this build") }}
}
