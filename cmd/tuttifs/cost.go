package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"

	"tuttifs/wear"
)

type costOptions struct {
	file   string
	prices wear.Prices
	json   bool
}

func newCost() *command {
	o := &costOptions{prices: wear.DefaultPrices()}
	f := newFlags("cost")
	f.StringVar(&o.file, "prices", "", "read these numbers from a JSON `FILE`; flags that are given count more")
	for _, field := range o.prices.Fields() {
		f.Var((*priceFlag)(field.Value), strings.ReplaceAll(field.Name, "_", "-"), field.Help)
	}
	f.BoolVar(&o.json, "json", false, "print as JSON")
	c := &command{
		name: "cost", synopsis: flagsOnly, summary: "what serving costs: recomputing, a cache in DRAM, tuttifs; with wear",
		exits: &plainExits, flags: f,
		long: `
Evaluates the Tutti paper's cost formula, with the drives' wear in it, for prompts that are computed
anew, for a cache in DRAM, and for tuttifs:

  $/hour  = GPUs x $/hour + DRAM GB x $/GB/hour + SSD GB x $/GB/hour + wear
  $/Mtok  = $/hour / (tokens per hour) x 10^6
  wear    = bytes written a day / 24 x price of a drive / its rated endurance

Tokens are those of prompts. A variant serves as many as it can: computing the part that is not
hit, and restoring the other part beside it, the slower of the two; or --tokens-per-second, with as
many GPUs as that takes. GB and TB are 10^9 and 10^12 bytes. The default prices are the paper's, of
a cloud; where the rent of SSDs covers their replacement, use --drive-dollars-per-tb 0. The numbers
may come from a file with the flags' names, as in {"ssd_hit_rate": 0.6}. docs/wear.md says more.`,
		example: `
tuttifs cost --gpus 8 --prefill-tokens-per-second 60000 --ssd-hit-rate 0.6 --dram-hit-rate 0.3
tuttifs cost --prices site.json --admitted 0.25 --host-buffer-gb 500 --json`,
	}
	c.run = func(_ context.Context, e *env, _ []string) error { return o.run(e, c) }
	return c
}

// priceFlag is a number of the prices; wear.Prices.Validate judges it.
type priceFlag float64

func (p *priceFlag) Type() string   { return "N" }
func (p *priceFlag) String() string { return strconv.FormatFloat(float64(*p), 'g', -1, 64) }

func (p *priceFlag) Set(text string) error {
	v, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return fmt.Errorf("%q is not a number", text)
	}
	*p = priceFlag(v)
	return nil
}

// readPrices reads a file of prices; those that it does not name stay the default.
func readPrices(name string) (wear.Prices, error) {
	f, err := os.Open(name)
	if err != nil {
		return wear.Prices{}, err
	}
	defer f.Close()
	p, err := wear.ParsePrices(f)
	if err != nil {
		return p, fmt.Errorf("%s: %w", name, err)
	}
	return p, nil
}

type costDocument struct {
	OutputVersion int         `json:"output_version"`
	Prices        wear.Prices `json:"prices"`
	Costs         []wear.Cost `json:"costs"`
}

func (o *costOptions) run(e *env, c *command) error {
	prices := o.prices
	if o.file != "" {
		var err error
		if prices, err = readPrices(o.file); err != nil {
			return err
		}
		given := o.prices.Fields()
		for i, field := range prices.Fields() {
			if c.flags.Changed(strings.ReplaceAll(field.Name, "_", "-")) {
				*field.Value = *given[i].Value
			}
		}
	}
	if err := prices.Validate(); err != nil {
		return usagef("%v", err)
	}
	costs := prices.Costs()
	if o.json {
		return printJSON(e.stdout, costDocument{outputVersion, prices, costs})
	}
	printCosts(e, costs)
	return nil
}

func printCosts(e *env, costs []wear.Cost) {
	w := table(e.stdout)
	fmt.Fprint(w, "VARIANT\tHIT\tTOKENS/S\tGPUS\tGPU $/H\tDRAM $/H\tSSD $/H\tWEAR $/H\tALL $/H\t$/MTOK\tOF RECOMPUTE\n")
	for i := range costs {
		c := &costs[i]
		part := "-" // of nothing
		if costs[0].Million > 0 {
			part = fmt.Sprintf("%.1f%%", 100*c.Million/costs[0].Million)
		}
		fmt.Fprintf(w, "%s\t%.1f%%\t%.0f\t%.2f\t%.3f\t%.3f\t%.3f\t%.3f\t%.3f\t%.4f\t%s\n", c.Variant, 100*c.Hit, c.Tokens,
			c.GPUs, c.GPUHour, c.DRAMHour, c.SSDHour, c.WearHour, c.Hour, c.Million, part)
	}
	w.Flush()
	for i := range costs {
		c := &costs[i]
		if c.WrittenDay == 0 || c.DWPD == 0 {
			continue
		}
		e.printf("\n%s: %.1f TB written to flash a day, %.2f drive writes per day", c.Variant, c.WrittenDay/1e12, c.DWPD)
		if c.YearsRated > 0 {
			e.printf("; the rated endurance lasts %.1f years", c.YearsRated)
		}
		e.printf("\n")
	}
}
