package wear

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPricesNames(t *testing.T) {
	p := DefaultPrices()
	require.NoError(t, p.Validate())
	b, err := json.Marshal(p)
	require.NoError(t, err)
	values := map[string]float64{}
	require.NoError(t, json.Unmarshal(b, &values))
	fields := p.Fields()
	require.Len(t, fields, reflect.TypeOf(p).NumField())
	require.Len(t, values, len(fields))
	for _, f := range fields {
		require.Equal(t, values[f.Name], *f.Value, f.Name)
		require.NotEmpty(t, f.Help)
	}
}

func TestParsePrices(t *testing.T) {
	p, err := ParsePrices(strings.NewReader(`{"gpus": 8, "drive_dollars_per_tb": 0, "endurance_dwpd": 0}`))
	require.NoError(t, err)
	want := DefaultPrices()
	want.GPUs, want.DriveTB, want.DWPD = 8, 0, 0
	require.Equal(t, want, p)
	for _, bad := range []string{
		"", "[]", `{"gpu": 1}`, `{"gpus": "8"}`, `{"gpus": 0}`, `{"gpus": -1}`, `{"ssd_hit_rate": 1.1}`,
		`{"gpus": 1e16}`, `{"prefill_tokens_per_second": 1e-300}`,
		`{"write_amplification": 0.9}`, `{"endurance_dwpd": 0}`, `{"gpus": 1} {}`, `{"gpus": 1e999}`, `{"GPUs": 1}`,
		`{"gpus": 1, "gpus": 1}`, `{"gpus": null}`, `{"gpus": [1]}`, `{"gpus": 1`, `{"gpus": 1} x`, `{"gpus" 1}`,
	} {
		_, err := ParsePrices(strings.NewReader(bad))
		require.ErrorIs(t, err, ErrInvalid, bad)
	}
	p.GPUHour = math.NaN()
	require.ErrorIs(t, p.Validate(), ErrInvalid)
}

func FuzzParsePrices(f *testing.F) {
	for _, s := range []string{`{}`, `{"gpus": 2}`, `{"gpus": 1e400}`, `{"admitted": 2}`, `nul`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		p, err := ParsePrices(strings.NewReader(text))
		if err != nil {
			return
		}
		for _, c := range p.Costs() {
			if !(c.Hour >= 0 && c.Million >= 0) || math.IsInf(c.Hour+c.Million+c.WrittenDay+c.DWPD+c.YearsRated, 0) {
				t.Fatalf("%s: %+v", text, c)
			}
		}
	})
}

// One line of the table by hand.
func TestCosts(t *testing.T) {
	p := Prices{
		GPUs: 2, GPUHour: 5, DRAMGBHour: 0.01, SSDGBHour: 0.0001, DriveTB: 100, DWPD: 1, RatingYears: 5,
		Prefill: 10000, TokenBytes: 100000, WriteFactor: 1.5, DRAMGB: 1000, DRAMHit: 0.2, DRAMRate: 50,
		SSDGB: 10000, SSDHit: 0.5, SSDRate: 25, BufferGB: 10, Admitted: 0.5,
	}
	require.NoError(t, p.Validate())
	costs := p.Costs()
	require.Len(t, costs, len(Variants))
	recompute, dram, ssd := costs[0], costs[1], costs[2]

	require.InDelta(t, 10000, recompute.Tokens, 1e-6)
	require.InDelta(t, 10, recompute.Hour, 1e-9)
	require.InDelta(t, 10/36.0, recompute.Million, 1e-9) // 36 million tokens an hour
	require.Zero(t, recompute.WrittenDay)

	require.InDelta(t, 12500, dram.Tokens, 1e-6)
	require.InDelta(t, 20, dram.Hour, 1e-9)
	require.InDelta(t, 20/45.0, dram.Million, 1e-9)
	require.Zero(t, dram.WearHour)

	require.InDelta(t, 20000, ssd.Tokens, 1e-6)
	// 10,000 new tokens a second, half of them written: 0.5 GB/s of KV, 43.2 TB a day, 64.8 TB with amplification.
	require.InDelta(t, 64.8e12, ssd.WrittenDay, 1e3)
	require.InDelta(t, 6.48, ssd.DWPD, 1e-9)
	require.InDelta(t, 5/6.48, ssd.YearsRated, 1e-9)
	// 1 TB written takes 100 / (365 x 5) dollars.
	require.InDelta(t, 64.8*100/1825/24, ssd.WearHour, 1e-9)
	require.InDelta(t, 10+0.1+1+ssd.WearHour, ssd.Hour, 1e-9)
	require.InDelta(t, ssd.Hour/72, ssd.Million, 1e-9)

	p.Tokens = 5000 // a quarter of what it can: GPUs in proportion, caches whole
	ssd = p.Costs()[2]
	require.InDelta(t, 0.5, ssd.GPUs, 1e-9)
	require.InDelta(t, 2.5+0.1+1+ssd.WearHour, ssd.Hour, 1e-9)
	require.InDelta(t, 6.48/4, ssd.DWPD, 1e-9)
}

// Restoring that is slower than computing bounds the throughput.
func TestCostsRestoreBound(t *testing.T) {
	p := DefaultPrices()
	p.SSDHit, p.SSDRate = 0.99, 1
	c := p.Costs()[2]
	require.InDelta(t, 1e9/(0.99*p.TokenBytes), c.Tokens, 1e-6)
	p.SSDHit = 1
	c = p.Costs()[2]
	require.Zero(t, c.WrittenDay)
	require.Zero(t, c.YearsRated)
}

// More hits, cheaper drives and fewer writes never make it dearer.
func TestCostsMonotone(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	for range 2000 {
		p := DefaultPrices()
		p.SSDHit, p.DriveTB, p.Admitted, p.SSDRate = rng.Float64()*0.9, rng.Float64()*1000, rng.Float64(), 1+rng.Float64()*50
		was := p.Costs()[2].Million
		for _, change := range []func(*Prices){
			func(q *Prices) { q.DriveTB /= 2 },
			func(q *Prices) { q.Admitted /= 2 },
			func(q *Prices) { q.DWPD *= 2 },
			func(q *Prices) { q.SSDRate *= 2 },
			func(q *Prices) { q.WriteFactor = 1 },
		} {
			q := p
			change(&q)
			require.LessOrEqual(t, q.Costs()[2].Million, was*(1+1e-12))
		}
	}
}
