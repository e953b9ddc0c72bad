//go:build cgo

package main

// #include "shim.h"
import "C"

import "fmt"

// hold keeps a session from being closed until the returned function is called.
func (s *session) hold() (release func(), err error) {
	s.mu.RLock()
	if s.closed {
		s.mu.RUnlock()
		return nil, fmt.Errorf("%w: its session was closed", errHandle)
	}
	return s.mu.RUnlock, nil
}

// held is what a handle can stand for that lives by a session.
type held interface{ its() *session }

func (s *session) its() *session  { return s }
func (p *pool) its() *session     { return p.session }
func (m *memory) its() *session   { return m.session }
func (l *layers) its() *session   { return l.session }
func (t *transfer) its() *session { return t.layers.session }

// on is the body of a function of the interface that uses a handle: f has what that stands for, and its session is
// held meanwhile.
func on[T held](h C.uintptr_t, what string, text *C.char, f func(T) error) C.int {
	return call(text, func() error {
		v, err := find[T](uintptr(h), what)
		if err != nil {
			return err
		}
		release, err := v.its().hold()
		if err != nil {
			return err
		}
		defer release()
		return f(v)
	})
}

func onSession(h C.uintptr_t, text *C.char, f func(*session) error) C.int {
	return on(h, "session", text, f)
}
func onPool(h C.uintptr_t, text *C.char, f func(*pool) error) C.int { return on(h, "pool", text, f) }
func onLayers(h C.uintptr_t, text *C.char, f func(*layers) error) C.int {
	return on(h, "layers", text, f)
}

func onMemory(h C.uintptr_t, text *C.char, f func(*memory) error) C.int {
	return on(h, "registered memory", text, f)
}

func onTransfer(h C.uintptr_t, text *C.char, f func(*transfer) error) C.int {
	return on(h, "transfer", text, f)
}
