package contentkey

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the keys of testdata/keys.json anew")

// hexBytes is bytes in JSON.
type hexBytes []byte

func (h hexBytes) MarshalText() ([]byte, error) { return []byte(hex.EncodeToString(h)), nil }

func (h *hexBytes) UnmarshalText(text []byte) (err error) {
	*h, err = hex.DecodeString(string(text))
	return err
}

// vector is one example of testdata/keys.json. Refused ones have no keys.
type vector struct {
	Name          string   `json:"name"`
	TokensPerFile uint32   `json:"tokens_per_file"`
	Tenant        uint32   `json:"tenant"`
	Adapter       hexBytes `json:"adapter"`
	Salt          hexBytes `json:"salt"`
	Tokens        []uint32 `json:"tokens"`
	Media         []struct {
		Start  uint64   `json:"start"`
		Tokens uint64   `json:"tokens"`
		ID     hexBytes `json:"id"`
	} `json:"media"`
	Refused bool       `json:"refused"`
	Root    hexBytes   `json:"root"`
	Keys    []hexBytes `json:"keys"`
}

func (v *vector) prompt() *Prompt {
	p := &Prompt{TokensPerFile: v.TokensPerFile, Tenant: v.Tenant, Adapter: v.Adapter, Salt: v.Salt}
	for _, m := range v.Media {
		p.Media = append(p.Media, Media{m.Start, m.Tokens, m.ID})
	}
	return p
}

const vectorsFile = "testdata/keys.json"

func TestVectors(t *testing.T) {
	text, err := os.ReadFile(vectorsFile)
	require.NoError(t, err)
	var vectors []*vector
	require.NoError(t, json.Unmarshal(text, &vectors))
	for _, v := range vectors {
		keys, err := v.prompt().Keys(nil, v.Tokens)
		if v.Refused {
			require.ErrorIs(t, err, ErrPrompt, v.Name)
			require.Empty(t, keys, v.Name)
			continue
		}
		require.NoError(t, err, v.Name)
		root, err := v.prompt().Root()
		require.NoError(t, err, v.Name)
		if *update {
			v.Root, v.Keys = root[:], []hexBytes{}
			for i := range keys {
				v.Keys = append(v.Keys, keys[i][:])
			}
			continue
		}
		require.Equal(t, v.Root, hexBytes(root[:]), v.Name)
		require.Len(t, keys, len(v.Keys), v.Name)
		for i := range keys {
			require.Equal(t, v.Keys[i], hexBytes(keys[i][:]), "%s: file %d", v.Name, i)
		}
	}
	if *update {
		var out bytes.Buffer
		for i, v := range vectors {
			line, err := json.Marshal(v)
			require.NoError(t, err)
			out.WriteString([]string{"[\n", ",\n"}[min(i, 1)])
			out.Write(line)
		}
		require.NoError(t, os.WriteFile(vectorsFile, append(out.Bytes(), "\n]\n"...), 0o644))
	}
}

// TestExample is the one that docs/keys.md spells out.
func TestExample(t *testing.T) {
	page, err := os.ReadFile("../docs/keys.md")
	require.NoError(t, err)
	_, example, found := strings.Cut(string(page), "## Example")
	require.True(t, found)
	blocks := strings.Split(example, "```")
	require.Len(t, blocks, 5)
	decode := func(s string) []byte {
		b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
		require.NoError(t, err)
		return b
	}
	p := &Prompt{TokensPerFile: 2, Media: []Media{{1, 1, []byte{0xff}}}}
	require.Equal(t, decode(blocks[1]), p.appendRoot(nil))
	root, err := p.Root()
	require.NoError(t, err)
	want := decode(strings.Replace(blocks[3], " R ", hex.EncodeToString(root[:]), 1))
	c := chain{media: p.Media}
	c.encode(root, 0, []uint32{1, 2})
	require.Equal(t, want, c.buffer)
	keys, err := p.Keys(nil, []uint32{1, 2, 3})
	require.NoError(t, err)
	require.Equal(t, []Key{sha256.Sum256(want)}, keys)
}

// reader takes an encoding apart.
type reader struct {
	b   []byte
	bad bool
}

func (r *reader) take(n uint64) []byte {
	if n > uint64(len(r.b)) {
		r.bad = true
		return make([]byte, min(n, 8))
	}
	b := r.b[:n]
	r.b = r.b[n:]
	return b
}

func (r *reader) u32() uint32 { return binary.LittleEndian.Uint32(r.take(4)) }
func (r *reader) u64() uint64 { return binary.LittleEndian.Uint64(r.take(8)) }

var errEncoding = errors.New("not an encoding")

// decodeRoot is the inverse of appendRoot.
func decodeRoot(b []byte) (p Prompt, err error) {
	r := reader{b: b}
	tag := r.take(uint64(len(rootTag)))
	p.TokensPerFile, p.Tenant = r.u32(), r.u32()
	adapter, salt := r.u64(), r.u64()
	p.Adapter, p.Salt = r.take(adapter), r.take(salt)
	if r.bad || len(r.b) != 0 || string(tag) != rootTag {
		return p, errEncoding
	}
	return p, nil
}

// decodeFile is the inverse of encode.
func decodeFile(b []byte) (previous Key, tokens []uint32, media []Media, err error) {
	r := reader{b: b}
	tag := r.take(uint64(len(fileTag)))
	copy(previous[:], r.take(32))
	n, items := r.u32(), r.u32()
	for ; n > 0 && !r.bad; n-- {
		tokens = append(tokens, r.u32())
	}
	for ; items > 0 && !r.bad; items-- {
		m := Media{Start: r.u64(), Tokens: r.u64()}
		m.ID = r.take(r.u64())
		media = append(media, m)
	}
	if r.bad || len(r.b) != 0 || string(tag) != fileTag {
		return previous, nil, nil, errEncoding
	}
	return previous, tokens, media, nil
}

// within are the items with a token in [begin, end).
func within(media []Media, begin, end uint64) (list []Media) {
	for _, m := range media {
		if m.Start < end && m.Start+m.Tokens > begin {
			list = append(list, m)
		}
	}
	return list
}

// requireInjective: what was put in can be read out of what is hashed, so no other input gives the same bytes.
func requireInjective(t *testing.T, p *Prompt, tokens []uint32) {
	t.Helper()
	root := p.appendRoot(nil)
	got, err := decodeRoot(root)
	require.NoError(t, err)
	require.Equal(t, p.TokensPerFile, got.TokensPerFile)
	require.Equal(t, p.Tenant, got.Tenant)
	require.True(t, bytes.Equal(p.Adapter, got.Adapter) && bytes.Equal(p.Salt, got.Salt))
	_, _, _, err = decodeFile(root)
	require.Error(t, err, "a root that is a file's encoding too")
	keys, err := p.Keys(nil, tokens)
	require.NoError(t, err)
	c, previous, per := chain{media: p.Media}, sha256.Sum256(root), uint64(p.TokensPerFile)
	require.Len(t, keys, len(tokens)/int(per))
	for i, key := range keys {
		begin := uint64(i) * per
		c.encode(previous, begin, tokens[begin:begin+per])
		before, some, media, err := decodeFile(c.buffer)
		require.NoError(t, err)
		require.Equal(t, previous, before)
		require.Equal(t, tokens[begin:begin+per], some)
		require.Equal(t, within(p.Media, begin, begin+per), media)
		_, err = decodeRoot(c.buffer)
		require.Error(t, err)
		require.Equal(t, sha256.Sum256(c.buffer), key)
		previous = key
	}
}

// requirePrefixes: a shorter prompt's keys are the beginning, and a chain can be continued from any of its keys.
func requirePrefixes(t *testing.T, p *Prompt, tokens []uint32) {
	t.Helper()
	whole, err := p.Keys(nil, tokens)
	require.NoError(t, err)
	for n := range len(tokens) {
		keys, err := p.Keys(nil, tokens[:n])
		require.NoError(t, err)
		require.True(t, slices.Equal(whole[:n/int(p.TokensPerFile)], keys))
	}
	for i := range whole {
		behind := (i + 1) * int(p.TokensPerFile)
		keys, err := p.Continue(slices.Clone(whole[:i+1]), whole[i], uint64(i)+1, tokens[behind:])
		require.NoError(t, err)
		require.Equal(t, whole, keys)
	}
}

// someBytes are up to n random bytes of few kinds, so that equal ones are met.
func someBytes(r *rand.Rand, n int) []byte {
	b := make([]byte, r.IntN(n+1))
	for i := range b {
		b[i] = byte(r.IntN(3))
	}
	return b
}

func somePrompt(r *rand.Rand) (*Prompt, []uint32) {
	p := &Prompt{TokensPerFile: 1 + r.Uint32N(5), Tenant: r.Uint32N(2), Adapter: someBytes(r, 2), Salt: someBytes(r, 2)}
	for range r.IntN(4) {
		p.Media = append(p.Media, Media{r.Uint64N(12), 1 + r.Uint64N(9), append(someBytes(r, 2), 1)})
	}
	slices.SortFunc(p.Media, func(a, b Media) int { return compare(&a, &b) })
	p.Media = slices.CompactFunc(p.Media, func(a, b Media) bool { return compare(&a, &b) == 0 })
	tokens := make([]uint32, r.IntN(20))
	for i := range tokens {
		tokens[i] = []uint32{0, 1, 256, math.MaxUint32}[r.IntN(4)]
	}
	return p, tokens
}

// TestProperties tries small prompts, of which many have a part in common.
func TestProperties(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	seen := map[Key]string{}
	for range 3000 {
		p, tokens := somePrompt(r)
		requireInjective(t, p, tokens)
		requirePrefixes(t, p, tokens)
		keys, err := p.Keys(nil, tokens)
		require.NoError(t, err)
		for i, key := range keys {
			end := uint64(i+1) * uint64(p.TokensPerFile)
			about, err := json.Marshal([]any{p.TokensPerFile, p.Tenant, hexBytes(p.Adapter), hexBytes(p.Salt), tokens[:end],
				within(p.Media, 0, end)})
			require.NoError(t, err)
			if before, met := seen[key]; met {
				require.Equal(t, before, string(about), "one key for two contents")
			}
			seen[key] = string(about)
		}
	}
	different := map[string]bool{}
	for _, about := range seen {
		require.False(t, different[about], "two keys for one content: %s", about)
		different[about] = true
	}
	require.Greater(t, len(seen), 1000)
}

// TestEachInputCounts changes one thing after the other.
func TestEachInputCounts(t *testing.T) {
	tokens := []uint32{1, 2, 3, 4, 5, 6}
	changes := map[string]func(*Prompt){
		"nothing":          func(*Prompt) {},
		"tokens per file":  func(p *Prompt) { p.TokensPerFile = 3 },
		"tenant":           func(p *Prompt) { p.Tenant = 1 },
		"adapter":          func(p *Prompt) { p.Adapter = []byte("x") },
		"salt":             func(p *Prompt) { p.Salt = []byte("x") },
		"both":             func(p *Prompt) { p.Adapter, p.Salt = []byte("x"), []byte("x") },
		"parted otherwise": func(p *Prompt) { p.Adapter = []byte("xx") },
		"medium":           func(p *Prompt) { p.Media = []Media{{0, 2, []byte("m")}} },
		"other medium":     func(p *Prompt) { p.Media = []Media{{0, 2, []byte("n")}} },
		"moved medium":     func(p *Prompt) { p.Media = []Media{{1, 2, []byte("m")}} },
		"longer medium":    func(p *Prompt) { p.Media = []Media{{0, 3, []byte("m")}} },
	}
	seen := map[Key]string{}
	for name, change := range changes {
		p := &Prompt{TokensPerFile: 2}
		change(p)
		keys, err := p.Keys(nil, tokens)
		require.NoError(t, err)
		for _, key := range keys {
			require.Empty(t, seen[key], name)
			seen[key] = name
		}
	}
	late := &Prompt{TokensPerFile: 2, Media: []Media{{6, 1, []byte("m")}}}
	keys, err := late.Keys(nil, tokens)
	require.NoError(t, err)
	for _, key := range keys {
		require.Equal(t, "nothing", seen[key], "a medium behind the end counts for nothing")
	}
}

func TestRefusals(t *testing.T) {
	long := make([]byte, BytesMax+1)
	for name, p := range map[string]*Prompt{
		"no tokens per file":   {},
		"many tokens per file": {TokensPerFile: TokensPerFileMax + 1},
		"long adapter":         {TokensPerFile: 1, Adapter: long},
		"long salt":            {TokensPerFile: 1, Salt: long},
		"no id":                {TokensPerFile: 1, Media: []Media{{0, 1, nil}}},
		"long id":              {TokensPerFile: 1, Media: []Media{{0, 1, long}}},
		"no tokens":            {TokensPerFile: 1, Media: []Media{{0, 0, []byte{1}}}},
		"far away":             {TokensPerFile: 1, Media: []Media{{PositionMax + 1, 1, []byte{1}}}},
		"endless":              {TokensPerFile: 1, Media: []Media{{0, PositionMax + 1, []byte{1}}}},
		"twice":                {TokensPerFile: 1, Media: []Media{{0, 1, []byte{1}}, {0, 1, []byte{1}}}},
		"unsorted ids":         {TokensPerFile: 1, Media: []Media{{0, 1, []byte{1, 0}}, {0, 1, []byte{1}}}},
		"unsorted starts":      {TokensPerFile: 1, Media: []Media{{1, 1, []byte{1}}, {0, 1, []byte{1}}}},
		"too many":             {TokensPerFile: 1, Media: make([]Media, MediaMax+1)},
	} {
		_, err := p.Keys(nil, []uint32{1})
		require.ErrorIs(t, err, ErrPrompt, name)
		_, err = p.Continue(nil, Key{}, 1, []uint32{1})
		require.ErrorIs(t, err, ErrPrompt, name)
	}
	p := Prompt{TokensPerFile: 4}
	for _, files := range []uint64{0, PositionMax/4 + 1, math.MaxUint64} {
		_, err := p.Continue(nil, Key{}, files, nil)
		require.ErrorIs(t, err, ErrPrompt)
	}
	_, err := p.Continue(nil, Key{}, PositionMax/4, []uint32{1})
	require.ErrorIs(t, err, ErrPrompt)
}

// TestAllocations: the cost is a prompt's, not a file's.
func TestAllocations(t *testing.T) {
	p := &Prompt{TokensPerFile: 16, Salt: []byte("s")}
	tokens, keys := make([]uint32, 16<<10), make([]Key, 0, 1<<10)
	require.LessOrEqual(t, testing.AllocsPerRun(5, func() {
		if _, err := p.Keys(keys, tokens); err != nil {
			t.Error(err)
		}
	}), 10.0)
}

// FuzzKeys: any input is refused, or has the properties.
func FuzzKeys(f *testing.F) {
	f.Add(uint32(2), uint32(0), []byte("a"), []byte("s"), []byte("\x01\x00\x00\x00\x02\x00\x00\x00"), []byte{0, 1, 1, 7})
	f.Add(uint32(1), uint32(7), []byte{}, []byte{}, make([]byte, 40), []byte{3, 2, 2, 1, 2, 3, 9, 1, 1})
	f.Fuzz(func(t *testing.T, per, tenant uint32, adapter, salt, ids, media []byte) {
		p := &Prompt{TokensPerFile: per, Tenant: tenant, Adapter: adapter, Salt: salt}
		for len(media) > 3 {
			n := min(int(media[2]), len(media)-3)
			p.Media = append(p.Media, Media{uint64(media[0]), uint64(media[1]), media[3 : 3+n]})
			media = media[3+n:]
		}
		var tokens []uint32
		for ; len(ids) >= 4 && len(tokens) < 64; ids = ids[4:] {
			tokens = append(tokens, binary.LittleEndian.Uint32(ids))
		}
		if _, err := p.Keys(nil, tokens); err != nil {
			require.ErrorIs(t, err, ErrPrompt)
			return
		}
		requireInjective(t, p, tokens)
		requirePrefixes(t, p, tokens)
	})
}

// BenchmarkKeys is a prompt of 64 K tokens.
func BenchmarkKeys(b *testing.B) {
	p := &Prompt{TokensPerFile: 64}
	tokens, keys := make([]uint32, 64<<10), make([]Key, 0, 1<<10)
	b.SetBytes(4 * int64(len(tokens)))
	for b.Loop() {
		if _, err := p.Keys(keys, tokens); err != nil {
			b.Fatal(err)
		}
	}
}
