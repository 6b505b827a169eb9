"""The idle judge: ends UNBOUND groups whose `stop_delay` is over, on evidence and not on the clock alone.

Before the workers of a group are stopped, a listing must show that its queue is empty, unacknowledged deliveries
included; so a lost activity report costs nothing but a cycle, and a busy worker is never stopped (LIFECYCLE 21).
One listing answers for all groups that are due.
"""

from __future__ import annotations

from osrdyne.aio.backoff import Backoff
from osrdyne.aio.clock import Clock
from osrdyne.errors import BrokerError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.facts import QueueBoard
from osrdyne.pool.planning import stop_evidence_from
from osrdyne.pool.roles import Totals
from osrdyne.pool.tracker import PoolStateTracker
from osrdyne.protocol.names import Key

LISTING_RETRY = Backoff(initial=1.0, maximum=30.0)
NO_EVIDENCE_RETRY = 10.0
"""Between listings that say nothing of a group, because its queue does not answer, seconds."""
GATHER_DELAY = 1.0
"""How long the judge waits for further groups before it asks for a listing, seconds."""


class IdleJudge:
    """Decides about the end of groups, one listing at a time."""

    def __init__(
        self,
        *,
        tracker: PoolStateTracker,
        board: QueueBoard,
        totals: Totals,
        settle_delay: float,
        clock: Clock,
    ) -> None:
        self._tracker = tracker
        self._board = board
        self._totals = totals
        self._settle_delay = settle_delay
        self._clock = clock
        self._log: Logger = get_logger("idle_judge")

    async def run(self) -> None:
        """Judge the groups that become due, for ever."""
        pause: float | None = None
        failures = 0
        while True:
            await self._tracker.stop_due.wait(pause)
            await self._clock.sleep(min(GATHER_DELAY, self._settle_delay))
            try:
                pause = await self.judge()
                failures = 0
            except BrokerError as error:
                failures += 1
                pause = LISTING_RETRY.delay(failures)
                self._log.warning("listing failed, nothing is stopped meanwhile", error=str(error))

    async def judge(self) -> float | None:
        """One pass. Returns seconds until a group that is due may be judged, or None when none is due."""
        now = self._clock.monotonic()
        evidence_from = {key: self._evidence_from(key) for key in self._tracker.stop_due_keys()}
        ripe = {key for key, at in evidence_from.items() if at is not None and at <= now}
        missing = {key for key in evidence_from if not self._board[key].exists}
        for key in missing:
            self._tracker.end(key)  # no queue, so nothing that could be lost
        if ripe:
            totals = await self._totals.list_message_totals()
            # What was unbound anew during the listing was sampled too early.
            self._apply({key for key in ripe if self._evidence_from(key) == evidence_from[key]}, totals)
        left = self._tracker.stop_due_keys() & evidence_from.keys()
        return min((self._wait(evidence_from[key], now) for key in left), default=None)

    def _evidence_from(self, key: Key) -> float | None:
        return stop_evidence_from(self._board[key], settle_delay=self._settle_delay)

    def _wait(self, evidence_from: float | None, now: float) -> float:
        """Seconds until a group that is still due may be judged; a listing that said nothing of it is asked again."""
        if evidence_from is None:
            return self._settle_delay
        return evidence_from - now if evidence_from > now else NO_EVIDENCE_RETRY

    def _apply(self, ripe: set[Key], totals: dict[Key, int]) -> None:
        for key in ripe:
            messages = totals.get(key)
            if messages == 0:
                if self._tracker.end(key):
                    self._log.info("group ends", key=key)
            elif messages is not None and key in self._tracker.stop_due_keys():
                self._tracker.require_worker_group(key)
                self._log.info("group is not idle after all", key=key, messages=messages)
