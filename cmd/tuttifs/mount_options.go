package main

import (
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"tuttifs/daemon"
	"tuttifs/drivemodel"
	"tuttifs/nvme/emu"
	"tuttifs/phase"
	"tuttifs/wear"
)

// mountSettings are the mount options, decoded.
type mountSettings struct {
	daemon daemon.Options
	volume string   // label or UUID
	search []string // directories where volumes named by label or UUID are looked for, besides block devices
}

// searchDir is where drive files of volumes are looked for by label unless -o search= names other directories.
const searchDir = "/var/lib/tuttifs"

func newMountSettings() *mountSettings {
	return &mountSettings{daemon: daemon.Options{UID: uint32(os.Getuid()), GID: uint32(os.Getgid()), Umask: 0o077,
		EntryTimeout: time.Second, AttrTimeout: time.Second}}
}

// policies are the names of eviction policies.
var policies = []string{"lru", "sieve", "s3fifo"}

// ioWays are the ways of commands to the drives. Auto maps files in memory, and takes the faster way to others.
var ioWays = map[string]emu.Backend{"auto": emu.Auto, "uring": emu.URing, "pread": emu.Pread}

// mountOption is one -o option. With a value, set gets it; without, "".
type mountOption struct {
	name, value, help string
	set               func(s *mountSettings, value string) error
}

// mountOptionTable is what -o understands.
var mountOptionTable = []mountOption{
	{"ro", "", "read-only: nothing is written to the drives", func(s *mountSettings, _ string) error {
		s.daemon.ReadOnly = true
		return nil
	}},
	{"rw", "", "read-write (default)", func(s *mountSettings, _ string) error {
		s.daemon.ReadOnly = false
		return nil
	}},
	{"degraded", "", "mount without drives that are missing, if at least half are there",
		func(s *mountSettings, _ string) error {
			s.daemon.Degraded = true
			return nil
		}},
	{"drive_timeout", "SECONDS", "how long a drive may take for one operation before it is given up (default 30)",
		func(s *mountSettings, v string) error {
			n := 0
			err := parsePositive(v, 86400, &n)
			s.daemon.DriveTimeout = time.Duration(n) * time.Second
			return err
		}},
	{"drive_profile", "[N:]NAME|FILE", "hold drives back to a drive profile, all or drive N; may be repeated",
		func(s *mountSettings, v string) error { return s.setProfile(v) }},
	{"phases", "on|off", "keep reads and writes of a drive apart in time; off lets them mix (default on)",
		func(s *mountSettings, v string) error {
			if v != "on" && v != "off" {
				return errors.New("on or off")
			}
			s.daemon.Phases.Off = v == "off"
			return nil
		}},
	{"phase_patience", "TIME", "how long writes wait for reads before they take a turn: 1ms to 2s (default 200ms)",
		func(s *mountSettings, v string) error {
			return parseTime(v, phase.PatienceMin, phase.PatienceMax, &s.daemon.Phases.Patience)
		}},
	{"phase_metadata", "TIME", "the same of metadata: 1ms to 2s (default 10ms)",
		func(s *mountSettings, v string) error {
			return parseTime(v, phase.PatienceMin, phase.PatienceMax, &s.daemon.Phases.Metadata)
		}},
	{"phase_turn", "TIME", "how long such a turn is: 100us to 1s (default 5ms)", func(s *mountSettings, v string) error {
		return parseTime(v, phase.TurnMin, phase.TurnMax, &s.daemon.Phases.Turn)
	}},
	{"phase_quiet", "TIME", "how long a drive must be without reads before writes begin: 1us to 100ms (default 500us)",
		func(s *mountSettings, v string) error {
			return parseTime(v, phase.QuietMin, phase.QuietMax, &s.daemon.Phases.Quiet)
		}},
	{"real", "off|on|UID", "engines that ask for it get queue pairs of SSDs bound to VFIO: all engines, or those of one " +
		"user; they can read and write everything on those drives (default off)",
		func(s *mountSettings, v string) (err error) {
			s.daemon.Real, err = daemon.ParseTrust(v)
			return err
		}},
	{"volume", "LABEL|UUID", "the volume, when SPEC is none", func(s *mountSettings, v string) error {
		s.volume = v
		return nil
	}},
	{"search", "DIR", "look for drive files in DIR too; may be repeated (default " + searchDir + ")",
		func(s *mountSettings, v string) error {
			s.search = append(s.search, v)
			return nil
		}},
	{"noxattr", "", "no extended attributes: faster for those who list millions of files",
		func(s *mountSettings, _ string) error {
			s.daemon.NoXattr = true
			return nil
		}},
	{"allow_other", "", "other users may use the mount, within the permissions", func(s *mountSettings, _ string) error {
		s.daemon.AllowOther = true
		return nil
	}},
	{"uid", "N", "owner of everything (default: the caller)", func(s *mountSettings, v string) error {
		return parseNumber(v, 10, math.MaxUint32, &s.daemon.UID)
	}},
	{"gid", "N", "group of everything (default: the caller's)", func(s *mountSettings, v string) error {
		return parseNumber(v, 10, math.MaxUint32, &s.daemon.GID)
	}},
	{"umask", "OCTAL", "permissions that nobody has (default 077)", func(s *mountSettings, v string) error {
		return parseNumber(v, 8, 0o777, &s.daemon.Umask)
	}},
	{"discard", "", "tell drives which blocks are free (default for block devices)",
		func(s *mountSettings, _ string) error {
			s.daemon.Discard = new(bool)
			*s.daemon.Discard = true
			return nil
		}},
	{"nodiscard", "", "do not (default for files)", func(s *mountSettings, _ string) error {
		s.daemon.Discard = new(bool)
		return nil
	}},
	{"policy", "lru|sieve|s3fifo", "what is evicted first (default lru)", func(s *mountSettings, v string) error {
		if !slices.Contains(policies, v) {
			return errors.New("one of " + strings.Join(policies, ", "))
		}
		s.daemon.Policy = v
		return nil
	}},
	{"admission", "[POOL:]POLICY", "what is stored at all: all, second-touch or cost-aware; of all pools, or of one " +
		"or a family; may be repeated (default all)",
		func(s *mountSettings, v string) error { return s.daemon.Admission.Admissions.Set(v) }},
	{"admission_memory", "SIZE", "memory of keys that were asked for, 2 bytes each (default 4m)",
		func(s *mountSettings, v string) error {
			n, err := parseSize(v)
			if err == nil && (n < wear.FilterBytesMin || n > wear.FilterBytesMax) {
				err = errors.New("from 64k to 1g")
			}
			s.daemon.Admission.FilterBytes = int(n)
			return err
		}},
	{"quota", "TENANT:SIZE", "what a tenant may store in all pools, 0 for no limit; the volume keeps it; may be repeated",
		func(s *mountSettings, v string) error { return s.setQuota(v) }},
	{"endurance", "[INDEX:]RATING", "what the drives, or one, are rated for, as in 'tuttifs info --wear'; may be repeated",
		func(s *mountSettings, v string) error { return s.daemon.Endurance.Set(v) }},
	{"prices", "FILE", "what cost-aware admission reckons with, as in 'tuttifs cost --prices'",
		func(s *mountSettings, v string) (err error) {
			s.daemon.Admission.Prices, err = readPrices(v)
			return err
		}},
	{"pollers", "N", "polling threads of each engine process (default: one a drive, an eighth of the cores at most; " +
		"where a GPU restores from files or memory, want its link / 5 GB/s)",
		func(s *mountSettings, v string) error { return parsePositive(v, 64, &s.daemon.Pollers) }},
	{"io", "auto|uring|pread", "way of engines' commands to the drives (default auto)",
		func(s *mountSettings, v string) error {
			way, ok := ioWays[v]
			if !ok {
				return errors.New("one of auto, uring, pread")
			}
			s.daemon.Backend = way
			return nil
		}},
	{"sockets", "DIR", "where engines attach (default /run/tuttifs)", func(s *mountSettings, v string) error {
		s.daemon.SocketDir = v
		return nil
	}},
	{"checkpoint", "SECONDS", "time between checkpoints (default 30)", func(s *mountSettings, v string) error {
		return parsePositive(v, 86400, &s.daemon.CheckpointSeconds)
	}},
	{"timeout", "SECONDS", "how long the kernel may keep names and attributes (default 1)",
		func(s *mountSettings, v string) error {
			f, err := strconv.ParseFloat(v, 64)
			if err != nil || !(f >= 0 && f <= 86400) {
				return errors.New("seconds from 0 to 86400")
			}
			s.daemon.EntryTimeout = time.Duration(f * float64(time.Second))
			s.daemon.AttrTimeout = s.daemon.EntryTimeout
			return nil
		}},
}

// setQuota decodes TENANT:SIZE.
func (s *mountSettings) setQuota(v string) error {
	number, size, _ := strings.Cut(v, ":")
	id, err := strconv.ParseUint(number, 10, 32)
	if err != nil {
		return fmt.Errorf("a tenant's number before a colon, not %q", number)
	}
	bytes, err := parseSize(size)
	if err != nil {
		return err
	}
	if s.daemon.Quotas == nil {
		s.daemon.Quotas = map[uint32]uint64{}
	}
	s.daemon.Quotas[uint32(id)] = bytes
	return nil
}

// setProfile decodes [N:]NAME|FILE.
func (s *mountSettings) setProfile(v string) error {
	number, rest, own := strings.Cut(v, ":")
	index, err := strconv.ParseUint(number, 10, 16)
	if own && err != nil && strings.Trim(number, "+-0123456789") == "" {
		return fmt.Errorf("a drive from 0 to 65535 before the colon, not %q", number)
	}
	if own = own && err == nil; own {
		v = rest
	}
	p, err := loadProfile(v)
	if err != nil {
		return err
	}
	profiles := &s.daemon.Profiles
	if !own {
		profiles.All = p
		return nil
	}
	if profiles.By == nil {
		profiles.By = map[uint16]*drivemodel.Profile{}
	}
	profiles.By[uint16(index)] = p
	return nil
}

// toleratedOptions are passed on by mount(8), libmount or systemd and mean nothing to a filesystem, or are true of this
// one anyway. A boot must not fail over them.
var toleratedOptions = strings.Fields(`
	user nouser users owner group auto noauto nofail _netdev defaults dev nodev suid nosuid exec noexec
	sync async dirsync atime noatime diratime nodiratime relatime norelatime strictatime nostrictatime
	lazytime nolazytime default_permissions nonempty silent loud iversion noiversion mand nomand fsname
	subtype comment`)

func isTolerated(name string) bool {
	return strings.HasPrefix(strings.ToLower(name), "x-") || slices.Contains(toleratedOptions, name)
}

func mountOptionsHelp() string {
	var b strings.Builder
	for _, o := range mountOptionTable {
		name := o.name
		if o.value != "" {
			name += "=" + o.value
		}
		fmt.Fprintf(&b, "  %-24s %s\n", name, o.help)
	}
	b.WriteString("Options that mount(8) hands on (nofail, _netdev, noatime, x-...) are accepted.\n" +
		"Others are an error unless -s is given.")
	return b.String()
}

// parse decodes all -o lists. It reports every unknown or malformed option.
func (s *mountSettings) parse(lists []string, sloppy bool) error {
	known := map[string]*mountOption{}
	for i := range mountOptionTable {
		known[mountOptionTable[i].name] = &mountOptionTable[i]
	}
	var problems []string
	for _, word := range strings.Split(strings.Join(lists, ","), ",") {
		name, value, hasValue := strings.Cut(word, "=")
		o := known[name]
		switch {
		case word == "remount":
			return usagef("a mount's options cannot be changed: unmount it, and mount with the new ones")
		case word == "" || isTolerated(name):
		case o == nil && sloppy:
		case o == nil:
			problems = append(problems, fmt.Sprintf("unknown mount option %q", word))
		case (o.value != "") != hasValue || hasValue && value == "":
			form := strings.TrimSuffix(o.name+"="+o.value, "=")
			problems = append(problems, fmt.Sprintf("mount option %q: write %s", word, form))
		default:
			if err := o.set(s, value); err != nil {
				problems = append(problems, fmt.Sprintf("mount option %q: %v", word, err))
			}
		}
	}
	a := &s.daemon.Admission
	if a.FilterBytes != 0 && !a.Admissions.Selective() {
		problems = append(problems, "mount option admission_memory: no admission policy needs it")
	}
	if a.Prices != (wear.Prices{}) && !a.Admissions.Uses(wear.CostAware) {
		problems = append(problems, "mount option prices: it is for admission=cost-aware")
	}
	if len(problems) > 0 {
		return usagef("%s", strings.Join(problems, "; "))
	}
	return nil
}

func parseNumber(text string, base int, most uint64, to *uint32) error {
	n, err := strconv.ParseUint(text, base, 32)
	if err != nil || n > most {
		return fmt.Errorf("a number of base %d from 0 to %s", base, strconv.FormatUint(most, base))
	}
	*to = uint32(n)
	return nil
}

// parseTime takes a time as 200ms, 5ms or 500us.
func parseTime(text string, least, most time.Duration, to *time.Duration) error {
	d, err := time.ParseDuration(text)
	if err != nil || d < least || d > most {
		return fmt.Errorf("a time from %v to %v, as 200ms or 500us", least, most)
	}
	*to = d
	return nil
}

func parsePositive(text string, most int, to *int) error {
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > most {
		return fmt.Errorf("a number from 1 to %d", most)
	}
	*to = n
	return nil
}
