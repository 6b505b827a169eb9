"""Gathers the facts about RabbitMQ that `checks` judges.

Called by the command `osrdyne doctor`. Changes nothing in RabbitMQ. Every failure becomes a finding; nothing raises.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any

from osrdyne import amqp
from osrdyne.aio.clock import Clock, SystemClock
from osrdyne.amqp.version import BrokerVersion
from osrdyne.broker.doctor import checks
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.management.credentials import REMEDY, administrator_of_workers, describe_administrator
from osrdyne.broker.session import connection_options
from osrdyne.broker.topology.comparison import Problem, compare, expected_objects, expected_topology
from osrdyne.broker.topology.declarations import Exchange, Topology
from osrdyne.broker.topology.policies import pool_policies
from osrdyne.broker.topology.telemetry import LogPlan, plan_log, streams_of
from osrdyne.config.models import Settings
from osrdyne.errors import BrokerAccessError, BrokerConflictError, BrokerNotFoundError, OsrdyneError
from osrdyne.findings import Finding
from osrdyne.logs import get_logger
from osrdyne.protocol.names import PoolNames

log = get_logger("broker.doctor")

BLOCKED_INTERVAL = 0.1  # Seconds between two looks whether RabbitMQ has blocked the connection.


async def run_broker_checks(
    settings: Settings,
    *,
    priorities: Collection[int] = (),
    delays_ms: Collection[int] = (),
    longest_ttl: float | None = None,
    clock: Clock | None = None,
) -> list[Finding]:
    """All findings about RabbitMQ, in the order in which an operator resolves them. `priorities`, `delays_ms`: of the
    active routes, whose exchanges and queues must exist; `longest_ttl`: the longest time-to-live of these routes."""
    of_amqp = await _guarded("AMQP", lambda: _check_amqp(settings), "Check broker.uri.")
    used = (priorities, delays_ms, longest_ttl)
    of_management = await _guarded("HTTP API", lambda: _check_management(settings, clock or SystemClock(), used))
    return of_amqp + of_management


async def _guarded(subject: str, check: Callable[[], Awaitable[list[Finding]]], remedy: str = "") -> list[Finding]:
    try:
        return await check()
    except OsrdyneError as error:
        return [Finding(subject, False, error.message, remedy or None)]
    except Exception:  # a broken check must not hide the others
        log.exception("check failed", subject=subject)
        return [Finding(subject, False, "The check itself failed; see the log of this command.", "Please report it.")]


async def _check_amqp(settings: Settings) -> list[Finding]:
    connection = await amqp.connect(connection_options(settings, purpose="doctor", heartbeat=settings.broker.heartbeat))
    try:
        version = BrokerVersion.parse(connection.server_version)
        return [
            Finding("AMQP", True, "RabbitMQ accepts the connection."),
            checks.check_version(version),
            checks.check_consumer_timeout(settings, version),
            await _check_message_size(connection, settings),
        ]
    finally:
        await (connection.close(timeout=BLOCKED_INTERVAL) if connection.is_blocked else connection.close())


async def _check_message_size(connection: amqp.Connection, settings: Settings) -> Finding:
    """Publish a message of the largest size to a queue that does not exist: RabbitMQ refuses its size, or drops it."""
    subject, size = "message size", settings.requests.max_message_bytes
    channel = await connection.channel(confirms=True)
    try:
        async with asyncio.timeout(settings.broker.rpc_timeout):
            nowhere = f"{settings.pool.id}-doctor-{secrets.token_hex(8)}"
            await _unless_blocked(
                connection, channel.publish(amqp.Message(bytes(size)), exchange="", routing_key=nowhere)
            )
    except TimeoutError:
        message = "RabbitMQ reads nothing from publishers at the moment (a memory or disk alarm)."
        return Finding(subject, False, message, "See its alarms.")
    except BrokerConflictError:
        return Finding(
            subject,
            False,
            f"RabbitMQ refuses messages of requests.max_message_bytes ({size} bytes).",
            f"Lower that, or set max_message_size = {size} in rabbitmq.conf.",
            fatal=False,
        )
    return Finding(subject, True, f"Messages of {size} bytes pass.")


async def _unless_blocked(connection: amqp.Connection, publish: Coroutine[Any, Any, None]) -> None:
    """Publish. Raises `TimeoutError` once RabbitMQ blocks the connection: it would read the message after the alarm."""
    publishing = asyncio.ensure_future(publish)
    try:
        while not (await asyncio.wait({publishing}, timeout=BLOCKED_INTERVAL))[0]:
            if connection.is_blocked:
                raise TimeoutError
        publishing.result()
    finally:
        publishing.cancel()


async def _check_management(
    settings: Settings, clock: Clock, used: tuple[Collection[int], Collection[int], float | None]
) -> list[Finding]:
    async with ManagementClient(settings.broker, clock=clock) as management:
        overview = await management.overview()
        findings = [
            Finding("HTTP API", True, f"The management plugin of {overview.cluster_name} answers."),
            checks.check_clock(overview.clock_offset, allowed=settings.requests.max_clock_skew),
        ]
        whoami = await management.whoami()
        findings += checks.check_tags(whoami, scoped_credentials=settings.broker.scoped_credentials)
        findings += await _guarded("worker credentials", lambda: _check_worker_credentials(settings, clock))
        findings += await _guarded("permissions", lambda: _check_permissions(management, settings))
        findings += await _guarded("feature flags", lambda: _check_feature_flags(management))
        findings += await _guarded("queue policy", lambda: _check_policy(management, settings))
        findings += await _guarded("controller queues", lambda: _check_controller_queues(management, settings))
        findings += await _guarded("wait queues", lambda: _check_retry_queues(management, settings))
        findings += await _guarded("telemetry", lambda: _check_log(management, settings))
        findings += await _guarded("topology", lambda: _check_topology(management, settings, overview.version, *used))
        if whoami.may_monitor:
            findings += await _guarded("nodes", lambda: _check_nodes(management))
        return findings


async def _check_worker_credentials(settings: Settings, clock: Clock) -> list[Finding]:
    subject = "worker credentials"
    if settings.broker.scoped_credentials and settings.driver.name != "noop":
        return [Finding(subject, True, "Each worker gets a RabbitMQ user of its own.")]
    user = await administrator_of_workers(settings.broker, clock=clock)
    if user is None:
        return [Finding(subject, True, "The user of the workers is not an administrator.")]
    return [Finding(subject, False, describe_administrator(user), REMEDY, fatal=False)]


async def _check_permissions(management: ManagementClient, settings: Settings) -> list[Finding]:
    try:
        permissions = await management.permissions()
    except BrokerAccessError:
        message = f"The permissions of {management.user!r} cannot be read without the tag administrator."
        remedy = f"Check them with rabbitmqctl list_user_permissions {management.user}."
        return [Finding("permissions", False, message, remedy, fatal=False)]
    pool = settings.pool.id
    return [checks.check_permissions(permissions, pool=pool, user=management.user, vhost=management.vhost)]


async def _check_feature_flags(management: ManagementClient) -> list[Finding]:
    try:
        return [checks.check_feature_flags(await management.disabled_feature_flags())]
    except BrokerAccessError:
        return []  # only administrators may read them; without a flag, the declaration of a queue fails


async def _check_policy(management: ManagementClient, settings: Settings) -> list[Finding]:
    try:
        queues = await management.list_queues(PoolNames(settings.pool.id).request_queue_prefix)
    except BrokerNotFoundError:
        return []  # no virtual host, which an earlier finding reports
    return [checks.check_policy(queues, pool=settings.pool.id)]


async def _check_topology(
    management: ManagementClient,
    settings: Settings,
    version: BrokerVersion,
    priorities: Collection[int],
    delays_ms: Collection[int],
    longest_ttl: float | None,
) -> list[Finding]:
    """Compare the topology as the leader does."""
    names, managed = PoolNames(settings.pool.id), settings.pool.is_managed
    topology = expected_topology(names, managed=managed, priorities=priorities, delays_ms=delays_ms)
    try:
        log_streams = (await _planned_log(management, settings)).streams
    except BrokerNotFoundError:
        return []  # as above
    topology = Topology((*topology.declarations, *log_streams))
    expected = expected_objects(names, topology, pool_policies(settings, version, longest_ttl=longest_ttl))
    try:
        found = await compare(management, expected, pool=names.pool)
    except BrokerNotFoundError:
        return []  # as above
    # A conflict of a wait queue only turns retries off, and has a check of its own.
    ours = [one for one in found if one.problem is not Problem.CONFLICT or not _is_retry_queue(one.name, names)]
    missing = [one for one in found if one.problem is Problem.MISSING and isinstance(one.repair, Exchange)]
    return checks.check_topology(ours, declared=len(missing) < len(topology.exchanges))


def _is_retry_queue(name: str, names: PoolNames) -> bool:
    return names.delay_of_retry_queue(name) is not None


async def _check_retry_queues(management: ManagementClient, settings: Settings) -> list[Finding]:
    try:
        queues = await management.list_queues(PoolNames(settings.pool.id).retry_queue_prefix)
    except BrokerNotFoundError:
        return []  # as above
    return checks.check_retry_queues(queues, pool=settings.pool.id)


async def _check_controller_queues(management: ManagementClient, settings: Settings) -> list[Finding]:
    names = checks.controller_queues(settings.pool.id)
    found = await asyncio.gather(*(management.queue_history(name) for name in names))
    return checks.check_controller_queues(one for one in found if one is not None)


async def _planned_log(management: ManagementClient, settings: Settings) -> LogPlan:
    names = PoolNames(settings.pool.id)
    if settings.telemetry.name is None:
        return LogPlan()
    found = streams_of(names, await management.list_queues(names.log_stream_prefix))
    return plan_log(names, settings.telemetry, found)


async def _check_log(management: ManagementClient, settings: Settings) -> list[Finding]:
    if settings.telemetry.name is None:
        return []
    try:
        return checks.check_log(await _planned_log(management, settings), name=settings.telemetry.name)
    except BrokerNotFoundError:
        return []  # as above


async def _check_nodes(management: ManagementClient) -> list[Finding]:
    return checks.check_nodes(await management.nodes())
