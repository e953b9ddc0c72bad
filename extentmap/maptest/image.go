package maptest

const pageBytes = 4096

// Image is the content of a drive. Clones share pages until one of them writes, so thousands of them are cheap.
type Image struct {
	pages []*[pageBytes]byte // nil: zeroes
	mine  []bool             // the page is not shared
}

// NewImage is n zero bytes, a multiple of 4096.
func NewImage(n int64) *Image {
	return &Image{pages: make([]*[pageBytes]byte, n/pageBytes), mine: make([]bool, n/pageBytes)}
}

// Size in bytes.
func (m *Image) Size() int64 { return int64(len(m.pages)) * pageBytes }

// Clone is an independent copy.
func (m *Image) Clone() *Image {
	clear(m.mine)
	return &Image{pages: append([]*[pageBytes]byte(nil), m.pages...), mine: make([]bool, len(m.pages))}
}

// Clone copies images.
func Clone(images []*Image) []*Image {
	out := make([]*Image, len(images))
	for i, m := range images {
		out[i] = m.Clone()
	}
	return out
}

func (m *Image) grow(n int64) {
	for m.Size() < n {
		m.pages, m.mine = append(m.pages, nil), append(m.mine, false)
	}
}

// ReadAt fills p.
func (m *Image) ReadAt(p []byte, off int64) {
	for len(p) > 0 {
		i, in := off/pageBytes, int(off%pageBytes)
		n := min(len(p), pageBytes-in)
		if page := m.pages[i]; page != nil {
			copy(p[:n], page[in:])
		} else {
			clear(p[:n])
		}
		p, off = p[n:], off+int64(n)
	}
}

// WriteAt stores p.
func (m *Image) WriteAt(p []byte, off int64) {
	for len(p) > 0 {
		in := int(off % pageBytes)
		n := copy(m.writable(off / pageBytes)[in:], p)
		p, off = p[n:], off+int64(n)
	}
}

// Page is the content of one page of 4 KiB, nil for zeroes. It is not to be changed; equal pointers are equal contents
// while both are held.
func (m *Image) Page(i int64) *[pageBytes]byte { return m.pages[i] }

// Add changes one byte.
func (m *Image) Add(off int64, d byte) { m.writable(off / pageBytes)[off%pageBytes] += d }

// fill is what a discard leaves: a pattern that nobody may rely on.
func (m *Image) fill(off, n int64) {
	for i := off; i < off+n; i++ {
		m.writable(i / pageBytes)[i%pageBytes] = 0xdd
	}
}

func (m *Image) writable(i int64) *[pageBytes]byte {
	if !m.mine[i] {
		page := new([pageBytes]byte)
		if m.pages[i] != nil {
			*page = *m.pages[i]
		}
		m.pages[i], m.mine[i] = page, true
	}
	return m.pages[i]
}

// Bytes is the whole content.
func (m *Image) Bytes() []byte {
	b := make([]byte, m.Size())
	m.ReadAt(b, 0)
	return b
}
