"""A small asyncio kit without any domain: clock, signals, tasks, back-off."""
