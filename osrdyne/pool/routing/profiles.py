"""The active profiles of a pool in one term: those that `osrdyne profiles apply` has stored, otherwise those of
`worker.profiles`.

A change counts at once: workers whose settings it changes are replaced, one at a time in each group. Source:
docs/decisions/0060-stored-profiles-replace-those-of-the-configuration.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from osrdyne.aio.tasks import SMALL, off_loop
from osrdyne.config.profiles import Profile, profile_problems
from osrdyne.errors import PoolConflictError
from osrdyne.ingress.documents.problems import InvalidDocumentError, Problem
from osrdyne.ingress.profiles import ProfileManifest, load_profiles_json
from osrdyne.pool.context import TermContext, TermState
from osrdyne.pool.routing.active_manifest import ActiveManifest
from osrdyne.pool.routing.manifest_store import ManifestChange, ManifestKind, ManifestStore
from osrdyne.pool.state.groups.pins import Parameters
from osrdyne.protocol.names import Key

# What keeps the driver from having workers of a profile, as a sentence with the remedy; None if it can.
DriverObstacle = Callable[[Profile], str | None]


@dataclass(frozen=True, slots=True)
class ProfileChange(ManifestChange):
    """The result of a change of the profiles. `changed`: the groups with workers of other settings."""

    changed: tuple[Key, ...] = ()


class ActiveProfiles(ActiveManifest[ProfileManifest]):
    """The active profiles, of managed and direct pools. `on_change` is called with the keys whose settings differ."""

    needs_managed: ClassVar[bool] = False

    def __init__(
        self,
        context: TermContext,
        state: TermState,
        parameters: Parameters,
        *,
        driver_obstacle: DriverObstacle,
        on_change: Callable[[Iterable[Key]], None],
    ) -> None:
        pool = context.names.pool
        super().__init__(
            context, ManifestStore(parameters, pool=pool, kind=ManifestKind.PROFILES, load=load_profiles_json)
        )
        self._settings = context.settings
        self._profiles = state.profiles
        self._tracker = state.tracker
        self._instances = state.instances
        self._driver_obstacle = driver_obstacle
        self._on_change = on_change
        self._changed: tuple[Key, ...] = ()
        # The stored profiles that cannot be used with the settings of this daemon, with the reason.
        self.left_out: tuple[Problem, ...] = ()

    async def _use(self, manifest: ProfileManifest | None) -> None:
        profiles = self._settings.worker.profiles if manifest is None else manifest.profiles
        problems = () if manifest is None else self._problems(profiles)
        # A term must not fail on a stored profile that was valid with other settings of the daemon.
        faulty = {problem.path.partition(".")[2].partition(".")[0] for problem in problems}
        usable = [profile for number, profile in enumerate(profiles) if str(number) not in faulty]
        for problem in problems:
            self._log.error("stored profile is left out", profile=problem.path, reason=problem.message)
        keys = self._keys()
        # In a thread if it takes long: it hashes the worker configuration for each profile, and matches each key.
        groups = await off_loop(len(usable) * SMALL // 20, self._profiles.prepare, usable)
        matched = await off_loop(len(usable) * len(keys) * 10, self._profiles.match, groups, keys)
        # No await from here on: a worker is planned with the former settings or with these.
        matched |= self._profiles.match(groups, self._keys() - keys)  # groups that have come meanwhile
        before = {key: self._profiles.of(key) for key in matched}
        self._profiles.use(groups, matched)
        self.left_out = tuple(problems)
        self._changed = tuple(sorted(key for key in matched if before[key].spec_hash != matched[key].spec_hash))
        self._on_change(self._changed)

    async def replace_workers(self) -> None:
        """Replace the workers of all groups, one at a time in each: the driver's hashes have changed."""
        async with self._changing:
            self._profiles.renew()
            self._on_change(self._keys())

    async def restore(self, version: int, *, author: str, expected: int | None = None) -> ManifestChange:
        try:
            return await super().restore(version, author=author, expected=expected)
        except InvalidDocumentError as error:
            raise PoolConflictError(
                f"The version {version} cannot be used with the present settings: {error}"
            ) from error

    async def _change(self, manifest: ProfileManifest | None, *, author: str) -> ProfileChange:
        # Refused as a whole before it is stored.
        if manifest is not None and (problems := self._problems(manifest.profiles)):
            raise InvalidDocumentError(problems)
        change = await super()._change(manifest, author=author)
        return ProfileChange(change.kept, change.warnings, self._changed)

    def _keys(self) -> set[Key]:
        """The groups that are desired or have workers."""
        return {*self._tracker.keys(), *(entry.instance.key for entry in self._instances.entries())}

    def _problems(self, profiles: Sequence[Profile]) -> list[Problem]:
        found = [
            Problem(message, path=f"profiles.{path}".rstrip("."))
            for path, message in profile_problems(self._settings, profiles)
        ]
        for number, profile in enumerate(profiles):
            if (obstacle := self._driver_obstacle(profile)) is not None:
                found.append(Problem(obstacle, path=f"profiles.{number}"))
        return found
