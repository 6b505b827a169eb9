"""The log of telemetry of a running daemon on a real RabbitMQ: what doctor and status say, and the lag of readers."""

import json
from collections import Counter

from broker_api import http_client, until
from test_term import SOON, Running, daemon_of, publish, settings_of

from osrdyne.broker.doctor.run import run_broker_checks
from osrdyne.config.models import BrokerSettings, LifecycleSettings, PoolSettings, Settings, TelemetrySettings
from osrdyne.findings import Finding
from osrdyne.ingress.routes.manifest import load_manifest
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.protocol.telemetry import partition_of
from osrdyne.telemetry.positions import PositionStore, ReaderPosition

ROUTES = {"log": 'FROM /messages/* INTO BrokeredEndpoint("/streams/plant/inputs/log")'}
WRITTEN = "osrdyne_telemetry_messages_total"
KEYS = [f"plant/{number}" for number in range(20)]


def telemetry_settings(broker: BrokerSettings, pool: str, **telemetry: object) -> Settings:
    settings = settings_of(broker, pool, LifecycleSettings(topology_interval=1.0))
    log = TelemetrySettings(name="plant", **telemetry)
    return settings.model_copy(update={"pool": PoolSettings(id=pool, kind="managed"), "telemetry": log})


async def findings_of(settings: Settings, *subjects: str) -> list[Finding]:
    return [finding for finding in await run_broker_checks(settings) if finding.subject in subjects]


def metric(running: Running, name: str, **labels: str) -> float | None:
    return running.daemon._metrics.registry.get_sample_value(name, labels)


async def test_lag_of_readers_and_changed_settings_of_a_log(broker_settings, pool_id, channel, management):
    names = PoolNames(pool_id)
    positions = PositionStore(management, pool=pool_id)
    settings = telemetry_settings(broker_settings, pool_id, partitions=2)
    expected = Counter(partition_of(Key(key), 2) for key in KEYS)
    async with daemon_of(settings) as running:
        await running.term.routing.routes.change(load_manifest(json.dumps({"routes": ROUTES})), author="me")
        assert {finding.ok for finding in await findings_of(settings, "telemetry", "topology")} == {True}
        for key in KEYS:
            await publish(channel, names, key)
        await until(lambda: all(metric(running, WRITTEN, partition=str(one)) == expected[one] for one in (0, 1)))
        await positions.save(ReaderPosition("warm", {0: 1, 1: expected[1]}, 1.7e9))
        async with http_client(running.daemon.api.announced_url) as http:
            answer = (await http.get("/v1/telemetry")).json()
    assert [(one["stream"], one["first"], one["next"], one["messages"]) for one in answer["partitions"]] == [
        (names.log_stream(one), 0, expected[one], expected[one]) for one in (0, 1)
    ]
    [reader] = answer["readers"]
    assert (reader["reader"], reader["messages"]) == ("warm", expected[0] - 1)
    behind, at_the_end = reader["partitions"]
    assert (behind["messages"], at_the_end["messages"], at_the_end["seconds"]) == (expected[0] - 1, 0, 0.0)
    assert 0 < behind["seconds"] < 2 * SOON

    # Changed settings leave the log as it is, and are named.
    changed = telemetry_settings(broker_settings, pool_id, partitions=3, max_bytes=24 * 2**30)
    async with daemon_of(changed) as running:
        [component] = [one for one in running.daemon._inspector.components() if one.name == "telemetry"]
        assert (component.ok, component.fatal) == (False, False)
        assert "telemetry.partitions is 3, but the log has 2" in component.detail
        [finding] = await findings_of(changed, "telemetry")
        assert (finding.ok, finding.fatal) == (False, False)
        assert running.term.routing.log.log.partitions == 2
        # The watch declares what is missing of the log as it is, and no third stream.
        await channel.delete_queue(names.log_stream(1))
        repairs = "osrdyne_topology_repairs_total"
        await until(lambda: (metric(running, repairs, object="queue") or 0) >= 1)
        found = sorted(queue.name for queue in await management.list_queues(names.log_stream_prefix))
        assert found == [names.log_stream(0), names.log_stream(1)]
