#!/bin/bash
# test-nvme.sh PROGRAMS QEMU [STEP,...]: boots a Debian kernel in an emulated machine with four NVMe controllers of different shapes
# behind an IOMMU, and runs test-nvme-guest.sh there as init, with the static programs of the directory PROGRAMS. QEMU is where
# need-qemu.sh puts QEMU and a kernel. STEPs are functions of test-nvme-guest.sh; without any, all are run, and then the images of the
# drives are checked here, where no driver of anybody stands between.
# Ends within the limit, and leaves nothing behind, whatever ends it: not even SIGKILL.
[ "${1:-}" != --help ] || { sed -n '2,/^[^#]/s/^# //p' "$0"; exit 0; }
set -euo pipefail
programs=$1 cache=$2 steps=${3:-conformance,volume,blocks,real,errors,faults}
limit=${TUTTIFS_NVME_LIMIT:-290} # seconds; on a machine of its own half of it is enough
scripts=$(cd "$(dirname "$0")" && pwd)
fail() { echo "test-nvme: $*" >&2; exit 1; }

status=0
flock "$cache.lock" "$scripts/need-qemu.sh" "$cache" || status=$?
[ $status != 3 ] || { echo "test-nvme: SKIPPED, QEMU cannot be had: see above"; exit 0; }
[ $status = 0 ] || exit $status
root=$(cd "$cache/root" && pwd)
# Debian 13 has moved them.
modules=$(echo "$root"/lib/modules/*)
[ -d "$modules" ] || modules=$(echo "$root"/usr/lib/modules/*)
version=${modules##*/}
busybox=$root/bin/busybox
[ -x "$busybox" ] || busybox=$root/usr/bin/busybox

# The keeper outlives everything else: it ends the machine at the limit and removes what is left as soon as nobody holds the other end
# of its pipe. It is in a process group of its own, where signals for this script do not reach it.
work=$(mktemp -d "${TMPDIR:-/tmp}/tuttifs-nvme.XXXXXX")
mkfifo "$work/alive"
exec 9<>"$work/alive"
keeper() {
  trap '' HUP INT TERM
  exec 8<"$work/alive" 9>&-
  read -r -t "$limit" -u 8 || true
  kill -KILL "$(cat "$work/pid")" || true
  read -r -u 8 || true
  rm -rf "$work"
}
set -m
keeper </dev/null >/dev/null 2>&1 &
set +m
keeper=$!
finish() { exec 9>&-; wait $keeper || true; }
trap finish EXIT
trap 'exit 130' INT TERM

# The initial ramdisk is all that the machine runs from.
mkdir -p "$work/init"/{bin,modules,proc,sys,dev}
cp "$busybox" "$programs"/* "$work/init/bin/"
install -m 0755 "$scripts/test-nvme-guest.sh" "$work/init/init"
# In the order in which they need each other. Some are built in, or do not exist, in other kernels.
n=0
for m in irqbypass iommufd vfio vfio_virqfd vfio_iommu_type1 vfio-pci-core vfio-pci fuse; do
  ko=$(find "$modules" -name "$m.ko*" -print -quit)
  n=$((n + 1))
  case $ko in
  '') ;;
  *.xz) xz -dc "$ko" >"$work/init/modules/$n-$m.ko" ;;
  *) cp "$ko" "$work/init/modules/$n-$m.ko" ;;
  esac
done
(cd "$work/init" && find . | "$busybox" cpio -o -H newc 2>/dev/null) >"$work/initrd"

# The drives: a name, megabytes.
drives=(a0 96 b0 96 c0 96 c1 64 d0 96 d1 64 d2 16)
blocks=()
for ((i = 0; i < ${#drives[@]}; i += 2)); do
  name=${drives[i]}
  truncate -s "${drives[i + 1]}M" "$work/$name.img"
  blocks+=(-blockdev "driver=file,node-name=$name.img,filename=$work/$name.img,discard=unmap,cache.no-flush=on")
  if [ $name = c1 ]; then
    # This one cannot read the 64 KiB at 5 MiB, nor write the 64 KiB at 24 MiB: a rule for each 4 KiB.
    for ((unit = 0; unit < 16; unit++)); do
      rule='[inject-error]\nevent = "%s_aio"\niotype = "%s"\nerrno = "5"\nonce = "off"\nsector = "%d"\n'
      # shellcheck disable=SC2059 # a format
      printf "$rule" read read $((10240 + 8 * unit)) write write $((49152 + 8 * unit))
    done >"$work/bad"
    blocks+=(-blockdev "driver=blkdebug,node-name=$name.bad,image=$name.img,config=$work/bad")
    blocks+=(-blockdev "driver=raw,node-name=$name,file=$name.bad,discard=unmap")
  else
    blocks+=(-blockdev "driver=raw,node-name=$name,file=$name.img,discard=unmap")
  fi
done
controllers=(
  # A: behind a port of its own, so that it can be taken out; and without a doorbell buffer, which Linux 6.1 frees too late when
  # that happens while the drive is open.
  -device pcie-root-port,id=slot1,chassis=1,slot=1
  -device nvme,id=A,serial=A,drive=a0,bus=slot1,max_ioqpairs=8,dbcs=off
  # B: blocks of 4096 bytes, and placement of data (FDP).
  -device nvme-subsys,id=sB,fdp=on,fdp.runs=16M,fdp.nruh=8
  -device nvme,id=B,serial=B,subsys=sB,max_ioqpairs=8
  -device 'nvme-ns,id=B1,bus=B,drive=b0,nsid=1,logical_block_size=4096,physical_block_size=4096,fdp.ruhs=0;1;2'
  # C: transfers of at most 16 KiB, few queues, memory of its own, and a namespace with blocks that cannot be read.
  -device nvme,id=C,serial=C,mdts=2,max_ioqpairs=3,msix_qsize=4,cmb_size_mb=2
  -device nvme-ns,id=C1,bus=C,drive=c0,nsid=1
  -device nvme-ns,id=C2,bus=C,drive=c1,nsid=2
  # D: no limit of transfers, and namespaces of both block sizes with a gap in their numbers.
  -device nvme,id=D,serial=D,mdts=0,max_ioqpairs=16
  -device nvme-ns,id=D1,bus=D,drive=d0,nsid=1
  -device nvme-ns,id=D2,bus=D,drive=d1,nsid=2,logical_block_size=4096,physical_block_size=4096
  -device nvme-ns,id=D5,bus=D,drive=d2,nsid=5
)
kernel="console=ttyS0 quiet loglevel=3 panic=-1 intel_iommu=on mitigations=off nokaslr random.trust_cpu=on nvme_core.multipath=N"
machine=(
  -machine q35,kernel-irqchip=split -accel tcg,thread=single -cpu max -smp 1 -m 768
  -nodefaults -no-user-config -display none -no-reboot -L "$root/usr/share/qemu" -L "$root/usr/share/seabios"
  -device intel-iommu,intremap=on,aw-bits=39
  -kernel "$root/boot/vmlinuz-$version" -initrd "$work/initrd"
  -append "$kernel steps=$steps"
  -serial stdio
  # The guest's second serial line is the machine's monitor.
  -chardev "socket,id=line,path=$work/monitor,server=on,wait=off" -serial chardev:line
  -chardev "socket,id=monitor,path=$work/monitor" -mon chardev=monitor,mode=readline
)
export LD_LIBRARY_PATH="$root/usr/lib/x86_64-linux-gnu:$root/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
true >"$work/console" # before the one who reads it is there
setpriv --pdeathsig KILL "$root/usr/bin/qemu-system-x86_64" "${machine[@]}" "${blocks[@]}" "${controllers[@]}" \
  </dev/null >"$work/console" 2>"$work/errors" 9>&- &
qemu=$!
echo $qemu >"$work/pid"
unset LD_LIBRARY_PATH
tail -n +1 -f -s 0.2 --pid=$qemu "$work/console" 9>&- &
status=0
wait $qemu || status=$?
rm "$work/pid"
wait $! # for the last of the console
[ $status = 0 ] || { tail -n 5 "$work/errors"; fail "the machine did not end by itself, within $limit seconds: status $status"; }
grep -q '^test-nvme-guest: passed' "$work/console" || fail "no good end: see above"
[ $# = 2 ] || exit 0

echo "== the images of the drives, as they are without any driver"
"$programs/tuttifs" fsck -n --data "$work/a0.img" "$work/b0.img" "$work/d1.img"
echo "test-nvme: passed"
