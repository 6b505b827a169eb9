"""Which streams the log of telemetry is to have, and what is said of those that contradict the settings."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from osrdyne.broker.doctor.checks import check_log
from osrdyne.broker.topology.telemetry import LogPlan, plan_log, stream_arguments
from osrdyne.config.models import PoolSettings, Settings, TelemetrySettings
from osrdyne.protocol.names import Key, PoolNames, QueueName, ReplyAddresses
from osrdyne.protocol.telemetry import partition_of

NAMES = PoolNames("p")
LOG = TelemetrySettings(name="plant", partitions=2)


def plan(settings: TelemetrySettings = LOG, found: dict[int, dict[str, object]] | None = None) -> LogPlan:
    return plan_log(NAMES, settings, found or {})


def existing(settings: TelemetrySettings = LOG) -> dict[int, dict[str, object]]:
    """The streams that a leader with these settings has declared."""
    return {one: stream_arguments(settings, partitions=settings.partitions) for one in range(settings.partitions)}


def changed(**fields: object) -> TelemetrySettings:
    return TelemetrySettings(**{**LOG.model_dump(), **fields})


def test_new_log_has_a_stream_for_each_partition_with_its_share_of_the_size():
    planned = plan(changed(max_age="1h", max_bytes="1GiB"))
    assert [queue.name for queue in planned.streams] == ["p-log-0", "p-log-1"]
    assert planned.streams[1].arguments == {
        "x-queue-type": "stream",
        "x-max-age": "3600s",
        "x-max-length-bytes": 2**29,
        "x-stream-max-segment-size-bytes": 2**26,
        "x-osrdyne-partitions": 2,
    }
    assert planned.conflicts == ()


def test_log_as_declared_is_kept_and_a_missing_stream_declared_again():
    assert plan(TelemetrySettings(), existing()) == LogPlan()
    found = existing()
    del found[0]
    assert plan(found=found) == plan(found=existing()) == plan()


@pytest.mark.proves("telemetry/telemetry-partitions-max-age")
def test_log_keeps_its_partitions_and_retention_when_the_settings_change():
    for partitions in (1, 3):
        planned = plan(changed(partitions=partitions, max_bytes=LOG.max_bytes // 2 * partitions), existing())
        assert (planned.partitions, planned.streams) == (2, plan().streams)
        [conflict] = planned.conflicts
        assert "telemetry.partitions" in conflict and "p-log-0 to p-log-1" in conflict
    planned = plan(changed(max_age="1h"), existing())
    assert (planned.streams, len(planned.conflicts)) == (plan().streams, 2)
    for one, conflict in enumerate(planned.conflicts):
        assert f"p-log-{one} has x-max-age 604800s instead of 3600s" in conflict
    planned = plan(found=existing() | {7: existing()[0]})
    assert (planned.partitions, "p-log-7" in planned.conflicts[0]) == (2, True)


@pytest.mark.proves("telemetry/leader-dies-declares-log")
def test_leader_that_was_killed_while_it_declared_the_log_is_no_conflict():
    found = existing(changed(partitions=4, max_bytes=LOG.max_bytes * 2))
    assert plan(changed(partitions=4, max_bytes=LOG.max_bytes * 2), {0: found[0]}).conflicts == ()


@pytest.mark.proves("telemetry/queue-stream-name-partition")
def test_log_is_not_written_while_a_queue_of_another_type_has_its_name():
    planned = plan(found=existing() | {1: {"x-queue-type": "quorum"}})
    assert (planned.partitions, planned.streams) == (0, ())
    [finding] = check_log(planned, name="plant")
    assert (finding.ok, finding.fatal, "p-log-1" in finding.message) == (False, True, True)
    assert [finding.ok for finding in check_log(plan(), name="plant")] == [True]
    differs = check_log(plan(changed(max_age="1h"), existing()), name="plant")
    assert {(finding.ok, finding.fatal) for finding in differs} == {(False, False)}, "it fails no daemon"


@given(st.text(st.characters(codec="utf-8"), max_size=60), st.integers(1, 256))
def test_partition_is_the_crc_of_the_key(key, partitions):
    """Readers and stored positions rely on it."""
    assert partition_of(Key(key), partitions) == zlib.crc32(key.encode()) % partitions
    assert [partition_of(Key(key), 4) for key in ("", "plant/1", "plant/2", "é", "\0")] == [0, 2, 0, 2, 1]


def test_streams_are_names_of_the_pool_and_lead_back_to_their_partition():
    queues = ("p-log-0", "p-log-12", "p-log-01", "p-log-x", "q-log-1")
    assert [NAMES.partition_of_log_stream(queue) for queue in queues] == [0, 12, None, None, None]
    assert ReplyAddresses(NAMES).refuse(QueueName("p-log-3")) is not None


def test_log_needs_a_managed_pool_and_the_least_size_for_its_partitions():
    with pytest.raises(ValidationError, match=r"telemetry\.name"):
        Settings(telemetry=LOG)
    assert Settings(telemetry=LOG, pool=PoolSettings(kind="managed")).telemetry.name == "plant"
    with pytest.raises(ValidationError, match="33554432"):
        changed(partitions=256, max_bytes="1MiB")
