package daemon

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"time"

	"tuttifs/drive"
	"tuttifs/drivemodel"
	"tuttifs/extentmap"
	"tuttifs/gpufile"
	"tuttifs/nvme/vfio"
	"tuttifs/phase"
	"tuttifs/wear"
)

// StatusVersion stands in every status document. It changes when a key is removed or changes its meaning.
const StatusVersion = 2

// VersionDocument is /.tuttifs/version.
type VersionDocument struct {
	OutputVersion int    `json:"output_version"`
	Version       string `json:"version"`
	PID           int    `json:"pid"`
	// PIDNamespace is that in which PID is its number, as /proc/self/ns/pid names it; empty where that cannot be read.
	PIDNamespace string `json:"pid_namespace"`
}

// VolumeDocument is /.tuttifs/volume. Pools are described, not counted: that is for the statistics.
type VolumeDocument struct {
	OutputVersion    int              `json:"output_version"`
	UUID             string           `json:"uuid"`
	Label            string           `json:"label"`
	Epoch            uint64           `json:"epoch"`
	Nonce            uint64           `json:"nonce"`
	Width            int              `json:"width"`
	SegmentBytes     uint64           `json:"segment_bytes"`
	ReadOnly         bool             `json:"read_only"`
	Degraded         bool             `json:"degraded"` // a drive is lost, or the metadata lacks its second copy
	RowsUnavailable  uint64           `json:"rows_unavailable"`
	TotalBytes       uint64           `json:"total_bytes"`
	UnassignedBytes  uint64           `json:"unassigned_bytes"`
	JournalBytes     uint64           `json:"journal_bytes"`
	JournalUsedBytes uint64           `json:"journal_used_bytes"`
	Pools            []PoolDocument   `json:"pools"`
	Families         []FamilyDocument `json:"families"`
	Tenants          []TenantDocument `json:"tenants"`
}

// PoolDocument describes one pool.
type PoolDocument struct {
	ID            uint16          `json:"id"`
	Name          string          `json:"name"`
	Identity      json.RawMessage `json:"identity"`
	Family        string          `json:"family,omitempty"`
	TrailingHit   uint32          `json:"trailing_hit,omitempty"`
	TokensPerFile uint32          `json:"tokens_per_file"`
	Objects       int             `json:"objects"`
	Ranks         int             `json:"ranks"`
	FileBytes     int64           `json:"file_bytes"`
	SlotBytes     uint64          `json:"slot_bytes"`
	Rows          int             `json:"rows"`
	SlotsPerRow   uint32          `json:"slots_per_row"`
	MinBytes      uint64          `json:"min_bytes"`
	MaxBytes      uint64          `json:"max_bytes"`
	MaxSlots      uint32          `json:"max_slots"`
	Created       time.Time       `json:"created,omitzero"`
	Admission     string          `json:"admission,omitempty"` // of a mounted volume
}

// FamilyDocument names the pools that hit and commit together.
type FamilyDocument struct {
	ID    uint16   `json:"id"`
	Name  string   `json:"name"`
	Pools []uint16 `json:"pools"`
}

// TenantDocument is a quota holder.
type TenantDocument struct {
	ID         uint32 `json:"id"`
	Name       string `json:"name"`
	QuotaBytes uint64 `json:"quota_bytes"`
}

// DrivesDocument is /.tuttifs/drives.
type DrivesDocument struct {
	OutputVersion int             `json:"output_version"`
	Drives        []DriveDocument `json:"drives"`
}

// DriveDocument describes one member drive.
type DriveDocument struct {
	Index        uint16 `json:"index"`
	UUID         string `json:"uuid"`
	Name         string `json:"name"`
	Kind         string `json:"kind"`
	Bytes        uint64 `json:"bytes"`
	LBABytes     int    `json:"lba_bytes"`
	Direct       bool   `json:"direct"`
	Mapped       bool   `json:"mapped"` // its bytes are memory, which the daemon addresses
	Metadata     bool   `json:"metadata"`
	Discard      bool   `json:"discard"` // in effect: asked for, and the drive can
	Segments     uint32 `json:"segments"`
	FreeSegments uint32 `json:"free_segments"`
	ReadErrors   uint64 `json:"read_errors"`
	WriteErrors  uint64 `json:"write_errors"`
	Timeouts     uint64 `json:"timeouts"` // operations that were given up
	State        string `json:"state"`    // "online", "lost" or "leaving"
	Held         bool   `json:"held"`     // gets no files before engines that do not know it have ended
	Cause        string `json:"cause,omitempty"`
	// Modelled is the profile that the drive is held back to: how fast it is says nothing about the one that is there.
	Modelled *drivemodel.Profile `json:"modelled,omitempty"`
}

// NewDriveDocument describes a drive as mkfs, info and the status files show it.
func NewDriveDocument(d *extentmap.DriveInfo) DriveDocument {
	kind := map[drive.Kind]string{
		drive.File: "file", drive.Block: "block", drive.Memory: "memory", drive.NVMe: "nvme",
	}[d.Kind]
	return DriveDocument{d.Index, extentmap.FormatUUID(d.UUID), d.Name, kind, d.Bytes, d.LBABytes, d.Direct, d.Mapped,
		d.Metadata, d.Discard, d.Segments, d.FreeSegments, d.ReadErrors, d.WriteErrors, d.Timeouts, d.State.String(),
		d.Held, d.Cause, nil}
}

// NewDriveDocuments describes all of them.
func NewDriveDocuments(drives []extentmap.DriveInfo) []DriveDocument {
	out := make([]DriveDocument, 0, len(drives))
	for i := range drives {
		out = append(out, NewDriveDocument(&drives[i]))
	}
	return out
}

// PoolStats are one pool's counters, monotonic since the mount, and gauges. Lookups are hits and misses together.
type PoolStats struct {
	Lookups       uint64 `json:"lookups"`
	Hits          uint64 `json:"hits"`
	Misses        uint64 `json:"misses"`
	Reserved      uint64 `json:"reserved"`
	Committed     uint64 `json:"committed"`
	Aborted       uint64 `json:"aborted"`
	Declined      uint64 `json:"declined"` // not admitted to the drives
	Evicted       uint64 `json:"evicted"`
	Doomed        uint64 `json:"doomed"`
	Bad           uint64 `json:"bad"`
	Unreadable    uint64 `json:"unreadable"`
	Files         uint64 `json:"files"`
	FilesPinned   uint64 `json:"files_pinned"`
	FilesReserved uint64 `json:"files_reserved"`
	FilesAway     uint64 `json:"files_unavailable"`
	SlotsFree     uint64 `json:"slots_free"`
	SlotsFreeing  uint64 `json:"slots_freeing"`
	SlotsUsed     uint64 `json:"slots_used"`
	BytesUsed     uint64 `json:"bytes_used"`
	BytesCapacity uint64 `json:"bytes_capacity"`
}

func newPoolStats(s gpufile.Stats) PoolStats {
	return PoolStats{s.Lookups, s.Hits, s.Misses, s.Reserved, s.Committed, s.Aborted, s.Declined, s.Evicted, s.Doomed,
		s.Bad, s.Unreadable, s.Files, s.FilesPinned, s.FilesReserved, s.FilesAway,
		s.SlotsFree, s.SlotsFreeing, s.SlotsUsed, s.BytesUsed, s.BytesCapacity}
}

func (s *PoolStats) add(o *PoolStats) {
	s.Lookups += o.Lookups
	s.Hits += o.Hits
	s.Misses += o.Misses
	s.Reserved += o.Reserved
	s.Committed += o.Committed
	s.Aborted += o.Aborted
	s.Declined += o.Declined
	s.Evicted += o.Evicted
	s.Doomed += o.Doomed
	s.Bad += o.Bad
	s.Unreadable += o.Unreadable
	s.Files += o.Files
	s.FilesPinned += o.FilesPinned
	s.FilesReserved += o.FilesReserved
	s.FilesAway += o.FilesAway
	s.SlotsFree += o.SlotsFree
	s.SlotsFreeing += o.SlotsFreeing
	s.SlotsUsed += o.SlotsUsed
	s.BytesUsed += o.BytesUsed
	s.BytesCapacity += o.BytesCapacity
}

// IOStats are what the virtual controllers did: of one drive, or of all.
type IOStats struct {
	Reads        uint64  `json:"reads"`
	Writes       uint64  `json:"writes"`
	Flushes      uint64  `json:"flushes"`
	BytesRead    uint64  `json:"bytes_read"`
	BytesWritten uint64  `json:"bytes_written"`
	Errors       uint64  `json:"errors"`
	Refused      uint64  `json:"refused"`
	QueuesKilled uint64  `json:"queues_killed"`
	BusySeconds  float64 `json:"busy_seconds"`
}

func (s *IOStats) add(o *IOStats) {
	s.Reads += o.Reads
	s.Writes += o.Writes
	s.Flushes += o.Flushes
	s.BytesRead += o.BytesRead
	s.BytesWritten += o.BytesWritten
	s.Errors += o.Errors
	s.Refused += o.Refused
	s.QueuesKilled += o.QueuesKilled
	s.BusySeconds += o.BusySeconds
}

// SpaceStats is what df shows.
type SpaceStats struct {
	TotalBytes     uint64 `json:"total_bytes"`
	UsedBytes      uint64 `json:"used_bytes"`
	FreeBytes      uint64 `json:"free_bytes"`
	AvailableBytes uint64 `json:"available_bytes"`
	Files          uint64 `json:"files"`
	FilesMax       uint64 `json:"files_max"`
}

// StatsDocument is /.tuttifs/stats. Prometheus gets the same values.
type StatsDocument struct {
	OutputVersion int                  `json:"output_version"`
	UptimeSeconds float64              `json:"uptime_seconds"`
	Total         PoolStats            `json:"total"` // of all pools
	Pools         map[string]PoolStats `json:"pools"`
	IO            IOStats              `json:"io"`     // of all drives
	Drives        map[string]IOStats   `json:"drives"` // by index
	Mount         MountStats           `json:"mount"`  // what the mount's own readers and writers did
	Space         SpaceStats           `json:"space"`
	Sessions      uint64               `json:"sessions"`
	Reached       uint64               `json:"reached_bytes"` // of GPUs' memory, by SSDs themselves
	ReadErrors    uint64               `json:"read_errors"`
	WriteErrors   uint64               `json:"write_errors"`
	Transactions  uint64               `json:"transactions"`
	Checkpoints   uint64               `json:"checkpoints"`
	JournalUsed   uint64               `json:"journal_used_bytes"`
	Degraded      uint64               `json:"degraded"` // 1: see DriveDocument
	DrivesLost    uint64               `json:"drives_lost"`
	RowsAway      uint64               `json:"rows_unavailable"`
	DriveErrors   map[string]DriveErrs `json:"drive_errors"` // by index
	Wear          map[string]DriveWear `json:"wear"`         // likewise
	// Discards are what drives were told of freed slots, by index; slots that wait for that, or were handed out without.
	Discards        map[string]DiscardStats `json:"discards"`
	DiscardsWaiting uint64                  `json:"discards_waiting"`
	DiscardsSpared  uint64                  `json:"discards_spared"`
	// Doorbells are how the daemon rings the drives that it drives itself, by index.
	Doorbells map[string]DoorbellStats `json:"doorbells"`
	// Phases are those of the drives in use, by index.
	Phases map[string]PhaseStats `json:"phases"`
	// Real is what engines did by queue pairs of the drives' own, by index: those of which any ever had one.
	Real map[string]RealStats `json:"real"`
	// Engines are what sessions say of themselves, by number.
	Engines map[string]EngineStats `json:"engines"`
	// Expectation is what cost-aware admission believes now, where a pool has it.
	Expectation *wear.Expectation `json:"admission_expectation,omitempty"`
}

// DriveErrs are what one drive has failed to do since the mount, metadata and payload of the mount's own readers and
// writers; commands of engines that failed are in IOStats.
type DriveErrs struct {
	Online   uint64 `json:"online"`   // 1 while it is in use
	Modelled uint64 `json:"modelled"` // 1 if it is held back to a profile
	Reads    uint64 `json:"reads"`
	Writes   uint64 `json:"writes"`
	Timeouts uint64 `json:"timeouts"`
}

// DiscardStats are what one drive was told since the mount of what freed slots no longer hold.
type DiscardStats struct {
	On       uint64 `json:"on"` // 1 while it is told
	Commands uint64 `json:"commands"`
	Ranges   uint64 `json:"ranges"`
	Bytes    uint64 `json:"bytes"`
	Failed   uint64 `json:"failed"` // commands
}

func newDiscardStats(d *extentmap.DriveInfo) DiscardStats {
	s := DiscardStats{Commands: d.Discards.Commands, Ranges: d.Discards.Ranges, Bytes: d.Discards.Bytes,
		Failed: d.Discards.Failed}
	if d.Discard {
		s.On = 1
	}
	return s
}

// DoorbellStats are how the daemon's own queues on a drive's controller were rung since it was opened. Namespaces of
// one controller have the same.
type DoorbellStats struct {
	Buffer  uint64 `json:"buffer"` // 1 where the controller looks in a doorbell buffer
	Written uint64 `json:"written"`
	Saved   uint64 `json:"saved"` // register writes that the buffer made unnecessary
}

func newDoorbellStats(c *vfio.Controller) (s DoorbellStats) {
	if _, ok := c.DoorbellBuffer(); ok {
		s.Buffer = 1
	}
	s.Written, s.Saved = c.Rings()
	return s
}

// PhaseStats are one drive's read/write phases since the mount. Reads and writes that were let in at once have not
// waited.
type PhaseStats struct {
	Mixed         uint64  `json:"mixed_commands"` // began while others of the other direction were in flight
	Switches      uint64  `json:"switches"`
	Turns         uint64  `json:"turns"`         // that writes took when they had lost patience
	Stuck         uint64  `json:"stuck_entries"` // past commands that did not move
	ReadWaits     uint64  `json:"read_waits"`
	ReadSeconds   float64 `json:"read_wait_seconds"` // all together
	ReadLongest   float64 `json:"read_wait_longest_seconds"`
	WriteWaits    uint64  `json:"write_waits"`
	WriteSeconds  float64 `json:"write_wait_seconds"`
	WriteLongest  float64 `json:"write_wait_longest_seconds"`
	WriteAge      float64 `json:"write_wait_now_seconds"` // of the write that waits longest now
	ReadersNow    int     `json:"readers_now"`            // pollers and the like that are in
	WritersNow    int     `json:"writers_now"`
	ReadsWaiting  int     `json:"readers_waiting"`
	WritesWaiting int     `json:"writers_waiting"`
	RealPairs     int     `json:"real_queue_pairs"` // of engines, now: they keep to the phase of their own accord
}

func newPhaseStats(s phase.Stats) PhaseStats {
	return PhaseStats{
		Mixed: s.Mixed, Switches: s.Switches, Turns: s.Turns, Stuck: s.Stuck,
		ReadWaits: s.Waits[phase.Read], ReadSeconds: s.Waited[phase.Read].Seconds(),
		ReadLongest: s.Longest[phase.Read].Seconds(),
		WriteWaits:  s.Waits[phase.Write], WriteSeconds: s.Waited[phase.Write].Seconds(),
		WriteLongest: s.Longest[phase.Write].Seconds(), WriteAge: s.Age[phase.Write].Seconds(),
		ReadersNow: s.Inside[phase.Read], WritersNow: s.Inside[phase.Write],
		ReadsWaiting: s.Wanting[phase.Read], WritesWaiting: s.Wanting[phase.Write],
	}
}

// MountStats counts bytes and files that went through the mount itself (cat, cp), not through queues.
type MountStats struct {
	ReadBytes   uint64 `json:"read_bytes"`  // verified, and returned to readers
	ReadErrors  uint64 `json:"read_errors"` // objects that could not be read or verified
	StoredFiles uint64 `json:"stored_files"`
	StoredBytes uint64 `json:"stored_bytes"`
}

// SessionsDocument is /.tuttifs/sessions.
type SessionsDocument struct {
	OutputVersion int               `json:"output_version"`
	Sessions      []SessionDocument `json:"sessions"`
	Processes     []MemberInfo      `json:"processes"`
}

// SessionDocument describes an engine's session.
type SessionDocument struct {
	ID       uint32    `json:"id"`
	UID      uint32    `json:"uid"`
	Members  int       `json:"members"`
	Pins     int       `json:"pins"`
	Reserved int       `json:"reserved"`
	Since    time.Time `json:"since"`
}

func (d *Daemon) versionDocument() any {
	namespace, _ := os.Readlink("/proc/self/ns/pid")
	return VersionDocument{StatusVersion, d.options.Version, os.Getpid(), namespace}
}

func (d *Daemon) volumeDocument() any {
	doc := NewVolumeDocument(d.volume)
	for i := range doc.Pools {
		if p := d.store.PoolByID(extentmap.PoolID(doc.Pools[i].ID)); p != nil {
			doc.Pools[i].Created, doc.Pools[i].Admission = p.Created(), p.Admission().String()
		}
	}
	return doc
}

// NewVolumeDocument describes a volume, mounted or not.
func NewVolumeDocument(v *extentmap.Volume) *VolumeDocument {
	info := v.Info()
	doc := &VolumeDocument{
		OutputVersion: StatusVersion, UUID: extentmap.FormatUUID(info.UUID), Label: info.Label, Epoch: info.Epoch,
		Nonce: info.Nonce, Width: info.Width, SegmentBytes: info.SegmentBytes, ReadOnly: info.ReadOnly,
		Degraded: info.Degraded, RowsUnavailable: info.RowsUnavailable,
		TotalBytes: info.TotalBytes, UnassignedBytes: info.FreeBytes, JournalBytes: info.JournalBytes,
		JournalUsedBytes: info.JournalUsedBytes,
		Pools:            []PoolDocument{}, Families: []FamilyDocument{}, Tenants: []TenantDocument{},
	}
	for _, p := range v.Pools() {
		doc.Pools = append(doc.Pools, newPoolDocument(p))
	}
	for _, f := range v.Families() {
		family := FamilyDocument{ID: f.ID, Name: f.Name, Pools: []uint16{}}
		for _, id := range f.Pools {
			family.Pools = append(family.Pools, uint16(id))
		}
		doc.Families = append(doc.Families, family)
	}
	for _, t := range v.Tenants() {
		doc.Tenants = append(doc.Tenants, TenantDocument(t))
	}
	return doc
}

func newPoolDocument(p *extentmap.Pool) PoolDocument {
	spec, layout := p.Spec(), p.Layout()
	return PoolDocument{
		ID: uint16(p.ID()), Name: spec.Name, Identity: spec.Identity, Family: spec.Family, TrailingHit: spec.TrailingHit,
		TokensPerFile: spec.TokensPerFile, Objects: layout.Objects(), Ranks: layout.Ranks(),
		FileBytes: layout.Geometry().FileBytes(), SlotBytes: p.SlotBytes(), Rows: len(p.Rows()),
		SlotsPerRow: p.SlotsPerRow(), MinBytes: spec.MinBytes, MaxBytes: spec.MaxBytes, MaxSlots: spec.MaxSlots,
	}
}

func (d *Daemon) drivesDocument() any {
	doc := DrivesDocument{StatusVersion, NewDriveDocuments(d.volume.Info().Drives)}
	for i := range doc.Drives {
		doc.Drives[i].Modelled = d.modelledOn(doc.Drives[i].Index)
	}
	return doc
}

// modelledOn is the profile of a drive in use that is modelled, without the measurements that it was made from.
func (d *Daemon) modelledOn(index uint16) *drivemodel.Profile {
	_, use := useOf(d.volume.Drive(index))
	if use == nil || use.medium == nil {
		return nil
	}
	profile := *use.medium.Profile()
	profile.Measured = nil
	return &profile
}

func (d *Daemon) sessionsDocument() any {
	doc := SessionsDocument{StatusVersion, []SessionDocument{}, d.control.Members()}
	engines := map[uint32]bool{}
	for _, m := range doc.Processes {
		engines[m.Session] = true
	}
	for _, s := range d.store.Sessions() {
		if engines[s.ID] { // the mount has a session of its own, for what is copied in
			doc.Sessions = append(doc.Sessions, SessionDocument(s))
		}
	}
	return doc
}

// OptionsDocument is /.tuttifs/options: what is in effect, defaults included.
type OptionsDocument struct {
	OutputVersion     int      `json:"output_version"`
	Drives            []string `json:"drives"`
	ReadOnly          bool     `json:"read_only"`
	Discard           string   `json:"discard"` // "on", "off" or "auto"; what it comes to is in DriveDocument
	CheckpointSeconds int      `json:"checkpoint_seconds"`
	Policy            string   `json:"policy"`
	// Admission is that of pools that have none of their own, which AdmissionOf has, by pool or family; the memory of keys
	// and the prices are there where a policy uses them.
	Admission           string            `json:"admission"`
	AdmissionOf         map[string]string `json:"admission_of"`
	AdmissionMemory     int               `json:"admission_memory_bytes,omitempty"`
	Prices              *wear.Prices      `json:"prices,omitempty"`
	Degraded            bool              `json:"degraded"` // allowed at the mount
	DriveTimeoutSeconds float64           `json:"drive_timeout_seconds"`
	Pollers             int               `json:"pollers"`
	IO                  string            `json:"io"` // "auto", "uring" or "pread"
	// Endurance are the drives' ratings, by index, or by "all" for those without one of their own.
	Endurance map[string]string `json:"endurance"`
	Phases    PhaseOptions      `json:"phases"`
	// Real says whose engines may have queue pairs of the SSDs themselves: "off", "on" or the number of a user.
	Real string `json:"real"`
	// DriveProfiles are the names of profiles that drives are held back to, by index, or by "all" for those without one
	// of their own.
	DriveProfiles       map[string]string `json:"drive_profiles"`
	SocketDir           string            `json:"socket_dir"`
	Metrics             string            `json:"metrics"` // the address listened on, empty for none
	Xattr               bool              `json:"xattr"`
	AllowOther          bool              `json:"allow_other"`
	UID                 uint32            `json:"uid"`
	GID                 uint32            `json:"gid"`
	Umask               string            `json:"umask"`
	EntryTimeoutSeconds float64           `json:"entry_timeout_seconds"`
	AttrTimeoutSeconds  float64           `json:"attr_timeout_seconds"`
}

// PhaseOptions are how reads and writes of a drive are kept apart.
type PhaseOptions struct {
	On              bool    `json:"on"`
	PatienceSeconds float64 `json:"patience_seconds"`
	MetadataSeconds float64 `json:"metadata_seconds"`
	TurnSeconds     float64 `json:"turn_seconds"`
	QuietSeconds    float64 `json:"quiet_seconds"`
	StuckSeconds    float64 `json:"stuck_seconds"`
}

func newPhaseOptions(o phase.Options) PhaseOptions {
	return PhaseOptions{!o.Off, o.Patience.Seconds(), o.Metadata.Seconds(), o.Turn.Seconds(), o.Quiet.Seconds(),
		o.Stuck.Seconds()}
}

func (d *Daemon) optionsDocument() any {
	o := &d.options
	doc := OptionsDocument{
		OutputVersion: StatusVersion, ReadOnly: o.ReadOnly, Discard: "auto", CheckpointSeconds: o.CheckpointSeconds,
		Degraded: o.Degraded, DriveTimeoutSeconds: o.DriveTimeout.Seconds(),
		Policy: o.Policy, Admission: o.Admission.Admissions.Default.String(), Pollers: o.Pollers,
		SocketDir: o.SocketDir, Xattr: !o.NoXattr, AllowOther: o.AllowOther,
		UID: o.UID, GID: o.GID, Umask: fmt.Sprintf("%04o", o.Umask), EntryTimeoutSeconds: o.EntryTimeout.Seconds(),
		AttrTimeoutSeconds: o.AttrTimeout.Seconds(), DriveProfiles: map[string]string{},
		IO: string(cmp.Or(o.Backend, "auto")), Endurance: map[string]string{},
		AdmissionOf: map[string]string{}, Phases: newPhaseOptions(o.Phases),
		Real: o.Real.String(),
	}
	for name, policy := range o.Admission.Admissions.Named {
		doc.AdmissionOf[name] = policy.String()
	}
	if o.Endurance.All.Known() {
		doc.Endurance["all"] = o.Endurance.All.String()
	}
	for index, e := range o.Endurance.Drive {
		doc.Endurance[strconv.Itoa(int(index))] = e.String()
	}
	if a := o.Admission.WithDefaults(); a.Admissions.Selective() {
		doc.AdmissionMemory = a.FilterBytes
		if a.Admissions.Uses(wear.CostAware) {
			doc.Prices = &a.Prices
		}
	}
	for _, drive := range d.volume.Info().Drives {
		doc.Drives = append(doc.Drives, drive.Name)
	}
	if o.Profiles.All != nil {
		doc.DriveProfiles["all"] = o.Profiles.All.Name
	}
	for index, p := range o.Profiles.By {
		doc.DriveProfiles[strconv.Itoa(int(index))] = p.Name
	}
	if o.Discard != nil {
		doc.Discard = map[bool]string{true: "on", false: "off"}[*o.Discard]
	}
	if d.metrics != nil {
		doc.Metrics = d.metrics.address
	}
	return doc
}
