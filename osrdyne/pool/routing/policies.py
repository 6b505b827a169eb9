"""The active queue policies of a managed pool in one term.

A change applies to requests that arrive after it. Those that wait keep their deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from osrdyne.aio.tasks import SMALL, off_loop
from osrdyne.ingress.documents.problems import InvalidDocumentError
from osrdyne.ingress.policies.authorization import unverifiable
from osrdyne.ingress.policies.manifest import PolicyManifest, load_policies_json
from osrdyne.ingress.policies.table import FoundPolicy, PolicyTable, warn_of_clamped
from osrdyne.pool.context import TermContext
from osrdyne.pool.routing.active_manifest import ActiveManifest
from osrdyne.pool.routing.manifest_store import ManifestChange, ManifestKind, ManifestStore
from osrdyne.pool.state.groups.pins import Parameters
from osrdyne.pool.state.queues.created_queues import CreatedQueues
from osrdyne.protocol.names import Key


class ActivePolicies(ActiveManifest[PolicyManifest]):
    """The active policies. `table` is None without a document: then a policy acts only on keys with a created queue.

    `present` returns the keys that have a queue or workers; `policy_changes` names them when the document changes.
    """

    def __init__(
        self,
        context: TermContext,
        parameters: Parameters,
        *,
        created: CreatedQueues,
        present: Callable[[], Iterable[Key]] = tuple,
    ) -> None:
        pool = context.names.pool
        super().__init__(
            context, ManifestStore(parameters, pool=pool, kind=ManifestKind.POLICIES, load=load_policies_json)
        )
        self.bounds = created.bounds
        self.table: PolicyTable | None = None
        self._created = created
        self._present = present

    @property
    def has_any(self) -> bool:
        """Whether a policy may act on a key."""
        return self.table is not None or self._created.has_any

    def of(self, key: str) -> FoundPolicy | None:
        """The policy of a key; None if none acts on it. That of a created queue comes before the document."""
        own = self._created.policy(Key(key))
        if own is not None:
            return own
        return None if self.table is None else self.table.of(key)

    def effective(self, key: str) -> FoundPolicy | None:
        """The policy of a key with every value as of now. Raises `PoolConflictError` in a direct pool."""
        self.require_managed()
        if (own := self._created.policy(Key(key))) is not None:
            return own
        return None if self.table is None else self.table.effective(key, now=self._now())

    async def _use(self, manifest: PolicyManifest | None) -> None:
        if manifest is None or not manifest.size:
            self.table = None
        else:
            # In a thread if there are many: it compiles each pattern.
            self.table = await off_loop(
                manifest.size * SMALL // 20, lambda: PolicyTable(manifest, bounds=self.bounds, now=self._now())
            )
        if manifest is not None and (refused := [*unverifiable(manifest, self.bounds)]):
            # Stored while the configuration had keys. Nothing passes until it has some again.
            self._log.error("policies demand tokens, but nothing can verify them", places=[one.path for one in refused])
        self.notify_present()

    def notify_present(self) -> None:
        """Have the keys that have a queue or workers compared with their policies again."""
        for key in self._present():
            self._created.policy_changes.notify(key)

    async def _change(self, manifest: PolicyManifest | None, *, author: str) -> ManifestChange:
        if manifest is not None and (problems := [*unverifiable(manifest, self.bounds)]):
            raise InvalidDocumentError(problems)
        change = await super()._change(manifest, author=author)
        clamped = () if manifest is None else warn_of_clamped(manifest, bounds=self.bounds, now=self._now())
        return ManifestChange(change.kept, (*change.warnings, *clamped))

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock.time(), UTC)
