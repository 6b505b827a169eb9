"""Fakes of the clock, drivers and the broker, and the conformance suites of drivers."""
