package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/term"
)

// progressInterval is the time between two redraws.
const progressInterval = 100 * time.Millisecond

// progress draws a bar on standard error while a long command works. It draws nothing unless that is a terminal, so its
// methods can be called regardless.
type progress struct {
	w     io.Writer
	label string
	total uint64
	start time.Time
	next  time.Time
	width int
}

// newProgress draws on e's standard error. total 0 means unknown.
func newProgress(e *env, label string, total uint64) *progress {
	p := &progress{label: label, total: total, start: time.Now()}
	f, ok := e.stderr.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return p
	}
	p.w, p.width = f, 80
	if w, _, err := term.GetSize(int(f.Fd())); err == nil && w > 20 {
		p.width = w
	}
	return p
}

// set says how far the work is; note is shown behind the bar.
func (p *progress) set(done uint64, note string) {
	if p.w == nil {
		return
	}
	now := time.Now()
	if now.Before(p.next) {
		return
	}
	p.next = now.Add(progressInterval)
	line := p.label
	if p.total > 0 {
		const cells = 24
		fill := min(int(done*cells/p.total), cells)
		line += fmt.Sprintf(" [%s%s] %3d%%", strings.Repeat("#", fill), strings.Repeat(" ", cells-fill), done*100/p.total)
		if elapsed := now.Sub(p.start); done > 0 && done < p.total && elapsed > time.Second {
			left := time.Duration(float64(elapsed) * float64(p.total-done) / float64(done))
			line += " " + left.Round(time.Second).String() + " left"
		}
	} else {
		line += fmt.Sprintf(" %d", done)
	}
	if note != "" {
		line += " " + note
	}
	if len(line) >= p.width {
		line = line[:p.width-1]
	}
	fmt.Fprintf(p.w, "\r\x1b[K%s", line)
}

// finish wipes the bar.
func (p *progress) finish() {
	if p.w != nil {
		fmt.Fprint(p.w, "\r\x1b[K")
	}
}
