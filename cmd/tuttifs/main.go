// Command tuttifs: mkfs, mount, umount, fsck, info, ls, prefixes, evict, replay, bench.
package main

func main() {}
