"""The embedded stack of `osrdyne dev`, the demo and the tests."""
