"""Progress: non-terminating replies, sent from whatever thread a handler runs in. Used by the processor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from osrdyne.errors import OsrdyneError
from osrdyne.logs import get_logger
from osrdyne_worker.app.call import Answer, CallCancelledError
from osrdyne_worker.app.codec import answer_to_response
from osrdyne_worker.requests.inflight import InFlight
from osrdyne_worker.requests.replies import ReplySender

LOOK_INTERVAL = 0.5
"""Seconds between two looks whether the call was cancelled, while its progress is under way."""

log = get_logger("worker")


class ProgressSender:
    """Made on the event loop; `send` may be called from any thread."""

    def __init__(self, sender: ReplySender, spawn: Callable[..., asyncio.Task[None]]) -> None:
        self._sender = sender
        self._spawn = spawn
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()

    def send(self, job: InFlight, answer: Answer) -> None:
        """Send one value. A thread waits until RabbitMQ has it; a coroutine goes on, and the answer waits instead."""
        sending = self._sender.send(job.link.replies, job.request, answer_to_response(answer, progress=True))
        if threading.get_ident() != self._loop_thread:
            _wait(job, asyncio.run_coroutine_threadsafe(sending, self._loop))
            return
        task = self._spawn(_quietly(sending))
        job.progress.add(task)
        task.add_done_callback(job.progress.discard)


def _wait(job: InFlight, future: Future[None]) -> None:
    while True:
        try:
            return future.result(timeout=LOOK_INTERVAL)
        except TimeoutError:
            job.call.raise_if_cancelled()
        except OsrdyneError as error:
            raise CallCancelledError("The progress could not be sent.") from error


async def _quietly(sending: Coroutine[Any, Any, None]) -> None:
    """A coroutine cannot wait for its progress; that the link is lost is found out by the answer."""
    try:
        await sending
    except OsrdyneError as error:
        log.debug("progress was not sent", reason=error.message)
