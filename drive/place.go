package drive

import "tuttifs/lifetime"

// placer is a drive that tells what is below it for how long bytes will probably stay.
type placer interface {
	WriteFor(c lifetime.Class, p []byte, off int64) error
}

// WriteFor is WriteAt with an expectation of how long the bytes will stay. Drives that have no use for it do without.
func WriteFor(d Drive, c lifetime.Class, p []byte, off int64) error {
	if w, ok := d.(placer); ok {
		return w.WriteFor(c, p, off)
	}
	return d.WriteAt(p, off)
}
