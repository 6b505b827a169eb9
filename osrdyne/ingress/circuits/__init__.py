"""The circuit breaker: pauses groups by the outcomes of their requests. Pure."""
