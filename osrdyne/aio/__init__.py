"""A small asyncio kit without any domain: clock, watch cell, wake-up, back-off, supervision. One primitive a file."""
