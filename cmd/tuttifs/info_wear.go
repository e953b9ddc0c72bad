package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"

	"tuttifs/daemon"
	"tuttifs/extentmap"
	"tuttifs/wear"
)

// enduranceFlag is wear.Ratings as a flag.
type enduranceFlag struct{ wear.Ratings }

func (f *enduranceFlag) Type() string   { return "[INDEX:]RATING" }
func (f *enduranceFlag) String() string { return "" }

// check refuses ratings of drives that the volume does not have.
func (f *enduranceFlag) check(drives []daemon.DriveDocument) error {
	for _, index := range slices.Sorted(maps.Keys(f.Drive)) {
		if !slices.ContainsFunc(drives, func(d daemon.DriveDocument) bool { return d.Index == index }) {
			return fmt.Errorf("--endurance: the volume has no drive %d: 'tuttifs info' lists them", index)
		}
	}
	return nil
}

// wearDocument is one drive's wear.
type wearDocument struct {
	Index uint16 `json:"index"`
	Name  string `json:"name"`
	daemon.DriveWear
}

// wearOf lists the drives' wear, by index. Ratings that are given count more than those of the mount.
func wearOf(drives []daemon.DriveDocument, stats map[string]daemon.DriveWear, ratings *wear.Ratings) []wearDocument {
	out := []wearDocument{}
	for i := range drives {
		dr := &drives[i]
		d := wearDocument{Index: dr.Index, Name: dr.Name, DriveWear: stats[strconv.Itoa(int(dr.Index))]}
		if e := ratings.Of(dr.Index); e.Known() {
			d.Rate(e)
		}
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

func printWear(e *env, drives []wearDocument, mounted bool) {
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
	if slices.ContainsFunc(drives, func(d wearDocument) bool { return d.RatedBytes > 0 }) {
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
	printPlacement(e, drives)
	for i := range drives {
		if d := &drives[i]; d.Log == nil {
			e.printf("drive %d has no log of its own: %s\n", d.Index, orDash(d.LogLack))
		}
	}
}

// printPlacement shows what drives with Flexible Data Placement count, and what was written apart on drives of ours.
func printPlacement(e *env, drives []wearDocument) {
	counted := func(d *wearDocument) bool { return d.Log != nil && d.Log.Placement != nil }
	if slices.ContainsFunc(drives, func(d wearDocument) bool { return counted(&d) }) {
		w := table(e.stdout)
		fmt.Fprint(w, "\nDRIVE\tHOST\tMEDIA\tERASED\tAMPLIFIED\tSINCE THE MOUNT\n")
		for i := range drives {
			if d := &drives[i]; counted(d) {
				l := d.Log.Placement
				fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%s\n", d.Index, humanBytes(uint64(l.HostWritten)),
					humanBytes(uint64(l.MediaWritten)), humanBytes(uint64(l.MediaErased)), timesOrDash(l.AmplificationLife),
					timesOrDash(l.Amplification))
			}
		}
		w.Flush()
		e.printf("by their statistics of flexible data placement, of the endurance group\n")
	}
	placed := func(d *wearDocument) bool { return d.Placement != nil && d.Placement.Handles > 0 }
	if !slices.ContainsFunc(drives, func(d wearDocument) bool { return placed(&d) }) {
		return
	}
	w := table(e.stdout)
	fmt.Fprint(w, "\nDRIVE\tHANDLES\tMETADATA\tSHORT\tNORMAL\tLONG\n")
	for i := range drives {
		if d := &drives[i]; placed(d) {
			p := d.Placement
			fmt.Fprintf(w, "%d\t%d\t%s\t%s\t%s\t%s\n", d.Index, p.Handles, humanBytes(p.Metadata), humanBytes(p.Short),
				humanBytes(p.Normal), humanBytes(p.Long))
		}
	}
	w.Flush()
	e.printf("written by this mount, by how long it will probably stay\n")
}

// printRated shows what the ratings make of it.
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
		rated := d.RatedBytes / 1e12
		digits := 0
		if rated < 10 {
			digits = 2
		}
		fmt.Fprintf(w, "%d\t%.*f TB\t%.2f%%\t%s\n", d.Index, digits, rated, 100*d.RatedUsed, years)
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
