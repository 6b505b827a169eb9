"""The active quotas of a managed pool in one term: their document, what was counted, and its snapshots.

A change applies to requests that arrive after it; what was counted stays. The counts are saved twice a second while
they change, so that a leader that is killed loses at most the counts of one second.
"""

from __future__ import annotations

import asyncio

from osrdyne.ingress.checks import RequestCheck
from osrdyne.ingress.quotas.document import QuotaManifest, load_quotas_json
from osrdyne.ingress.quotas.meters import Level
from osrdyne.ingress.quotas.quotas import Quotas, Usage, quota_check
from osrdyne.ingress.quotas.state import QuotaState, encode_state, parse_state
from osrdyne.ingress.quotas.window import Moment
from osrdyne.pool.context import TermContext
from osrdyne.pool.routing.active_manifest import ActiveManifest
from osrdyne.pool.routing.manifest_store import ManifestKind, ManifestStore
from osrdyne.pool.state.groups.pins import Parameters
from osrdyne.pool.state.snapshots import SnapshotStorage, SnapshotStore
from osrdyne.pool.state.workers.rates import GroupRates

SNAPSHOT = "quota"  # The name of the snapshots.
SAVE_INTERVAL = 0.5  # Seconds; with the time that RabbitMQ takes, less than one second of counts can be lost.


class ActiveQuotas(ActiveManifest[QuotaManifest]):
    """The active quotas. `quotas` is None without a document: then nothing is counted."""

    def __init__(
        self, context: TermContext, parameters: Parameters, *, snapshots: SnapshotStorage, rates: GroupRates
    ) -> None:
        pool = context.names.pool
        super().__init__(context, ManifestStore(parameters, pool=pool, kind=ManifestKind.QUOTA, load=load_quotas_json))
        self._snapshots = SnapshotStore[QuotaState](snapshots, pool=pool, encode=encode_state, parse=parse_state)
        self._rates = rates
        self._unsaved = asyncio.Event()
        self.quotas: Quotas | None = None

    def check(self) -> RequestCheck:
        """The check of a request by these quotas."""
        return quota_check(lambda: self.quotas, self._now, self._note_passed)

    def usage(self) -> Usage | None:
        """What was used; None if there are no quotas."""
        return None if self.quotas is None else self.quotas.usage(self._now())

    async def load(self) -> None:
        """Activate the stored document and continue with the stored counts, at the beginning of a term."""
        await super().load()
        if self.quotas is not None and (state := await self._snapshots.load()) is not None:
            # Requests are taken only after this: nothing has been counted yet.
            self.quotas.restore(state, self._now())

    async def run_saving(self) -> None:
        """Save the counts while they change. Runs until cancelled."""
        while True:
            await self._unsaved.wait()
            await self._clock.sleep(SAVE_INTERVAL)
            await self.save()

    async def save(self) -> None:
        """Save the counts if they have changed. Raises `LeadershipLostError`."""
        if not self._unsaved.is_set():
            return
        # Before the save: counts that change meanwhile are saved the next time. Crash before the save has ended: the
        # next leader continues with the earlier counts. After: with these.
        self._unsaved.clear()
        saved = self.quotas is None
        try:
            if self.quotas is not None:
                saved = await self._snapshots.save(self.quotas.store(self._now()))
        finally:
            if not saved:  # also if it is cancelled: the term saves once more when it ends in order
                self._unsaved.set()

    async def _use(self, manifest: QuotaManifest | None) -> None:
        self._rates.use(() if manifest is None else manifest.rates)
        if manifest is None or (manifest.pool is None and not manifest.rules):
            self.quotas = None
        elif self.quotas is None:
            self.quotas = Quotas(manifest, self._now())
        else:
            self.quotas.use(manifest)

    def _note_passed(self, levels: list[Level]) -> None:
        self._unsaved.set()
        for level in levels:
            whose = {} if level.name is None else {"name": level.name}
            self._log.warning("daily quota nearly used up", meter=level.meter, percent=level.percent, **whose)

    def _now(self) -> Moment:
        return Moment(self._clock.monotonic(), self._clock.time())
