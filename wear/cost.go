package wear

// Cost is what one way of serving costs: the paper's formula with wear in it.
//
//	dollars per hour = GPUs x price + DRAM GB x price + SSD GB x price + wear
//	dollars per million tokens = dollars per hour / (tokens per hour) x 10^6
//	wear per day = bytes written a day x price of a drive / its rated endurance in bytes
type Cost struct {
	Variant    string  `json:"variant"`
	Hit        float64 `json:"hit_rate"`
	Tokens     float64 `json:"tokens_per_second"` // prompt tokens, hits included
	GPUs       float64 `json:"gpus"`              // as many as these tokens take
	GPUHour    float64 `json:"gpu_dollars_per_hour"`
	DRAMHour   float64 `json:"dram_dollars_per_hour"`
	SSDHour    float64 `json:"ssd_dollars_per_hour"`
	WearHour   float64 `json:"wear_dollars_per_hour"`
	Hour       float64 `json:"dollars_per_hour"`
	Million    float64 `json:"dollars_per_million_tokens"`
	WrittenDay float64 `json:"bytes_written_per_day"` // to flash
	DWPD       float64 `json:"drive_writes_per_day"`
	YearsRated float64 `json:"years_until_rated_endurance,omitempty"` // absent where nothing is written or rated
}

// Variants of Costs, in their order.
var Variants = []string{"recompute", "DRAM cache", "tuttifs"}

// Costs evaluates the formula for serving without a cache, with one in DRAM and with one on SSDs. The prices are valid.
func (p *Prices) Costs() []Cost {
	return []Cost{
		p.cost(Variants[0], 0, 1, 0, 0, 0),
		p.cost(Variants[1], p.DRAMHit, p.DRAMRate, p.DRAMGB, 0, 0),
		p.cost(Variants[2], p.SSDHit, p.SSDRate, p.BufferGB, p.SSDGB, p.Admitted),
	}
}

// throughput is how many prompt tokens a second can be served when a part of them is hit. Restoring runs beside
// computing, so the slower of the two decides.
func (p *Prices) throughput(hit, gbPerSecond float64) float64 {
	compute, restore := (1-hit)/p.Prefill, hit*p.TokenBytes/(gbPerSecond*1e9)
	return 1 / max(compute, restore)
}

func (p *Prices) cost(name string, hit, rate, dramGB, ssdGB, admitted float64) Cost {
	most := p.throughput(hit, rate)
	c := Cost{Variant: name, Hit: hit, Tokens: most, GPUs: p.GPUs}
	if p.Tokens > 0 {
		c.Tokens, c.GPUs = p.Tokens, p.GPUs*p.Tokens/most
	}
	c.GPUHour, c.DRAMHour, c.SSDHour = c.GPUs*p.GPUHour, dramGB*p.DRAMGBHour, ssdGB*p.SSDGBHour
	written := c.Tokens * (1 - hit) * p.TokenBytes * admitted * secondsPerDay // KV
	c.WearHour = written * p.byteWear() / 24
	c.WrittenDay = written * p.WriteFactor
	if bytes := ssdGB * 1e9; bytes > 0 {
		c.DWPD = c.WrittenDay / bytes
		if c.DWPD > 0 && p.DWPD > 0 {
			c.YearsRated = p.RatingYears * p.DWPD / c.DWPD
		}
	}
	c.Hour = c.GPUHour + c.DRAMHour + c.SSDHour + c.WearHour
	c.Million = c.Hour / (c.Tokens * 3600) * 1e6
	return c
}
