package emu

// timers are delayed commands, the one due first in front: a binary heap that allocates only when it grows.
type timers []*command

func (t timers) less(i, j int) bool { return t[i].due.Before(t[j].due) }

func (t *timers) push(c *command) {
	*t = append(*t, c)
	t.up(len(*t) - 1)
}

func (t *timers) pop() *command { return t.remove(0) }

func (t *timers) remove(i int) *command {
	h := *t
	c, last := h[i], len(h)-1
	h[i] = h[last]
	h[last] = nil
	*t = h[:last]
	if i < last {
		t.down(i)
		t.up(i)
	}
	return c
}

func (t timers) up(i int) {
	for i > 0 {
		parent := (i - 1) / 2
		if !t.less(i, parent) {
			return
		}
		t[i], t[parent] = t[parent], t[i]
		i = parent
	}
}

func (t timers) down(i int) {
	for {
		child := 2*i + 1
		if child >= len(t) {
			return
		}
		if child+1 < len(t) && t.less(child+1, child) {
			child++
		}
		if !t.less(child, i) {
			return
		}
		t[i], t[child] = t[child], t[i]
		i = child
	}
}
