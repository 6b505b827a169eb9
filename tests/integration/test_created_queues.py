"""A created queue expires on a real broker, with a whole daemon; the test plays the clients and the worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from daemon_in_process import api_of, group_of, managed_settings, running_daemon, until

from osrdyne import amqp
from osrdyne.amqp import Channel, Message
from osrdyne.config.models import BrokerSettings
from osrdyne.daemon.daemon import Daemon
from osrdyne.ingress.policies import policy
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.protocol.statuses import decode_text

pytestmark = pytest.mark.usefixtures("processes")

WAITING = 50
KEY = Key("batch/42")


@pytest.fixture
async def daemon(
    broker_settings: BrokerSettings, pool_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Daemon]:
    monkeypatch.setattr(policy, "SHORTEST_LIFETIME", timedelta(seconds=5))
    async with running_daemon(managed_settings(broker_settings, pool_id, tmp_path)) as daemon:
        yield daemon


@pytest.fixture
async def api(daemon: Daemon) -> AsyncIterator[httpx.AsyncClient]:
    async with api_of(daemon) as client:
        yield client


@pytest.mark.nightly
@pytest.mark.proves("managed/created-queue-expires-deleted")
async def test_queue_expires_while_requests_wait(
    daemon: Daemon, api: httpx.AsyncClient, connection: amqp.Connection, channel: Channel, pool_id: str
) -> None:
    """Each request that waits is answered `gone`; the one that a worker has is left to it."""
    names, replies = PoolNames(pool_id), f"{pool_id}-test-replies"
    await channel.declare_queue(replies)
    now = datetime.now(UTC)
    proposal = {"ExpirationInstant": now.isoformat(), "MaxDequeueRetries": 7}
    refused = await api.post("/v1/queues", json=proposal, params={"key": KEY, "author": "test"})
    assert refused.status_code == 422
    proposal["ExpirationInstant"] = (now + timedelta(minutes=1)).isoformat()
    created = await api.post("/v1/queues", json=proposal, params={"key": KEY, "author": "test"})
    assert created.status_code == 201

    publishing = await connection.channel(confirms=True)
    for number in range(WAITING + 1):
        message = Message(body=b"x", reply_to=replies, correlation_id=str(number))
        await publishing.publish(message, exchange=names.requests_exchange, routing_key=KEY, mandatory=True)

    async def all_wait() -> bool:
        if not (await group_of(daemon, KEY)).get("queue", {}).get("exists"):
            return False
        return (await channel.declare_queue(names.request_queue(KEY), passive=True)).ready == WAITING + 1

    await until(all_wait, "all requests wait")
    consumer = await channel.consume(names.request_queue(KEY), prefetch=1)
    running = await consumer.get()

    soon = {"ExpirationInstant": (datetime.now(UTC) + timedelta(seconds=1)).isoformat()}
    assert (await api.put("/v1/queue", json=soon, params={"key": KEY, "author": "test"})).status_code == 200

    answers = await channel.consume(replies)
    statuses: dict[str | None, str | None] = {}
    while len(statuses) < WAITING:
        answer = await answers.get()
        statuses[answer.properties.correlation_id] = decode_text(answer.headers["x-status"])
        await answer.ack()
    assert set(statuses.values()) == {"gone"}
    assert running.properties.correlation_id not in statuses

    await running.ack()
    await channel.cancel(consumer)

    async def is_removed() -> bool:
        return (await api.get("/v1/queue", params={"key": KEY})).status_code == 404

    await until(is_removed, "the queue is removed")
    assert answers.waiting() == 0
