"""The AMQP credentials of workers: one user for all of them, or one for each (`broker.scoped_credentials`).

A worker's own user may consume its requests, declare its control queue, report and reply, and nothing else. It is
created before the worker starts and deleted when the worker has ended. The deletion closes remaining connections of the
user at once (broker: user-per-worker), so that requests of a dead connection return to their queue. The daemon stores
nothing: a password is in memory only until its worker is known to be started, and a new leader reads users from
RabbitMQ and workers from the driver (decision 0010).
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
# For the user of one worker: it needs one connection, another one for direct replies, and as many again while RabbitMQ
# has not noticed the loss of these.
LIMITS = {"max-connections": 4, "max-channels": 64}
# The end of the id of a replica, after the id of its start (`protocol.names.replica_id`).
_REPLICA = r"\.[a-z0-9][a-z0-9-]{0,251}"


class SharedCredentials:
    """Every worker gets the same URI."""

    def __init__(self, uri: str) -> None:
        self._uri = uri

    async def uri_for(self, key: Key, worker_id: WorkerId) -> str:
        return self._uri

    async def uri_for_process(self, worker_id: WorkerId) -> str:
        return self._uri

    def keep(self, worker_id: WorkerId) -> bool:
        """Return False: no worker has a user of its own."""
        return False

    def release(self, worker_id: WorkerId) -> None:
        """Do nothing, as `keep`."""

    async def tidy(self) -> None:
        """Do nothing, as `keep`."""

    async def run(self) -> None:
        await asyncio.Event().wait()


class ScopedCredentials:
    """A RabbitMQ user for each worker of one pool.

    `uri`: the address of RabbitMQ for workers. `alive` returns the ids of the workers that exist. A new user is kept
    for `start_timeout` seconds even without a worker, because its start may still be in progress. `workers_of_start`:
    how many workers share a user, if the platform makes several of one start.
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
        """Create the worker's user and return its URI. A crash or error leaves a user without use, which `tidy`
        deletes.

        Raises `BrokerError`; it is not `retryable` if this controller may not create users.
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
        """Create the user of a pooled process, as `uri_for`. It may report and read its control queue, and nothing
        else: the workers of the process have users of their own."""
        return await self._make_user(
            worker_id,
            topics=_exactly(own=re.escape(self._names.control_worker_routing_key(worker_id))),
            permissions=process_permissions(self._names, worker_id),
        )

    async def _make_user(self, worker_id: WorkerId, *, topics: str, permissions: Permissions) -> str:
        # Before the user exists: a concurrent `tidy` would delete a user without a worker.
        self._kept_until[worker_id] = self._clock.monotonic() + self._start_timeout
        user, password = f"{self._prefix}{worker_id}", secrets.token_urlsafe(32)
        try:
            await self._management.put_user(user, password=password)
            for limit, value in LIMITS.items():
                # Limits and topics before the permissions: until the last call the user may do nothing.
                await self._management.put_user_limit(user, limit, value * self._workers_of_start)
            await self._management.put_topic_permissions(
                user,
                self._names.control_exchange,
                # No write: other workers would take a message of this worker for one of the leader.
                write="^$",
                read=topics,
            )
            await self._management.put_permissions(user, permissions)
        except BaseException:
            self.release(worker_id)  # `tidy` deletes the user, as after a leader that was killed here
            raise
        return with_user(self._uri, user, password)

    def keep(self, worker_id: WorkerId) -> bool:
        """Keep the user of an unfinished start for another `start_timeout` seconds; False if it may be deleted."""
        # `tidy` deletes no user that is in here, however old.
        if worker_id not in self._kept_until:
            return False
        self._kept_until[worker_id] = self._clock.monotonic() + self._start_timeout
        return True

    def release(self, worker_id: WorkerId) -> None:
        """Have `run` delete the user of a worker that has ended or was not started."""
        self._kept_until.pop(worker_id, None)
        self._wakeup.set()

    async def run(self) -> None:
        """Delete unused users when a worker has ended, and every `interval` seconds; never returns."""
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
        """Delete the users of this pool whose worker does not exist."""
        # Listed before `alive` is read: a worker that starts in between is in `alive`, or its user is not listed.
        users = await self._management.list_users(self._prefix)
        now, alive = self._clock.monotonic(), self._alive()
        self._kept_until = {worker: until for worker, until in self._kept_until.items() if until > now}
        for user in users:
            worker_id = WorkerId(user.removeprefix(self._prefix))
            if worker_id not in alive and worker_id not in self._kept_until:
                # This also closes the connections of a worker that still runs although no driver lists it.
                await self._management.delete_user(user)
                self._log.info("worker credentials removed", worker_id=worker_id)
                # After the user, whose worker could otherwise declare them again.
                await self._remove_objects_of(worker_id)

    async def _remove_objects_of(self, worker_id: WorkerId) -> None:
        """Delete queues and exchanges of a deleted user that have the name of its control queue.

        A worker's own control queue is exclusive and is deleted with its connection. The same permission allows code in
        the worker to declare a durable queue or an exchange of that name.
        """
        name = self._names.control_queue(worker_id)

        def is_its_own(other: str) -> bool:
            return other == name or other.startswith(f"{name}.")

        try:
            for exchange in filter(is_its_own, await self._management.list_exchanges()):
                await self._management.delete_exchange(exchange)
            for queue in await self._management.list_queues(name):
                # The listing is by prefix, and the name of one worker may be the beginning of that of another.
                if is_its_own(queue.name):
                    await self._management.delete_queue(queue.name)
        except BrokerError as error:  # such as an exclusive queue whose connection is just being closed
            self._log.warning("objects of a removed user not deleted", worker_id=worker_id, error=str(error))


def user_prefix(pool: str, vhost: str) -> str:
    """The prefix of the names of a pool's users, with the virtual host, because users belong to the whole cluster."""
    return f"osrdyne-{pool}-{encode_key(Key(vhost))}-"


def worker_permissions(
    names: PoolNames,
    queues: Sequence[QueueName],
    worker_id: WorkerId,
    *,
    has_retries: bool = False,
    replicas: bool = False,
) -> Permissions:
    """The permissions of a worker of these request queues. Declaring the control queue needs configure on it, binding
    it needs write on it and read on the exchange, and a reply needs write on `amq.default`, which routes to every
    queue. `has_retries`: it publishes failed requests to wait queues. `replicas`: several workers share the user."""
    control = _own(names.control_queue(worker_id), replicas=replicas)
    retries = [names.retry_exchange] if has_retries else []
    return Permissions(
        configure=_exactly(own=control),
        write=_exactly(names.activity_exchange, "amq.default", *retries, own=control),
        read=_exactly(*queues, names.control_exchange, names.credit_exchange, own=control),
    )


def client_permissions(names: PoolNames) -> Permissions:
    """The permissions of a client: to publish requests, cancels, inquiries and credit. Direct reply-to needs none."""
    return Permissions(configure="^$", write=f"^{re.escape(names.pool)}-(req|cancel|progress|credit)-xchg$", read="^$")


def process_permissions(names: PoolNames, worker_id: WorkerId) -> Permissions:
    """The permissions of a pooled process: its control queue, and the exchange for its reports."""
    control = _own(names.control_queue(worker_id), replicas=False)
    return Permissions(
        configure=_exactly(own=control),
        write=_exactly(names.activity_exchange, own=control),
        read=_exactly(names.control_exchange, own=control),
    )


def control_topics(names: PoolNames, key: Key, worker_id: WorkerId, *, replicas: bool = False) -> str:
    """The pattern of the routing keys of control messages that the worker may receive: to its group and to itself."""
    own = _own(names.control_worker_routing_key(worker_id), replicas=replicas)
    return _exactly(names.control_group_routing_key(key), own=own)


def _own(name: str, *, replicas: bool) -> str:
    """The pattern of one name of a worker. If several workers share a user, each has its own suffix."""
    return f"{re.escape(name)}{_REPLICA if replicas else ''}"


def _exactly(*texts: str, own: str) -> str:
    """A regular expression that matches these texts, the pattern `own`, and nothing else. `$` is safe: names in
    RabbitMQ contain no line feed."""
    return f"^({'|'.join([*map(re.escape, texts), own])})$"


REMEDY = "Set broker.scoped_credentials: true, or name a user with fewer rights in broker.worker_uri."


async def administrator_of_workers(settings: BrokerSettings, *, clock: Clock) -> str | None:
    """The user in the URI of all workers, if it is an administrator of RabbitMQ.

    The query is made as that user, so that the daemon's own user needs no permission. Raises `BrokerError`.
    """
    parts = urlsplit(settings.effective_worker_uri())
    user, password = unquote(parts.username or "guest"), unquote(parts.password or "guest")
    address = SecretStr(with_user(settings.effective_management_uri(), user, password))
    async with ManagementClient(settings.model_copy(update={"management_uri": address}), clock=clock) as management:
        try:
            whoami = await management.whoami()
        except BrokerAccessError:  # a user without tags may not use the HTTP API
            return None
    return user if whoami.may_make_users else None


def describe_administrator(user: str) -> str:
    """The warning of daemon and doctor."""
    return f"Workers log in as {user!r}, an administrator of RabbitMQ: code in a worker can do everything there."
