"""The settings of every group: those of the pool, or of the profile that matches its key. No I/O.

`ActiveProfiles` (`pool.routing.profiles`) writes it when the profiles change; components that need the settings of a
key read it. They are cached by key, because they are read for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from osrdyne.config.models import Settings
from osrdyne.config.profiles import EVICTION_ORDER, Eviction, Profile, describe_profile
from osrdyne.drivers.pooled.placement import ProcessSettings
from osrdyne.pool.state.groups.transitions import Delays
from osrdyne.protocol.names import Key
from osrdyne.protocol.spark_master import parse_spark_master, shown_master

MAX_CACHED = 100_000
"""Keys whose settings are cached; beyond that the cache is cleared. So many groups cannot be up."""

# The hash that workers with these settings carry, and the processes that have them; None: each has its own.
WorkerShape = Callable[[Settings], tuple[str, ProcessSettings | None]]


@dataclass(frozen=True, slots=True, eq=False)
class GroupSettings:
    """The settings of a group. `profile` None: those of the pool. `spec_hash`: the hash that its workers carry.
    `processes`: those that its workers share; None: each has its own."""

    settings: Settings
    spec_hash: str
    delays: Delays
    profile: Profile | None = None
    processes: ProcessSettings | None = None

    def shown(self) -> dict[str, object]:
        """The effective values of what a profile may change, without secrets: of `spark_conf` only the names."""
        worker = self.settings.worker
        cluster = {"cores": worker.cores} if parse_spark_master(worker.spark_master).is_shared else {}
        memory = {} if worker.memory is None else {"memory": worker.memory}
        return {
            "placement": worker.placement,
            "spark_master": shown_master(worker.spark_master),
            **cluster,
            **memory,
            "footprint": worker.footprint,
            "concurrency": worker.concurrency,
            "spark_conf": sorted(worker.spark_conf),
            "unbind_delay": self.delays.unbind,
            "stop_delay": self.delays.stop,
            "eviction": self.eviction,
        }

    @property
    def eviction(self) -> Eviction:
        """Its rank when idle groups are ended to free memory or a place."""
        return "normal" if self.profile is None or self.profile.eviction is None else self.profile.eviction

    @classmethod
    def of(cls, settings: Settings, profile: Profile | None, shape: WorkerShape) -> GroupSettings:
        effective = settings.with_profile(profile)
        delays = Delays(unbind=effective.lifecycle.unbind_delay, stop=effective.lifecycle.stop_delay)
        spec_hash, processes = shape(effective)
        if processes is not None and profile is not None:
            processes = replace(processes, profile=profile.match)
        return cls(effective, spec_hash, delays, profile, processes)


class GroupProfiles:
    """The profiles of a term, in their order, and the settings of each key."""

    def __init__(
        self,
        settings: Settings,
        *,
        shape: WorkerShape,
        use_processes: Callable[[list[ProcessSettings]], None] = lambda processes: None,
    ) -> None:
        """`use_processes` is called with the settings of processes whenever the profiles change."""
        self._settings = settings
        self._shape = shape
        self._use_processes = use_processes
        self.pool = GroupSettings.of(settings, None, shape)
        self._groups: tuple[GroupSettings, ...] = ()
        self._cached: dict[Key, GroupSettings] = {}
        self.all_share = False
        """Whether the workers of all keys are pooled."""
        self.use(self.prepare(settings.worker.profiles))

    @property
    def groups(self) -> tuple[GroupSettings, ...]:
        """The settings of each profile, in the order of the profiles."""
        return self._groups

    def of(self, key: Key) -> GroupSettings:
        """The settings of a group."""
        if not self._groups:
            return self.pool
        found = self._cached.get(key)
        if found is None:
            found = self._match(self._groups, key)
            if len(self._cached) >= MAX_CACHED:
                self._cached.clear()
            self._cached[key] = found
        return found

    def describe(self, key: Key) -> str | None:
        """A sentence about the profile of a key; None if the pool has no profiles."""
        return describe_profile(self.of(key).profile) if self._groups else None

    def delays_of(self, key: Key) -> Delays:
        return self.of(key).delays

    def eviction_rank(self, key: Key) -> int:
        """The rank of a group when idle groups are ended to free memory or a place: the lowest ends first."""
        return EVICTION_ORDER.index(self.of(key).eviction)

    def prepare(self, profiles: Sequence[Profile]) -> tuple[GroupSettings, ...]:
        """The settings of these profiles, for `use`. May take long: it hashes the worker configuration of each one."""
        return tuple(GroupSettings.of(self._settings, profile, self._shape) for profile in profiles)

    def match(self, groups: Sequence[GroupSettings], keys: Iterable[Key]) -> dict[Key, GroupSettings]:
        """The settings that these keys would have with these profiles, for `use`. May take long: it matches each key
        with each profile."""
        return {key: self._match(groups, key) for key in keys}

    def use(self, groups: Sequence[GroupSettings], matched: Mapping[Key, GroupSettings] | None = None) -> None:
        """Use these profiles from now on. `matched`: the settings of some keys with them."""
        self._groups, self._cached = tuple(groups), dict(matched or {})
        self.all_share = all(group.processes is not None for group in (self.pool, *self._groups))
        self._use_processes(self._processes())

    def renew(self) -> None:
        """Compute all hashes again: what the driver starts has changed."""
        self.pool = GroupSettings.of(self._settings, None, self._shape)
        self.use(self.prepare([group.profile for group in self._groups if group.profile is not None]))

    def _processes(self) -> list[ProcessSettings]:
        """The different settings of processes. Profiles with the same ones share processes."""
        found: dict[str, ProcessSettings] = {}
        for group in (self.pool, *self._groups):
            if (processes := group.processes) is not None:
                known = found.setdefault(processes.hash, processes)
                found[processes.hash] = replace(known, spares=max(known.spares, processes.spares))
        return list(found.values())

    def _match(self, groups: Sequence[GroupSettings], key: Key) -> GroupSettings:
        return next((one for one in groups if one.profile is not None and one.profile.matches(key)), self.pool)
