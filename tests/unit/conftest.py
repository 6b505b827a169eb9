"""Settings of the unit tests: property tests are judged by their result, not by the load of the machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("osrdyne", deadline=None)
settings.load_profile("osrdyne")
