"""Handlers that return frames of Spark and pandas, on a real Spark."""

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from osrdyne.protocol.messages import ARROW_TYPE, Request, Response
from osrdyne.protocol.names import Key
from osrdyne_worker import App, Call, Context
from osrdyne_worker.requests.dispatch import Dispatcher

Ask = Callable[..., Response]


@pytest.fixture
def ask(sessions, spark):
    """Runs a handler on the session of the tests, as a worker does."""
    with ThreadPoolExecutor(3) as threads:

        def run(handler, *, accept=None, row_limit=10):
            app = App(sessions=sessions)
            app.handler("/p", row_limit=row_limit)(handler)
            headers = {} if accept is None else {"accept": accept}
            call = Call(Context(Key("k"), session=spark), Request("k", b"", path="/p", headers=headers))
            return asyncio.run(Dispatcher(app, threads=threads, side_threads=threads).run(call, group_id="answers"))

        yield run


def frame(call: Call) -> Any:
    return call.context.session.sql(
        "select id, cast(id as decimal(20, 3)) as amount, timestamp '2024-02-29 12:00:00' as at, "
        "interval '1-2' year to month as term, double('NaN') as ratio from range(3)"
    )


async def frame_of_a_coroutine(call: Call) -> Any:
    return frame(call)


@pytest.mark.parametrize("handler", [frame, frame_of_a_coroutine])
def test_frame_of_spark_has_the_exact_values_of_the_sql_pipeline(ask, handler):
    response = ask(handler, row_limit=2)
    assert response.headers == {"x-truncated": "true"}
    assert json.loads(response.body) == {
        "columns": [
            {"name": "id", "type": "bigint"},
            {"name": "amount", "type": "decimal(20,3)"},
            {"name": "at", "type": "timestamp"},
            {"name": "term", "type": "interval year to month"},
            {"name": "ratio", "type": "double"},
        ],
        "rows": [[n, f"{n}.000", "2024-02-29T12:00:00Z", "INTERVAL '1-2' YEAR TO MONTH", "NaN"] for n in range(2)],
        "row_count": 2,
        "truncated": True,
    }


def test_frame_of_spark_is_arrow_for_a_caller_that_accepts_it(ask):
    response = ask(frame, accept=ARROW_TYPE)
    with pa.ipc.open_stream(response.body) as reader:
        table = reader.read_all()
    assert table.column("id").to_pylist() == [0, 1, 2]
    assert table.schema.metadata[b"truncated"] == b"false"


def test_limit_reaches_spark_before_the_rows_are_made(ask):
    """All rows of this frame would not fit into any memory."""
    response = ask(lambda call: call.context.session.range(10**12), row_limit=5)
    assert json.loads(response.body)["rows"] == [[0], [1], [2], [3], [4]]


def test_frame_of_pandas_from_spark_is_answered(ask):
    def describe(call: Call) -> pd.DataFrame:
        found = call.context.session.range(4).toPandas()
        return found.assign(even=found["id"] % 2 == 0)

    document = json.loads(ask(describe).body)
    assert document["columns"] == [{"name": "id", "type": "bigint"}, {"name": "even", "type": "boolean"}]
    assert document["rows"] == [[0, True], [1, False], [2, True], [3, False]]


def test_batches_of_spark_are_answered_as_they_come(ask):
    def batches(call: Call) -> Iterator[pa.RecordBatch]:
        for row in call.context.session.range(3).toLocalIterator():
            yield pa.record_batch({"n": [row.id]})

    assert json.loads(ask(batches).body)["rows"] == [[0], [1], [2]]
