// Package ioctl is ABI v1: numbers, fixed-size structs, the dispatcher that checks them, the generated C header and the Go client.
package ioctl
