"""The groups that circuits pause in this term. No I/O.

`ActiveCircuits` (`pool.routing.circuits`) writes it. The components that start workers, send them control messages or
check their liveness read it.
"""

from __future__ import annotations

from collections.abc import Iterable

from osrdyne.aio.signals import ChangeFeed
from osrdyne.protocol.names import Key


class PausedGroups:
    """Groups whose workers take no requests. `feed`: groups that were paused or resumed, or need a worker for a probe.

    A paused group gets no worker, except one that starts paused for a probe.
    """

    def __init__(self) -> None:
        self.feed: ChangeFeed[Key] = ChangeFeed()
        self._paused: set[Key] = set()
        self._probing: set[Key] = set()

    def is_paused(self, key: Key) -> bool:
        """Whether a circuit pauses the group. Called for each report and each start."""
        return key in self._paused

    def is_probing(self, key: Key) -> bool:
        """Whether one paused worker of the group is needed for a probe."""
        return key in self._probing

    def pause(self, key: Key) -> None:
        if key not in self._paused:
            self._paused.add(key)
            self.feed.notify(key)

    def resume(self, key: Key) -> None:
        self._paused.discard(key)
        self._probing.discard(key)
        self.feed.notify(key)

    def set_probing(self, keys: Iterable[Key]) -> None:
        """Replace the groups that need a worker for a probe."""
        after = set(keys)
        changed, self._probing = after ^ self._probing, after
        for key in changed:
            self.feed.notify(key)
