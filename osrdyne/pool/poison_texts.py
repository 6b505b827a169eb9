"""Texts (path and body) of requests that ended a worker with nothing else running: workers refuse them for a while.

`WorkerActions` notes them, new workers get them with their environment, running ones by a control message. Kept in
memory and bounded: a new leader knows none, and RabbitMQ's delivery limit holds then.
"""

from __future__ import annotations

from collections.abc import Mapping

from osrdyne.aio.clock import Clock
from osrdyne.protocol.names import Key

MAX_OF_KEY = 100
MAX_KEYS = 1000


class PoisonTexts:
    """The refused texts of a term, each for `seconds`; 0: none ever is."""

    def __init__(self, clock: Clock, *, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._until: dict[Key, dict[str, float]] = {}

    def note(self, key: Key, text: str) -> bool:
        """Refuse a text from now on; the oldest make room. False when nothing is refused in this pool."""
        if self._seconds <= 0:
            return False
        texts = self._until.pop(key, {})
        texts.pop(text, None)
        texts[text] = self._clock.monotonic() + self._seconds
        self._until[key] = texts
        if len(texts) > MAX_OF_KEY:
            del texts[next(iter(texts))]
        if len(self._until) > MAX_KEYS:
            del self._until[next(iter(self._until))]
        return True

    def of_key(self, key: Key) -> Mapping[str, float]:
        """The texts that are refused now, and for how many seconds yet."""
        now = self._clock.monotonic()
        texts = {text: until for text, until in self._until.get(key, {}).items() if until > now}
        if texts:
            self._until[key] = texts
        else:
            self._until.pop(key, None)
        return {text: round(until - now, 3) for text, until in texts.items()}
