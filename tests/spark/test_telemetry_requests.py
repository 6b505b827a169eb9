"""Requests of the ingest on Spark, with streams of a real RabbitMQ, in one session for all tests."""

import asyncio
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filled_streams import SMALL_SEGMENTS, fill, padded
from stored_telemetry import START, events, stored

from osrdyne import amqp
from osrdyne.amqp.streams import StreamConnection
from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key, PoolNames
from osrdyne_worker import Call, Context, RequestError
from osrdyne_worker.pipelines import ingest as pipeline
from osrdyne_worker.pipelines.telemetry.compaction import SORTED_BY
from osrdyne_worker.pipelines.telemetry.events import EVENTS
from osrdyne_worker.pipelines.telemetry.live_files import DataFile
from osrdyne_worker.pipelines.telemetry.table import Table

pytestmark = pytest.mark.one_rabbitmq

Opened = Callable[..., Call]


def messages(first: int, stop: int, *, step: int = 1_000, **properties: Any) -> Iterator[amqp.Message]:
    """Messages with two events, a second apart; the value of one is a number in every other message, else a text."""
    for number in range(first, stop):
        headers = {"x-osrdyne-key": f"plant/{number % 3}", "x-osrdyne-enqueued": START + number * step}
        value = number if number % 2 else f"text {number}"
        body = json.dumps([{"series": "b", "value": value}, {"series": "a"}]).encode()
        yield amqp.Message(body, headers=headers, **{"message_id": f"m{number}"} | properties)


@pytest.fixture
def opened(spark, broker, pool_id, tmp_path):
    """A call of a worker for a key, with settings of its table."""
    uri = tmp_path / "uri"
    uri.write_text(broker.amqp_uri)

    def open_worker(key, **settings):
        name = key.partition("/")[0]
        tables = {name: {"directory": str(tmp_path / name)} | settings}
        config = {"uri_file": str(uri), "pool": pool_id, "tables": tables, "timeout": 120}
        context = Context(key=Key(key), config=config, session=spark)
        started = dataclasses.replace(context, state=pipeline.start(context))
        return Call(started, Request(key=Key(key), body=b""))

    return open_worker


def table_of(call: Call) -> Table:
    state: pipeline.Ingest = call.context.state
    return state.table


def files_of(table: Table) -> list[DataFile]:
    """The files of events with their whole paths, by hour."""
    files = sorted(table.live(0).files.values(), key=lambda one: (one.path.rpartition("/")[0], one.sorted))
    return [dataclasses.replace(one, path=str(table.directory / one.path)) for one in files]


def rows_of(table: Table) -> dict[str, list[Any]]:
    several = [pq.read_table(path, partitioning=None) for path in table.files()]
    keys = [("offset", "ascending"), ("index", "ascending")]
    rows: dict[str, list[Any]] = pa.concat_tables(several).sort_by(keys).to_pydict()
    return rows


def ask(call: Call, **body: Any) -> dict[str, Any]:
    return pipeline.ingest(call, pipeline.IngestRequest(**body))


def replay(call: Call, **body: Any) -> dict[str, Any]:
    return pipeline.replay(call, pipeline.ReplayRequest.model_validate(body))


@pytest.mark.proves("telemetry-tables/replay-interrupted-requested-twice")
async def test_replay_stores_a_range_of_times_once(opened, broker, pool_id):
    await fill(broker.amqp_uri, PoolNames(pool_id).log_stream(2), messages(0, 100))
    call = opened("again/2", begin="replay")
    assert ask(call)["commit"] is None
    span = {
        "from": datetime.fromtimestamp(START / 1000 + 30, UTC).isoformat(),
        "to": datetime.fromtimestamp(START / 1000 + 69.5, UTC).isoformat(),
    }
    first = replay(call, max_offsets=25, **span)
    assert first["offsets"] == {"start": 30, "stop": 55, "end": 70}
    await fill(broker.amqp_uri, PoolNames(pool_id).log_stream(2), messages(100, 120))
    assert [replay(call, **span)["rows"], ask(call)["rows"], replay(call, **span)["rows"]] == [30, 0, 0]
    assert stored(table_of(call)) == events(30, 70)
    with pytest.raises(RequestError) as refusal:
        replay(call, **{"from": 30})
    assert (refusal.value.code, refusal.value.error_code) == (409, "replay_conflict")
    with pytest.raises(RequestError) as refusal:
        replay(opened("other/2"), **{"from": "noon"})
    assert (refusal.value.code, refusal.value.error_code) == (400, "invalid_range")


async def test_closed_hours_are_compacted_after_an_ingest_or_on_request(opened, broker, pool_id):
    stream, half_hour = PoolNames(pool_id).log_stream(0), 1_800_000
    await fill(broker.amqp_uri, stream, messages(0, 6, step=half_hour))
    call = opened("cold/0", compact_interval=3600)
    table = table_of(call)
    ask(call, max_offsets=3)
    assert not any(one.sorted for one in files_of(table))
    assert ask(call)["commit"] == 2
    assert [one.sorted for one in files_of(table)] == [True, True, False]

    broken = [amqp.Message(b"{", headers=one.headers) for one in messages(2, 4, step=half_hour)]
    await fill(broker.amqp_uri, stream, [*broken, *messages(2, 4, step=half_hour)])
    ask(opened("cold/0"))
    before = rows_of(table)
    requested = [pipeline.compact(call, pipeline.CompactRequest(max_hours=1)) for _ in range(2)]
    assert [(answer["hours"], answer["remaining_hours"]) for answer in requested] == [(1, 0), (0, 0)]
    assert rows_of(table) == before
    assert len(table.files(invalid=True)) == 1
    for file in (one for one in files_of(table) if one.sorted):
        rows = pq.read_table(file.path, partitioning=None)
        assert rows.schema.equals(EVENTS)
        assert rows.equals(rows.sort_by([(column, "ascending") for column in SORTED_BY]))


@pytest.mark.parametrize(("mode", "expected"), [("drop", None), ("mark", 2)])
@pytest.mark.proves("telemetry-tables/message-log-twice-one")
async def test_copies_are_dropped_or_marked(opened, broker, pool_id, monkeypatch, mode, expected):
    monkeypatch.setattr(pipeline, "_SMALLEST_TASK", 3)
    sent = list(messages(0, 6))
    await fill(broker.amqp_uri, PoolNames(pool_id).log_stream(0), [*sent, sent[2], sent[5], *messages(6, 9), sent[2]])
    call = opened("cold/0", copies=mode)
    assert [ask(call, max_offsets=7)["copies"], ask(call)["copies"]] == [1, 2]
    found = dict.fromkeys((6, 7, 11), None) | {
        offset: original
        for offset, original in zip(*(rows_of(table_of(call))[name] for name in ("offset", "copy_of")), strict=True)
        if original is not None
    }
    assert found == {6: expected, 7: expected and 5, 11: expected}
    stays = range(12) if expected else [one for one in range(12) if one not in (6, 7, 11)]
    assert stored(table_of(call)) == [(offset, index) for offset in stays for index in (0, 1)]


@pytest.mark.proves("telemetry-tables/retention-removes-messages-ingest")
async def test_messages_lost_while_they_are_read_are_data_lost(opened, broker, pool_id, monkeypatch):
    stream = PoolNames(pool_id).log_stream(0)
    await fill(broker.amqp_uri, stream, padded(20), arguments=SMALL_SEGMENTS)
    plan = pipeline.next_range

    def plan_and_lose(*arguments, **options):
        """The retention removes the planned range before Spark reads it."""

        async def lose():
            options = amqp.ConnectionOptions(uri=broker.amqp_uri, connect_timeout=120, rpc_timeout=120)
            async with await StreamConnection.open(options, silence=120) as streams:
                while await streams.first_offset(stream) < 20:
                    await fill(broker.amqp_uri, stream, padded(100), arguments=SMALL_SEGMENTS)

        wanted = plan(*arguments, **options)
        thread = threading.Thread(target=lambda: asyncio.run(lose()))
        thread.start()
        thread.join()
        return wanted

    monkeypatch.setattr(pipeline, "next_range", plan_and_lose)
    call = opened("cold/0")
    with pytest.raises(RequestError, match=r"The offsets 0 to 19 of the stream .* are no longer in it") as refusal:
        ask(call)
    assert (refusal.value.code, refusal.value.error_code) == (410, "data_lost")
    assert table_of(call).last_commit(0) is None


@pytest.mark.proves("telemetry-tables/table-reaches-storage-limit")
async def test_table_at_its_limit_is_paused_or_purged(opened, broker, pool_id):
    await fill(broker.amqp_uri, PoolNames(pool_id).log_stream(0), messages(0, 6, step=3_600_000))
    call = opened("warm/0", max_rows=9, on_storage_limit="purge")
    assert ask(call, max_offsets=3)["storage"]["purged"] == 0
    storage = ask(call)["storage"]
    assert (storage["rows"], storage["purged"]) == (8, 4)
    assert stored(table_of(call)) == events(2, 6)
    paused = opened("warm/0", max_rows=8)
    with pytest.raises(RequestError, match="Nothing more is stored") as refusal:
        ask(paused)
    assert (refusal.value.code, refusal.value.error_code) == (507, "storage_limit")
    assert table_of(paused).positions() == {0: 6}


async def test_throttled_table_takes_its_units_in_each_request_and_another_takes_all(
    opened, broker, pool_id, monkeypatch
):
    now = START / 1000
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(time=lambda: now, monotonic=time.monotonic))
    await fill(broker.amqp_uri, PoolNames(pool_id).log_stream(0), messages(0, 1_500, step=0))
    warm, cold = opened("warm/0", preset="store-s1", units=2), opened("cold/0")
    # Two units of S1 store 24 events a second: 12 messages. The clock stands between the ends of two messages.
    for seconds, messages_stored in ((19.95, 240), (0, 240), (30, 600), (60, 1_320), (60, 1_500)):
        now += seconds
        before = table_of(warm).positions().get(0, 0)
        answer = ask(warm)
        taken = 2 * (messages_stored - before)
        assert (answer["rows"], answer["blocks"]) == (taken, taken)
        assert answer["offsets"] == {"start": before, "stop": messages_stored, "end": 1_500}
        if not before:
            assert ask(cold)["offsets"] == {"start": 0, "stop": 1_500, "end": 1_500}
    assert stored(table_of(warm)) == stored(table_of(cold)) == events(0, 1_500)
