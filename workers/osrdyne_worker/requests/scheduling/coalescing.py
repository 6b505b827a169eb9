"""Coalescing: identical requests that are in this worker at the same time are answered by one run of their handler.

It applies to handlers with `coalesce`, and to requests whose route has `coalesce: true`. Each request has its own task,
which waits here for its answer. The processor handles its deadline, cancel, retry, reply and acknowledgement. So if the
worker dies, the effect on each request is the same as for a request that runs by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from osrdyne.aio.clock import Clock
from osrdyne.protocol.messages import Response
from osrdyne.protocol.names import Key
from osrdyne_worker.app.app import Context
from osrdyne_worker.app.call import Answer, Call
from osrdyne_worker.app.errors import CallCancelledError
from osrdyne_worker.requests.dispatch import Dispatcher
from osrdyne_worker.requests.inflight import InFlight
from osrdyne_worker.requests.scheduling.priorities import Slots

MAX_SHARING = 100
"""Requests of one run that do not count towards the prefetch: for each of them RabbitMQ delivers a further request."""

Identity = tuple[Key, str, bytes, str | None, str | None, str | None, str | None]
"""Key, path, body, its content type and encoding, the content type of the answer, and the principal."""


@dataclass(slots=True, eq=False)
class SharedRun:
    """One run of a handler, and the requests that it answers. `call` is what the handler gets."""

    identity: Identity
    priority: int
    group_id: str
    call: Call
    members: dict[InFlight, asyncio.Future[Response]] = field(default_factory=dict)
    """The requests that were not interrupted, each with the future of its answer."""
    has_begun: bool = False
    has_slot: bool = False
    running: asyncio.Task[Response] | None = None


class Coalescing:
    """The runs of coalescing handlers in one worker. Used on the event loop only.

    `begin` marks a request as running in a job group; `confirm_running` returns when RabbitMQ has the names of the
    running requests; `context` returns that of requests that begin now. `may_abandon` decides whether the handler of a
    run may continue without a slot, after the last of its requests was interrupted.
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
        context: Callable[[], Context],
        may_abandon: Callable[[InFlight], bool],
    ) -> None:
        self._dispatcher = dispatcher
        self._slots = slots
        self._clock = clock
        self._spawn = spawn
        self._begin = begin
        self._confirm_running = confirm_running
        self._context = context
        self._may_abandon = may_abandon
        self._runs: dict[Identity, SharedRun] = {}

    async def run(self, job: InFlight) -> Response:
        """Run the request, alone or with identical ones, and return its answer. Raises what the dispatcher raises."""
        run = self._run_for(job)
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        # A member until it has its answer or is interrupted: only members get an answer.
        run.members[job] = answer
        if run.has_begun:
            self._begin_member(run, job)
        elif len(run.members) > 1:
            # Not the first one: otherwise requests that all differ would move the whole queue into this worker.
            self._set_aside(run, job)
        try:
            return await answer
        except asyncio.CancelledError:
            # The others continue, even if it was the first one.
            run.members.pop(job, None)
            if not run.members:
                # No request needs the answer any more. Closed first: a request that arrives now gets another run.
                self._close(run)
                run.call.cancel()
                if run.running is not None:
                    run.running.cancel()
                    if self._may_abandon(job):
                        self._free_slot(run)
                    # As any other cancelled request, the last one ends only when the handler has ended.
                    await asyncio.wait({run.running})
            raise

    def _run_for(self, job: InFlight) -> SharedRun:
        request = job.request
        identity = (
            job.call.context.key,
            request.path,
            request.body,
            request.content_type,
            request.content_encoding,
            request.accept,
            request.principal,  # a handler may answer each principal differently
        )
        run = self._runs.get(identity)
        if run is not None:
            # A run that has begun uses the data of its beginning, which may be too old for this request after a reload.
            # A run that waits for its slot has a priority: a request with a higher one must not wait behind it.
            fits = run.call.context is self._context() if run.has_begun else run.priority <= job.priority
            if fits:
                return run
        call = Call(self._context(), request, clock=self._clock, max_bytes=job.call.max_bytes)
        run = self._runs[identity] = SharedRun(identity, job.priority, job.group_id, call)
        call.attach(lambda answer: _send_progress(run, answer))
        # Not the task of the first request, which may be cancelled before the others.
        self._spawn(self._serve(run))
        return run

    def _begin_member(self, run: SharedRun, job: InFlight) -> None:
        self._begin(job, run.group_id, 1)
        # The handler may work until the last deadline of its requests.
        run.call.set_timeout(max(run.call.deadline, job.call.deadline))
        self._set_aside(run, job)

    def _set_aside(self, run: SharedRun, job: InFlight) -> None:
        """Make RabbitMQ deliver a further request in the place of this one: it may be identical, too."""
        if len(run.members) <= MAX_SHARING:
            job.set_aside()

    def _free_slot(self, run: SharedRun) -> None:
        if run.has_slot:
            run.has_slot = False
            self._slots.release()

    def _close(self, run: SharedRun) -> None:
        if self._runs.get(run.identity) is run:
            del self._runs[run.identity]

    async def _serve(self, run: SharedRun) -> None:
        """Wait for a slot, and run the handler in it."""
        await self._slots.acquire(run.priority)
        run.has_slot = True
        try:
            if run.members:
                await self._run(run)
        except Exception as error:  # every request must get an outcome
            self._resolve(run, error)
        finally:
            self._close(run)
            self._free_slot(run)

    async def _run(self, run: SharedRun) -> None:
        run.has_begun = True
        run.call.context = self._context()
        run.call.set_timeout(0.0)
        for job in list(run.members):
            self._begin_member(run, job)
        if any(job.request.redelivered for job in run.members):  # it may have ended an earlier worker
            await self._confirm_running()
        if not run.members:
            return  # all were interrupted during the confirm
        run.running = asyncio.ensure_future(self._answer(run))
        try:
            # `wait` and not `await`: an error of the handler belongs to the requests, not to this task.
            await asyncio.wait({run.running})
        finally:
            run.running.cancel()  # no effect unless this task itself was cancelled
        if not run.running.cancelled():
            self._resolve(run, run.running.exception() or run.running.result())

    async def _answer(self, run: SharedRun) -> Response:
        response = await self._dispatcher.run(run.call, group_id=run.group_id)
        assert isinstance(response, Response), "streams are attached to requests that run by themselves only"
        return response

    def _resolve(self, run: SharedRun, outcome: Response | BaseException) -> None:
        """Give each waiting request the answer, or the exception."""
        # First, and without an await: no request may join a run that has its outcome.
        self._close(run)
        for answer in run.members.values():
            if answer.done():
                continue
            if isinstance(outcome, BaseException):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)


def _send_progress(run: SharedRun, answer: Answer) -> None:
    for job in tuple(run.members):
        with suppress(CallCancelledError):  # this request was cancelled, the others were not
            job.call.progress(answer)
