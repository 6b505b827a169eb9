"""Stands in for a pool in tests of the client: its exchanges, one request queue, and answers by a function."""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from osrdyne.amqp import Channel, ConnectionOptions, Delivery, Message, connect
from osrdyne.errors import BrokerUnavailableError
from osrdyne.protocol.messages import JOB_PROGRESS_HEADER, Request, Response
from osrdyne.protocol.names import PoolNames, QueueName
from osrdyne.protocol.progress import JobProgress
from osrdyne.testing.fakes.amqp import delete_exchange
from tests.integration.broker_api import PATIENCE, until

Answer = Callable[[Request], Iterable[Response]]


def echo(request: Request) -> list[Response]:
    return [Response(body=request.body, content_type=request.content_type, worker_id="echo")]


def silence(request: Request) -> list[Response]:
    return []


JOBS = JobProgress(jobs=1, stages_done=1, stages_total=2, tasks_done=3, tasks_total=8, rows=1000)


def with_progress(request: Request) -> list[Response]:
    """Progress of jobs and three parts, for a caller that asks for them, and a last answer."""
    headers = {JOB_PROGRESS_HEADER: True}
    jobs = [Response(body=JOBS.to_json(), progress=True, headers=headers)] if request.wants_job_progress else []
    steps = [Response(body=str(step).encode(), progress=True) for step in range(3 if request.wants_progress else 0)]
    return [*jobs, *steps, Response(body=b"last")]


def waiting(arrived: threading.Event) -> Answer:
    """Answers nothing, and shows that a request has arrived."""

    def wait(request: Request) -> list[Response]:
        arrived.set()
        return []

    return wait


class Responder:
    """`async with Responder(uri, pool, keys, answer) as responder:`; `requests` holds everything that came, raw."""

    def __init__(
        self,
        uri: str,
        pool: str,
        keys: Iterable[str] = ("k",),
        answer: Answer = echo,
        *,
        queue_arguments: dict[str, object] | None = None,
        consume: bool = True,
    ) -> None:
        self.names = PoolNames(pool)
        self.queue = QueueName(f"{pool}-req-test")
        self.requests: asyncio.Queue[Delivery] = asyncio.Queue()
        self._uri = uri
        self._keys = tuple(keys)
        self._answer = answer
        self._arguments = {"x-queue-type": "quorum", **(queue_arguments or {})}
        self._consume = consume

    async def __aenter__(self) -> Self:
        self._connection = await connect(ConnectionOptions(self._uri, name="test responder"))
        self.channel: Channel = await self._connection.channel(confirms=True)
        await self.channel.declare_exchange(self.names.requests_exchange, "direct")
        await self.channel.declare_exchange(self.names.cancel_exchange, "fanout")
        await self.channel.declare_queue(self.names.cancel_queue)
        await self.channel.bind_queue(self.names.cancel_queue, self.names.cancel_exchange)
        await self.channel.declare_queue(self.queue, arguments=self._arguments)
        for key in self._keys:
            await self.channel.bind_queue(self.queue, self.names.requests_exchange, key)
        self._task = asyncio.create_task(self._serve()) if self._consume else None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if not self.channel.is_closed:
            await self.channel.delete_queue(self.queue)
            await self.channel.delete_queue(self.names.cancel_queue)
            await delete_exchange(self.channel, self.names.requests_exchange)
            await delete_exchange(self.channel, self.names.cancel_exchange)
        await self._connection.close()

    async def next_cancel(self) -> Delivery:
        """The next message on the cancel queue."""
        found: Delivery = await until(lambda: self.channel.get(self.names.cancel_queue))
        return found

    async def _serve(self) -> None:
        consumer = await self.channel.consume(self.queue, prefetch=300)
        try:
            async for delivery in consumer:
                self.requests.put_nowait(delivery)
                await self._reply(delivery)
                await delivery.ack()
        except BrokerUnavailableError:
            return

    async def _reply(self, delivery: Delivery) -> None:
        request = delivery.to_request(now_ms=0)
        for response in self._answer(request):
            message = Message(
                body=response.body,
                headers=response.wire_headers(),
                correlation_id=request.correlation_id,
                content_type=response.content_type,
            )
            await self.channel.publish(message, exchange="", routing_key=request.reply_to or "")


@contextmanager
def responder_in_a_thread(
    uri: str, pool: str, answer: Answer = echo, *, keys: Iterable[str] = ("k",)
) -> Iterator[queue.SimpleQueue[Delivery]]:
    """A responder on a loop of its own, for tests that block theirs. Gives what comes on the cancel queue."""
    ready, done = threading.Event(), threading.Event()
    cancels: queue.SimpleQueue[Delivery] = queue.SimpleQueue()

    async def run() -> None:
        async with Responder(uri, pool, keys, answer) as responder:
            ready.set()
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(watch(responder))
                await asyncio.to_thread(done.wait)
                watching.cancel()

    async def watch(responder: Responder) -> None:
        async for delivery in await responder.channel.consume(responder.names.cancel_queue, no_ack=True):
            cancels.put(delivery)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        yield cancels
    finally:
        done.set()
        thread.join(PATIENCE)
