package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/big"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// env is what a command sees of its process. Commands write data to stdout and everything else to stderr.
type env struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	prog           string // for messages, e.g. "tuttifs mkfs" or "mkfs.tuttifs"
}

func (e *env) printf(format string, args ...any) { fmt.Fprintf(e.stdout, format, args...) }

// warnf reports something that does not stop the command.
func (e *env) warnf(format string, args ...any) {
	fmt.Fprintf(e.stderr, "%s: %s\n", e.prog, fmt.Sprintf(format, args...))
}

// command is one verb. Constructors (newMkfs and so on) make it with its flags bound to an options struct of their own,
// so that no state outlives a run.
type command struct {
	name     string // "mkfs", or "bench rings"
	synopsis string // flags and arguments, as after the name; with flagsOnly, arguments are refused
	summary  string // one line, for the list of commands
	long     string // what it does and what not; wrapped by hand
	example  string // whole lines
	exits    *exitTable
	flags    *pflag.FlagSet
	// run gets the arguments without flags. Returned errors are printed and mapped to an exit status by the caller.
	run func(ctx context.Context, e *env, args []string) error
}

// flagsOnly is the synopsis of commands that take no arguments.
const flagsOnly = "[FLAGS]"

// newFlags makes a flag set that leaves errors and help to the caller and lists flags in the order of their definition.
func newFlags(name string) *pflag.FlagSet {
	f := pflag.NewFlagSet(name, pflag.ContinueOnError)
	f.SortFlags = false
	f.Usage = func() {}
	f.SetOutput(io.Discard)
	return f
}

// commands is the table of verbs, in the order of the help.
var commands = []func() *command{
	newMkfs, newMount, newUmount, newFsck, newInfo, newStatus, newLs, newPrefixes, newEvict, newScrub,
	newDriveList, newDriveAdd, newDriveReplace, newDriveForget, newDrivesCheck, newDrivesBind, newDrivesUnbind, newDrives,
	newReplay, newTrace, newCost,
	newProfileDrive, newProfileModel,
	newBenchMeta, newBenchRings, newBenchGPU,
}

// helpers are the names that mkfs(8), fsck(8) and mount(8) call.
var helpers = map[string]func() *command{
	"mkfs.tuttifs": newMkfs, "fsck.tuttifs": newFsck, "fsck.fuse.tuttifs": newFsck,
	"mount.tuttifs": newMount, "mount.fuse.tuttifs": newMount,
}

// runMain finds the command, runs it, and sees to it that what it printed could be written. It returns the exit status.
func runMain(ctx context.Context, e *env, argv []string) int {
	out, own := &output{w: e.stdout}, *e
	own.stdout = out
	exits, code := runWords(ctx, &own, argv)
	if out.err == nil {
		return code
	}
	if !out.told {
		fmt.Fprint(e.stderr, message(own.prog, fmt.Errorf("the output cannot be written: %w", out.err)))
	}
	if code == 0 || exits.bits {
		code |= exits.failure
	}
	return code
}

// runWords runs what the words name. The table is the one that the status is of.
func runWords(ctx context.Context, e *env, argv []string) (*exitTable, int) {
	base := filepath.Base(argv[0])
	if mk := helpers[base]; mk != nil {
		e.prog = base
		c := mk()
		return c.exits, runCommand(ctx, e, c, argv[1:])
	}
	e.prog = "tuttifs"
	args := argv[1:]
	if len(args) == 0 {
		printUsage(e.stderr)
		return &plainExits, plainExits.usage
	}
	switch args[0] {
	case "-h", "--help", "help":
		if args[0] == "help" && len(args) > 1 {
			return helpWith(ctx, e, args[1:])
		}
		printUsage(e.stdout)
		return &plainExits, 0
	case "-V", "--version", "version":
		e.printf("tuttifs %s\n", version)
		return &plainExits, 0
	}
	c, rest := findCommand(args)
	if c == nil && looksLikeMount(args) {
		c, rest = newMount(), args
	}
	if c == nil {
		return &plainExits, unknownCommand(e, args)
	}
	e.prog = "tuttifs " + c.name
	return c.exits, runCommand(ctx, e, c, rest)
}

// helpWith prints the help of the command or group that the words name, as --help behind them does.
func helpWith(ctx context.Context, e *env, words []string) (*exitTable, int) {
	c, rest := findCommand(words)
	switch {
	case c == nil:
		return &plainExits, unknownCommand(e, append(words[:len(words):len(words)], "--help"))
	case len(rest) > 0:
		fmt.Fprintf(e.stderr, "tuttifs: help is of one command: unexpected argument %q behind %q\n", rest[0], c.name)
		return &plainExits, plainExits.usage
	}
	e.prog = "tuttifs " + c.name
	return c.exits, runCommand(ctx, e, c, []string{"--help"})
}

// findCommand matches one word, or two for the members of a group.
func findCommand(args []string) (*command, []string) {
	for _, mk := range commands {
		c := mk()
		words := strings.Fields(c.name)
		if len(args) >= len(words) && strings.Join(args[:len(words)], " ") == c.name {
			return c, args[len(words):]
		}
	}
	return nil, nil
}

// unknownCommand says so, or names the members if it is a group.
func unknownCommand(e *env, args []string) int {
	word := args[0]
	var members []string
	for _, mk := range commands {
		if name := mk().name; strings.HasPrefix(name, word+" ") {
			members = append(members, "'tuttifs "+name+"'")
		}
	}
	if members != nil && len(args) > 1 && (args[1] == "-h" || args[1] == "--help") {
		e.printf("%s; each has --help\n", strings.Join(members, ", "))
		return 0
	}
	if members != nil {
		fmt.Fprintf(e.stderr, "tuttifs: %q is one of %s\n", word, strings.Join(members, ", "))
	} else {
		fmt.Fprintf(e.stderr, "tuttifs: unknown command %q; 'tuttifs --help' lists them\n", word)
	}
	return plainExits.usage
}

// looksLikeMount recognises the form in which mount.fuse(8) calls a filesystem: SPEC DIR -o OPTIONS.
func looksLikeMount(args []string) bool {
	if len(args) < 2 || strings.HasPrefix(args[0], "-") || strings.HasPrefix(args[1], "-") {
		return false
	}
	if args[0] == "none" || strings.ContainsAny(args[0], "/=") {
		return true
	}
	_, err := os.Stat(args[0])
	return err == nil
}

// runCommand parses flags, runs c and maps its outcome to an exit status.
func runCommand(ctx context.Context, e *env, c *command, args []string) int {
	err := parseAndRun(ctx, e, c, args)
	code := c.exits.code(err)
	var status exitStatus
	if err == nil || errors.As(err, &status) {
		return code
	}
	fmt.Fprint(e.stderr, message(e.prog, err))
	if out, ok := e.stdout.(*output); ok && out.err != nil && errors.Is(err, out.err) {
		out.told = true
	}
	var usage *usageError
	var crash *panicError
	switch {
	case errors.As(err, &usage):
		fmt.Fprintf(e.stderr, "%s: try '%s --help'\n", e.prog, e.prog)
	case errors.As(err, &crash):
		fmt.Fprintf(e.stderr, "%s\n%s: please report this with the lines above\n", crash.stack, e.prog)
	}
	return code
}

func parseAndRun(ctx context.Context, e *env, c *command, args []string) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &panicError{v, debug.Stack()}
		}
	}()
	var help, showVersion bool
	c.flags.BoolVarP(&help, "help", "h", false, "print this help")
	if c.flags.ShorthandLookup("V") == nil {
		c.flags.BoolVarP(&showVersion, "version", "V", false, "print the version")
	}
	if err := c.flags.Parse(args); err != nil {
		return flagError(err)
	}
	switch {
	case help:
		printHelp(e.stdout, e.prog, c)
		return nil
	case showVersion:
		e.printf("tuttifs %s\n", version)
		return nil
	}
	if name := emptyFlag(c.flags); name != "" {
		return usagef("--%s is empty: give it a value, or leave it out", name)
	}
	if slices.Contains(c.flags.Args(), "") { // it would be the label of volumes without one, and the current directory
		return usagef("an argument is empty")
	}
	if c.synopsis == flagsOnly && c.flags.NArg() > 0 {
		return usagef("unexpected argument %q", c.flags.Arg(0))
	}
	return c.run(ctx, e, c.flags.Args())
}

// flagError is what is wrong with a flag. A number that is too large is not to be told that it must be a number.
func flagError(err error) error {
	var bad *pflag.InvalidValueError
	if errors.As(err, &bad) {
		if n, ok := new(big.Int).SetString(bad.GetValue(), 0); ok && n.Sign() > 0 && isWhole(bad.GetFlag()) {
			return usagef("--%s %s: the number is too large", bad.GetFlag().Name, bad.GetValue())
		}
	}
	return usagef("%v", err)
}

func isWhole(f *pflag.Flag) bool { return strings.Contains(f.Value.Type(), "int") }

// mayBeEmpty marks flags whose value may be of no length.
const mayBeEmpty = "may be empty"

// emptyFlag names a flag that was given a text of no length, as by a variable of a script that is not set: it is not
// what leaving the flag out says.
func emptyFlag(flags *pflag.FlagSet) (name string) {
	flags.Visit(func(f *pflag.Flag) {
		if _, may := f.Annotations[mayBeEmpty]; may || !strings.HasPrefix(f.Value.Type(), "string") {
			return
		}
		empty := f.Value.String() == ""
		if list, ok := f.Value.(pflag.SliceValue); ok {
			empty = len(list.GetSlice()) == 0 || slices.Contains(list.GetSlice(), "")
		}
		if empty {
			name = f.Name
		}
	})
	return name
}

func printUsage(w io.Writer) {
	fmt.Fprint(w, "tuttifs: a filesystem for LLM KV cache on NVMe\n\nusage: tuttifs COMMAND [FLAGS] [ARGUMENTS]\n\n")
	for _, mk := range commands {
		c := mk()
		fmt.Fprintf(w, "  %-14s %s\n", c.name, c.summary)
	}
	fmt.Fprint(w, "\n'tuttifs help COMMAND', or --help behind a command, describes it; "+
		"'tuttifs --version' says which this is.\n")
}

func printHelp(w io.Writer, prog string, c *command) {
	fmt.Fprintf(w, "usage: %s %s\n\n%s\n\nFLAGS\n%s\nEXAMPLE\n%s\n\nEXIT STATUS\n%s\n",
		prog, c.synopsis, strings.TrimSpace(c.long), flagUsages(c.flags), indent(c.example), c.exits.text)
}

// flagUsages lists flags, one a line: names, the kind of value, what it does, and the default where there is one.
func flagUsages(flags *pflag.FlagSet) string {
	var b strings.Builder
	w := table(&b)
	flags.VisitAll(func(f *pflag.Flag) {
		name := "    --" + f.Name
		if f.Shorthand != "" {
			name = "-" + f.Shorthand + ", --" + f.Name
		}
		kind, usage := pflag.UnquoteUsage(f)
		switch kind {
		case "": // a switch
		case "string":
			name += " TEXT"
		case "int", "uint", "uint32", "uint64", "float":
			name += " N"
		default:
			name += " " + kind
		}
		switch f.DefValue {
		case "", "0", "[]", "false":
		default:
			if !strings.Contains(usage, "default") {
				usage += " (default " + f.DefValue + ")"
			}
		}
		fmt.Fprintf(w, "  %s\t%s\n", name, usage)
	})
	w.Flush()
	return b.String()
}

// indent puts two spaces before every line.
func indent(s string) string {
	return "  " + strings.ReplaceAll(strings.TrimSpace(s), "\n", "\n  ")
}
