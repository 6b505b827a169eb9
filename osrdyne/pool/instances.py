"""The book of instances: what the driver listed last, and what is known of each beyond that. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from osrdyne.drivers.base import Instance, InstanceId, InstanceState
from osrdyne.protocol.names import Key


@dataclass(slots=True)
class Entry:
    """One instance. `seen_at`: monotonic time of its first sight in this term. `stopped_for`: why we stopped it."""

    instance: Instance
    seen_at: float
    served: bool = False
    stopped_for: str | None = None


class InstanceBook:
    """The instances of the pool, by id and by key."""

    def __init__(self) -> None:
        self._entries: dict[InstanceId, Entry] = {}
        self._by_key: dict[Key, list[InstanceId]] = {}

    def __getitem__(self, instance_id: InstanceId) -> Entry:
        return self._entries[instance_id]

    def get(self, instance_id: InstanceId) -> Entry | None:
        return self._entries.get(instance_id)

    def of_key(self, key: Key) -> list[Entry]:
        return [self._entries[instance_id] for instance_id in self._by_key.get(key, ())]

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def note(self, instance: Instance, *, now: float) -> None:
        """The instance is as given; new or changed."""
        entry = self._entries.get(instance.instance_id)
        if entry is None:
            self._entries[instance.instance_id] = Entry(instance, now)
            self._by_key.setdefault(instance.key, []).append(instance.instance_id)
        else:
            entry.instance = instance

    def drop(self, instance_id: InstanceId) -> None:
        entry = self._entries.pop(instance_id, None)
        if entry is not None:
            ids = self._by_key[entry.instance.key]
            ids.remove(instance_id)
            if not ids:
                del self._by_key[entry.instance.key]

    def apply_listing(self, listing: Iterable[Instance], *, now: float) -> tuple[set[Key], list[Entry]]:
        """Take over a complete listing: the keys that changed, and the instances that vanished without a word."""
        listed = {instance.instance_id: instance for instance in listing}
        changed = set()
        for instance in listed.values():
            before = self._entries.get(instance.instance_id)
            if before is None or before.instance != instance:
                changed.add(instance.key)
                self.note(instance, now=now)
        vanished = [entry for entry in self.entries() if entry.instance.instance_id not in listed]
        for entry in vanished:
            changed.add(entry.instance.key)
            self.drop(entry.instance.instance_id)
        return changed, vanished

    def loading(self) -> int:
        """How many run and do not serve yet: what `max_concurrent_starts` counts."""
        return sum(
            1
            for entry in self._entries.values()
            if entry.instance.state is InstanceState.RUNNING and not entry.served and entry.stopped_for is None
        )
