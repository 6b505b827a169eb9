"""Texts (path and body) of requests that ended two workers: workers refuse them for a while.

Either the second worker died while nothing else ran in it, or both ended because the handler could not be cancelled.

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
        self._stuck: dict[Key, dict[str, float]] = {}
        """Texts whose handler was stuck in one worker, and until when a second one counts."""

    def note(self, key: Key, text: str) -> bool:
        """Refuse a text from now on; the oldest make room. False when nothing is refused in this pool."""
        if self._seconds <= 0:
            return False
        self._put(self._until, key, text)
        return True

    def note_stuck(self, key: Key, text: str) -> bool:
        """A worker ended because a handler of this text did not end. True when it is the second one in `seconds`."""
        until = self._stuck.get(key, {}).pop(text, None)
        if until is not None and until > self._clock.monotonic():
            return True
        self._put(self._stuck, key, text)
        return False

    def _put(self, kept: dict[Key, dict[str, float]], key: Key, text: str) -> None:
        texts = kept.pop(key, {})
        texts.pop(text, None)
        texts[text] = self._clock.monotonic() + self._seconds
        kept[key] = texts
        if len(texts) > MAX_OF_KEY:
            del texts[next(iter(texts))]
        if len(kept) > MAX_KEYS:
            del kept[next(iter(kept))]

    def of_key(self, key: Key) -> Mapping[str, float]:
        """The texts that are refused now, and for how many seconds yet."""
        now = self._clock.monotonic()
        texts = {text: until for text, until in self._until.get(key, {}).items() if until > now}
        if texts:
            self._until[key] = texts
        else:
            self._until.pop(key, None)
        return {text: round(until - now, 3) for text, until in texts.items()}
