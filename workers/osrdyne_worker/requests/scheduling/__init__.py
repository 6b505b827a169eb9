"""Which request runs next, and with which others: prefetch, priorities, batches, coalescing, rates, suspects."""
