// Package wear is what writing to flash costs, and whether it is worth it: how fast drives are written and how long
// they last at that rate, which blocks are admitted to them, and what serving costs with all of that counted.
//
// Everything here is arithmetic over numbers that others give it: no I/O, no clock of its own. What grows with the
// number of keys lies in anonymous memory of a fixed size that the garbage collector does not see.
package wear

import "errors"

// ErrInvalid: a number that cannot be what it says it is.
var ErrInvalid = errors.New("wear: invalid")
