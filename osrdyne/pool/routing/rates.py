"""Sends workers the rate at which they serve events (docs/reference/quotas.md, "Rates of workers").

Level-triggered: a worker reports its rate with its state, and is sent the right one for as long as it reports another.
A lost message delays a change by `SEND_AGAIN_AFTER`. New workers are started with their rate.
"""

from __future__ import annotations

import asyncio

from osrdyne.pool.context import TermContext
from osrdyne.pool.state.workers.rates import GroupRates
from osrdyne.pool.state.workers.worker_reports import WorkerRegistry
from osrdyne.pool.workers.control import WorkerControl
from osrdyne.protocol.names import Key
from osrdyne.protocol.rates import EventRate

SEND_AGAIN_AFTER = 10.0  # Seconds without the report of a worker that it has the rate; also between two passes.


class WorkerRates:
    """Gives the workers of each group their rate."""

    def __init__(
        self, context: TermContext, *, rates: GroupRates, worker_reports: WorkerRegistry, control: WorkerControl
    ) -> None:
        self._rates = rates
        self._worker_reports = worker_reports
        self._control = control
        self._clock = context.clock
        self._sent: dict[Key, tuple[EventRate | None, float]] = {}

    async def run(self) -> None:
        """Send rates to new workers, after a change, and at intervals. Runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send_on_report(), name="send rates to reporting workers")
            while True:
                keys = {worker.key for worker in self._worker_reports.all()}
                self._sent = {key: sent for key, sent in self._sent.items() if key in keys}
                for key in keys:
                    await self._send(key)
                await self._rates.changed.wait(SEND_AGAIN_AFTER)

    async def _send_on_report(self) -> None:
        changes = self._worker_reports.feed.subscribe()
        while True:
            for key in await changes.wait():
                await self._send(key)

    async def _send(self, key: Key) -> None:
        """Send the workers of a group their rate if one of them has another."""
        # A worker that reports no generation does not follow control messages.
        workers = [worker for worker in self._worker_reports.of_key(key) if worker.generation is not None]
        rate = self._rates.of(key, workers=sum(worker.state.serves for worker in workers))
        if all(worker.rate == rate for worker in workers):
            return
        now = self._clock.monotonic()
        sent, at = self._sent.get(key, (None, -SEND_AGAIN_AFTER))
        if sent == rate and now - at < SEND_AGAIN_AFTER:
            return
        self._sent[key] = (rate, now)
        await self._control.send_rate(key, rate)
