"""Attacks with forged messages, on a real RabbitMQ with a real daemon and real workers.

The attacker's user may publish requests and nothing else. It uses a handler that echoes: the answer is a message with a
body of the attacker's choice, published by a worker, to any queue that `reply-to` names.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from osrdyne import amqp
from osrdyne.amqp import Channel, Message
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.management.models import Permissions
from osrdyne.client import AsyncClient
from osrdyne.config.models import Settings
from osrdyne.daemon.daemon import Daemon
from osrdyne.pool.views import PoisonQuery
from osrdyne.protocol.names import Key, PoolNames, WorkerId
from osrdyne.protocol.uri import with_user
from tests.integration.daemon_in_process import PATIENCE, LeaderOf, echo_settings, running_daemon, until

pytestmark = pytest.mark.usefixtures("processes")

VICTIM, ACCOMPLICE = "victim", "accomplice"
FORGED_COMMANDS = (
    {"command": "pause", "generation": [10**12, 1]},
    {"command": "queues", "generation": [10**12, 2], "queues": ["elsewhere"]},
    {"command": "drain", "generation": [10**12, 3]},
)


@dataclass
class Attack:
    """A pool with a worker that echoes for the attacker, and one for another client."""

    daemon: Daemon
    names: PoolNames
    client: AsyncClient
    attacker: Channel
    """Logged in as a user that may publish requests and nothing else."""
    victim: WorkerId

    async def request(self, body: bytes, *, reply_to: str, key: str = ACCOMPLICE) -> None:
        """Have an answer with this body sent to `reply_to`."""
        message = Message(body=body, headers={"x-rpc-path": "/echo"}, correlation_id="c", reply_to=reply_to)
        await self.attacker.publish(message, exchange=self.names.requests_exchange, routing_key=key)

    async def counted(self, metric: str, **labels: str) -> int:
        url = f"http://127.0.0.1:{self.daemon.api.port}/metrics"
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=PATIENCE) as http:
            text = (await http.get(url)).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        of_metric = [sample for sample in samples if sample.name == f"{metric}_total"]
        return int(sum(sample.value for sample in of_metric if labels.items() <= sample.labels.items()))

    async def until_counted(self, count: int, metric: str, **labels: str) -> None:
        async def reached() -> bool:
            return await self.counted(metric, **labels) >= count

        await until(reached, f"{count} in {metric} {labels}")

    async def who_answers(self) -> str:
        """The worker that answers the victim's requests."""
        return str((await self.client.call(VICTIM, "/info")).json()["worker_id"])

    async def groups(self) -> set[str]:
        """The keys that have a group."""
        return set(map(str, LeaderOf(self.daemon).groups()))


@pytest.fixture
def settings(broker_settings, pool_id, tmp_path):
    return echo_settings(broker_settings, pool_id, tmp_path)


@asynccontextmanager
async def publisher_of_requests(settings: Settings, management: ManagementClient) -> AsyncIterator[Channel]:
    """A channel of a user that may write to the requests exchange and nothing else."""
    names, user = PoolNames(settings.pool.id), f"osrdyne-{settings.pool.id}-attacker"
    await management.put_user(user, password="secret")
    try:
        await management.put_permissions(
            user, Permissions(configure="^$", write=f"^{names.requests_exchange}$", read="^$")
        )
        uri = with_user(settings.broker.effective_uri(), user, "secret")
        connection = await amqp.connect(
            amqp.ConnectionOptions(uri=uri, name="attacker", connect_timeout=PATIENCE, rpc_timeout=PATIENCE)
        )
        try:
            yield await connection.channel(confirms=True)
        finally:
            await connection.close()
    finally:
        await management.delete_user(user)


@asynccontextmanager
async def attack_on(settings: Settings, management: ManagementClient) -> AsyncIterator[Attack]:
    async with (
        running_daemon(settings) as daemon,
        AsyncClient(settings.broker.effective_uri(), settings.pool.id, default_timeout=PATIENCE) as client,
        publisher_of_requests(settings, management) as attacker,
    ):
        await client.call(ACCOMPLICE, "/info")
        victim = WorkerId((await client.call(VICTIM, "/info")).json()["worker_id"])
        yield Attack(daemon, PoolNames(settings.pool.id), client, attacker, victim)


@pytest.fixture
async def attack(settings, management):
    async with attack_on(settings, management) as attack:
        yield attack


async def test_echoing_handler_cannot_be_made_to_command_another_keys_worker(attack):
    for command in FORGED_COMMANDS:
        await attack.request(json.dumps(command).encode(), reply_to=attack.names.control_queue(attack.victim))
    await attack.until_counted(len(FORGED_COMMANDS), "osrdyne_forged_reply_to")
    assert await attack.who_answers() == attack.victim


@pytest.mark.proves("hostile/message-reaches-queue-pool")
async def test_request_whose_reply_to_is_a_queue_of_the_pool_is_not_run(attack, channel):
    names = attack.names
    places = [
        names.poison_queue, names.dead_letter_queue, names.cancel_queue, names.activity_queue, names.orphan_queue,
        names.progress_queue, names.leader_queue, names.request_queue(Key(VICTIM)), names.requests_exchange,
    ]  # fmt: skip
    for place in places:
        await attack.request(b'{"term": 1000000000000000}', reply_to=place)
        await attack.request(b'{"term": 1000000000000000}', reply_to=place, key="new")
    await attack.until_counted(2 * len(places), "osrdyne_forged_reply_to")
    assert await attack.groups() <= {VICTIM, ACCOMPLICE, "new"}  # none for the name of a queue
    assert (await channel.declare_queue(names.poison_queue, passive=True)).ready == 0
    assert await attack.who_answers() == attack.victim


@pytest.mark.proves("hostile/message-reaches-queue-pool")
async def test_message_that_did_not_come_through_the_pools_own_exchange_is_counted_and_dropped(attack, channel):
    """A worker that is not ours answers to any address, and one with a user of its own may write to any queue."""
    names, daemon = attack.names, attack.daemon
    died = {"x-first-death-reason": "expired", "x-death": [{"reason": "expired", "queue": "q"}]}
    report = {"x-event": "ready", "x-worker-id": "w"}
    poison = {"x-osrdyne-poison-key": VICTIM, "x-osrdyne-poison-id": "1", "x-osrdyne-poison-reason": "rejected"}
    await channel.declare_queue(f"{names.pool}-replies")
    sender = {"correlation_id": "c", "reply_to": f"{names.pool}-replies"}
    places = {
        "dead-letters": (names.dead_letter_queue, Message(headers=died, **sender)),
        "activity": (names.activity_queue, Message(headers=report)),
        "cancel": (names.cancel_queue, Message(**sender)),
        "progress": (names.progress_queue, Message(**sender)),
        "orphans": (names.orphan_queue, Message(**sender)),
        "poison": (names.poison_queue, Message(headers=poison)),
    }
    for queue, message in places.values():
        await channel.publish(message, exchange="", routing_key=queue)
    for command in FORGED_COMMANDS:
        message = Message(json.dumps(command).encode())
        await channel.publish(message, exchange="", routing_key=names.control_queue(attack.victim))
    poisoned = await LeaderOf(daemon).term.processors.poison.page(PoisonQuery(limit=10))
    for place in places:
        await attack.until_counted(1, "osrdyne_forged_messages", queue=place)
    await attack.until_counted(len(FORGED_COMMANDS), "osrdyne_forged_messages", queue="control")
    assert (poisoned.entries, await attack.groups()) == ((), {VICTIM, ACCOMPLICE})
    assert (await channel.declare_queue(f"{names.pool}-replies", passive=True)).ready == 0
    assert await attack.who_answers() == attack.victim


async def test_managed_pool_that_allows_some_reply_queues_answers_no_other(settings, management, channel):
    pool = settings.pool.model_copy(update={"kind": "managed"})
    requests = settings.requests.model_copy(update={"reply_to_prefixes": (f"{pool.id}-replies.",)})
    settings = settings.model_copy(update={"pool": pool, "requests": requests})
    async with attack_on(settings, management) as attack:
        refused, allowed = f"{pool.id}-elsewhere", f"{pool.id}-replies.1"
        for queue in (refused, allowed):
            await channel.declare_queue(queue)
        await attack.request(b"", reply_to=refused)
        await attack.request(b"", reply_to=attack.names.control_queue(attack.victim))
        await attack.until_counted(2, "osrdyne_forged_reply_to", component="ingress")
        # Past the ingress, as in a direct pool: the worker checks by itself.
        message = Message(headers={"x-rpc-path": "/echo"}, correlation_id="c", reply_to=refused)
        await channel.publish(message, exchange="", routing_key=attack.names.request_queue(Key(ACCOMPLICE)))
        await attack.until_counted(1, "osrdyne_forged_reply_to", component="worker")
        await attack.request(b"", reply_to=allowed)

        async def answered():
            return (await channel.declare_queue(allowed, passive=True)).ready == 1

        await until(answered, "an answer in the queue that is allowed")
        assert (await channel.declare_queue(refused, passive=True)).ready == 0
        assert await attack.who_answers() == attack.victim


@pytest.mark.proves("controller/leader-queue-holds-something")
async def test_enormous_term_in_the_leader_queue_keeps_no_pool_without_a_leader(settings, channel):
    queue = PoolNames(settings.pool.id).leader_queue
    forged = [Message(b'{"term": %d, "host": "elsewhere"}' % term) for term in (10**400, 2**60, 10**15)]
    led = []
    for _ in range(2):
        async with running_daemon(settings) as daemon:
            led.append(LeaderOf(daemon).generation.term)
            for message in forged:  # dropped by the daemon that leads
                await channel.publish(message, exchange="", routing_key=queue)
        for message in forged:  # found by the one that comes next
            await channel.publish(message, exchange="", routing_key=queue)
    assert led == [1, 2]


async def test_worker_paused_by_a_stranger_serves_again(settings, management, channel):
    """By a user that may write to the control exchange, with a generation that makes it deaf to the leader."""
    worker = settings.worker.model_copy(update={"silence_timeout": 6.0, "stop_grace": 1.0})
    async with attack_on(settings.model_copy(update={"worker": worker}), management) as attack:
        term, _ = LeaderOf(attack.daemon).generation
        body = json.dumps({"command": "pause", "generation": [term + 1, 0]}).encode()
        routing_key = attack.names.control_group_routing_key(Key(VICTIM))
        await channel.publish(Message(body), exchange=attack.names.control_exchange, routing_key=routing_key)
        requests = attack.names.request_queue(Key(VICTIM))

        async def is_paused():
            return (await channel.declare_queue(requests, passive=True)).consumers == 0

        await until(is_paused, "the worker has paused")
        assert await attack.who_answers() != attack.victim
