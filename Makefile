# make demo    a volume on four files, mounted, used, checked and taken down again, in under a minute
# make test    everything that a change must pass; what needs NVMe controllers is in make test-nvme
SHELL   := /bin/bash
GO      ?= go
PYTHON  ?= python3
PREFIX  ?= /usr/local
DESTDIR ?=
FUZZTIME ?= 10s
FLIPS   ?= 100000
DEATHS  ?= 500
STRESS  ?= 60
VERSION := $(shell git describe --always --dirty 2>/dev/null || echo devel)
# No cgo: the binary opens libcuda at run time, by way of the system's libc. Only the race detector needs a C compiler.
RACE    := $(shell command -v gcc >/dev/null 2>&1 && echo -race)
# mount(8) looks for helpers nowhere but in /sbin.
HELPERS ?= /sbin
LIBOUT  ?= build/lib
LIBVERSION := $(shell sed -n 's/^\#define TUTTIFS_LIB_M[AJINOR]* //p' include/libtuttifs.h | paste -sd.)
SONAME  := libtuttifs.so.$(firstword $(subst ., ,$(LIBVERSION)))
LINKS   := mkfs.tuttifs fsck.tuttifs fsck.fuse.tuttifs mount.tuttifs mount.fuse.tuttifs

.PHONY: build static lib wheel demo test test-nvme test-vllm test-adapters compare crash space deaths stress check gpu-tests ptx ptx-check fuzz flips bench install install-lib uninstall clean

build: scripts/need-go.sh
	@scripts/need-go.sh $(GO)
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w -X main.version=$(VERSION)' -o bin/tuttifs ./cmd/tuttifs

# A fully static binary, for machines without glibc. It knows no GPUs.
static: scripts/need-go.sh
	@scripts/need-go.sh $(GO)
	CGO_ENABLED=0 $(GO) build -tags nogpu -trimpath -ldflags '-s -w -X main.version=$(VERSION)' -o bin/tuttifs ./cmd/tuttifs

# The GPU kernels, compiled by nvcc 13.0, which is installed in build/nvcc from PyPI. What they compile to is committed.
ptx:
	@scripts/ptx.sh build

ptx-check:
	@scripts/ptx.sh check

# The C library, build/lib/libtuttifs.so, for include/libtuttifs.h. Needs a C compiler.
lib: scripts/need-go.sh
	@scripts/need-go.sh $(GO)
	@scripts/lib.sh $(GO) $(LIBOUT)

# The Python package with the library and the command in it, build/wheel/tuttifs-*.whl.
wheel: build lib
	@TUTTIFS_BINARY=bin/tuttifs TUTTIFS_LIBRARY=$(LIBOUT)/$(SONAME) $(PYTHON) -B python/wheel_backend.py build/wheel

demo: build
	@scripts/demo.sh bin/tuttifs

check:
	@scripts/need-go.sh $(GO)
	@bad=$$(gofmt -l $$(find . -name '*.go' -not -path './build/*')); [ -z "$$bad" ] || { echo "gofmt -w these: $$bad"; exit 1; }
	$(GO) vet ./...

test: check ptx-check build
	@scripts/need-tools.sh getfattr:attr rsync:rsync
	@[ -n "$(RACE)" ] || echo "no gcc here: testing without the race detector"
	CGO_ENABLED=$(if $(RACE),1,0) $(GO) test $(RACE) -p 2 -timeout 15m ./...
	$(GO) test -timeout 15m -run TestCrashPoints ./gpufile

# NVMe controllers that are not ours, emulated by QEMU, with a kernel of their own: docs/hardware.md. A minute or two.
test-nvme: scripts/need-go.sh
	@scripts/need-go.sh $(GO)
	@mkdir -p build/guest
	CGO_ENABLED=0 $(GO) build -tags nogpu -trimpath -o build/guest/tuttifs ./cmd/tuttifs
	CGO_ENABLED=0 $(GO) test -c -tags nogpu -trimpath -o build/guest/vfio.test ./nvme/vfio
	@scripts/test-nvme.sh build/guest build/qemu

# The vLLM connector in real engines on the CPU, with a small model: ten minutes, and 6 GB in build/vllm the first time.
test-vllm: build lib
	@scripts/test-engines.sh vllm build/vllm

# The adapters for SGLang and LMCache with those packages' own loaders, host pools and controllers, without a GPU: four
# minutes, and 6 GB in build/adapters the first time.
test-adapters: build lib
	@scripts/test-engines.sh adapters build/adapters

# vLLM without a cache, with its own files, with LMCache's and with a mount, on the CPU, side by side: ten minutes, and 6 GB
# in build/vllm and build/compare the first time.
compare: build lib
	@scripts/compare_engines.sh build/compare build/vllm

# A million power cuts: some twenty minutes on two cores.
crash:
	TUTTIFS_CRASH_CUTS=1000000 $(GO) test -timeout 4h -v -run TestCrashPoints ./gpufile | grep -v -e '^=== ' -e '--- PASS'

# Eight engines store five hundred times what a volume holds: three minutes and more.
space:
	TUTTIFS_SPACE_TIMES=500 $(GO) test -count=1 -timeout 4h -v -run 'TestSpace$$' ./daemon | grep -v -e '^=== ' -e ended:

# Kills daemons and engines under load: a mount, so it needs root. What was killed is in the last lines.
deaths:
	set -o pipefail; TUTTIFS_DEATHS=$(DEATHS) $(GO) test -count=1 -timeout 4h -v -run '^TestDeaths$$' ./engine \
		| grep -v '=== '

# Races, STRESS seconds each, with the scheduler disturbed: other numbers of threads, other places to be interrupted.
stress:
	set -o pipefail; for n in 1 2 8; do for gc in 5 400; do GOMAXPROCS=$$n GOGC=$$gc TUTTIFS_STRESS_SECONDS=$(STRESS) \
		CGO_ENABLED=$(if $(RACE),1,0) $(GO) test $(RACE) -count=1 -timeout 4h -v \
		-run '^(TestMountRaces|TestReserveRaces|TestCommitRaces|TestReuseWaits.*|TestHeldCommands|TestRaces.*|TestLeasesWhilePolling)$$' \
		./engine ./daemon ./gpufile | grep -v -e '=== ' -e ended: || exit 1; done; done

# The tests as programs, for scripts/gpu-check.sh on a machine with a GPU and without Go.
gpu-tests: scripts/need-go.sh
	@scripts/need-go.sh $(GO)
	@mkdir -p build/gpu
	for p in cuda cuda/cudatest gio engine; do \
		CGO_ENABLED=0 $(GO) test -c -trimpath -o build/gpu/$${p##*/}.test ./$$p || exit 1; \
	done

fuzz:
	@scripts/fuzz.sh $(GO) $(FUZZTIME)

# How many images were spoilt, and what became of them, is in the last lines.
flips:
	set -o pipefail; TUTTIFS_LONG=1 TUTTIFS_FLIPS=$(FLIPS) $(GO) test -count=1 -timeout 4h -v \
		-run '^(TestFlips|TestSealedDamage|TestRepairCut|TestTakingInIsCut)$$' ./extentmap/check | grep -v '^    --- PASS\|=== '

bench: build
	@scripts/need-tools.sh fio:fio
	bin/tuttifs bench meta --files 10000000
	bin/tuttifs bench rings

install: build
	install -D -m 0755 bin/tuttifs $(DESTDIR)$(PREFIX)/sbin/tuttifs
	for n in $(LINKS); do ln -sf tuttifs $(DESTDIR)$(PREFIX)/sbin/$$n; done
	install -d $(DESTDIR)$(HELPERS)
	for n in $(LINKS); do ln -sf $(PREFIX)/sbin/tuttifs $(DESTDIR)$(HELPERS)/$$n; done
	install -d $(DESTDIR)$(PREFIX)/lib/systemd/system
	sed 's,/usr/local/,$(PREFIX)/,' scripts/tuttifs@.service >$(DESTDIR)$(PREFIX)/lib/systemd/system/tuttifs@.service
	for m in docs/man/*.8; do install -D -m 0644 $$m $(DESTDIR)$(PREFIX)/share/man/man8/$${m##*/}; done

install-lib: lib
	install -D -m 0755 $(LIBOUT)/$(SONAME) $(DESTDIR)$(PREFIX)/lib/$(SONAME)
	ln -sf $(SONAME) $(DESTDIR)$(PREFIX)/lib/libtuttifs.so
	install -d $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(PREFIX)/lib/pkgconfig
	install -m 0644 include/libtuttifs.h include/tuttifs.h $(DESTDIR)$(PREFIX)/include
	sed 's,@PREFIX@,$(PREFIX),; s,@VERSION@,$(LIBVERSION),' lib/libtuttifs.pc.in \
		>$(DESTDIR)$(PREFIX)/lib/pkgconfig/libtuttifs.pc

uninstall:
	rm -f $(addprefix $(DESTDIR)$(HELPERS)/,$(LINKS)) $(addprefix $(DESTDIR)$(PREFIX)/sbin/,tuttifs $(LINKS))
	rm -f $(DESTDIR)$(PREFIX)/lib/systemd/system/tuttifs@.service $(addprefix $(DESTDIR)$(PREFIX)/lib/,$(SONAME) libtuttifs.so)
	rm -f $(DESTDIR)$(PREFIX)/lib/pkgconfig/libtuttifs.pc
	rm -f $(addprefix $(DESTDIR)$(PREFIX)/include/,libtuttifs.h tuttifs.h)
	for m in docs/man/*.8; do rm -f $(DESTDIR)$(PREFIX)/share/man/man8/$${m##*/}; done

clean:
	rm -rf bin build
