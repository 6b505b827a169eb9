"""The quarantine of keys whose commands RabbitMQ has refused on the token channel (lifecycle:
token-channel-never-fails).

A refused command closes the token channel and ends the leader's term for all keys. A key with two refusals is
quarantined: for a while the leader sends no such command for it, and its requests are answered with the reason.
"""

from __future__ import annotations

from osrdyne.aio.clock import Clock
from osrdyne.protocol.names import Key

LIMIT = 2  # Refused commands after which a key is quarantined.
DURATION = 600.0  # Seconds after the last refusal in which refusals count.


class Quarantine:
    """The refused commands of each key; kept by the daemon from term to term."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._refused: dict[Key, tuple[int, float, str]] = {}

    def note(self, key: Key, reason: str) -> None:
        """Note that a command of this key, or one that shared its answer, closed the token channel."""
        # An old refusal does not count: an operator may have removed its cause since.
        count = self._refused[key][0] if self._is_fresh(key) else 0
        self._refused[key] = (count + 1, self._clock.monotonic(), reason)

    def reason(self, key: Key) -> str | None:
        """Return why the key is quarantined now, or None."""
        if not self._is_fresh(key):
            self._refused.pop(key, None)
            return None
        count, _, reason = self._refused[key]
        return reason if count >= LIMIT else None

    def is_suspected(self, key: Key) -> bool:
        """Whether a refusal of the key counts, so that its commands are sent alone."""
        return self._is_fresh(key)

    def _is_fresh(self, key: Key) -> bool:
        return key in self._refused and self._clock.monotonic() - self._refused[key][1] < DURATION
