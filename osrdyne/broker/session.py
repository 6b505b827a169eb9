"""A leader's session with RabbitMQ, for one term: three connections, the token channel, and everything built on them.

All of it opens and closes together, and nothing reconnects. A lost session ends the term, and the daemon begins again
as a standby, without any state of that term (lifecycle: term-ends-whole).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

from osrdyne.aio.clock import Clock
from osrdyne.amqp import Channel, Connection, ConnectionOptions, Message, connect
from osrdyne.amqp.errors import describe_end
from osrdyne.amqp.tls import ssl_context
from osrdyne.amqp.version import BrokerVersion
from osrdyne.broker.leadership.channel_pool import ChannelPool, LeaderChannels
from osrdyne.broker.leadership.token import Token, TokenChannel, TokenPublisher, TokenTimes
from osrdyne.broker.management.apply import declare_topology
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.publishing.proofs import Proofs
from osrdyne.broker.publishing.publisher import LeaderPublisher
from osrdyne.broker.queues.durability import QueueDurability
from osrdyne.broker.queues.quarantine import Quarantine
from osrdyne.broker.queues.request_queues import RequestQueueCommands
from osrdyne.broker.queues.retry_queues import RetryQueueCommands
from osrdyne.broker.queues.snapshots import SnapshotQueue
from osrdyne.broker.topology.declarations import Topology, pool_topology
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.config.models import Settings
from osrdyne.errors import (
    BrokerConflictError,
    BrokerError,
    BrokerNotFoundError,
    BrokerUnavailableError,
)
from osrdyne.logs import Logger, get_logger
from osrdyne.protocol.names import PoolNames

Connect = Callable[[ConnectionOptions], Awaitable[Connection]]


def connection_options(settings: Settings, *, purpose: str, heartbeat: float) -> ConnectionOptions:
    """Options for a connection of the controller; its name in RabbitMQ's management pages contains `purpose`."""
    broker = settings.broker
    return ConnectionOptions(
        uri=broker.uri.get_secret_value(),
        name=f"osrdyne {settings.pool.id} {purpose} {socket.gethostname()}",
        # Whole seconds and never 0, which switches heartbeats off in AMQP: a dead leader would keep the token.
        heartbeat=max(1, round(heartbeat)),
        connect_timeout=broker.connect_timeout,
        rpc_timeout=broker.rpc_timeout,
        tls=ssl_context(broker.effective_tls(), place="broker.tls") if broker.uses_amqps else None,
    )


class LeaderSession:
    """The open connections of a leader or standby."""

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Clock,
        quarantine: Quarantine | None = None,
        connect: Connect = connect,
        last_term: Callable[[], Awaitable[int | None]] | None = None,
        on_forged: Callable[[], None] | None = None,
    ) -> None:
        """`last_term` returns the term that a leader of the pool last announced. `on_forged` is called for each message
        in the leader queue that is not a token of this pool's daemons."""
        self._settings = settings
        self._clock = clock
        self._quarantine = quarantine or Quarantine(clock)
        self._connect_to_broker = connect
        self._last_term = last_term
        self._on_forged = on_forged
        self.names = PoolNames(settings.pool.id)
        self.control: Connection
        self.publishing: Connection
        self.consuming: Connection
        self.publisher: LeaderPublisher
        self.token: TokenChannel
        self._channels: LeaderChannels
        self._durability: QueueDurability
        self._open: list[Connection] = []
        self._closing: list[asyncio.Task[None]] = []
        self._log: Logger = get_logger("leader", pool=settings.pool.id)

    async def __aenter__(self) -> Self:
        try:
            await self._connect()
        except BaseException:
            # A consumer that stays open would receive the token, and no daemon would lead.
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _connect(self) -> None:
        broker = self._settings.broker
        control = connection_options(self._settings, purpose="leader", heartbeat=broker.leader_heartbeat)
        publishing = connection_options(self._settings, purpose="publisher", heartbeat=broker.heartbeat)
        # Requests may be large: on a connection of their own they delay neither heartbeats nor answers of `control`.
        # Its heartbeat is as short, so that requests of a silent leader return to their queues when the token does.
        consuming = connection_options(self._settings, purpose="consumer", heartbeat=broker.leader_heartbeat)
        self.control, self.publishing, self.consuming = await self._open_connections(control, publishing, consuming)
        self.publisher = await LeaderPublisher.open(
            self.publishing, open_another=self._open_for_replies, clock=self._clock
        )
        self.token = TokenChannel(
            # T, on the control connection: nothing is published there, and nothing large is read.
            await self.control.channel(),
            names=self.names,
            host=socket.gethostname(),
            publisher=TokenPublisher(
                publish=lambda message: self.publisher.publish(
                    message, exchange="", routing_key=self.names.leader_queue, mandatory=True
                ),
                is_blocked=lambda: self.publishing.is_blocked,
                user=await self._verified_user(),
            ),
            times=TokenTimes.of(heartbeat=broker.leader_heartbeat, reattaches=self.version.reattaches_consumers),
            reopen=self.control.channel,
            last_term=self._last_term,
            on_forged=self._on_forged,
            clock=self._clock,
        )
        self._channels = LeaderChannels(
            token=self.token,
            spare=ChannelPool(self.control),
            probing=ChannelPool(self.control),
            declaring=ChannelPool(self.control),
            publisher=self.publisher,
        )
        self._durability = QueueDurability(
            self.names, self._channels.spare, term=lambda: self.token.term, clock=self._clock
        )
        # Last: it publishes a token with the verified user.
        await self._ensure_token()

    async def _verified_user(self) -> str | None:
        """Return the user in the URI if RabbitMQ accepts messages with this `user-id`.

        None if RabbitMQ has another name for the connection's user, as with OAuth 2. Then tokens carry no user. Raises
        `BrokerAccessError` if the user may not publish to the default exchange at present: that says nothing about its
        name, and once it may again a term without a verified user would begin.
        """
        user = unquote(urlsplit(self._settings.broker.uri.get_secret_value()).username or "guest")
        # On a channel of its own, which a refusal closes.
        trial = await self.publishing.channel(confirms=True)
        try:
            # No queue has this name: RabbitMQ checks the user before it routes.
            await trial.publish(Message(user_id=user), exchange="", routing_key=f"{self.names.pool}-user")
        except BrokerConflictError as error:
            self._log.warning("tokens carry no user: forged tokens cannot be detected", user=user, error=str(error))
            return None
        await trial.close()
        return user

    async def _open_connections(self, *options: ConnectionOptions) -> list[Connection]:
        """Open all of them at once. Raises the first error after every attempt has ended."""
        opened = await asyncio.gather(*map(self._open_connection, options), return_exceptions=True)
        for one in opened:
            # The caller closes the open ones, which are in `_open`.
            if isinstance(one, BaseException):
                raise one
        return [one for one in opened if isinstance(one, Connection)]

    async def _open_connection(self, options: ConnectionOptions) -> Connection:
        connection = await self._connect_to_broker(options)
        self._open.append(connection)
        return connection

    async def _open_for_replies(self) -> Connection:
        return await self.open_another("replies")

    async def open_another(self, purpose: str) -> Connection:
        """Open a further connection, for publishes that may close it. It is closed with the session at the latest."""
        heartbeat = self._settings.broker.heartbeat
        self._open = [connection for connection in self._open if not connection.is_closed]
        return await self._open_connection(connection_options(self._settings, purpose=purpose, heartbeat=heartbeat))

    async def _ensure_token(self) -> None:
        """Make sure that the leader queue and a token exist (lifecycle: token-queue)."""
        queue = next(queue for queue in pool_topology(self.names.pool).queues if queue.name == self.names.leader_queue)
        channel = await self.control.channel()
        try:
            info = await channel.declare_queue(queue.name, passive=True)
        except BrokerNotFoundError:
            channel = await self.control.channel()
            info = await channel.declare_queue(queue.name, arguments=queue.arguments)
        await channel.close()
        # Two daemons may both publish: several tokens are harmless, because one consumer is active at a time.
        if info.ready == 0 and info.consumers == 0:
            token = Token(0, "").to_message(self.token.user)
            await self.publisher.publish(token, exchange="", routing_key=queue.name, mandatory=True)

    @property
    def version(self) -> BrokerVersion:
        return BrokerVersion.parse(self.control.server_version)

    @property
    def is_blocked(self) -> bool:
        """Whether a memory or disk alarm keeps this daemon from publishing, also while it connects."""
        return any(connection.is_blocked for connection in self._open)

    def proofs(self) -> Proofs:
        """The proofs for the consumers of the controller's queues."""
        return Proofs(
            self.publisher,
            user=self.token.user,
            # So long RabbitMQ may take an earlier leader for the active consumer of a queue.
            patience=3 * self.control.options.heartbeat,
            reattaches=self.version.reattaches_consumers,
        )

    def request_queues(self, management: ManagementClient, layout: QueueLayout | None = None) -> RequestQueueCommands:
        """Commands on request queues; without a layout, those of a direct pool."""
        return RequestQueueCommands(
            channels=self._channels,
            management=management,
            quarantine=self._quarantine,
            durability=self._durability,
            layout=layout or QueueLayout(self.names),
            clock=self._clock,
            reattaches=self.version.reattaches_consumers,
        )

    def retry_queues(self, management: ManagementClient) -> RetryQueueCommands:
        """Commands on the wait queues."""
        return RetryQueueCommands(
            names=self.names,
            channels=self._channels,
            durability=self._durability,
            management=management,
            declare=self.declare,
            clock=self._clock,
        )

    def snapshots(self, name: str, management: ManagementClient) -> SnapshotQueue:
        """The queue for snapshots of this name."""
        return SnapshotQueue(
            name,
            names=self.names,
            channels=self._channels,
            durability=self._durability,
            management=management,
            clock=self._clock,
        )

    async def declare(self, topology: Topology) -> None:
        """Declare infrastructure, on a channel of its own, which a conflict (`BrokerConflictError`) closes."""
        channel = await self.control.channel()
        await declare_topology(channel, topology)
        await channel.close()

    async def declare_persisted(self, topology: Topology) -> None:
        """Declare queues and wait until RabbitMQ has persisted them: otherwise a node that is killed could lose
        messages that they have confirmed (decision 0020)."""
        await self.declare(topology)
        try:
            await self._durability.persist()
        except BrokerConflictError as error:
            # The term goes on: only a node that is killed within a second could lose messages.
            self._log.warning("queue durability helper failed", error=str(error))

    async def channel(self) -> Channel:
        """Open a channel for a consumer, which also carries its acknowledgements."""
        return await self.consuming.channel()

    async def acquire(self, *, accept: Callable[[Token], None] | None = None) -> tuple[Token, Token]:
        """Wait for the token, as `TokenChannel.acquire`.

        Raises `BrokerUnavailableError` if a connection is lost meanwhile: a daemon that got the token without one of
        them could not lead.
        """
        acquiring = asyncio.ensure_future(self.token.acquire(accept=accept))
        losing = asyncio.ensure_future(self._wait_lost())
        try:
            await asyncio.wait({acquiring, losing}, return_when=asyncio.FIRST_COMPLETED)
            if losing.done():
                raise losing.result()
            return acquiring.result()
        finally:
            acquiring.cancel()
            losing.cancel()

    async def _wait_lost(self) -> BrokerUnavailableError:
        """Wait until a connection or the publishing channel is closed; return the error that names it."""
        parts: dict[str, Connection | LeaderPublisher] = {
            "leader connection": self.control,
            "publisher connection": self.publishing,
            "consumer connection": self.consuming,
            "publishing channel": self.publisher,
        }
        ends = {asyncio.ensure_future(part.wait_closed()): name for name, part in parts.items()}
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        # In the order of `parts`: the loss of a connection also ends its channels.
        end, name = next((end, name) for end, name in ends.items() if end in done)
        reason = describe_end(end.result())
        return BrokerUnavailableError(f"The {name} was lost while waiting for the token: {reason}.")

    async def run(self, token: Token) -> None:
        """Keep the token and watch the connections; ends only with an error, such as `LeadershipLostError`."""
        # At most a quarter of the time after which RabbitMQ takes the token away: a renewal may take a while.
        renew = min(self.token.renew_every, self._settings.effective_consumer_timeout() / 4)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_token(token, renew), name="leader token")
            group.create_task(self._channels.spare.run(), name="spare channels")
            group.create_task(self._channels.probing.run(), name="probe channels")
            group.create_task(self._channels.declaring.run(), name="declare channels")
            group.create_task(self._durability.run(), name="queue durability")
            group.create_task(self._durability.tidy(), name="durability queues of the earlier leader")
            group.create_task(self._watch_publishing(), name="publishing channel")
            group.create_task(self.publisher.run(), name="isolation channels")

    async def _keep_token(self, token: Token, renew_interval: float) -> None:
        try:
            await self.token.run(token, renew_interval=renew_interval)
        except* BrokerError:
            # At once, and not after the other tasks of the term have ended: another daemon may lead already.
            self._begin_close([self.control, self.consuming])
            raise

    async def _watch_publishing(self) -> None:
        reason = await self.publisher.wait_closed()
        # Ends the term: the outcome of publishes without a confirm is unknown.
        raise BrokerUnavailableError(f"The publishing channel was lost: {describe_end(reason)}.")

    def _begin_close(self, connections: list[Connection]) -> None:
        """Close these connections at the same time: one that does not answer takes some seconds."""
        # Each is closed only once.
        self._open = [connection for connection in self._open if connection not in connections]
        self._closing += [
            asyncio.create_task(connection.close(), name="close a connection") for connection in connections
        ]

    async def close(self) -> None:
        """Close all connections; RabbitMQ then gives the token to the next daemon that waits for it."""
        self._begin_close(self._open)
        # Shielded: a session that is closed by half would keep the token, and no daemon would lead.
        await asyncio.shield(asyncio.gather(*self._closing))
