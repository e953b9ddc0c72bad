package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	"tuttifs/wholefile"
)

// outputVersion stands in every JSON document. It changes when a key is removed or changes its meaning; keys may be
// added any time.
const outputVersion = 1

// printJSON writes v as one indented document.
func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// output is a command's standard output. It keeps the first failure, so that what prints need not look at each write.
type output struct {
	w    io.Writer
	err  error
	told bool // the command itself has failed of it
}

func (o *output) Write(b []byte) (int, error) {
	if o.err != nil {
		return 0, o.err
	}
	n, err := o.w.Write(b)
	o.err = err
	return n, err
}

// checkOutput refuses the file of -o before there is anything to write, if it could not be written. Without one, it is
// none.
func checkOutput(path string) error {
	if path == "" {
		return nil
	}
	if err := wholefile.Check(path); err != nil {
		return fmt.Errorf("-o: %w", err)
	}
	return nil
}

// table aligns tab-separated cells; the caller flushes it.
func table(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 8, 2, ' ', 0) }

// humanBytes formats with powers of 1024.
func humanBytes(n uint64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, i := float64(n)/1024, 0
	for v >= 1023.95 && i < len(units)-1 {
		v, i = v/1024, i+1
	}
	return fmt.Sprintf("%.1f %ciB", v, units[i])
}

// sizeFlag is a pflag.Value for a byte count with an optional suffix k, m, g, t or p: powers of 1024.
type sizeFlag uint64

func (s *sizeFlag) Type() string { return "SIZE" }

func (s *sizeFlag) String() string {
	n, suffix := uint64(*s), ""
	for _, next := range []string{"k", "m", "g", "t", "p"} {
		if n == 0 || n%1024 != 0 {
			break
		}
		n, suffix = n/1024, next
	}
	return strconv.FormatUint(n, 10) + suffix
}

func (s *sizeFlag) Set(text string) error {
	v, err := parseSize(text)
	if err != nil {
		return err
	}
	*s = sizeFlag(v)
	return nil
}

func parseSize(text string) (uint64, error) {
	t := strings.ToLower(strings.TrimSpace(text))
	t = strings.TrimSuffix(strings.TrimSuffix(t, "b"), "i")
	shift := 0
	if t != "" {
		if i := strings.IndexByte("kmgtp", t[len(t)-1]); i >= 0 {
			shift, t = 10*(i+1), t[:len(t)-1]
		}
	}
	n, err := strconv.ParseUint(t, 10, 64)
	if err != nil || n<<shift>>shift != n {
		return 0, fmt.Errorf("%q is not a size: digits with an optional suffix k, m, g, t or p", text)
	}
	return n << shift, nil
}
