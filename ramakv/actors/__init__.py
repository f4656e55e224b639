"""Tasks that own one thing each and change it in the order of their mailbox."""
