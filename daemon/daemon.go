// Package daemon is a running mount: volume, store, virtual controllers, sessions' shared memory, FUSE tree and metrics joined together.
package daemon
