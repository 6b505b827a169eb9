"""Sends copies of poison requests to the address that the queue policy names (PoisonMessageDrop).

Each copy is sent once, after its dead letter is acknowledged, and never again: the poison inventory holds the request
in any case. A crash between the acknowledgement and the send loses the copy. Copies are sent concurrently with the dead
letter responder; while sending is slow, a bounded number of copies waits, and further ones are dropped and counted. The
host name of an HTTP endpoint is resolved and checked here, and the connection goes to the checked IP address, so that
the name cannot change in between. Redirects and proxies are not followed. Logs show host and port of a URL only.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from ipaddress import ip_network
from urllib.parse import quote, urlsplit, urlunsplit

import httpx

from osrdyne.aio.signals import Wakeup
from osrdyne.amqp import Channel, Connection, Delivery, Message
from osrdyne.errors import BrokerError
from osrdyne.ingress.policies.poison_drop import AmqpDrop, HttpDrop, Network, PoisonDrop, refuse_address
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.processors.poison.entries import DELIVERIES_HEADER, KEY_HEADER, REASON_HEADER
from osrdyne.protocol.messages import AUTHORIZATION_HEADER
from osrdyne.protocol.names import Key

SENDERS = 4
SEND_TIMEOUT = 10.0  # Seconds for one copy, with the resolution of the name.
MAX_WAITING = 200
MAX_WAITING_BYTES = 64 * 2**20

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


@dataclass(frozen=True, slots=True)
class _Copy:
    key: Key
    drop: PoisonDrop
    message: Message = field(repr=False)
    reason: str
    deliveries: int

    @property
    def size(self) -> int:
        return len(self.message.body)


class DropRefusedError(Exception):
    """A copy was not sent, or its receiver refused it. The message holds no secret."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """The IP addresses of a host."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(one[4][0]) for one in found]


class PoisonDrops:
    """The copies of one leader's term."""

    def __init__(
        self,
        context: TermContext,
        *,
        drop_of: Callable[[Key], PoisonDrop | None],
        connect: Callable[[], Awaitable[Connection]],
        resolve: Resolve = resolve,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`connect` opens a connection that is used for nothing else: a publish may close it."""
        self._names, self._metrics = context.names, context.metrics
        self._allowed: tuple[Network, ...] = tuple(map(ip_network, context.settings.requests.poison_drop_networks))
        self._drop_of = drop_of
        self._connect = connect
        self._resolve = resolve
        self._transport = transport
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()
        self._client: httpx.AsyncClient | None = None
        self._creating = asyncio.Lock()
        self._waiting: deque[_Copy] = deque()
        self._waiting_bytes = 0
        self._wakeup = Wakeup(context.clock)
        self._log: Logger = get_logger("poison_drop", pool=context.names.pool)

    def submit(self, key: Key, delivery: Delivery, *, reason: str, deliveries: int) -> None:
        """Send a copy of a request that is in the poison inventory, if its policy has an address. Does not wait."""
        drop = self._drop_of(key)
        if drop is None:
            return
        copy = _Copy(key, drop, drop_message(delivery, key, reason, deliveries), reason, deliveries)
        if len(self._waiting) >= MAX_WAITING or self._waiting_bytes + copy.size > MAX_WAITING_BYTES:
            self._count("dropped")
            self._log.warning("copy of a poison request dropped, too many wait", key=key, address=drop.shown)
            return
        self._waiting.append(copy)
        self._waiting_bytes += copy.size
        self._wakeup.set()

    async def run(self) -> None:
        """Send copies. Runs until cancelled."""
        room = asyncio.Semaphore(SENDERS)
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await self._wakeup.wait(None)
                    while self._waiting:
                        await room.acquire()
                        sending = group.create_task(self._send(self._next()), name="copy of a poison request")
                        sending.add_done_callback(lambda _: room.release())
        finally:
            if self._client is not None:
                await self._client.aclose()

    def _next(self) -> _Copy:
        copy = self._waiting.popleft()
        self._waiting_bytes -= copy.size
        return copy

    async def _send(self, copy: _Copy) -> None:
        # Crash before: the copy is not sent. After: it is not sent again.
        try:
            async with asyncio.timeout(SEND_TIMEOUT):
                if isinstance(copy.drop, AmqpDrop):
                    await self._publish(copy, copy.drop)
                else:
                    await self._post(copy, copy.drop)
        except Exception as error:
            # No behaviour of the receiver may end the leader's term. The text of an error of httpx may hold the URL.
            reason = str(error) if isinstance(error, DropRefusedError | BrokerError) else type(error).__name__
            self._count("failed")
            self._log.warning("copy of a poison request not sent", key=copy.key, address=copy.drop.shown, error=reason)
        else:
            self._count("sent")
            self._log.info("copy of a poison request sent", key=copy.key, address=copy.drop.shown)

    def _count(self, outcome: str) -> None:
        self._metrics.poison_drops.labels(outcome=outcome).inc()

    async def _publish(self, copy: _Copy, drop: AmqpDrop) -> None:
        if self._names.owns(drop.exchange) or (not drop.exchange and self._names.owns(drop.routing_key)):
            raise DropRefusedError("it is a queue or an exchange of the pool itself")
        connection = await self._connected()
        # A channel for each copy: a missing exchange closes the channel, and a refusal concerns this copy alone.
        channel: Channel = await connection.channel(confirms=True)
        try:
            # Mandatory: with a missing queue the copy is refused and counted, and not lost silently.
            await channel.publish(copy.message, exchange=drop.exchange, routing_key=drop.routing_key, mandatory=True)
        finally:
            with suppress(BrokerError):
                await channel.close()

    async def _connected(self) -> Connection:
        async with self._opening:
            if self._connection is None or self._connection.is_closed:
                self._connection = await self._connect()
            return self._connection

    async def _http_client(self) -> httpx.AsyncClient:
        """Created for the first copy that needs it, in a thread: it loads the certificates of all authorities."""
        async with self._creating:
            if self._client is None:
                self._client = await asyncio.to_thread(
                    httpx.AsyncClient,
                    transport=self._transport,
                    timeout=SEND_TIMEOUT,
                    follow_redirects=False,
                    trust_env=False,
                )
            return self._client

    async def _post(self, copy: _Copy, drop: HttpDrop) -> None:
        try:
            addresses = await self._resolve(drop.host, drop.port)
        except OSError as error:
            raise DropRefusedError("the name of its host cannot be resolved") from error
        for address in addresses:
            # All addresses: a name may stand for a public and a loopback address, in any order.
            if (why := refuse_address(address, self._allowed)) is not None:
                raise DropRefusedError(f"{why}; requests.poison_drop_networks can allow it")
        if not addresses:
            raise DropRefusedError("the name of its host has no address")
        headers = {
            "host": _host_header(drop),
            "content-type": copy.message.content_type or "application/octet-stream",
            "x-osrdyne-pool": self._names.pool,
            "x-osrdyne-key": quote(copy.key, safe=""),
            "x-osrdyne-poison-reason": copy.reason,
            "x-osrdyne-poison-deliveries": str(copy.deliveries),
        }
        if copy.message.content_encoding:
            headers["content-encoding"] = copy.message.content_encoding
        if copy.message.correlation_id is not None:
            headers["x-osrdyne-correlation-id"] = quote(copy.message.correlation_id, safe="", errors="surrogateescape")
        client = await self._http_client()
        request = client.build_request(
            "POST",
            _resolved(drop, addresses[0]),
            content=copy.message.body,
            headers={name: _header(value) for name, value in headers.items()},
            # The certificate must be that of the name, not of the address that is connected to.
            extensions={"sni_hostname": drop.host} if drop.secure else {},
        )
        answer = await client.send(request, stream=True)
        await answer.aclose()  # its body may be of any size
        if not answer.is_success:
            raise DropRefusedError(f"it answered {answer.status_code}")


def drop_message(delivery: Delivery, key: Key, reason: str, deliveries: int) -> Message:
    """The copy as an AMQP message: the request without the client's credentials and without a reply address."""
    kept = {name: value for name, value in delivery.headers.items() if name.lower() != AUTHORIZATION_HEADER}
    ours = {KEY_HEADER: key, REASON_HEADER: reason, DELIVERIES_HEADER: deliveries}
    # A consumer of the copy must not answer the client, which has its answer.
    return replace(delivery.to_message(headers={**kept, **ours}, expiration=None), reply_to=None)


def _host_header(drop: HttpDrop) -> str:
    return urlsplit(drop.url).netloc


def _resolved(drop: HttpDrop, address: str) -> str:
    """The URL with the address instead of the name."""
    host = f"[{address}]" if ":" in address else address
    parts = urlsplit(drop.url)
    return urlunsplit((parts.scheme, f"{host}:{drop.port}", parts.path or "/", parts.query, ""))


def _header(value: str) -> str:
    """A value that fits into an HTTP header: properties of messages may hold anything."""
    return "".join(character if " " <= character <= "~" else "?" for character in value)
