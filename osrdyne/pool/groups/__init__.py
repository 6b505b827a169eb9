"""The end of groups: the idle reaper, and eviction while other groups wait for a place."""
