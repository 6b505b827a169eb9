"""The circuit breaker: decides from outcomes which groups wait. Pure."""
