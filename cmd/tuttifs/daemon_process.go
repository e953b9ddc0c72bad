package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strconv"

	"tuttifs/daemon"
)

// errElsewhere: the daemon is not among the processes that can be seen from here.
var errElsewhere = errors.New("its process is of another PID namespace")

// daemonProcess is the process behind a mount, by its number in this PID namespace.
func daemonProcess(dir string) (int, error) {
	var v daemon.VersionDocument
	if err := readStatus(dir, "version", &v); err != nil {
		return 0, err
	}
	ours, _ := os.Readlink("/proc/self/ns/pid")
	if v.PIDNamespace == "" || v.PIDNamespace == ours {
		return v.PID, nil
	}
	// Processes of a container can be seen from outside, under other numbers.
	links, _ := filepath.Glob("/proc/[1-9]*/ns/pid") // the pattern is well formed
	for _, link := range links {
		proc := filepath.Dir(filepath.Dir(link))
		if namespace, _ := os.Readlink(link); namespace != v.PIDNamespace {
			continue
		}
		if status, _ := os.ReadFile(filepath.Join(proc, "status")); innermostPID(status) == v.PID {
			return strconv.Atoi(filepath.Base(proc))
		}
	}
	return 0, errElsewhere
}

// innermostPID is the number of a process in its own PID namespace, by its proc_pid_status(5); 0 if that has ended.
func innermostPID(status []byte) int {
	for line := range bytes.Lines(status) {
		if numbers := bytes.Fields(line); len(numbers) > 1 && string(numbers[0]) == "NSpid:" {
			pid, _ := strconv.Atoi(string(numbers[len(numbers)-1])) // the kernel's
			return pid
		}
	}
	return 0
}
