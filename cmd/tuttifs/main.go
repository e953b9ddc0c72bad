// Command tuttifs formats, mounts, checks and watches volumes of KV cache, and replays traces against them.
//
// It is one binary under several names: mkfs.tuttifs, fsck.tuttifs, fsck.fuse.tuttifs, mount.tuttifs and
// mount.fuse.tuttifs are links to it, so that mkfs(8), fsck(8) and mount(8) find their helpers.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"tuttifs/drive"
	"tuttifs/nvme/vfio"
)

// version is set by the Makefile (git describe); a plain go build says "devel".
var version = "devel"

func main() {
	drive.OpenAddress = vfio.NewMachine("/sys", "/dev", "/proc").OpenDrive
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends a command that is slow to stop
	code := runMain(ctx, &env{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr}, os.Args)
	stop()
	os.Exit(code)
}
