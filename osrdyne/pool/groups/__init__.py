"""The end of groups: idle groups, and eviction while others wait for room."""
