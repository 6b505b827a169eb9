"""Real workers on Spark and RabbitMQ: `/ingest` stores every event of a stream once; and answers in every form."""

import asyncio
import json
from collections.abc import Iterator

import pyarrow.parquet as pq
import pytest
from filled_streams import fill
from pydantic import SecretStr
from spark_fixtures import SMALL_SPARK
from worker_process import stage

from osrdyne import amqp
from osrdyne.broker.management.client import ManagementClient
from osrdyne.client import AsyncClient, RequestError
from osrdyne.config.models import BrokerSettings
from osrdyne.protocol.messages import ARROW_TYPE
from osrdyne.protocol.names import PoolNames
from osrdyne.telemetry.positions import PositionStore
from osrdyne_worker.pipelines.telemetry.table import Table

pytestmark = [pytest.mark.one_rabbitmq, pytest.mark.usefixtures("java")]

KEY = "cold/1"
START = 1_795_341_600_000
PATIENCE = 600


def messages(first: int, stop: int) -> Iterator[amqp.Message]:
    """Two events in each message, in three hours; every tenth message is not JSON."""
    for number in range(first, stop):
        body = b"{" if number % 10 == 0 else json.dumps([{"series": "a", "value": number}, {"series": "b"}]).encode()
        headers = {"x-osrdyne-key": "plant/ü", "x-osrdyne-enqueued": START + number % 3 * 3_600_000}
        yield amqp.Message(body, message_id=f"m{number}", headers=headers)


def stored(table: Table, *, invalid: bool = False) -> list[tuple[int, int]]:
    rows = []
    for path in table.files(invalid=invalid):
        columns = pq.read_table(path, partitioning=None).select(["offset", "index"]).to_pydict()
        rows += list(zip(columns["offset"], columns["index"], strict=True))
    return sorted(rows)


def expected(count: int) -> list[tuple[int, int]]:
    return [(number, index) for number in range(count) if number % 10 for index in (0, 1)]


@pytest.mark.timeout(1800)
@pytest.mark.proves("telemetry-tables/two-ingests-one-partition", "telemetry-tables/worker-dies-during-ingest")
async def test_every_event_is_stored_once(broker, pool_id, tmp_path):
    uri, management = tmp_path / "uri", tmp_path / "management"
    uri.write_text(broker.amqp_uri)
    management.write_text(broker.management_uri)
    stream = PoolNames(pool_id).log_stream(1)
    await fill(broker.amqp_uri, stream, messages(0, 50))
    table = Table(tmp_path / "cold")
    config = {
        "uri_file": str(uri),
        "management_uri_file": str(management),
        "tables": {"cold": {"directory": str(table.directory)}},
        "timeout": 120,
    }

    async def start(pool):
        return await pool.start(
            app="osrdyne_worker.pipelines.ingest:app", spark=SMALL_SPARK, config=config, ready=False
        )

    settings = BrokerSettings(uri=SecretStr(broker.amqp_uri), management_uri=SecretStr(broker.management_uri))
    async with (
        stage(broker.amqp_uri, pool_id, KEY) as pool,
        AsyncClient(broker.amqp_uri, pool_id) as client,
        ManagementClient(settings) as parameters,
    ):
        worker = await start(pool)
        first = (await client.call(KEY, "/ingest", {"max_offsets": 30}, timeout=PATIENCE)).json()
        assert (first["rows"], first["invalid"], first["commit"]) == (54, 3, 1)
        assert first["offsets"] == {"start": 0, "stop": 30, "end": 50}
        assert stored(table) == expected(30)
        second = (await client.call(KEY, "/ingest", {}, timeout=PATIENCE)).json()
        third = (await client.call(KEY, "/ingest", {}, timeout=PATIENCE)).json()
        assert (second["rows"], third["rows"], third["files"]) == (36, 0, [])
        assert stored(table) == expected(50)
        assert stored(table, invalid=True) == [(number, -1) for number in range(0, 50, 10)]
        (position,) = await PositionStore(parameters, pool=pool_id).load()
        assert (position.reader, position.offsets) == ("cold", {1: 50})

        await fill(broker.amqp_uri, stream, messages(50, 60))
        obstacle = table.directory / "_commits" / "1" / f"{3:020d}.json"
        obstacle.mkdir()
        with pytest.raises(RequestError, match=r"3\.json cannot be read: Is a directory") as refusal:
            await client.call(KEY, "/ingest", {}, timeout=PATIENCE)
        assert refusal.value.code == 507
        obstacle.rmdir()

        # Two at once, in a worker that is killed: the next worker answers what this one has not.
        calls = [asyncio.create_task(client.call(KEY, "/ingest", {}, timeout=PATIENCE)) for _ in range(2)]
        await worker.kill()
        await start(pool)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        replies = [one.json() for one in answers if not isinstance(one, BaseException)]
        assert replies
        assert all(one.code == 409 for one in answers if isinstance(one, RequestError))
        assert len(replies) + sum(isinstance(one, RequestError) for one in answers) == 2
        assert sum(one["rows"] for one in replies) in (0, 18)
        assert {one["commit"] for one in replies} == {3}
        assert stored(table) == expected(60)


@pytest.mark.timeout(1200)
async def test_rows_and_look_ups_reach_the_client(broker, pool_id):
    async with stage(broker.amqp_uri, pool_id, "2") as pool, AsyncClient(broker.amqp_uri, pool_id) as client:
        await pool.start(app="workers.examples.scoring:app", spark=SMALL_SPARK, ready=False)
        segment = (await client.call("2", "/segment", {"minimum_age": 79}, timeout=600)).json()
        assert [row[:2] for row in segment["rows"]] == [[79, 33]]
        assert segment["truncated"] is False

        reply = await client.call("2", "/scores", accept=ARROW_TYPE, timeout=600)
        table = reply.arrow()
        assert (table.num_rows, table.column_names) == (1000, ["id", "score"])
        assert reply.headers["x-truncated"] in ("true", b"true")
        scores = dict(zip(*table.to_pydict().values(), strict=True))

        looked_up = await asyncio.gather(
            *(client.call("2", "/customer", {"id": number}, timeout=600) for number in range(100))
        )
        assert {one.json()["id"]: one.json()["score"] for one in looked_up} == pytest.approx(
            {number: scores[number] for number in range(100)}
        )
        with pytest.raises(RequestError, match="no customer 2000"):
            await client.call("2", "/customer", {"id": 2000}, timeout=600)
