"""A running daemon whose objects in RabbitMQ are deleted or changed by hand: real RabbitMQ, noop driver."""

import asyncio

import pytest
from broker_api import http_client, until
from test_term import Running, daemon_of, publish, settings_of, take

from osrdyne.amqp import Message
from osrdyne.broker.doctor.run import run_broker_checks
from osrdyne.broker.topology.comparison import compare, expected_objects, expected_topology
from osrdyne.broker.topology.policies import PolicySpec, pool_policies
from osrdyne.config.models import LifecycleSettings, PoolSettings, Settings
from osrdyne.findings import Finding
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.protocol.statuses import decode_text

A = Key("a")
OFTEN = LifecycleSettings(topology_interval=1.0, resync_interval=3600.0)


def repairs(running: Running, kind: str) -> float:
    labels = {"object": kind}
    return running.daemon._metrics.registry.get_sample_value("osrdyne_topology_repairs_total", labels) or 0.0


def finding_of(running: Running) -> Finding:
    return running.term.routing.topology.finding()


async def findings_of(settings: Settings, subject: str) -> list[bool]:
    return [finding.ok for finding in await run_broker_checks(settings) if finding.subject == subject]


@pytest.mark.proves("broker/policy-exchange-queue-controller")
async def test_everything_that_is_deleted_by_hand_is_declared_again(
    broker_settings, pool_id, channel, management, broker
):
    """A managed pool: policy, exchanges with their bindings, single bindings, the inventory, the parameter.

    The request queue of an earlier version, without a dead letter exchange, is used as it is."""
    names = PoolNames(pool_id)
    managed = {"pool": PoolSettings(id=pool_id, kind="managed")}
    settings = settings_of(broker_settings, pool_id, OFTEN).model_copy(update=managed)
    assert await findings_of(settings, "topology") == [True]  # nothing is declared yet
    arguments = {"x-queue-type": "quorum", "x-osrdyne-key": A}
    await channel.declare_queue(names.request_queue(A), arguments=arguments)
    async with daemon_of(settings) as running, http_client(broker.management_uri) as api:
        await publish(channel, names, A, b"before")
        assert await take(channel, names.request_queue(A), 1) == [b"before"]
        assert await findings_of(settings, "topology") == [True]
        for exchange in (names.orphan_exchange, names.work_exchange(), names.retried_exchange, names.control_exchange):
            await management.delete_exchange(exchange)
        await management.delete_policy(names.policy)
        await api.delete(f"/api/global-parameters/osrdyne-{pool_id}-leader")
        await channel.delete_queue(names.poison_queue)
        await channel.unbind_queue(names.dead_letter_queue, names.dead_letter_exchange)
        topology = expected_topology(names, managed=True)
        expected = expected_objects(names, topology, pool_policies(settings, running.term._session.version))

        async def repaired():
            return (
                await compare(management, expected, pool=pool_id) == []
                and await management.get_global_parameter(f"osrdyne-{pool_id}-leader") is not None
            )

        await until(repaired)
        await until(lambda: running.queue_of(A).is_bound and repairs(running, "request_binding") >= 1)
        assert (await running.leads(), running.task.done()) == (1, False)
        for kind in ("exchange", "binding", "queue", "policy", "parameter"):
            assert repairs(running, kind) >= 1, kind
        finding = finding_of(running)
        assert (finding.subject, finding.ok, "repaired in this term" in finding.message) == ("topology", True, True)
        await publish(channel, names, A, b"after")
        assert await take(channel, names.request_queue(A), 1) == [b"after"]


@pytest.mark.proves("broker/exchange-queue-exists-arguments")
async def test_doctor_and_status_name_what_cannot_be_repaired(broker_settings, pool_id, management, broker):
    """Another policy above ours, an operator policy that removes messages, and our policy when no daemon runs."""
    names, settings = PoolNames(pool_id), settings_of(broker_settings, pool_id, OFTEN)
    place = f"/api/operator-policies/{management.vhost}/{pool_id}-limits"
    harmful = {"leader": "message-ttl", "orphan": "message-ttl", "dl": "expires", "poison": "max-length"}
    async with daemon_of(settings) as running, http_client(broker.management_uri) as api:
        above = {"pattern": f"^{pool_id}-req-", "definition": {"max-length": 7}, "priority": 200, "apply-to": "queues"}
        await api.put(f"/api/policies/{management.vhost}/{pool_id}-other", json=above)
        await until(lambda: not finding_of(running).ok and pool_id in finding_of(running).message)
        assert False in await findings_of(settings, "topology")
        await management.delete_policy(f"{pool_id}-other")
        await until(lambda: finding_of(running).ok)
        body = {"pattern": f"^{pool_id}-", "definition": {"message-ttl": 10**8}, "apply-to": "queues"}
        (await api.put(place, json=body)).raise_for_status()
        of_all = (names.orphan_queue, names.dead_letter_queue, names.poison_queue)
        await until(lambda: all(name in finding_of(running).message for name in of_all))
        for queue, element in harmful.items():
            body = {"pattern": f"^{pool_id}-{queue}$", "definition": {element: 10**8}, "apply-to": "queues"}
            (await api.put(place, json=body)).raise_for_status()
            named = f"{element} on {pool_id}-{queue}"
            await until(lambda named=named: named in finding_of(running).message)
        assert False in await findings_of(settings, "topology")
        await api.delete(place)
        await until(lambda: finding_of(running).ok)
    await management.delete_policy(names.policy)
    assert False in await findings_of(settings, "topology")


@pytest.mark.proves("broker/policy-exchange-queue-controller")
async def test_requests_that_expire_while_the_policy_is_missing_are_answered(
    broker_settings, pool_id, channel, management
):
    names = PoolNames(pool_id)
    settings = settings_of(broker_settings, pool_id, LifecycleSettings(topology_interval=3600.0))
    replies = f"{pool_id}-callers"
    await channel.declare_queue(replies, exclusive=True)
    async with daemon_of(settings) as running:
        await publish(channel, names, A, b"before")
        assert await take(channel, names.request_queue(A), 1) == [b"before"]
        await until(lambda: running.queue_of(A).is_bound)
        await management.delete_policy(names.policy)
        for number in range(50):
            message = Message(b"1", reply_to=replies, correlation_id=str(number), expiration="100")
            await channel.publish(message, exchange=names.requests_exchange, routing_key=A, mandatory=True)
        consumer = await channel.consume(replies, no_ack=True)
        async with asyncio.timeout(60):
            answers = [await consumer.get() for _ in range(50)]
    assert {decode_text(answer.headers["x-status"]) for answer in answers} == {"expired"}
    assert sorted(int(answer.properties.correlation_id or -1) for answer in answers) == list(range(50))


@pytest.mark.proves("broker/exchange-queue-exists-arguments")
async def test_policy_for_all_queues_removes_no_request_while_no_controller_runs(
    broker_settings, pool_id, channel, management
):
    names, settings = PoolNames(pool_id), settings_of(broker_settings, pool_id, OFTEN)
    foreign = PolicySpec(f"{pool_id}-all", f"^{pool_id}-", "all", {"message-ttl": 50}, priority=0)
    keys = [Key(f"k{number}") for number in range(20)]
    async with daemon_of(settings):
        pass
    await management.put_policy(foreign)
    try:
        for key in keys:
            await publish(channel, names, key, key.encode())
        await asyncio.sleep(1.0)  # longer than the TTL: what it applies to is gone then
        async with daemon_of(settings) as running:
            for key in keys:
                assert await take(channel, names.request_queue(key), 1) == [key.encode()]
            assert finding_of(running).ok
    finally:
        await management.delete_policy(foreign.name)
