"""The inventory of instances: the latest listing of the driver, and the marks of this term on each instance. No I/O.

`WorkerGroupsLoop` and its `WorkerActions` write it, through the methods of `InstanceInventory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, replace
from typing import Any

from osrdyne.drivers.base import Instance, InstanceId, InstanceState
from osrdyne.protocol.names import Key, WorkerId


@dataclass(frozen=True, slots=True)
class Draining:
    """A worker that was asked to drain. Monotonic: it is asked again at `ask_again_at`, and stopped at `until`."""

    why: str
    until: float
    ask_again_at: float


@dataclass(frozen=True, slots=True)
class InventoryEntry:
    """One instance. `seen_at`: monotonic time when this term first saw it. `started_here`: this term started it.
    `given`: the hash of the settings that this term gave it, at its start or later; None: an earlier term did.
    `is_mismarked`: the driver still lists it with the hash of other settings. `served`: it has been ready. `hangs`: why
    it counts as alive but not working. `draining`: it was asked to end. `stopped_for`: why it was stopped."""

    instance: Instance
    seen_at: float
    started_here: bool = False
    given: str | None = None
    is_mismarked: bool = False
    served: bool = False
    hangs: str | None = None
    draining: Draining | None = None
    stopped_for: str | None = None

    def is_outdated(self, spec_hash: str) -> bool:
        """Whether it is to be replaced: its settings differ from those of `spec_hash`, or its backend will end it.

        The hash of this term takes precedence over the listed one: otherwise a driver that lists a wrong hash would
        cause endless replacements."""
        return self.instance.retiring or (self.given or self.instance.spec_hash) != spec_hash

    @property
    def is_loading(self) -> bool:
        """Whether this term started it and it runs but does not serve yet: what `max_concurrent_starts` counts.

        Instances found at the start of the term do not count: a worker that implements only part of the protocol does
        not report again that it is ready, and must not keep other workers from starting.
        """
        running = self.instance.state is InstanceState.RUNNING
        leaving = self.stopped_for is not None or self.draining is not None
        return self.started_here and running and not self.served and not leaving


class InstanceInventory:
    """The instances of the pool, by id and by key."""

    def __init__(self) -> None:
        self._entries: dict[InstanceId, InventoryEntry] = {}
        self._by_key: dict[Key, list[InstanceId]] = {}
        self._may_load: set[InstanceId] = set()  # a superset of the loading instances, so that none is missed

    def get(self, instance_id: InstanceId) -> InventoryEntry | None:
        return self._entries.get(instance_id)

    def of_key(self, key: Key) -> list[InventoryEntry]:
        return [self._entries[instance_id] for instance_id in self._by_key.get(key, ())]

    def entries(self) -> list[InventoryEntry]:
        return list(self._entries.values())

    def worker_ids(self) -> set[WorkerId]:
        """The ids of the workers that have not exited."""
        instances = (entry.instance for entry in self._entries.values())
        return {instance.worker_id for instance in instances if instance.state is not InstanceState.EXITED}

    def note(self, instance: Instance, *, now: float, started_here: bool = False, given: str | None = None) -> None:
        """Add an instance, or update it. `given`: the hash of the settings that it was started with in this term."""
        before = self._entries.get(instance.instance_id)
        if before is None:
            self._by_key.setdefault(instance.key, []).append(instance.instance_id)
            entry = InventoryEntry(instance, now, started_here, given)
        else:
            # A listing may have been faster than the answer to the start.
            entry = replace(
                before,
                instance=instance,
                started_here=before.started_here or started_here,
                given=given or before.given,
            )
        self._entries[instance.instance_id] = entry
        if entry.is_loading:
            self._may_load.add(instance.instance_id)

    def drop(self, instance_id: InstanceId) -> InventoryEntry | None:
        """Forget an instance and return its last entry."""
        entry = self._entries.pop(instance_id, None)
        self._may_load.discard(instance_id)
        if entry is not None:
            ids = self._by_key[entry.instance.key]
            ids.remove(instance_id)
            if not ids:
                del self._by_key[entry.instance.key]
        return entry

    # A mark on an instance that is no longer in the inventory has no effect.

    def mark_served(self, instance_id: InstanceId) -> None:
        """Mark a worker that has been ready."""
        self._change(instance_id, served=True)

    def mark_hanging(self, instance_id: InstanceId, why: str) -> None:
        """Mark a worker that is alive and does not work. The first reason stays."""
        entry = self._entries.get(instance_id)
        if entry is not None and entry.hangs is None:
            self._change(instance_id, hangs=why)

    def mark_mismarked(self, instance_id: InstanceId) -> None:
        self._change(instance_id, is_mismarked=True)

    def mark_draining(self, instance_id: InstanceId, draining: Draining) -> None:
        self._change(instance_id, draining=draining)

    def mark_updated(self, instance_id: InstanceId, instance: Instance, *, given: str | None) -> None:
        """Record that the driver gave the instance the settings of the hash `given`, and returned `instance`."""
        self._change(instance_id, instance=instance, given=given, is_mismarked=False)

    def mark_stopping(self, instance_id: InstanceId, why: str) -> None:
        self._change(instance_id, stopped_for=why)

    def mark_exited(self, instance_id: InstanceId) -> None:
        """Mark an instance that the driver has stopped."""
        entry = self._entries.get(instance_id)
        if entry is not None:
            self._change(instance_id, instance=replace(entry.instance, state=InstanceState.EXITED))

    def _change(self, instance_id: InstanceId, **changes: Any) -> None:
        entry = self._entries.get(instance_id)
        if entry is not None:
            self._entries[instance_id] = replace(entry, **changes)

    def apply_listing(
        self, listing: Iterable[Instance], *, now: float, ignoring: Set[Key] = frozenset()
    ) -> tuple[set[Key], list[InventoryEntry]]:
        """Take over a complete listing. Returns the keys that changed, and the instances that vanished.

        Instances of the keys in `ignoring` are left as they are: the listing may be outdated for them.
        """
        listed = {instance.instance_id: instance for instance in listing}
        changed = set()
        for instance in listed.values():
            before = self._entries.get(instance.instance_id)
            if instance.key not in ignoring and (before is None or before.instance != instance):
                changed.add(instance.key)
                self.note(instance, now=now)
        vanished = [
            entry
            for entry in self.entries()
            if entry.instance.instance_id not in listed and entry.instance.key not in ignoring
        ]
        for entry in vanished:
            changed.add(entry.instance.key)
            self.drop(entry.instance.instance_id)
        return changed, vanished

    def loading_entries(self) -> list[InventoryEntry]:
        """The workers that load their data."""
        return [entry for name in self._may_load if (entry := self._entries[name]).is_loading]

    def loading(self) -> int:
        """The number of workers that load their data. Examines only instances that may load."""
        self._may_load = {instance_id for instance_id in self._may_load if self._entries[instance_id].is_loading}
        return len(self._may_load)
