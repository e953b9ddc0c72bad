package wear

import (
	"fmt"
	"io"
	"math"

	"tuttifs/strictjson"
)

// Prices are what 'tuttifs cost' and cost-aware admission reckon with. Money is in dollars, or in any other currency
// that all of them are in. GB and TB are 10^9 and 10^12 bytes. Fields says what each is.
type Prices struct {
	GPUs        float64 `json:"gpus"`
	GPUHour     float64 `json:"gpu_dollars_per_hour"`
	DRAMGBHour  float64 `json:"dram_dollars_per_gb_hour"`
	SSDGBHour   float64 `json:"ssd_dollars_per_gb_hour"`
	DriveTB     float64 `json:"drive_dollars_per_tb"`
	DWPD        float64 `json:"endurance_dwpd"`
	RatingYears float64 `json:"endurance_years"`
	Prefill     float64 `json:"prefill_tokens_per_second"`
	TokenBytes  float64 `json:"kv_bytes_per_token"`
	WriteFactor float64 `json:"write_amplification"`
	DRAMGB      float64 `json:"dram_gb"`
	DRAMHit     float64 `json:"dram_hit_rate"`
	DRAMRate    float64 `json:"dram_gb_per_second"`
	SSDGB       float64 `json:"ssd_gb"`
	SSDHit      float64 `json:"ssd_hit_rate"`
	SSDRate     float64 `json:"ssd_gb_per_second"`
	BufferGB    float64 `json:"host_buffer_gb"`
	Admitted    float64 `json:"admitted"`
	Tokens      float64 `json:"tokens_per_second"`
}

// DefaultPrices are the paper's cloud prices; a data-centre drive of 100 $/TB rated for a drive write a day over five
// years; and an 8B model of which one GPU computes 19,500 tokens a second in long prompts, with the hit rates of the
// Mooncake conversation trace.
func DefaultPrices() Prices {
	return Prices{
		GPUs: 1, GPUHour: 5, DRAMGBHour: 0.0088, SSDGBHour: 0.000082,
		DriveTB: 100, DWPD: 1, RatingYears: WarrantyYears,
		Prefill: 19500, TokenBytes: 131072, WriteFactor: 1.1,
		DRAMGB: 1000, DRAMHit: 0.26, DRAMRate: 50,
		SSDGB: 14000, SSDHit: 0.37, SSDRate: 29, BufferGB: 1, Admitted: 1,
	}
}

// Field is one of the prices by its name in JSON, for checks and flags.
type Field struct {
	Name, Help string
	Value      *float64
	kind       fieldKind
}

type fieldKind uint8

const (
	anyNumber fieldKind = iota // from 0 on
	positive
	fraction // of 1
	factor   // from 1 on
)

// Fields lists all prices.
func (p *Prices) Fields() []Field {
	return []Field{
		{"gpus", "GPUs that serve", &p.GPUs, positive},
		{"gpu_dollars_per_hour", "price of one of them", &p.GPUHour, anyNumber},
		{"dram_dollars_per_gb_hour", "rent of DRAM", &p.DRAMGBHour, anyNumber},
		{"ssd_dollars_per_gb_hour", "rent of SSDs", &p.SSDGBHour, anyNumber},
		{"drive_dollars_per_tb", "price of another drive when one is worn out; 0: wear costs nothing", &p.DriveTB,
			anyNumber},
		{"endurance_dwpd", "the drives' rating in drive writes per day", &p.DWPD, anyNumber},
		{"endurance_years", "years that the rating is meant for", &p.RatingYears, anyNumber},
		{"prefill_tokens_per_second", "what all GPUs together compute when nothing is cached", &p.Prefill, positive},
		{"kv_bytes_per_token", "KV of a token, all layers and ranks", &p.TokenBytes, positive},
		{"write_amplification", "bytes written to flash for a byte of KV", &p.WriteFactor, factor},
		{"dram_gb", "size of a cache in DRAM", &p.DRAMGB, anyNumber},
		{"dram_hit_rate", "part of the tokens that it has", &p.DRAMHit, fraction},
		{"dram_gb_per_second", "restoring from it", &p.DRAMRate, positive},
		{"ssd_gb", "size of a cache on SSDs", &p.SSDGB, anyNumber},
		{"ssd_hit_rate", "part of the tokens that it has", &p.SSDHit, fraction},
		{"ssd_gb_per_second", "restoring from it", &p.SSDRate, positive},
		{"host_buffer_gb", "DRAM that the cache on SSDs needs", &p.BufferGB, anyNumber},
		{"admitted", "part of the computed KV that is written to the SSDs", &p.Admitted, fraction},
		{"tokens_per_second", "what is asked of the service; 0: as much as each variant can", &p.Tokens, anyNumber},
	}
}

// Bounds of prices that are not 0: what is computed from numbers within them is finite.
const (
	priceMin = 1e-15
	priceMax = 1e15
)

// Validate refuses numbers that cannot be.
func (p *Prices) Validate() error {
	for _, f := range p.Fields() {
		v := *f.Value
		switch {
		case math.IsNaN(v) || math.IsInf(v, 0) || v < 0:
			return fmt.Errorf("%w: %s is %v: numbers from 0 on are possible", ErrInvalid, f.Name, v)
		case v > priceMax || v > 0 && v < priceMin:
			return fmt.Errorf("%w: %s is %v: numbers from %.0e to %.0e are possible", ErrInvalid, f.Name, v, priceMin, priceMax)
		case f.kind == positive && v == 0:
			return fmt.Errorf("%w: %s must be more than 0", ErrInvalid, f.Name)
		case f.kind == fraction && v > 1:
			return fmt.Errorf("%w: %s is %v: a part of 1", ErrInvalid, f.Name, v)
		case f.kind == factor && v < 1:
			return fmt.Errorf("%w: %s is %v: at least 1", ErrInvalid, f.Name, v)
		}
	}
	if p.DriveTB > 0 && (p.DWPD == 0 || p.RatingYears == 0) {
		return fmt.Errorf("%w: endurance_dwpd and endurance_years must be more than 0 where drive_dollars_per_tb is: wear "+
			"cannot be priced without the drives' rating", ErrInvalid)
	}
	return nil
}

// pricesMax bounds a file of prices.
const pricesMax = 64 << 10

// ParsePrices reads a JSON object of prices; those that it does not name stay the default. Names are exact and given
// once; one that is not known is an error, not a comment.
func ParsePrices(r io.Reader) (Prices, error) {
	p := DefaultPrices()
	b, err := io.ReadAll(io.LimitReader(r, pricesMax+1))
	switch {
	case err != nil:
	case len(b) > pricesMax:
		err = fmt.Errorf("more than %d bytes", pricesMax)
	default:
		err = strictjson.Decode(b, &p)
	}
	if err != nil {
		return Prices{}, fmt.Errorf("%w: prices: %w", ErrInvalid, err)
	}
	return p, p.Validate()
}

// byteWear is what writing a byte of KV costs in flash: the part of the drive's rated endurance that it takes. Both
// price and rating are by capacity, which cancels out.
func (p *Prices) byteWear() float64 {
	if p.DriveTB == 0 {
		return 0
	}
	return p.WriteFactor * p.DriveTB / terabyte / (p.DWPD * daysPerYear * p.RatingYears)
}

// tokenPrice is what computing a token costs.
func (p *Prices) tokenPrice() float64 { return p.GPUs * p.GPUHour / 3600 / p.Prefill }

// Pays says whether storing a block of KV is worth it: what its hits save in GPU time, less what the hits would have
// saved that it costs by evicting another, against the wear of writing it.
func (p *Prices) Pays(hits, lost float64, tokens uint32, bytes uint64) bool {
	return (hits-lost)*float64(tokens)*p.tokenPrice() > float64(bytes)*p.byteWear()
}
