"""The AMQP credentials that workers are given: one user for all of them, or one for each (`broker.scoped_credentials`).

A worker's own user may consume its requests, own its control queue, report and reply, and nothing else. It is made
before the worker starts and removed when the worker has ended, which closes whatever connection of it is left at once
(broker: user-per-worker) and gives back what a dead connection held. RabbitMQ and the driver know everything there is
to know: the
password is kept nowhere, a new leader finds users and workers as they are (decision 0010). Built by the term.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Sequence, Set
from urllib.parse import unquote, urlsplit

from pydantic import SecretStr

from osrdyne.aio.clock import Backoff, Clock
from osrdyne.aio.signals import Wakeup
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.management.models import Permissions
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.config.models import BrokerSettings
from osrdyne.errors import BrokerAccessError, BrokerError
from osrdyne.logs import Logger, get_logger
from osrdyne.protocol.names import Key, PoolNames, QueueName, WorkerId, encode_key
from osrdyne.protocol.uri import with_user

RETRY = Backoff(initial=1.0, maximum=30.0)
# Of one worker's user: it needs one connection, perhaps another for direct replies, and as many again while RabbitMQ
# has not noticed their loss.
LIMITS = {"max-connections": 4, "max-channels": 64}
# What follows the id of a start in the id of one of several workers made of it (`protocol.names.replica_id`).
_REPLICA = r"\.[a-z0-9][a-z0-9-]{0,251}"


class SharedCredentials:
    """Every worker gets the same URI."""

    def __init__(self, uri: str) -> None:
        self._uri = uri

    async def uri_for(self, key: Key, worker_id: WorkerId) -> str:
        return self._uri

    async def uri_for_process(self, worker_id: WorkerId) -> str:
        return self._uri

    def release(self, worker_id: WorkerId) -> None:
        """Nothing is the worker's own."""

    async def tidy(self) -> None:
        """Nothing is left behind."""

    async def run(self) -> None:
        await asyncio.Event().wait()


class ScopedCredentials:
    """A RabbitMQ user for each worker of one pool.

    `uri` says where workers find the broker. `alive` tells the ids of the workers that exist. A user that was made for
    a start is kept for `start_timeout` seconds, whatever `alive` says: that start may still be under way.
    `workers_of_start`: how many workers may share a user, where a platform makes several of one start.
    """

    def __init__(
        self,
        *,
        names: PoolNames,
        layout: QueueLayout,
        management: ManagementClient,
        uri: str,
        alive: Callable[[], Set[WorkerId]],
        start_timeout: float,
        interval: float,
        clock: Clock,
        workers_of_start: int = 1,
    ) -> None:
        self._names = names
        self._layout = layout
        self._management = management
        self._uri = uri
        self._alive = alive
        self._start_timeout = start_timeout
        self._interval = interval
        self._clock = clock
        self._workers_of_start = workers_of_start
        self._replicas = workers_of_start > 1
        self._prefix = user_prefix(names.pool, management.vhost)
        self._kept_until: dict[WorkerId, float] = {}
        self._wakeup = Wakeup(clock)
        self._log: Logger = get_logger("credentials")

    async def uri_for(self, key: Key, worker_id: WorkerId) -> str:
        """Make the worker's user. A crash or an error in between leaves a user that is of no use and soon removed.

        Raises `BrokerError`, one that is not `retryable` when this controller may not make users.
        """
        return await self._make_user(
            worker_id,
            topics=control_topics(self._names, key, worker_id, replicas=self._replicas),
            permissions=worker_permissions(
                self._names,
                self._layout.possible(key),
                worker_id,
                has_retries=self._layout.managed,
                replicas=self._replicas,
            ),
        )

    async def uri_for_process(self, worker_id: WorkerId) -> str:
        """Make the user of a pooled process: it reports and reads its control queue, and nothing else. Its workers have
        users of their own. As `uri_for`."""
        return await self._make_user(
            worker_id,
            topics=_exactly(own=re.escape(self._names.control_worker_routing_key(worker_id))),
            permissions=process_permissions(self._names, worker_id),
        )

    async def _make_user(self, worker_id: WorkerId, *, topics: str, permissions: Permissions) -> str:
        # Before the user exists: a `tidy` at the same time would find it without a worker and delete it.
        self._kept_until[worker_id] = self._clock.monotonic() + self._start_timeout
        user, password = f"{self._prefix}{worker_id}", secrets.token_urlsafe(32)
        try:
            await self._management.put_user(user, password=password)
            for limit, value in LIMITS.items():
                # Limits and topics before the permissions: until the last call the user may do nothing at all.
                await self._management.put_user_limit(user, limit, value * self._workers_of_start)
            await self._management.put_topic_permissions(
                user,
                self._names.control_exchange,
                # A worker only listens on the control exchange: a message from it would be taken for one of the leader.
                write="^$",
                read=topics,
            )
            await self._management.put_permissions(user, permissions)
        except BaseException:
            self.release(worker_id)
            # What was made so far is left to `tidy`, which also finds users of a leader that was killed here.
            raise
        return with_user(self._uri, user, password)

    def release(self, worker_id: WorkerId) -> None:
        """The worker has ended, or never began: its user goes soon."""
        self._kept_until.pop(worker_id, None)
        self._wakeup.set()

    async def run(self) -> None:
        """Remove unused users whenever a worker has ended, and every `interval` seconds; never returns."""
        failures = 0
        while True:
            try:
                await self.tidy()
                failures = 0
            except BrokerError as error:
                failures += 1
                self._log.warning("users of ended workers not removed", error=str(error))
            await (self._clock.sleep(RETRY.delay(failures)) if failures else self._wakeup.wait(self._interval))

    async def tidy(self) -> None:
        """Remove the users of this pool whose worker does not exist."""
        # Listed before `alive` is read: a worker that starts in between is in `alive`, or its user is not listed.
        users = await self._management.list_users(self._prefix)
        now, alive = self._clock.monotonic(), self._alive()
        self._kept_until = {worker: until for worker, until in self._kept_until.items() if until > now}
        for user in users:
            worker_id = WorkerId(user.removeprefix(self._prefix))
            if worker_id not in alive and worker_id not in self._kept_until:
                # Closes the connections of the user as well: a worker that lives on unseen loses its right to reply.
                await self._management.delete_user(user)
                self._log.info("worker credentials removed", worker_id=worker_id)
                # After the user: before, its worker could declare them again.
                await self._remove_objects_of(worker_id)

    async def _remove_objects_of(self, worker_id: WorkerId) -> None:
        """Delete what the removed user has left under the name of its control queue.

        A worker's own control queue is exclusive and goes with its connection. The same permission allows a queue that
        stays, or an exchange, of that name: code in a worker may have made one.
        """
        name = self._names.control_queue(worker_id)

        def is_its_own(other: str) -> bool:
            return other == name or other.startswith(f"{name}.")

        try:
            for exchange in filter(is_its_own, await self._management.list_exchanges()):
                await self._management.delete_exchange(exchange)
            for queue in await self._management.list_queues(name):
                # The listing is by prefix, and the name of one worker may be the beginning of another's.
                if is_its_own(queue.name):
                    await self._management.delete_queue(queue.name)
        except BrokerError as error:  # RabbitMQ refuses an exclusive queue whose connection is just being closed
            self._log.warning("objects of a removed user not deleted", worker_id=worker_id, error=str(error))


def user_prefix(pool: str, vhost: str) -> str:
    """How the users of a pool begin. Users belong to a whole cluster, so that the virtual host is part of it."""
    return f"osrdyne-{pool}-{encode_key(Key(vhost))}-"


def worker_permissions(
    names: PoolNames,
    queues: Sequence[QueueName],
    worker_id: WorkerId,
    *,
    has_retries: bool = False,
    replicas: bool = False,
) -> Permissions:
    """What a worker of these request queues needs: declaring a queue needs configure, binding it write on
    the queue and read on the exchange, and a reply is written to `amq.default`, which is the way to every queue.
    `has_retries`: it sends failed requests to wait. `replicas`: several workers share the user."""
    control = _own(names.control_queue(worker_id), replicas=replicas)
    retries = [names.retry_exchange] if has_retries else []
    return Permissions(
        configure=_exactly(own=control),
        write=_exactly(names.activity_exchange, "amq.default", *retries, own=control),
        read=_exactly(*queues, names.control_exchange, names.credit_exchange, own=control),
    )


def client_permissions(names: PoolNames) -> Permissions:
    """What a client needs: it publishes requests, and what belongs to them. Direct reply-to needs no permission."""
    return Permissions(configure="^$", write=f"^{re.escape(names.pool)}-(req|cancel|progress|credit)-xchg$", read="^$")


def process_permissions(names: PoolNames, worker_id: WorkerId) -> Permissions:
    """What a pooled process needs: its control queue, and the exchange that takes its reports."""
    control = _own(names.control_queue(worker_id), replicas=False)
    return Permissions(
        configure=_exactly(own=control),
        write=_exactly(names.activity_exchange, own=control),
        read=_exactly(names.control_exchange, own=control),
    )


def control_topics(names: PoolNames, key: Key, worker_id: WorkerId, *, replicas: bool = False) -> str:
    """The routing keys of control messages that the worker may listen to: those to its group and to itself."""
    own = _own(names.control_worker_routing_key(worker_id), replicas=replicas)
    return _exactly(names.control_group_routing_key(key), own=own)


def _own(name: str, *, replicas: bool) -> str:
    """The pattern of one name of a worker. Where several workers share a user, each adds a name of its own."""
    return f"{re.escape(name)}{_REPLICA if replicas else ''}"


def _exactly(*texts: str, own: str) -> str:
    """A regular expression that matches these texts, the names of the worker's own, and nothing else.

    RabbitMQ's names hold no line feed.
    """
    return f"^({'|'.join([*map(re.escape, texts), own])})$"


REMEDY = "Set broker.scoped_credentials: true, or name a user with fewer rights in broker.worker_uri."


async def administrator_of_workers(settings: BrokerSettings, *, clock: Clock) -> str | None:
    """The user in the URI that every worker is given, if that user is an administrator of RabbitMQ.

    RabbitMQ is asked as that very user, so that the daemon's own user needs no rights for it. Raises `BrokerError`.
    """
    parts = urlsplit(settings.effective_worker_uri())
    user, password = unquote(parts.username or "guest"), unquote(parts.password or "guest")
    address = SecretStr(with_user(settings.effective_management_uri(), user, password))
    async with ManagementClient(settings.model_copy(update={"management_uri": address}), clock=clock) as management:
        try:
            whoami = await management.whoami()
        except BrokerAccessError:  # a user without tags may not use the HTTP API at all
            return None
    return user if whoami.may_make_users else None


def describe_administrator(user: str) -> str:
    """The warning of daemon and doctor."""
    return f"Workers log in as {user!r}, an administrator of RabbitMQ: code in a worker can do everything there."
