"""Progress of the session's jobs (of Spark) to the callers that ask for it with `x-job-progress`.

One task for all requests of the worker, which runs only while there is such a request. Requests that share a run, such
as a batch, get the progress of the run. The final answer of a request always comes last. Made by the processor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from osrdyne.aio.clock import Clock
from osrdyne.logs import get_logger
from osrdyne.protocol.messages import JOB_PROGRESS_HEADER, JSON_TYPE
from osrdyne.protocol.progress import JOB_PROGRESS_INTERVAL, JobProgress
from osrdyne_worker.app.call import Answer
from osrdyne_worker.requests.dispatch import Dispatcher
from osrdyne_worker.requests.inflight import InFlight, Phase
from osrdyne_worker.requests.replies import ProgressSender

QUERY_TIMEOUT = 5.0
"""Seconds for the session to answer; if it does not, this round is left out."""

log = get_logger("worker")


class JobProgressSender:
    """Sends the progress of the requests in `jobs` whose callers want it, every `JOB_PROGRESS_INTERVAL` seconds."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        progress: ProgressSender,
        clock: Clock,
        spawn: Callable[..., asyncio.Future[None]],
        *,
        session: Callable[[], Any],
        jobs: Callable[[], Iterable[InFlight]],
    ) -> None:
        self._dispatcher = dispatcher
        self._progress = progress
        self._clock = clock
        self._spawn = spawn
        self._session = session
        self._jobs = jobs
        self._running: asyncio.Future[None] | None = None
        self._sent: dict[str, JobProgress] = {}
        """What was sent last, by group."""

    def watch(self) -> None:
        """Begin to send; called when a request arrives that wants it."""
        if self._running is None or self._running.done():
            self._running = self._spawn(self._run())

    async def _run(self) -> None:
        while wanted := self._wanted():
            groups = {job.group_id for job in wanted if _works(job)}
            self._sent = {group: sent for group, sent in self._sent.items() if group in groups}
            for group in groups:
                await self._report(group)
            await self._clock.sleep(JOB_PROGRESS_INTERVAL)

    def _wanted(self) -> list[InFlight]:
        return [job for job in self._jobs() if job.request.wants_job_progress]

    async def _report(self, group: str) -> None:
        try:
            async with asyncio.timeout(QUERY_TIMEOUT):
                progress = await self._dispatcher.job_progress(self._session(), group)
        except Exception as error:  # of the session, which the health check watches
            log.debug("progress of jobs unknown", group=group, error=str(error))
            return
        if not progress.tasks_total or progress == self._sent.get(group):
            return  # no job has begun, or nothing has changed
        self._sent[group] = progress
        answer = Answer(progress.to_json(), content_type=JSON_TYPE, headers={JOB_PROGRESS_HEADER: True})
        for job in self._wanted():
            # Again, without an await before the send: a request that is answered must get nothing more.
            if job.group_id == group and _works(job):
                self._progress.send(job, answer)


def _works(job: InFlight) -> bool:
    return job.in_handler and job.phase is Phase.RUNNING and job.interruption is None
