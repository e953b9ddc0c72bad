package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"tuttifs/daemon"
	"tuttifs/extentmap"
	"tuttifs/wear"
)

// enduranceFlag is the rating of all drives, and of those that have another.
type enduranceFlag struct {
	all   wear.Endurance
	drive map[uint16]wear.Endurance
}

func (f *enduranceFlag) Type() string   { return "[INDEX:]RATING" }
func (f *enduranceFlag) String() string { return "" }

func (f *enduranceFlag) Set(text string) error {
	index, rating, one := strings.Cut(text, ":")
	if !one {
		rating = text
	}
	e, err := wear.ParseEndurance(rating)
	switch {
	case err != nil:
		return err
	case !one:
		f.all = e
		return nil
	}
	n, err := strconv.ParseUint(index, 10, 16)
	if err != nil {
		return fmt.Errorf("%q is not the index of a drive", index)
	}
	if f.drive == nil {
		f.drive = map[uint16]wear.Endurance{}
	}
	f.drive[uint16(n)] = e
	return nil
}

func (f *enduranceFlag) given() bool { return f.all.Known() || len(f.drive) > 0 }

func (f *enduranceFlag) of(index uint16) wear.Endurance {
	if e, ok := f.drive[index]; ok {
		return e
	}
	return f.all
}

// wearDocument is one drive's wear with what its rating makes of it. Years and the part that is used up go by the
// drive's own log where there is one, else by what was written since the mount.
type wearDocument struct {
	Index uint16 `json:"index"`
	Name  string `json:"name"`
	daemon.DriveWear
	RatedBytes float64  `json:"rated_bytes,omitempty"`
	RatedUsed  float64  `json:"rated_used,omitempty"`       // part of 1
	YearsLeft  *float64 `json:"rated_years_left,omitempty"` // at the last hour's rate; absent if nothing is written
}

// rate adds what a rating says.
func (d *wearDocument) rate(e wear.Endurance) {
	written := float64(d.PayloadWritten + d.MetadataWritten)
	if d.Log != nil {
		written = d.Log.HostWritten
	}
	if d.RatedBytes = e.Rated(d.Capacity); d.RatedBytes > 0 {
		d.RatedUsed = written / d.RatedBytes
	}
	if years, ok := e.YearsLeft(d.Capacity, written, d.HourRate); ok {
		d.YearsLeft = &years
	}
}

// wearOf lists the drives' wear, by index.
func wearOf(drives []daemon.DriveDocument, stats map[string]daemon.DriveWear, endurance *enduranceFlag) []wearDocument {
	out := []wearDocument{}
	for i := range drives {
		dr := &drives[i]
		d := wearDocument{Index: dr.Index, Name: dr.Name, DriveWear: stats[strconv.Itoa(int(dr.Index))]}
		d.rate(endurance.of(dr.Index))
		out = append(out, d)
	}
	return out
}

// logsOf reads the drives' own logs, for a volume that is not mounted.
func logsOf(v *extentmap.Volume, drives []extentmap.DriveInfo) map[string]daemon.DriveWear {
	out := map[string]daemon.DriveWear{}
	for i := range drives {
		w := daemon.DriveWear{Capacity: drives[i].Bytes, LogLack: "the drive is not there"}
		if dev := v.Drive(drives[i].Index); dev != nil {
			w.Log, w.LogLack = daemon.DriveLogOf(dev)
		}
		out[strconv.Itoa(int(drives[i].Index))] = w
	}
	return out
}

func printWear(e *env, drives []wearDocument, mounted, rated bool) {
	w := table(e.stdout)
	if mounted {
		fmt.Fprint(w, "DRIVE\tFILES WRITTEN\tMETADATA\tAMPLIFIED\tNOW\tLAST HOUR\tDWPD NOW\tDWPD LAST HOUR\n")
		for i := range drives {
			d := &drives[i]
			fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s/s\t%s/s\t%.2f\t%.2f\n", d.Index, humanBytes(d.PayloadWritten),
				humanBytes(d.MetadataWritten), timesOrDash(d.Amplification), humanBytes(uint64(d.MinuteRate)),
				humanBytes(uint64(d.HourRate)), d.MinuteDWPD, d.HourDWPD)
		}
		w.Flush()
		e.printf("since the mount; now is the last minute\n\n")
	}
	printLogs(e, drives)
	if rated {
		printRated(e, drives)
	}
}

// printLogs shows what the drives say of themselves, and which of them say nothing.
func printLogs(e *env, drives []wearDocument) {
	w := table(e.stdout)
	logs := slices.ContainsFunc(drives, func(d wearDocument) bool { return d.Log != nil })
	if logs {
		fmt.Fprint(w, "DRIVE\tWRITTEN IN ITS LIFE\tTO ITS MEDIA\tAMPLIFIED\tSINCE THE MOUNT\tOF OUR WRITES\tLIFE USED\t",
			"SPARE\n")
	}
	for i := range drives {
		if d := &drives[i]; d.Log != nil {
			l := d.Log
			fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%s\t%d%%\t%d%%\n", d.Index, humanBytes(uint64(l.HostWritten)),
				bytesOrDash(l.MediaWritten), timesOrDash(l.MediaFactorLife), timesOrDash(l.MediaFactor),
				timesOrDash(l.HostFactor), l.UsedPercent, l.SparePercent)
		}
	}
	w.Flush()
	if logs {
		e.printf("by the drives' own logs, which count the whole drive and whoever writes to it\n")
	}
	for i := range drives {
		if d := &drives[i]; d.Log == nil {
			e.printf("drive %d has no log of its own: %s\n", d.Index, orDash(d.LogLack))
		}
	}
}

// printRated shows what the ratings that were given make of it.
func printRated(e *env, drives []wearDocument) {
	w := table(e.stdout)
	fmt.Fprint(w, "\nDRIVE\tRATED FOR\tUSED\tYEARS LEFT\n")
	partial := false
	for i := range drives {
		d := &drives[i]
		if d.RatedBytes == 0 {
			continue
		}
		years := "-"
		if d.YearsLeft != nil {
			years = fmt.Sprintf("%.1f", *d.YearsLeft)
		}
		partial = partial || d.Log == nil
		fmt.Fprintf(w, "%d\t%.0f TB\t%.2f%%\t%s\n", d.Index, d.RatedBytes/1e12, 100*d.RatedUsed, years)
	}
	w.Flush()
	e.printf("at the rate of the last hour\n")
	if partial {
		e.printf("drives without a log of their own: only what was written since the mount counts as used\n")
	}
}

// timesOrDash is a factor; 0 is not known.
func timesOrDash(v float64) string {
	if v == 0 {
		return "-"
	}
	return fmt.Sprintf("x %.2f", v)
}

func bytesOrDash(v float64) string {
	if v == 0 {
		return "-"
	}
	return humanBytes(uint64(v))
}
