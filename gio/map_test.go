package gio

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"tuttifs/stripe"
)

// randomGeometry has objects of all sorts of lengths.
func randomGeometry() stripe.Geometry {
	var g stripe.Geometry
	ranks := 1 + rand.IntN(3)
	for layer := range 1 + rand.IntN(6) {
		for rank := range ranks {
			for range 1 + rand.IntN(3) {
				g.Objects = append(g.Objects, stripe.Object{Layer: uint16(layer), Rank: uint16(rank),
					Runs: []stripe.Run{{Kind: stripe.RunKV, Bytes: uint32(1 + rand.IntN(300000))}}})
			}
		}
	}
	return g.WithTrailers()
}

func TestMapAgreesWithLayout(t *testing.T) {
	for range 60 {
		width := 1 + rand.IntN(8)
		layout, err := stripe.NewLayout(randomGeometry(), width)
		require.NoError(t, err)
		entry := layout.SlotUnits()*uint64(1+rand.IntN(4)) + uint64(rand.IntN(9))
		var rows []MapRow
		for number := range uint32(12) {
			if rand.IntN(3) == 0 {
				continue
			}
			row := MapRow{Number: number}
			for range width {
				row.Drives = append(row.Drives, uint16(rand.IntN(65536)))
				row.Units = append(row.Units, rand.Uint64N(1<<47))
			}
			rows = append(rows, row)
		}
		rand.Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
		m, err := NewMap(layout, entry, rows, 77)
		require.NoError(t, err)
		require.Same(t, layout, m.Layout())
		require.EqualValues(t, 77, m.Generation())
		held := map[uint32]*MapRow{}
		for i := range rows {
			held[rows[i].Number] = &rows[i]
		}
		perRow := layout.SlotsPerRow(entry)
		for range 500 {
			slot, object := rand.Uint32N(13*perRow), uint16(rand.IntN(layout.Objects()))
			drive, unit, units, ok := m.Locate(slot, object)
			row := held[slot/perRow]
			require.Equal(t, row != nil, ok)
			if row == nil {
				continue
			}
			e, within := layout.Locate(slot%perRow, object)
			require.Equal(t, row.Drives[e], drive)
			require.Equal(t, row.Units[e]+within, unit)
			require.Equal(t, layout.Geometry().Objects[object].Units(), units)
			require.LessOrEqual(t, within+uint64(units), entry)
		}
		_, _, _, ok := m.Locate(0, uint16(layout.Objects()))
		require.False(t, ok)
		_, _, _, ok = m.Locate(1<<32-1, 0)
		require.False(t, ok)
	}
}

func TestMapRefusesNonsense(t *testing.T) {
	layout, err := stripe.NewLayout(randomGeometry(), 2)
	require.NoError(t, err)
	row := func(number uint32, drives []uint16, units ...uint64) []MapRow {
		return []MapRow{{Number: number, Drives: drives, Units: units}}
	}
	entry := layout.SlotUnits()
	for name, rows := range map[string][]MapRow{
		"number":  row(RowsMax, []uint16{0, 1}, 0, 0),
		"drives":  row(0, []uint16{0}, 0, 0),
		"units":   row(0, []uint16{0, 1}, 0),
		"address": row(0, []uint16{0, 1}, 0, 1<<48),
		"wrap":    row(0, []uint16{0, 1}, 0, ^uint64(0)),
		"twice":   append(row(3, []uint16{0, 1}, 0, 0), row(3, []uint16{0, 1}, 0, 0)...),
	} {
		_, err := NewMap(layout, entry, rows, 1)
		require.ErrorIs(t, err, ErrInvalid, name)
	}
	_, err = NewMap(layout, entry-1, nil, 1)
	require.ErrorIs(t, err, ErrInvalid, "no set fits")
}
