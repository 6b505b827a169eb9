"""The leader token, and the channels that a leader works with beside it."""
