"""Keys whose commands cost a leader its token, remembered from term to term (lifecycle: token-channel-never-fails).

A command that RabbitMQ refuses closes the token channel and deposes the leader for all keys. A key that did so twice
is left alone for a while: its requests are answered with the reason, and the others go on.
"""

from __future__ import annotations

from osrdyne.aio.clock import Clock
from osrdyne.protocol.names import Key

LIMIT = 2  # Refused commands after which a key is left alone.
DURATION = 600.0  # For how long, seconds after the last refusal.


class Quarantine:
    """The refused commands of each key; kept by the daemon."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._refused: dict[Key, tuple[int, float, str]] = {}

    def note(self, key: Key, reason: str) -> None:
        """A command of this key closed the token channel."""
        # An old refusal counts no more: an operator may have removed its cause since.
        count = self._refused[key][0] if self._is_fresh(key) else 0
        self._refused[key] = (count + 1, self._clock.monotonic(), reason)

    def reason(self, key: Key) -> str | None:
        """Why the key is to be left alone now, or None."""
        if not self._is_fresh(key):
            self._refused.pop(key, None)
            return None
        count, _, reason = self._refused[key]
        return reason if count >= LIMIT else None

    def is_suspected(self, key: Key) -> bool:
        """Whether a command of this key, or one that was sent with it, closed the token channel lately."""
        return self._is_fresh(key)

    def _is_fresh(self, key: Key) -> bool:
        return key in self._refused and self._clock.monotonic() - self._refused[key][1] < DURATION
