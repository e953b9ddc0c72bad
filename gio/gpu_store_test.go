package gio

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tuttifs/checksum"
	"tuttifs/cuda"
	"tuttifs/nvme"
)

// storeBench has two lanes for what is stored beside two others, and a buffer of four pieces.
func storeBench(t *testing.T, config func(c *GPUConfig)) *bench {
	return newBench(t, benchShape{
		lanes: 4, drives: 1, depth: 64, bounce: 2 * 8 * pageBytes, store: StoreLeast, units: []int{1, 2}, config: config,
	})
}

// storeLayers stores both layers of so many slots, once fail has been called, and returns the first error of a verb,
// and what Finish says.
func (b *bench) storeLayers(slots int, fail func()) (l Layers, err, finish error) {
	b.t.Helper()
	var desc [2][]uint64
	for layer := range desc {
		buf, ctxs := b.target(slots, layer)
		fillRandom(buf, uint64(layer))
		for i := range ctxs {
			desc[layer] = append(desc[layer], ctxs[i].Desc)
		}
	}
	if fail != nil {
		fail()
	}
	var list []SlotIO
	for i := range slots {
		list = append(list, SlotIO{Slot: uint32(i), Seed: checksum.Seed{byte(i)}})
	}
	l, err = b.g.CreateLayers(b.m, 0, list)
	require.NoError(b.t, err)
	for layer := range uint16(2) {
		t, failed := l.StoreLayer(layer, desc[layer])
		if failed == nil {
			failed = t.Wait()
		}
		if err == nil {
			err = failed
		}
	}
	return l, err, l.Finish()
}

// TestGPUStoreFailsTyped: whatever call of CUDA fails on a store's way, what was not written is not called stored, and
// every wait ends.
func TestGPUStoreFailsTyped(t *testing.T) {
	hit := map[string]bool{}
	for _, function := range []string{"LaunchKernel", "MemcpyDtoHAsync", "EventRecord"} {
		for n := 1; n <= 9; n++ {
			name := fmt.Sprintf("%s %d", function, n)
			b := storeBench(t, func(c *GPUConfig) { c.ChunkCommands, c.MoveBytes = 8, 4*pageBytes })
			l, err, finish := b.storeLayers(40, func() { b.fake.Fail(function, n, cuda.ErrLaunchFailed) })
			if err == nil && finish == nil {
				require.Zero(t, b.g.StoreStats().Fill)
				l.Close()
				continue
			}
			hit[function] = true
			if err != nil {
				require.ErrorIs(t, err, ErrDead, name)
			}
			require.Error(t, finish, name)
			l.Close()
			_, err = b.g.CreateLayers(b.m, 0, nil)
			require.ErrorIs(t, err, ErrDead, name)
			require.ErrorIs(t, err, cuda.ErrLaunchFailed, name)
			require.Zero(t, b.g.StoreStats().Objects, name)
		}
	}
	require.Len(t, hit, 3, "every call was made to fail")
}

// TestGPUStoreNeverEnds: a kernel that is never done ends all waits of a store, too, in bounded time.
func TestGPUStoreNeverEnds(t *testing.T) {
	for _, kernel := range []string{"tuttifs_build", "tuttifs_gather"} {
		hold := make(chan struct{})
		b := storeBench(t, func(c *GPUConfig) { c.Deadline, c.grace = 200*time.Millisecond, 300*time.Millisecond })
		l, err, finish := b.storeLayers(20, func() {
			b.fake.Before(func(_ uintptr, op string) cuda.Result {
				if op == kernel {
					<-hold
				}
				return cuda.Success
			})
		})
		if kernel == "tuttifs_gather" {
			require.ErrorIs(t, err, ErrStuck)
		}
		require.Error(t, finish)
		for _, err := range l.Failed() {
			require.ErrorIs(t, err, ErrDead)
		}
		l.Close()
		require.ErrorIs(t, b.g.Close(), ErrDead)
		close(hold)
		b.giveBack()
	}
}

// TestStoreLanesDie: with the last lane for them what is stored fails, and restores go on.
func TestStoreLanesDie(t *testing.T) {
	b := storeBench(t, func(c *GPUConfig) { c.Deadline, c.Reattach = 100*time.Millisecond, nil })
	buf, ctxs := b.target(20, 0)
	b.turnOver(buf, ctxs, 1)
	lost := map[int]bool{}
	b.setHook(func(_ *nvme.SQE, lane int) bool { lost[lane] = true; return false })
	l, err, finish := b.storeLayers(20, nil)
	require.NoError(t, err)
	require.Error(t, finish)
	l.Close()
	b.setHook(nil)
	require.Equal(t, map[int]bool{2: true, 3: true}, lost)
	require.Eventually(t, func() bool { return b.g.Alive() == 2 }, 10*time.Second, time.Millisecond)
	require.Zero(t, b.g.StoreStats().Fill)
	l, err, _ = b.storeLayers(1, nil)
	require.ErrorIs(t, err, ErrDead)
	l.Close()
	b.turnOver(buf, ctxs, 2)
}
