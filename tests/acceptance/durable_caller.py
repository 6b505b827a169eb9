"""A caller that loses nothing: requests published with confirms, answers in a durable queue. It survives the broker."""

import asyncio
import json
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

from daemon_process import PATIENCE, until

from osrdyne import amqp
from osrdyne.errors import BrokerError
from osrdyne.protocol.messages import PATH_HEADER, Response
from osrdyne.protocol.names import Key, PoolNames
from tests.connections import keep_connected


class DurableCaller:
    """`answers` holds what came back, by correlation id; a confirmed request must get one, and may get more."""

    def __init__(self, uri: str, pool: str) -> None:
        self._uri = uri
        self._names = PoolNames(pool)
        self._queue = f"{pool}-test-replies"
        self._channel: amqp.Channel | None = None
        self.answers: dict[str, list[Response]] = defaultdict(list)
        self.confirmed: list[str] = []

    async def run(self) -> None:
        """Collect answers until cancelled; connect again whenever the connection is lost."""
        await keep_connected(self._use, self._uri, name="osrdyne durable caller", heartbeat=5)

    async def _use(self, connection: amqp.Connection) -> None:
        try:
            channel = await connection.channel(confirms=True)
            await channel.declare_queue(self._queue, arguments={"x-queue-type": "quorum"})
            self._channel = await connection.channel(confirms=True)
            async for delivery in await channel.consume(self._queue, prefetch=100):
                correlation_id, response = answer_in(delivery)
                if not response.progress:
                    self.answers[correlation_id].append(response)
                await delivery.ack()
        finally:
            self._channel = None

    async def until_connected(self) -> amqp.Channel:
        channel = await until(lambda: self._channel, "the caller is connected")
        assert channel is not None
        return channel

    async def send(self, key: str, path: str = "/info", body: object = None, *, expiration: float | None = None) -> str:
        """Publish; returns the correlation id once the broker has confirmed. Tries until it has."""
        correlation_id = secrets.token_hex(8)
        message = amqp.Message(
            body=b"" if body is None else json.dumps(body).encode(),
            headers={PATH_HEADER: path},
            correlation_id=correlation_id,
            reply_to=self._queue,
            content_type="application/json",
            expiration=None if expiration is None else str(int(expiration * 1000)),
        )
        exchange = self._names.requests_exchange
        while True:
            channel = await self.until_connected()
            with suppress(BrokerError):
                await channel.publish(message, exchange=exchange, routing_key=Key(key), mandatory=True)
                self.confirmed.append(correlation_id)
                return correlation_id
            await asyncio.sleep(0.05)

    async def answer(self, correlation_id: str, *, timeout: float = PATIENCE) -> Response:
        found = await until(lambda: self.answers.get(correlation_id), "the request is answered", timeout=timeout)
        return found[0]

    async def call(self, key: str, *request: Any, expiration: float | None = None) -> Response:
        return await self.answer(await self.send(key, *request, expiration=expiration))

    async def info(self, key: str) -> dict[str, object]:
        """The `/info` answer of the worker of `key`."""
        response = await self.call(key)
        assert response.status == "ok", response
        info: dict[str, object] = json.loads(response.body)
        assert info["key"] == key
        return info

    def unanswered(self, correlation_ids: Iterable[str] | None = None) -> list[str]:
        wanted = self.confirmed if correlation_ids is None else correlation_ids
        return [one for one in wanted if not self.answers.get(one)]

    async def until_all_answered(self) -> None:
        """Every request confirmed so far has an answer, and each of its answers has the same status."""
        await until(lambda: not self.unanswered(), "every confirmed request is answered")

    def statuses(self, correlation_ids: Iterable[str] | None = None) -> set[str]:
        wanted = self.confirmed if correlation_ids is None else correlation_ids
        return {str(answer.status) for one in wanted for answer in self.answers[one]}


def answer_in(delivery: amqp.Delivery) -> tuple[str, Response]:
    """Correlation id and answer."""
    properties = delivery.properties
    response = Response.from_wire(headers=delivery.headers, body=delivery.body, content_type=properties.content_type)
    return properties.correlation_id or "", response


@asynccontextmanager
async def durable_caller(uri: str, pool: str) -> AsyncIterator[DurableCaller]:
    caller = DurableCaller(uri, pool)
    running = asyncio.create_task(caller.run())
    try:
        await caller.until_connected()
        yield caller
        if running.done():
            running.result()
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
