#!/bin/busybox sh
# test-nvme-guest.sh: the init of the machine of test-nvme.sh. Runs the steps that the kernel's command line names, says on the
# console what each does, and ends with the line that test-nvme.sh looks for. Controllers go by their serial numbers, A to D;
# test-nvme.sh has their shapes. The second serial line is the machine's monitor: what is wrong with a drive is arranged there.
set -u
export PATH=/bin
/bin/busybox mount -t proc proc /proc
/bin/busybox --install -s /bin
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev 2>/dev/null
mkdir -p /tmp /run /mnt/kv
mount -t tmpfs tmp /tmp
exec </dev/null >/dev/console 2>&1
ulimit -l unlimited
dmesg -c >/dev/null
stty -F /dev/ttyS1 raw -echo
cat /dev/ttyS1 >/tmp/monitor &
step=start

title() { step=$*; echo "== $(cut -d ' ' -f 1 /proc/uptime) s: $step"; }
# verdict WORDS: the last that is said. The monitor ends the machine: the kernel would wait for drives that do not answer.
verdict() {
  echo "test-nvme-guest: $*"
  sleep 0.2
  echo quit >/dev/ttyS1
  sleep 5
  poweroff -f
}
# fail WORDS: tells what was seen, and ends the machine.
fail() {
  echo "-- $*"
  [ ! -s /tmp/log ] || { echo "-- the daemon's log:"; tail -n 30 /tmp/log; }
  echo "-- the kernel's:"
  dmesg | tail -n 30
  verdict "FAILED: $step"
}
# expect STATUS COMMAND...: runs it for at most a minute. Its output stays in /tmp/out, and is shown if the status is another one.
expect() {
  local want=$1 got
  shift
  timeout 60 "$@" >/tmp/out 2>&1
  got=$?
  [ $got = "$want" ] || { tail -n 40 /tmp/out; fail "'$*' ended with status $got, not $want"; }
}
must() { expect 0 "$@"; }
# says PATTERN: so the last command must have said.
says() { grep -q -e "$1" /tmp/out || { tail -n 40 /tmp/out; fail "nobody said '$1'"; }; }
# number KEY: the first of that name in the JSON of the last command.
number() { sed -n "s/.*\"$1\": \([0-9.]*\).*/\1/p" /tmp/out | head -n 1; }
# within SECONDS COMMAND...: waits until it succeeds.
within() {
  local tries=$(($1 * 5))
  shift
  until "$@" >/tmp/out 2>&1; do
    tries=$((tries - 1))
    [ $tries -gt 0 ] || { tail -n 40 /tmp/out; fail "still not so: $*"; }
    sleep 0.2
  done
}

# monitor WORDS: gives a command, and waits until the monitor asks for the next.
monitor() {
  local n
  n=$(prompts)
  echo "$*" >/dev/ttyS1
  within 10 answered "$n"
}
prompts() { grep -o '(qemu)' /tmp/monitor | wc -l; }
answered() { [ "$(prompts)" -gt "$1" ]; }

# node SERIAL NAMESPACE: prints the kernel's block device, if it is there.
node() {
  local c n
  for c in /sys/class/nvme/*; do
    [ "$(tr -d ' ' 2>/dev/null <"$c/serial")" = "$1" ] || continue
    for n in "$c"/nvme*n*; do
      [ "$(cat "$n/nsid" 2>/dev/null)" != "$2" ] || echo "/dev/$(basename "$n")"
    done
  done | grep .
}
address() { basename "$(readlink -f "/sys/class/nvme/$(basename "$(node "$1" 1)" | sed 's/n[0-9]*$//')/device")"; }
# nodes: waits until the kernel's driver has all namespaces.
nodes() {
  local n
  for n in 'A 1' 'B 1' 'C 1' 'C 2' 'D 1' 'D 2' 'D 5'; do
    within 10 node $n
  done
}
# drivers NAME: gives the controllers to a driver.
drivers() {
  local a at
  for a in $A $B $C $D; do
    at=/sys/bus/pci/devices/$a
    [ ! -e "$at/driver" ] || echo "$a" >"$at/driver/unbind"
    echo "$1" >"$at/driver_override"
    echo "$a" >/sys/bus/pci/drivers_probe
    [ "$(basename "$(readlink "$at/driver")")" = "$1" ] || fail "controller $a does not go to $1"
  done
  [ "$1" != nvme ] || nodes
}

replay='tuttifs replay --scale 1024'
options= # of mount, in lives
# state DRIVE WORD: so 'drive list' must call it.
state() { tuttifs drive list /mnt/kv | grep -q "^$1  *$2 "; }
# files N: so many are there, or more.
files() { [ "$(find /mnt/kv/*/blocks -type f | wc -l)" -ge "$1" ]; }
# dead PROCESS: it has given everything back; the last of its threads does.
dead() { [ ! -e "/proc/$1" ] || { grep -q '^State:.Z' "/proc/$1/status" && [ "$(ls "/proc/$1/task" | wc -l)" = 1 ]; }; }
# daemon: its process.
daemon() { pidof tuttifs | tr ' ' '\n' | sort -n | head -n 1; }

start() {
  local m
  title "the kernel's driver finds the controllers"
  expect 1 tuttifs drives check
  says 'modprobe vfio-pci'
  for m in /modules/*; do
    must insmod "$m"
  done
  must tuttifs drives check
  monitor info status
  nodes
  A=$(address A) B=$(address B) C=$(address C) D=$(address D)
  echo "A $A, B $B, C $C, D $D"
  must tuttifs trace --requests 30 --seed 7 -o /tmp/trace
  must tuttifs trace --requests 80 --seed 8 -o /tmp/more
}

conformance() {
  title "our driver does what its suite asks of it, on each controller"
  drivers vfio-pci
  must tuttifs drives check
  says '4 groups can be opened'
  # Its own limit is that of the machine.
  TUTTIFS_NVME=$A,$B,$C/2@10240+128!49152,$D/2 vfio.test -test.v -test.run '^TestHardware$' >/tmp/out 2>&1 ||
    { grep -v -e '^=== ' -e '--- PASS' /tmp/out; fail "the suite does not pass"; }
  grep '^    --- ' /tmp/out
  echo "skipped: $(sed -n 's,.*--- SKIP: [^ ]*/\([A-Za-z]*\) .*,\1,p' /tmp/out | sort | uniq -c | tr -s ' \n' ' ')"
  drivers nvme
}

# lives DRIVE...: a volume from its beginning to a clean end, with a death in between.
lives() {
  must tuttifs mkfs -f -L kv "$@"
  grep '^drive' /tmp/out
  must tuttifs mount --log /tmp/log $options "$@" /mnt/kv
  must $replay /tmp/trace /mnt/kv
  grep -e blocks -e read -e written /tmp/out
  must tuttifs info --wear /mnt/kv
  cp /tmp/out /tmp/wear
  # Again and again, so that some engine is there however late the daemon is killed: the first one stores.
  timeout 60 sh -c "while $replay /tmp/more /mnt/kv; do :; done" >/tmp/killed 2>&1 &
  within 30 files 220
  killed=$(daemon)
  must kill -KILL "$killed"
  wait $!
  [ $? != 124 ] || fail "the engine did not notice"
  within 10 dead "$killed" # a controller of ours takes its time
  tail -n 1 /tmp/killed
  must umount /mnt/kv
  expect 1 tuttifs fsck -p --data "$@" # 1: the journal was replayed
  must tuttifs mount --log /tmp/log $options "$@" /mnt/kv
  must $replay --json /tmp/trace /mnt/kv
  [ "$(number hit_rate)" = 1 ] || fail "of what was stored before, $(number hit_rate) is there"
  [ -n "$options" ] || evicted
  must tuttifs umount /mnt/kv
  must tuttifs fsck -n --data "$@"
  tail -n 2 /tmp/out
}
# evicted: what is freed the drives are told, many ranges at a time.
evicted() {
  must tuttifs evict --count 60 /mnt/kv "$(ls /mnt/kv | head -n 1)"
  within 10 told
  echo "drive 0 was told of $(number ranges) ranges in $(number commands) commands"
  rings
}
# rings: prints how the daemon rings the doorbells of drives of ours: written, and saved by a doorbell buffer.
rings() {
  tr -d ' \n' </mnt/kv/.tuttifs/stats | grep -o '"doorbells":{"[^}]*}[^}]*}[^}]*}[^}]*}[^}]*}' || true
}
told() { cat /mnt/kv/.tuttifs/stats && sed -n '/"discards": /,$p' /tmp/out | grep '"ranges": [1-9]'; }
# amplification DRIVE...: prints what those of a volume's drives count that place data, which must be something.
amplification() {
  must tuttifs info --wear "$@"
  says 'ERASED'
  grep -A 1 ERASED /tmp/out
}

volume() {
  title "a volume on the kernel's driver, whose daemon is killed while an engine stores"
  lives "$(node A 1)" "$(node B 1)" "$(node C 1)" "$(node D 1)"
  amplification "$(node A 1)" "$(node B 1)" "$(node C 1)" "$(node D 1)"

  title "what was written through the kernel's driver, read through ours"
  must tuttifs drives bind --force --force $A $B $C $D
  must tuttifs fsck -n --data $A $B $C/1 $D/1

  title "a volume on our driver, whose daemon is killed while an engine stores"
  lives $A $B $C/1 $D/1 $D/2
  # Only B has placement handles: what was written to it since the mount, by lifetime.
  grep -A 1 HANDLES /tmp/wear || fail "nothing was written apart"
  amplification $A $B $C/1 $D/1 $D/2

  title "what was written through our driver, read through the kernel's"
  must tuttifs drives unbind $A $B $C $D
  nodes
  must tuttifs fsck -n --data "$(node A 1)" "$(node B 1)" "$(node C 1)" "$(node D 1)" "$(node D 2)"
  tail -n 2 /tmp/out
}

# has SERIAL NAMESPACE BYTES: the kernel's driver knows its blocks.
has() { [ "$(cat "/sys/block/$(basename "$(node "$1" "$2")")/queue/logical_block_size")" = "$3" ]; }

blocks() {
  title "blocks of another size: on our driver, and back on the kernel's"
  must tuttifs drives bind --force --force $D
  must tuttifs mkfs --lba-size list $D/1 $D/2
  cat /tmp/out
  expect 1 tuttifs mkfs -f --lba-size 4096 $D/1
  says 'format-nvm'
  must tuttifs mkfs -f --lba-size 4096 --format-nvm -L blocks $D/1 $D/2
  says '^drive 0 .*4096-byte'
  must tuttifs mount --log /tmp/log $D/1 $D/2 /mnt/kv
  must $replay /tmp/trace /mnt/kv
  expect 1 tuttifs mkfs -f --lba-size 512 --format-nvm $D/1
  says 'in use\|mounted'
  must tuttifs umount /mnt/kv
  must tuttifs drives unbind $D
  nodes
  has D 1 4096 || fail "the kernel sees no blocks of 4096 bytes"
  must tuttifs fsck -n --data "$(node D 1)" "$(node D 2)"
  tail -n 2 /tmp/out
  must tuttifs mkfs -f --lba-size 512 --format-nvm "$(node D 1)"
  says '^drive 0 .*512-byte'
  has D 1 512 || fail "the kernel sees no blocks of 512 bytes"
}

# mediated: no engine has queue pairs of a drive's own.
mediated() { ! tuttifs info /mnt/kv | grep -q 'real'; }

real() {
  title "a volume whose engine has queue pairs of the SSDs themselves, and whose daemon is killed while it stores"
  must tuttifs drives bind --force --force $A $B $D
  options='-o real=on' replay='tuttifs replay --scale 1024 --real'
  lives $A $B $D/1 $D/2

  title "an engine that drives the SSDs is killed"
  must tuttifs mount --log /tmp/log $options $A $B $D/1 $D/2 /mnt/kv
  sh -c "while $replay /tmp/more /mnt/kv; do :; done" >/tmp/killed 2>&1 &
  within 10 busy
  grep 'real on' /tmp/out
  kill -KILL $! # first, or it would begin another one
  kill -KILL $(pidof tuttifs | tr ' ' '\n' | grep -v "^$(daemon)$")
  wait $!
  within 10 mediated
  must tuttifs info /mnt/kv
  says "queue pairs of the drives' own, as engines say"
  grep -A 4 "queue pairs of the drives' own" /tmp/out
  must tuttifs info --json /mnt/kv
  ! grep -q '"mixed_commands": *[1-9]' /tmp/out || fail "reads and writes met on a drive"
  ! grep -q '"passed_by": *[1-9]' /tmp/out || fail "an engine did not leave a drive to others"
  must tuttifs umount /mnt/kv

  title "the same volume where the mount does not allow it"
  must tuttifs mount --log /tmp/log $A $B $D/1 $D/2 /mnt/kv
  expect 1 $replay /tmp/trace /mnt/kv
  says 'mount -o real='
  replay='tuttifs replay --scale 1024' options=
  must $replay --json /tmp/trace /mnt/kv
  [ "$(number hit_rate)" = 1 ] || fail "of what was stored before, $(number hit_rate) is there"
  must tuttifs umount /mnt/kv
  must tuttifs fsck -n --data $A $B $D/1 $D/2
  tail -n 2 /tmp/out
  must tuttifs drives unbind $A $B $D
  nodes
  must tuttifs fsck -n --data "$(node A 1)" "$(node B 1)" "$(node D 1)" "$(node D 2)"
}
busy() { tuttifs info /mnt/kv | grep 'real on'; }

errors() {
  title "a drive with bytes that cannot be read, and others that cannot be written"
  must tuttifs mkfs -f -L bad "$(node C 2)"
  must tuttifs mount --log /tmp/log "$(node C 2)" /mnt/kv
  must $replay /tmp/trace /mnt/kv
  expect 1 $replay /tmp/trace /mnt/kv
  says 'did not verify'
  tail -n 1 /tmp/out
  must $replay /tmp/trace /mnt/kv # what is unreadable is a miss by now
  expect 1 $replay /tmp/more /mnt/kv
  says 'was not stored: .* write'
  tail -n 1 /tmp/out
  within 5 state 0 online
  must tuttifs umount /mnt/kv
  expect 4 tuttifs fsck -n --data "$(node C 2)"
  says 'cannot be read'
  tail -n 1 /tmp/out
}

faults() {
  title "a drive that is slow"
  must tuttifs mkfs -f -L faulty --width 1 "$(node A 1)" "$(node B 1)" "$(node D 2)"
  must tuttifs mount --log /tmp/log "$(node D 2)" /mnt/kv
  must $replay /tmp/trace /mnt/kv
  slow
  must tuttifs umount /mnt/kv

  title "a drive that does not answer, and comes back"
  must tuttifs mount --log /tmp/log -o drive_timeout=5 "$(node A 1)" /mnt/kv
  monitor block_set_io_throttle B1 1 0 0 1 0 0
  timeout 60 $replay /tmp/more /mnt/kv >/tmp/stuck 2>&1
  echo "status $?: $(tail -n 1 /tmp/stuck)"
  within 30 state 1 lost
  must $replay /tmp/trace /mnt/kv
  monitor block_set_io_throttle B1 0 0 0 0 0 0
  within 30 tuttifs drive add /mnt/kv "$(node B 1)"
  within 5 state 1 online

  title "a drive that is taken out, and put back"
  taken_out
  must tuttifs drive add /mnt/kv "$(node A 1)"
  taken_in "$(node A 1)"

  title "the same on our driver: the kernel asks for it, and gets it"
  must tuttifs drives bind --force --force $A $B $D
  must tuttifs mkfs -f -L faulty --width 1 $A $B $D/2
  must tuttifs mount --log /tmp/log $A $B $D/2 /mnt/kv
  must $replay /tmp/trace /mnt/kv
  slow
  taken_out
  expect 1 tuttifs drives unbind $B
  says 'in use'
  must tuttifs drives bind $A
  must tuttifs drive add /mnt/kv $A
  taken_in $A $B $D/2
  must tuttifs drives unbind $A $B $D
}

# slow: what was stored is there, though a drive takes its time.
slow() {
  monitor block_set_io_throttle B1 0 0 0 200 0 0
  must $replay --json /tmp/trace /mnt/kv
  [ "$(number hit_rate)" = 1 ] || fail "of what was stored before, $(number hit_rate) is there"
  # It has a third of some 1600 objects, and gives 200 of them a second.
  [ "$(number seconds | cut -d . -f 1)" -ge 1 ] || fail "nothing was slow: $(number seconds) s"
  monitor block_set_io_throttle B1 0 0 0 0 0 0
}

# taken_out: drive 0, on controller A, is taken out while an engine stores, and put back. The kernel's driver has it then.
taken_out() {
  timeout 60 $replay /tmp/more /mnt/kv >/tmp/removed 2>&1 &
  sleep 0.5
  monitor device_del A
  wait $!
  echo "status $?: $(tail -n 1 /tmp/removed)"
  within 30 state 0 lost
  must $replay /tmp/trace /mnt/kv
  within 10 absent $A
  monitor device_add nvme,id=A,serial=A,drive=a0,bus=slot1,max_ioqpairs=8,dbcs=off
  within 10 node A 1
}
absent() { [ ! -e "/sys/bus/pci/devices/$1" ]; }
# taken_in DRIVE...: drive 0 is in use again, and the volume is whole.
taken_in() {
  within 5 state 0 online
  must $replay /tmp/trace /mnt/kv
  must tuttifs drive list /mnt/kv
  cat /tmp/out
  must tuttifs umount /mnt/kv
  must tuttifs fsck -n --data "$@"
  tail -n 2 /tmp/out
}

start
for s in $(sed 's/.*steps=\([a-z,]*\).*/\1/' /proc/cmdline | tr , ' '); do
  $s
done
title "the end"
grep -i error /tmp/monitor && fail "the monitor refused a command"
# A transfer that the IOMMU refuses is one that the emulated controller calls good.
dmesg | grep -e 'DMAR:.*fault' -e 'BUG:' -e 'WARNING:' && fail "the kernel has complaints"
verdict "passed in $(cut -d ' ' -f 1 /proc/uptime) s"
