"""Stand-ins for the outside world that tests and the contract suites share: clock, drivers, sessions."""
