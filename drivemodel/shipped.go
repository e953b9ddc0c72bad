package drivemodel

import (
	"embed"
	"strings"
)

//go:embed profiles/*.json
var files embed.FS

const folder = "profiles"

// Names lists the profiles that are part of the program, in alphabetical order.
func Names() (names []string) {
	entries, err := files.ReadDir(folder)
	if err != nil {
		panic(err) // it is embedded
	}
	for _, e := range entries {
		names = append(names, strings.TrimSuffix(e.Name(), ".json"))
	}
	return names
}

// Shipped returns a profile that is part of the program.
func Shipped(name string) (*Profile, bool) {
	b, err := files.ReadFile(folder + "/" + name + ".json")
	if err != nil {
		return nil, false
	}
	p, err := Parse(b)
	return p, err == nil
}
