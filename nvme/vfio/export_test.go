package vfio

// SetTransport has drives opened over transports of a test's own.
func (m *Machine) SetTransport(open func(address string) (Transport, error)) { m.transport = open }

// Open counts the controllers that drives are open on.
func (m *Machine) OpenControllers() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.open)
}
