"""The example worker on Spark: a real process, a real RabbitMQ and the client, with answers in every form."""

import asyncio

import pytest
from spark_fixtures import SMALL_SPARK
from worker_process import stage

from osrdyne.client import AsyncClient, RequestError
from osrdyne.protocol.messages import ARROW_TYPE

pytestmark = [pytest.mark.one_rabbitmq, pytest.mark.usefixtures("java")]

KEY = "2"


@pytest.mark.timeout(1200)
async def test_rows_and_look_ups_reach_the_client(broker, pool_id):
    async with stage(broker.amqp_uri, pool_id, KEY) as pool, AsyncClient(broker.amqp_uri, pool_id) as client:
        await pool.start(app="workers.examples.scoring:app", spark=SMALL_SPARK, ready=False)
        segment = (await client.call(KEY, "/segment", {"minimum_age": 79}, timeout=600)).json()
        assert [row[:2] for row in segment["rows"]] == [[79, 33]]
        assert segment["truncated"] is False

        reply = await client.call(KEY, "/scores", accept=ARROW_TYPE, timeout=600)
        table = reply.arrow()
        assert (table.num_rows, table.column_names) == (1000, ["id", "score"])
        assert reply.headers["x-truncated"] in ("true", b"true")
        scores = dict(zip(*table.to_pydict().values(), strict=True))

        looked_up = await asyncio.gather(
            *(client.call(KEY, "/customer", {"id": number}, timeout=600) for number in range(100))
        )
        assert {one.json()["id"]: one.json()["score"] for one in looked_up} == pytest.approx(
            {number: scores[number] for number in range(100)}
        )
        with pytest.raises(RequestError, match="no customer 2000"):
            await client.call(KEY, "/customer", {"id": 2000}, timeout=600)
