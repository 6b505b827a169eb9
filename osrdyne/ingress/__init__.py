"""What a request of a managed pool meets before its queue: decisions only, as pure functions on values."""
