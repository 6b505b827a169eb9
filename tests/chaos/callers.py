"""Callers that record everything: what they published, what was confirmed, what came back into a durable queue.

They speak AMQP and do not use the client: what is judged must not depend on what is tested. A publish without a
confirm is not repeated; there is no promise for it.
"""

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any

from osrdyne import amqp
from osrdyne.errors import BrokerError
from osrdyne.protocol.deadlines import DEADLINE_HEADER
from osrdyne.protocol.messages import PATH_HEADER, Response
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.protocol.retries import RetryTerms, read_attempts
from tests.acceptance.daemon_process import until
from tests.chaos.beside import beside
from tests.chaos.checker import LIFETIME, Answered, Sent
from tests.chaos.rules import APP_ID, FLAKY_PATH
from tests.connections import keep_connected

KEYS = tuple(map(Key, ("a", "infra=42,timetable=24", "é 漢 🚄", "A", "%41", "/ # * . :\n'\"", "x" * 255)))
HEARTBEAT = 5
RPC_TIMEOUT = 10.0
PAUSE = (3.0, 15.0)
LONG_PAUSE = (15.0, 40.0)
"""Seconds, around all delays of the pool together, evidence of emptiness included: the group is unbound or about to end
after the one, ends or has ended after the other."""
LONGEST_SLEEP = 3.0
QUIET_TIMEOUT = 30.0
FLAKY_SHARE = 0.25
"""Of the requests, where they are tried again."""


class Limit(StrEnum):
    """How a request states for how long its caller waits."""

    NONE = "none"
    EXPIRATION = "expiration"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class Work:
    """`expected`, `attempts` and `fails` are those of `Sent`."""

    path: str
    body: object
    expected: str | None
    limit: Limit = Limit.NONE
    attempts: int = 1
    fails: bool = False


class Callers:
    """One connection for requests and one for answers, both made again whenever they are lost.

    Where the pool has requests tried again, `retry` says how, and some of them need it.
    """

    def __init__(self, uri: str, pool: str, *, seed: int, retry: RetryTerms | None = None) -> None:
        self._uri = uri
        self._names = PoolNames(pool)
        self._seed = seed
        self._retry = retry
        self._publisher: amqp.Channel | None = None
        self._stop = asyncio.Event()
        self.replies = f"replies-of-{pool}"
        self.sent: list[Sent] = []
        self.answers: list[Answered] = []
        self._answered: set[str] = set()
        self._held: Counter[str] = Counter()
        self._publishing: Counter[str] = Counter()

    @asynccontextmanager
    async def calling(self) -> AsyncIterator[None]:
        """Ask for all keys until the end of the block; then the answers are still collected by `collecting`."""
        async with asyncio.TaskGroup() as group:
            for number, key in enumerate(KEYS):
                group.create_task(self._ask(key, Random(f"{self._seed} {number}")))
            yield
            self._stop.set()

    def collecting(self) -> AbstractAsyncContextManager[None]:
        options: dict[str, Any] = {"name": "osrdyne chaos callers", "heartbeat": HEARTBEAT, "rpc_timeout": RPC_TIMEOUT}
        uses = (self._hold_publisher, self._collect)
        return beside(*(keep_connected(use, self._uri, **options) for use in uses))

    def waiting(self) -> list[str]:
        """Confirmed requests without an answer."""
        return [one.correlation_id for one in self.sent if one.confirmed and one.correlation_id not in self._answered]

    @asynccontextmanager
    async def quiet(self, key: Key) -> AsyncIterator[bool]:
        """Publish nothing for this key in the block; whether all that was sent to it before is answered."""
        self._held[key] += 1
        try:
            with suppress(AssertionError):
                await until(lambda: not self._is_in_use(key), "all is answered", timeout=QUIET_TIMEOUT)
            yield not self._is_in_use(key)
        finally:
            self._held[key] -= 1

    def _is_in_use(self, key: Key) -> bool:
        unanswered = set(self.waiting())
        return self._publishing[key] > 0 or any(one.correlation_id in unanswered for one in self.sent if one.key == key)

    # --- asking

    async def _ask(self, key: Key, random: Random) -> None:
        """Bursts, with pauses between them in which the group may end."""
        while not self._stop.is_set():
            async with asyncio.TaskGroup() as burst:
                for _ in range(random.randint(1, 8)):
                    burst.create_task(self._request(key, _draw_work(random, self._retry)))
            await self._pause(random.choice((0.1, 1.0, random.uniform(*PAUSE), random.uniform(*LONG_PAUSE))))

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()

    async def poison(self, key: Key) -> None:
        """A request that kills each worker that takes it, and must never be answered `ok`."""
        while self._publisher is None:
            await asyncio.sleep(0.2)
        await self._request(key, Work("/crash", {}, None))

    async def _request(self, key: Key, work: Work) -> None:
        """Publish one request and note whether it was confirmed."""
        while self._held[key]:
            await asyncio.sleep(0.1)
        channel = self._publisher
        if channel is None:
            return await self._pause(0.5)
        self._publishing[key] += 1
        at, confirmed = time.time(), False
        message = self._message(work, at=at)
        with suppress(BrokerError):
            await channel.publish(message, exchange=self._names.requests_exchange, routing_key=key, mandatory=True)
            confirmed = True
        self._publishing[key] -= 1
        self.sent.append(
            Sent(message.correlation_id or "", key, work.expected, confirmed, at, work.attempts, work.fails)
        )

    def _message(self, work: Work, *, at: float) -> amqp.Message:
        headers: dict[str, object] = {PATH_HEADER: work.path}
        if work.limit is Limit.DEADLINE:
            headers[DEADLINE_HEADER] = int((at + LIFETIME) * 1000)
        return amqp.Message(
            body=json.dumps(work.body).encode(),
            headers=headers,
            correlation_id=secrets.token_hex(8),
            reply_to=self.replies,
            content_type="application/json",
            app_id=APP_ID,
            expiration=str(int(LIFETIME * 1000)) if work.limit is Limit.EXPIRATION else None,
        )

    async def _hold_publisher(self, connection: amqp.Connection) -> None:
        try:
            self._publisher = await connection.channel(confirms=True)
            await self._publisher.wait_closed()
        finally:
            self._publisher = None

    # --- answers

    async def _collect(self, connection: amqp.Connection) -> None:
        channel = await connection.channel()
        await channel.declare_queue(self.replies, arguments={"x-queue-type": "quorum"})
        async for delivery in await channel.consume(self.replies, prefetch=100):
            response = Response.from_wire(
                headers=delivery.headers, body=delivery.body, content_type=delivery.properties.content_type
            )
            if not response.progress:
                correlation_id = delivery.properties.correlation_id or ""
                self._answered.add(correlation_id)
                body = delivery.body.decode("utf-8", "replace")
                attempts = max(1, read_attempts(response.headers))
                self.answers.append(Answered(correlation_id, str(response.status), body, time.time(), attempts))
            await delivery.ack()


def _draw_work(random: Random, retry: RetryTerms | None) -> Work:
    """No two requests have the same text: one of them may be refused because its worker was killed twice."""
    limit = random.choice(tuple(Limit))
    if retry is not None and random.random() < FLAKY_SHARE:
        return _flaky_work(random.randint(1, retry.max_attempts), retry, limit)
    if random.random() < 0.7:
        text = secrets.token_hex(8)
        return Work("/echo", text, json.dumps(text), limit)
    seconds = round(random.uniform(0, LONGEST_SLEEP), 2)
    answer = json.dumps({"slept": seconds}, separators=(",", ":"))
    body = {"seconds": seconds, "text": secrets.token_hex(8)}
    return Work(random.choice(("/sleep", "/sleep_thread")), body, answer, limit)


def _flaky_work(failures: int, retry: RetryTerms, limit: Limit) -> Work:
    """Fails so often; the last attempt that it gets may fail as well."""
    attempts, fails = min(failures + 1, retry.max_attempts), failures >= retry.max_attempts
    expected = None if fails else json.dumps({"attempt": attempts}, separators=(",", ":"))
    body = {"failures": failures, "text": secrets.token_hex(8)}
    return Work(FLAKY_PATH, body, expected, limit, attempts, fails)
