package main

import "errors"

type volumeLabel struct {
	Name   string
	Volume [16]byte
}

func readLabel(string) (*volumeLabel, error) { return nil, errors.New("not in this build") }
