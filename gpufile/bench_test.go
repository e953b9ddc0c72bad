package gpufile

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"tuttifs/extentmap"
	"tuttifs/stripe"
)

const benchChain = 4096

// benchPool holds files (TUTTIFS_BENCH_FILES, a million by default) in chains of 4,096, of one 4-KiB object each.
func benchPool(b *testing.B) (*world, *Pool, int) {
	files := 1 << 20
	if s := os.Getenv("TUTTIFS_BENCH_FILES"); s != "" {
		n, err := strconv.Atoi(s)
		require.NoError(b, err)
		files = n
	}
	w := newWorld(b, 4, int64(files)*2300/4096*4096+256*mib, Options{NoIO: true})
	p := w.pool("a", 1, func(s *extentmap.PoolSpec) {
		s.Geometry = stripe.Geometry{Objects: []stripe.Object{{Runs: []stripe.Run{{Bytes: 4096}}}}}.WithTrailers()
	})
	m := w.member()
	for c := 0; c*benchChain < files; c++ {
		require.NoError(b, store(b, m, w.s.GroupOfPool(p.ID()), 0, chainItems(benchKeys(c))))
	}
	return w, p, files
}

func benchKeys(chain int) []Key {
	keys := make([]Key, benchChain)
	for i := range keys {
		keys[i] = traceKey(uint64(chain*benchChain + i))
	}
	return keys
}

// cpu reports the CPU time of the process, which other load on the machine does not stretch as it does wall time.
func cpu(b *testing.B) func() {
	b.Helper()
	now := func() int64 {
		var r unix.Rusage
		require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &r))
		return r.Utime.Nano() + r.Stime.Nano()
	}
	start := now()
	return func() { b.ReportMetric(float64(now()-start)/float64(b.N), "cpu-ns/op") }
}

// benched is what the benchmarks run on.
type benched struct {
	w     *world
	p     *Pool
	g     *Group
	m     *Member
	files int
}

func BenchmarkPool(b *testing.B) {
	w, p, files := benchPool(b)
	x := &benched{w, p, w.s.GroupOfPool(p.ID()), w.member(), files}
	b.Run("lookup", x.benchLookup)
	b.Run("pin+release4096", x.benchPin)
	b.Run("peek4096", x.benchPeek)
	b.Run("list", x.benchList)
	b.Run("authorize", x.benchAuthorize)
	b.Run("store64", x.benchStore)
	b.Run("load", x.benchLoad)
}

func (x *benched) benchLookup(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 2))
	keys, slots := make([]Key, 1<<16), make([]uint32, 1<<16)
	for i := range keys {
		keys[i] = traceKey(rng.Uint64N(uint64(x.files)))
	}
	b.ResetTimer()
	defer cpu(b)()
	for i := 0; i < b.N; i += len(keys) {
		x.p.Lookup(keys, slots)
	}
}

func (x *benched) benchPin(b *testing.B) {
	grants := make([]Grant, benchChain)
	chains := make([][]Key, 64)
	for i := range chains {
		chains[i] = benchKeys(i * (x.files/benchChain - 1) / len(chains))
	}
	b.ReportAllocs()
	defer cpu(b)()
	for i := 0; b.Loop(); i++ {
		n, err := x.m.Pin(x.g, 0, uint64(i), chains[i%len(chains)], grants)
		if err != nil || n != benchChain {
			b.Fatal(n, err)
		}
		if err := x.m.Release(x.g, uint64(i)); err != nil {
			b.Fatal(err)
		}
	}
}

func (x *benched) benchPeek(b *testing.B) {
	keys := benchKeys(x.files / benchChain / 2)
	defer cpu(b)()
	for b.Loop() {
		if n, err := x.m.Peek(x.g, 0, keys); err != nil || n != benchChain {
			b.Fatal(n, err)
		}
	}
}

func (x *benched) benchList(b *testing.B) {
	out := make([]ListEntry, 1024)
	cookie, shard := uint64(0), 0
	defer cpu(b)()
	for i := 0; i < b.N; {
		n := x.p.List(byte(shard), cookie, out)
		if n == 0 {
			shard, cookie = (shard+1)%256, 0
			continue
		}
		i += n
		cookie = out[n-1].Cookie
	}
}

func (x *benched) benchAuthorize(b *testing.B) {
	grants := make([]Grant, benchChain)
	_, err := x.m.Pin(x.g, 0, 1<<40, benchKeys(1), grants)
	require.NoError(b, err)
	type command struct {
		drive uint16
		unit  uint64
	}
	commands := make([]command, benchChain)
	for i := range commands {
		d, u, _, ok := x.p.m.Extent(grants[i].Slot, 0)
		require.True(b, ok)
		commands[i] = command{d, u}
	}
	rand.Shuffle(len(commands), func(i, j int) { commands[i], commands[j] = commands[j], commands[i] })
	b.ReportAllocs()
	defer cpu(b)()
	for i := 0; b.Loop(); i++ {
		c := commands[i%len(commands)]
		a, ok := x.m.Authorize(false, c.drive, c.unit, 1)
		if !ok {
			b.Fatal("refused")
		}
		x.m.Complete(a, true)
	}
}

func (x *benched) benchStore(b *testing.B) {
	defer cpu(b)()
	for i := 0; b.Loop(); i++ {
		keys := chainKeys(uint64(1000+i), 64)
		if err := store(b, x.m, x.g, 0, chainItems(keys)); err != nil {
			b.Fatal(err)
		}
	}
}

func (x *benched) benchLoad(b *testing.B) {
	defer cpu(b)()
	for b.Loop() {
		q, err := newPool(x.w.s, x.p.m)
		require.NoError(b, err)
		b.StopTimer()
		q.close()
		b.StartTimer()
	}
}
