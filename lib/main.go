//go:build cgo

// Command lib is libtuttifs: the engine's side of a mount behind a stable C interface (include/libtuttifs.h). It is
// built with -buildmode=c-shared. The functions of the header are in shim.c, each in front of one function here.
//
// At the border nothing is believed and nothing escapes: handles are numbers in a table, counts and pointers are
// checked, and a panic becomes an error code.
package main

// main is never called: a shared library has none.
func main() {}
