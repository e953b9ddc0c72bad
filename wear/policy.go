package wear

import (
	"fmt"
	"strings"
)

// Policy says which blocks are admitted to the drives.
type Policy uint8

const (
	// All admits every block.
	All Policy = iota
	// SecondTouch admits a block when it is asked for a second time.
	SecondTouch
	// CostAware admits a block when what its hits will probably save is worth more than the writing.
	CostAware
)

// Policies are the names that ParsePolicy takes; the first is the default.
var Policies = []string{"all", "second-touch", "cost-aware"}

func (p Policy) String() string {
	if int(p) < len(Policies) {
		return Policies[p]
	}
	return fmt.Sprintf("policy %d", uint8(p))
}

// ParsePolicy reads a policy's name.
func ParsePolicy(name string) (Policy, error) {
	for i, p := range Policies {
		if p == name {
			return Policy(i), nil
		}
	}
	return All, fmt.Errorf("%w: admission policy %q: one of %s", ErrInvalid, name, strings.Join(Policies, ", "))
}

// Admissions are the policy of a mount and of those of its pools and families that have another.
type Admissions struct {
	Default Policy
	Named   map[string]Policy // by the name of a pool, or of a family
}

// Of is the policy of a pool of a family, "" for none: the pool's own, else the family's, else the mount's.
func (a *Admissions) Of(pool, family string) Policy {
	if p, ok := a.Named[pool]; ok {
		return p
	}
	if p, ok := a.Named[family]; ok && family != "" {
		return p
	}
	return a.Default
}

// Uses says whether a policy is that of the mount or of any name.
func (a *Admissions) Uses(p Policy) bool {
	for _, named := range a.Named {
		if named == p {
			return true
		}
	}
	return a.Default == p
}

// Selective says whether any policy refuses anything.
func (a *Admissions) Selective() bool { return a.Uses(SecondTouch) || a.Uses(CostAware) }

// Set reads POLICY or NAME:POLICY into the admissions.
func (a *Admissions) Set(text string) error {
	name, policy, named := strings.Cut(text, ":")
	if !named {
		name, policy = "", text
	}
	p, err := ParsePolicy(policy)
	if err != nil {
		return err
	}
	switch {
	case !named:
		a.Default = p
	case name == "":
		return fmt.Errorf("%w: admission %q: write POLICY, or POOL:POLICY", ErrInvalid, text)
	default:
		if a.Named == nil {
			a.Named = map[string]Policy{}
		}
		a.Named[name] = p
	}
	return nil
}

func (a *Admissions) String() string { return a.Default.String() }
