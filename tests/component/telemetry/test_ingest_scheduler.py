"""The scheduler of ingests in virtual time: when it sends requests, and what failures and killed leaders change."""

import asyncio
import json
import math
from collections import Counter
from contextlib import closing
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tables_world import World, refusal

from osrdyne.client.errors import PoolNotFoundError, RequestTimeoutError
from osrdyne.client.reply import Reply
from osrdyne.protocol.rates import EventRate
from osrdyne.telemetry.schedule import TableRules
from osrdyne.telemetry.scheduler import LONGEST_MEASURE_INTERVAL, RETRY
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.loop import MemoryLoop

COLD = TableRules("cold", "ingest", target_lag=60.0)
INVALID = ("invalid_answer", "osrdyne_worker.pipelines.ingest:app")
LATE = 60.0 + LONGEST_MEASURE_INTERVAL + 1.0
LONGEST_PAUSE = RETRY.maximum * (1 + RETRY.jitter)


def pauses_of(ats: list[float]) -> list[float]:
    return [round(later - earlier, 6) for earlier, later in pairwise(ats)]


@pytest.fixture
def world(clock):
    return World(clock)


async def test_request_follows_when_the_lag_has_passed_its_target(world, clock):
    async with world.scheduling(COLD):
        await clock.advance(3600.0)
        assert world.requests == []  # nothing to read
        begun = clock.monotonic()
        world.write(30)
        await clock.advance(59.0)
        assert world.requests == []
        await clock.advance(LATE + 3600.0)
    assert world.is_stored_once("cold")
    [at] = world.at("cold/0")
    assert 60.0 <= at - begun <= LATE


async def test_interval_demands_an_ingest_before_the_target_lag(world, clock):
    async with world.scheduling(TableRules("cold", "ingest", target_lag=3600.0, interval=20.0)):
        for _ in range(10):
            world.write()
            await clock.advance(60.0)
            assert world.is_stored_once("cold")


@pytest.mark.parametrize("next_after", [0.0, 100.0], ids=["unlimited", "throttled"])
async def test_next_request_follows_at_once_or_when_the_table_takes_more(world, clock, next_after):
    world.write(450)
    world.next_after, world.rate = next_after, EventRate(720, 1024) if next_after else None
    async with world.scheduling(COLD):
        await clock.advance(LATE + 5 * (world.duration + next_after))
    assert world.is_stored_once("cold")
    assert pauses_of(world.at("cold/0")) == [world.duration + next_after] * 4


async def test_many_partitions_are_ingested_a_few_at_once_and_in_turn(clock):
    world = World(clock, partitions=256)
    async with world.scheduling(COLD):
        for partition in range(256):
            world.write(250, partition=partition)
        await clock.advance(LATE + 256 * 3 / 4 * world.duration + 60.0)
        assert world.is_stored_once("cold")
        assert world.most_busy == 4
        # Now each gets a message every 10 seconds, and one request in a target lag is enough.
        world.requests.clear()
        for _ in range(60):
            for partition in range(256):
                world.write(partition=partition)
            await clock.advance(10.0)
    assert max(Counter(key for _, key in world.requests).values()) <= 11
    assert len({key for _, key in world.requests}) == 256


@pytest.mark.proves("telemetry/request-ingest-fails-answered")
async def test_failing_table_waits_longer_each_time_and_delays_no_other(world, clock):
    full = refusal("storage_error", 507, "The table /data/warm cannot be used: disk full. Free space.")
    world.fault = lambda key: full if key.startswith("warm") else None
    async with world.scheduling(COLD, TableRules("warm", "ingest")) as scheduler:
        with capture_logs() as logs:
            for _ in range(60):
                world.write()
                await clock.advance(60.0)
        ats = world.at("warm/0")
        pauses = pauses_of(ats)
        assert pauses[0] < 30.0
        assert 0.7 * RETRY.maximum < pauses[-1] <= LONGEST_PAUSE + LATE
        assert len(world.written[0]) - world.positions["cold/0"] <= 2
        warnings = [one for one in logs if one["log_level"] == "warning"]
        assert {(one["table"], one["code"]) for one in warnings} == {("warm", "storage_error")}
        assert all("Free space." in one["error"] for one in warnings)
        [shown] = [one.partitions[0] for one in scheduler.status() if one.name == "warm"]
        assert (shown.code, len(ats) - shown.failures in {0, 1}) == ("storage_error", True)  # the last may still run
        world.fault = lambda key: None
        await clock.advance(LONGEST_PAUSE + 60 * world.duration)
        assert world.is_stored_once("warm")
        assert scheduler.status()[1].partitions[0].failures == 0


def answer(start: int, stop: int, end: object, **fields: object) -> Reply:
    offsets = {"start": start, "stop": stop, "end": end}
    return Reply(body=json.dumps({"offsets": offsets, "rows": 5, "invalid": 0, **fields}).encode())


@pytest.mark.parametrize(
    ("fault", "code", "remedy"),
    [
        pytest.param(RequestTimeoutError("after 600 s", sent=True), "no_answer", "pool ingest", id="no answer"),
        pytest.param(PoolNotFoundError("There is no pool 'ingest'"), "no_pool", "pool ingest", id="no pool"),
        pytest.param(Reply(status="capacity"), "capacity", "lifecycle.max_groups", id="capacity"),
        pytest.param(Reply(status="no-route"), "no-route", "/ingest", id="no route"),
        pytest.param(Reply(status="unauthorized"), "unauthorized", "token_file", id="no token"),
        pytest.param(Reply(status="forbidden"), "forbidden", "'cold/0'", id="token without grant"),
        pytest.param(Reply(body=b"[]"), *INVALID, id="no object"),
        pytest.param(Reply(body=b"null"), *INVALID, id="null"),
        pytest.param(Reply(body=b'{"offsets": {}}'), *INVALID, id="no offsets"),
        pytest.param(answer(0, 1, None), *INVALID, id="no end"),
        pytest.param(answer(0, 1, -1), *INVALID, id="negative"),
        pytest.param(answer(0, 1, 1, rows=True), *INVALID, id="bool"),
        pytest.param(answer(0, 1, 1, next_after=math.nan), *INVALID, id="nan"),
    ],
)
@pytest.mark.proves("telemetry/request-ingest-fails-answered")
async def test_failure_is_logged_with_its_code_and_remedy(world, clock, fault, code, remedy):
    world.write()
    world.fault = lambda key: fault
    async with world.scheduling(COLD):
        with capture_logs() as logs:
            await clock.advance(LATE + world.duration)
    first = next(one for one in logs if one["log_level"] == "warning")
    assert (first["code"], first["partition"], remedy in first["error"]) == (code, 0, True)
    assert world.count("cold", "failed") >= 1


async def test_token_is_read_again_for_each_request(world, clock, tmp_path):
    file = tmp_path / "token"

    async def until_more(count):
        before = count()
        world.write()
        while count() == before:
            await clock.advance(1.0)
            await asyncio.sleep(0.01)  # the file is read in a thread, which knows no virtual time

    async with world.scheduling(replace(COLD, token_file=str(file))) as scheduler:
        await until_more(lambda: world.count("cold", "failed"))
        [shown] = scheduler.status()
        assert (str(file) in str(shown.partitions[0].error), world.tokens) == (True, [])
        with capture_logs() as logs:
            for token in ("hidden-1", "hidden-2"):
                file.write_text(f"{token}\n")
                await until_more(lambda: len(world.tokens))
    assert (world.tokens[0], world.tokens[-1]) == ("hidden-1", "hidden-2")
    assert "hidden" not in f"{logs}{scheduler.status()}"


async def test_defect_in_one_request_ends_neither_the_scheduler_nor_its_table(world, clock):
    world.write()
    faults: list[Exception | None] = [RuntimeError("defect")]
    world.fault = lambda key: faults.pop() if faults else None
    async with world.scheduling(COLD):
        with capture_logs() as logs:
            await clock.advance(LATE + LONGEST_MEASURE_INTERVAL + 2 * world.duration)
    assert [one["code"] for one in logs if one["log_level"] == "error"] == ["unexpected_error"]
    assert world.is_stored_once("cold")


@pytest.mark.proves("telemetry/two-leaders-request-one")
async def test_conflict_is_no_failure(world, clock):
    world.write(450)
    async with world.scheduling(COLD), world.scheduling(COLD):
        with capture_logs() as logs:
            await clock.advance(600.0)
    assert world.is_stored_once("cold")
    assert (world.count("cold", "conflict") >= 1, world.count("cold", "failed")) == (True, 0)
    assert [one for one in logs if one["log_level"] != "info"] == []


@pytest.mark.proves("telemetry/lag-log-cannot-measured")
async def test_lag_that_cannot_be_measured_is_measured_again(world, clock):
    world.write()
    world.is_measurable = False
    async with world.scheduling(COLD):
        with capture_logs() as logs:
            await clock.advance(600.0)
        assert {one["log_level"] for one in logs} == {"warning"}
        assert 8 <= len(logs) <= 30
        world.is_measurable = True
        await clock.advance(60.0 * 1.3 + 2 * world.duration)
        assert world.is_stored_once("cold")


async def test_position_of_a_table_is_kept_for_the_next_leader(world, clock):
    world.write(50)
    async with world.scheduling(COLD):
        await clock.advance(LATE + 2 * world.duration)
    assert world.parameters.values["osrdyne-plant-telemetry-cold"]["offsets"] == {"0": 50}  # type: ignore[index]
    async with world.scheduling(COLD):
        await clock.advance(600.0)
    assert len(world.requests) == 1


@pytest.mark.proves("telemetry/leader-dies-between-request")
@given(kills=st.lists(st.floats(0.0, 90.0), min_size=1, max_size=6), duration=st.sampled_from([0.0, 3.0, 40.0]))
def test_leader_killed_at_any_moment_stores_each_message_once(kills, duration):
    async def live():
        clock = VirtualClock()
        world = World(clock, partitions=2, duration=duration, batch=20)
        for after in kills:
            async with world.scheduling(COLD):
                world.write(15)
                world.write(5, partition=1)
                await clock.advance(after)
        async with world.scheduling(COLD):
            await clock.advance(LATE + 60.0 + 10 * (duration + 1.0))
        assert world.is_stored_once("cold")
        assert world.count("cold", "failed") == 0

    with closing(MemoryLoop()) as loop:
        loop.run_until_complete(live())


async def test_copies_old_events_and_storage_of_the_answers_are_metrics(world, clock):
    counted = answer(0, 5, 9, copies=2, old=4, storage={"rows": 500, "bytes": 9_000, "purged": 40})
    world.fault = lambda key: counted if len(world.requests) < 4 else None
    world.write(9)
    async with world.scheduling(COLD):
        await clock.advance(LATE + 10 * world.duration)
    metric = world.metrics.registry.get_sample_value
    names = ("copies_total", "purged_rows_total", "table_rows", "table_bytes")
    assert [metric(f"osrdyne_telemetry_{name}", {"table": "cold"}) for name in names] == [6, 120, 500, 9_000]
    assert metric("osrdyne_telemetry_old_events_total", {"table": "cold", "partition": "0"})
