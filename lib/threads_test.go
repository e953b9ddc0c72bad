//go:build cgo

package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"tuttifs/engine"
	"tuttifs/stripe"
)

// The race detector does not work in a shared library, so this calls what the shim calls, as threads of C would:
// testdata/threads.c does the same through the library.

// invoke calls an exported function with its arguments made those of C: numbers, and unsafe.Pointers for pointers. It
// returns the code and the text.
func invoke(f any, args ...any) (int, string) {
	v := reflect.ValueOf(f)
	text := make([]byte, 2048)
	args = append(args, unsafe.Pointer(&text[0]))
	in := make([]reflect.Value, len(args))
	for i, a := range args {
		switch want := v.Type().In(i); want.Kind() {
		case reflect.Pointer:
			p, _ := a.(unsafe.Pointer)
			in[i] = reflect.NewAt(want.Elem(), p)
		default:
			in[i] = reflect.ValueOf(a).Convert(want)
		}
	}
	code := int(v.Call(in)[0].Int())
	if code == 0 {
		return 0, ""
	}
	return code, string(text[:bytes.IndexByte(text, 0)])
}

const ebadf = -9 // what a closed handle gets

// cLease and cItem are the header's structures.
type cLease struct {
	slot, tokens     uint32
	generation       uint64
	seed             [16]byte
	status, reserved uint32
}

type cItem struct {
	key, parent      [32]byte
	tokens, position uint32
}

const threadLayers, threadFiles, threadBlock = 3, 4, 4096

// threadUser is one thread's cache: blocks, of which those from threadFiles on are restored to.
type threadUser struct {
	number        int
	session, pool uintptr
	memory        uintptr
	cache         [][]byte
}

func (u *threadUser) ok(t *testing.T, f any, args ...any) {
	code, text := invoke(f, args...)
	if code != 0 {
		t.Errorf("thread %d: %d: %s", u.number, code, text)
	}
}

// roundTrip stores a chain of the thread's own and restores it.
func (u *threadUser) roundTrip(t *testing.T, round int) {
	keys, items := make([][32]byte, threadFiles), make([]cItem, threadFiles)
	leases, blocks := make([]cLease, threadFiles), make([]uint64, threadFiles)
	for f := range keys {
		copy(keys[f][:], fmt.Sprintf("thread %d, round %d, file %d", u.number, round, f))
		items[f] = cItem{key: keys[f], tokens: 16, position: uint32(f)}
		if f > 0 {
			items[f].parent = keys[f-1]
		}
		blocks[f] = uint64(f)
		for l := range u.cache {
			binary.LittleEndian.PutUint64(u.cache[l][f*threadBlock+l:], uint64(u.number)<<32|uint64(round)<<16|uint64(f))
		}
	}
	request, n, layers, rank := uint64(u.number*100+round+1), uint64(0), uintptr(0), uint16(0)
	p := func(x *uintptr) unsafe.Pointer { return unsafe.Pointer(x) }
	u.ok(t, goReserve, u.pool, 0, request, unsafe.Pointer(&items[0]), threadFiles, 0, unsafe.Pointer(&leases[0]),
		unsafe.Pointer(&n))
	for store := 1; store >= 0; store-- {
		u.ok(t, goLayersOpen, u.pool, 0, store, unsafe.Pointer(&leases[0]), threadFiles, u.memory,
			unsafe.Pointer(&blocks[0]), p(&layers))
		transfers := make([]uintptr, threadLayers)
		for l := range transfers {
			u.ok(t, goMoveLayer, layers, store, l, 0, p(&transfers[l]))
		}
		for _, x := range transfers[store:] {
			u.ok(t, goWaitOn, x, 0)
			u.ok(t, goWait, x)
		}
		if store == 0 {
			u.ok(t, goLayersClose, layers)
			break
		}
		u.ok(t, goWait, transfers[0])
		u.ok(t, goFinish, layers)
		u.ok(t, goLayersClose, layers)
		u.ok(t, goCommit, u.pool, request, unsafe.Pointer(&rank), 1)
		u.ok(t, goPin, u.pool, 0, request, unsafe.Pointer(&keys[0]), threadFiles, unsafe.Pointer(&leases[0]),
			unsafe.Pointer(&n))
		for f := range blocks {
			blocks[f] = uint64(2*threadFiles - 1 - f)
		}
	}
	u.ok(t, goRelease, u.pool, request)
	for f := range keys {
		for l := range u.cache {
			got := u.cache[l][(2*threadFiles-1-f)*threadBlock:][:threadBlock]
			if want := u.cache[l][f*threadBlock:][:threadBlock]; string(got) != string(want) {
				t.Errorf("thread %d, round %d: layer %d of file %d differs", u.number, round, l, f)
			}
		}
	}
}

// threadSession makes a session, a pool and a user for each thread.
func threadSession(t *testing.T, threads int) []*threadUser {
	t.Helper()
	m, err := engine.Open(newMount(t))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	s, err := m.NewSession(engine.SessionOptions{Lanes: 2, Depth: 32, DMABytes: 8 << 20, BounceBytes: 4 << 20,
		Deadline: time.Minute})
	require.NoError(t, err)
	spec := engine.PoolSpec{Name: "threads", Identity: []byte(gpuIdentity), TokensPerFile: 16}
	for layer := range uint16(threadLayers) {
		spec.Geometry.Objects = append(spec.Geometry.Objects,
			stripe.Object{Layer: layer, Runs: []stripe.Run{{Bytes: threadBlock}}})
	}
	opened, err := s.OpenPool(spec)
	require.NoError(t, err)
	wrapped := &session{Session: s}
	h := newHandle(wrapped, 0)
	p := newHandle(&pool{Pool: opened, session: wrapped}, h)
	users := make([]*threadUser, threads)
	for i := range users {
		u := &threadUser{number: i, session: h, pool: p}
		memory := &memory{session: wrapped, classes: make([]class, threadLayers), blocks: 2 * threadFiles}
		for l := range memory.classes {
			u.cache = append(u.cache, make([]byte, 2*threadFiles*threadBlock))
			host, err := s.Ring().Register(u.cache[l])
			require.NoError(t, err)
			memory.classes[l] = class{bytes: threadBlock, host: host, stride: threadBlock}
		}
		u.memory = newHandle(memory, h)
		users[i] = u
	}
	return users
}

// TestThreads: threads use one session and one pool at once, and it is closed under the last calls.
func TestThreads(t *testing.T) {
	users := threadSession(t, 6)
	var all sync.WaitGroup
	for _, u := range users {
		all.Go(func() {
			for round := range 4 {
				u.roundTrip(t, round)
			}
			u.ok(t, goUnregister, u.memory)
		})
	}
	all.Wait()
	var calls atomic.Int64
	h, p := users[0].session, users[0].pool
	for i := range users {
		all.Go(func() {
			var key [32]byte
			var n uint64
			about, code, text := make([]byte, 100), 0, ""
			for code == 0 {
				if i%2 == 0 {
					code, text = invoke(goPeek, p, 0, unsafe.Pointer(&key), 1, unsafe.Pointer(&n))
				} else {
					code, text = invoke(goSessionDescribe, h, unsafe.Pointer(&about[0]), len(about))
				}
				calls.Add(1)
			}
			if code != ebadf {
				t.Errorf("%d: %s", code, text)
			}
		})
	}
	require.Eventually(t, func() bool { return calls.Load() > 100 }, time.Minute, time.Millisecond)
	code, text := invoke(goSessionClose, h)
	require.Zero(t, code, text)
	all.Wait()
}

// TestOneHandleManyThreads: of all who wait for a transfer, or close a handle, one has it.
func TestOneHandleManyThreads(t *testing.T) {
	u := threadSession(t, 1)[0]
	item, lease, n, block := cItem{key: [32]byte{1}, tokens: 16}, cLease{}, uint64(0), uint64(0)
	for round := range 10 {
		var layers, transfer uintptr
		request := uint64(round + 1)
		u.ok(t, goReserve, u.pool, 0, request, unsafe.Pointer(&item), 1, 0, unsafe.Pointer(&lease), unsafe.Pointer(&n))
		u.ok(t, goLayersOpen, u.pool, 0, 1, unsafe.Pointer(&lease), 1, u.memory, unsafe.Pointer(&block),
			unsafe.Pointer(&layers))
		u.ok(t, goMoveLayer, layers, 1, 0, 0, unsafe.Pointer(&transfer))
		var won atomic.Int64
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				if code, text := invoke(goWaitOn, transfer, 0); code != 0 && code != ebadf {
					t.Errorf("%d: %s", code, text)
				}
				switch code, text := invoke(goWait, transfer); code {
				case 0:
					won.Add(1)
				case ebadf:
				default:
					t.Errorf("%d: %s", code, text)
				}
			})
		}
		all.Wait()
		require.EqualValues(t, 1, won.Load())
		u.ok(t, goLayersClose, layers)
		u.ok(t, goAbort, u.pool, request)
	}
	u.ok(t, goSessionClose, u.session)
}
