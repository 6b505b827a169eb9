"""Batches: requests of one path and priority level that one call of a batch handler answers together.

Each request has its own task, which waits here for its answer. The processor handles its deadline, cancel, retry, reply
and acknowledgement. So if the worker dies, the effect on each request is the same as for a request that runs by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from osrdyne.aio.clock import Clock
from osrdyne.aio.signals import Wakeup
from osrdyne.protocol.messages import Response
from osrdyne.protocol.names import Key
from osrdyne_worker.app.app import BatchOptions
from osrdyne_worker.requests.dispatch import Dispatcher
from osrdyne_worker.requests.inflight import InFlight
from osrdyne_worker.requests.scheduling.priorities import Slots

Kind = tuple[Key, str, int]
"""Key, path and priority level. Requests of one kind may be in one batch."""


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that wait for their slot, or run in it."""

    kind: Kind
    options: BatchOptions
    opened_at: float
    full: Wakeup
    members: dict[InFlight, asyncio.Future[Response]] = field(default_factory=dict)
    """The requests that were not interrupted, each with the future of its answer."""
    running: asyncio.Task[list[Response | None]] | None = None

    @property
    def is_full(self) -> bool:
        return len(self.members) >= self.options.max_size


class Batches:
    """Collects and runs the batches of one worker. Used on the event loop only.

    `begin` marks a request as running in a batch of the given size and job group. `confirm_running` returns when
    RabbitMQ has the names of the running requests.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        slots: Slots,
        clock: Clock,
        *,
        spawn: Callable[..., asyncio.Future[None]],
        begin: Callable[[InFlight, str, int], None],
        confirm_running: Callable[[], Awaitable[None]],
    ) -> None:
        self._dispatcher = dispatcher
        self._slots = slots
        self._clock = clock
        self._spawn = spawn
        self._begin = begin
        self._confirm_running = confirm_running
        self._open: dict[Kind, Batch] = {}

    async def run(self, job: InFlight, options: BatchOptions) -> Response:
        """Run the request in a batch and return its answer. Raises what the dispatcher raises for the whole batch."""
        batch = self._batch_for(job, options)
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        # A member until it has its answer or is interrupted: only members get an answer.
        batch.members[job] = answer
        if batch.is_full:
            self._close(batch)
        try:
            return await answer
        except asyncio.CancelledError:
            # The others continue. The call of this request is marked as cancelled, and the dispatcher leaves it out.
            batch.members.pop(job, None)
            if batch.running is not None and not batch.members:
                # No request of the batch needs its answer any more. The last request ends only when the handler has
                # ended, so that the worker detects a handler that does not end; the others have already left the batch.
                batch.running.cancel()
                await asyncio.wait({batch.running})
            raise

    def _batch_for(self, job: InFlight, options: BatchOptions) -> Batch:
        """Return the batch of this kind that takes further requests; open one if there is none."""
        kind = (job.call.context.key, job.request.path, job.priority)
        batch = self._open.get(kind)
        if batch is None:
            batch = self._open[kind] = Batch(kind, options, self._clock.monotonic(), Wakeup(self._clock))
            # One task for each batch, not for the request that opened it: that one may be cancelled first.
            self._spawn(self._serve(batch))
        return batch

    def _close(self, batch: Batch) -> None:
        """Take no further requests into the batch."""
        if self._open.get(batch.kind) is batch:
            # A later batch of the same kind may be open by now, and stays.
            del self._open[batch.kind]
        batch.full.set()

    async def _serve(self, batch: Batch) -> None:
        """Wait for a slot, then for further requests; run the batch.

        It waits for the slot first, because no batch of a lower level may begin while this one waits for further
        requests. Under load the batch fills while it waits for its slot, so there is no further wait.
        """
        # One slot for all requests of the batch: its handler has one call at a time, in one thread.
        await self._slots.acquire(batch.kind[2])
        try:
            # Counted from the first request: the wait for the slot uses `max_wait` up.
            until = batch.opened_at + batch.options.max_wait
            if not batch.is_full and batch.members:
                await batch.full.wait(max(0.0, until - self._clock.monotonic()))
            self._close(batch)
            # Closed without an await before the run: no request can join a batch whose handler has its calls already.
            await self._run(batch)
        except Exception as error:  # every request must get an outcome
            _resolve(batch, list(batch.members), error)
        finally:
            self._slots.release()

    async def _run(self, batch: Batch) -> None:
        # Copied: an interruption during the run removes members, and answers are matched by position.
        jobs = list(batch.members)
        if not jobs:
            return  # all were interrupted while they waited
        group_id = jobs[0].group_id
        for job in jobs:
            # One Spark job group for the whole batch, so that a cancel of the batch finds its jobs.
            self._begin(job, group_id, len(jobs))
        if any(job.request.redelivered for job in jobs):  # one of them may have ended an earlier worker
            await self._confirm_running()
        if not batch.members:
            return  # all were interrupted during the confirm
        running = self._dispatcher.run_batch([job.call for job in jobs], group_id=group_id)
        batch.running = asyncio.ensure_future(running)
        try:
            # `wait` and not `await`: an error of the handler belongs to the requests, not to this task.
            await asyncio.wait({batch.running})
        finally:
            batch.running.cancel()  # no effect unless this task itself was cancelled
        if not batch.running.cancelled():
            _resolve(batch, jobs, batch.running.exception() or batch.running.result())


def _resolve(batch: Batch, jobs: list[InFlight], outcome: list[Response | None] | BaseException) -> None:
    """Give each waiting request its answer, or the exception."""
    for place, job in enumerate(jobs):
        answer = batch.members.get(job)
        # Interrupted meanwhile: the interruption has settled it.
        if answer is None or answer.done():
            continue
        response = None if isinstance(outcome, BaseException) else outcome[place]
        if response is not None:
            answer.set_result(response)
        else:
            answer.set_exception(outcome if isinstance(outcome, BaseException) else RuntimeError("no answer"))
