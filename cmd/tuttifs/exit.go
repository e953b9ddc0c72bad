package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
)

// exitTable is the meaning of a command's exit statuses. They differ because different programs read them: a
// shell, mount(8) and fsck(8).
type exitTable struct {
	failure     int  // anything without a better number
	usage       int  // bad flags and arguments
	permission  int  // not allowed
	system      int  // out of memory, cannot start a process
	internal    int  // a defect of this program
	interrupted int  // SIGINT or SIGTERM
	bits        bool // a status is the sum of the conditions that hold
	text        string
}

var plainExits = exitTable{
	failure: 1, usage: 2, permission: 1, system: 1, internal: 70, interrupted: 130,
	text: `  0    success
  1    failure; the message on standard error says what to do
  2    usage error
  70   defect of tuttifs
  130  interrupted`,
}

// mountExits are those of mount(8), which hands the helper's status through.
var mountExits = exitTable{
	failure: 32, usage: 1, permission: 1, system: 2, internal: 4, interrupted: 8,
	text: `  0   mounted and usable
  1   usage error, unknown option or missing permission
  2   system error (no memory, no process)
  4   defect of tuttifs
  8   interrupted
  32  mount failure`,
}

// fsckExits are the bits of fsck(8). A panic that Go reports itself would exit with 2, which fsck(8) reads as "reboot".
var fsckExits = exitTable{
	failure: 8, usage: 16, permission: 8, system: 8, internal: 8, interrupted: 32, bits: true,
	text: `  0   no errors
  1   errors corrected
  2   system should be rebooted
  4   errors left uncorrected
  8   operational error
  16  usage error
  32  interrupted
  The status is the sum of the conditions that hold.`,
}

// scrubExits are fsck's, as far as they apply.
var scrubExits = exitTable{
	failure: 8, usage: 16, permission: 8, system: 8, internal: 8, interrupted: 32, bits: true,
	text: `  0   all files are as they were stored
  1   damaged files were found, and evicted
  4   files could not be read, or are damaged and the mount is read-only
  8   operational error
  16  usage error
  32  interrupted
  The status is the sum of the conditions that hold.`,
}

// usageError is a mistake in flags or arguments.
type usageError struct{ msg string }

func (e *usageError) Error() string { return e.msg }

func usagef(format string, args ...any) error { return &usageError{fmt.Sprintf(format, args...)} }

// exitStatus ends a command that has reported its findings already with exactly this status.
type exitStatus int

func (e exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// systemError marks failures of the machine rather than of the request.
type systemError struct{ error }

func (e systemError) Unwrap() error { return e.error }

// panicError is a recovered panic.
type panicError struct {
	value any
	stack []byte
}

func (e *panicError) Error() string { return fmt.Sprintf("defect in tuttifs: %v", e.value) }

// code maps an error to an exit status: the only place that does.
func (t *exitTable) code(err error) int {
	var (
		status exitStatus
		usage  *usageError
		crash  *panicError
		system systemError
	)
	switch {
	case err == nil:
		return 0
	case errors.As(err, &status):
		return int(status)
	case errors.As(err, &usage):
		return t.usage
	case errors.As(err, &crash):
		return t.internal
	case errors.Is(err, context.Canceled):
		return t.interrupted
	case errors.As(err, &system):
		return t.system
	case errors.Is(err, os.ErrPermission):
		return t.permission
	}
	return t.failure
}

// message is what a person reads on standard error: one line an error, the first with the program's name.
func message(prog string, err error) string {
	if errors.Is(err, context.Canceled) {
		return prog + ": interrupted\n"
	}
	return prog + ": " + strings.ReplaceAll(err.Error(), "\n", "\n"+prog+": ") + "\n"
}
