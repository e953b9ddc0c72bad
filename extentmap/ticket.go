package extentmap

// Ticket is the completion of something durable. Who promises it makes it with NewTicket and calls Complete exactly
// once;
// gpufile makes tickets of its own for what spans several transactions.
type Ticket struct {
	done chan struct{}
	err  error // written before done is closed, read after
}

// NewTicket returns a ticket that is not done.
func NewTicket() *Ticket { return &Ticket{done: make(chan struct{})} }

// Complete tells everyone who waits; nil means durable.
func (t *Ticket) Complete(err error) {
	t.err = err
	close(t.done)
}

// Done is closed when the change is durable or has failed; Err is valid then.
func (t *Ticket) Done() <-chan struct{} { return t.done }

// Err is nil until the ticket is done, then the outcome.
func (t *Ticket) Err() error {
	select {
	case <-t.done:
		return t.err
	default:
		return nil
	}
}

// Wait blocks until the ticket is done. Nobody who must stay interruptible uses it.
func (t *Ticket) Wait() error {
	<-t.done
	return t.err
}

// doneTicket is a ticket of something that needed no waiting.
func doneTicket(err error) *Ticket {
	t := NewTicket()
	t.Complete(err)
	return t
}
