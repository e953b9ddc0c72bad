package extentmap

// Ticket is the completion of something durable.
type Ticket struct {
	done chan struct{}
	err  error // valid once done is closed
}

// NewTicket makes a ticket and the function that completes it, to be called once.
func NewTicket() (*Ticket, func(error)) {
	t := &Ticket{done: make(chan struct{})}
	return t, t.complete
}

func (t *Ticket) complete(err error) {
	t.err = err
	close(t.done)
}

// Done is closed when the change is durable or has failed; Err is valid then.
func (t *Ticket) Done() <-chan struct{} { return t.done }

// Err is the outcome; nil while the ticket is not done.
func (t *Ticket) Err() error {
	select {
	case <-t.done:
		return t.err
	default:
		return nil
	}
}

// Wait blocks until the ticket is done. No caller that must stay interruptible uses it.
func (t *Ticket) Wait() error {
	<-t.done
	return t.err
}

// doneTicket is a ticket of something that needed no waiting.
func doneTicket(err error) *Ticket {
	t := &Ticket{done: make(chan struct{})}
	t.complete(err)
	return t
}
