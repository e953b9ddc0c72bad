// Package check is fsck: it reads the medium itself through ondisk and never imports the engine that it judges.
package check
