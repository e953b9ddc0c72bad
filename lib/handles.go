//go:build cgo

package main

import (
	"fmt"
	"sync"
)

// entry is what a handle stands for, and the handle that it was made from.
type entry struct {
	value any
	from  uintptr
}

// handles is the table of open handles. Numbers are never used again, so that a closed handle is known for what it is.
var handles = struct {
	mu   sync.Mutex
	last uintptr
	open map[uintptr]entry
}{open: map[uintptr]entry{}}

// newHandle opens a handle that is closed with the one it was made from (0: by itself only).
func newHandle(value any, from uintptr) uintptr {
	handles.mu.Lock()
	defer handles.mu.Unlock()
	handles.last++
	handles.open[handles.last] = entry{value, from}
	return handles.last
}

// find is what an open handle of kind T stands for.
func find[T any](h uintptr, what string) (T, error) {
	handles.mu.Lock()
	defer handles.mu.Unlock()
	v, ok := handles.open[h].value.(T)
	if !ok {
		return v, badHandle(h, what)
	}
	return v, nil
}

// take is find, and closes the handle and all that were made from it: whoever takes it has it alone.
func take[T any](h uintptr, what string) (T, error) {
	handles.mu.Lock()
	defer handles.mu.Unlock()
	v, ok := handles.open[h].value.(T)
	if !ok {
		return v, badHandle(h, what)
	}
	drop(h)
	return v, nil
}

// madeFrom lists what open handles of kind T, made from h, stand for.
func madeFrom[T any](h uintptr) (list []T) {
	handles.mu.Lock()
	defer handles.mu.Unlock()
	for _, e := range handles.open {
		if v, ok := e.value.(T); ok && e.from == h {
			list = append(list, v)
		}
	}
	return list
}

// drop closes a handle and all that were made from it. The lock is held.
func drop(h uintptr) {
	delete(handles.open, h)
	for child, e := range handles.open {
		if e.from == h {
			drop(child)
		}
	}
}

func badHandle(h uintptr, what string) error {
	if h == 0 {
		return fmt.Errorf("%w: %s is NULL", errHandle, what)
	}
	return fmt.Errorf("%w: %s was closed, or never was one", errHandle, what)
}
