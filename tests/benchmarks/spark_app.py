"""The SQL pipeline, a handler that runs the same query without it, and look-ups one by one and in batches.

`spark_query` compares them.
"""

from __future__ import annotations

import time

from pydantic import BaseModel

from osrdyne_worker import App, Call
from osrdyne_worker.pipelines import sql as pipeline
from osrdyne_worker.pipelines.guard.sessions import REQUIRED_SETTINGS
from osrdyne_worker.pipelines.queries.lookup import MAX_BATCH, LookupRequest
from osrdyne_worker.spark.session import SparkSessions

app = App(sessions=SparkSessions(required=REQUIRED_SETTINGS))
app.on_start(pipeline.open_data)
app.handler("/sql")(pipeline.sql)
app.batch_handler("/view_lookup", max_size=MAX_BATCH, max_wait="10ms")(pipeline.lookup)


class InProcess(BaseModel):
    query: str


@app.handler("/in_process")
def in_process(call: Call, request: InProcess) -> float:
    """Milliseconds of the query, as a user with a session would write it."""
    began = time.perf_counter()
    call.context.session.sql(request.query).collect()
    return (time.perf_counter() - began) * 1000


@app.handler("/view_lookup_one")
def view_lookup_one(call: Call, request: LookupRequest) -> object:
    """`/lookup` of the SQL pipeline with one request."""
    [answer] = pipeline.lookup([call], [request])
    return answer


class Lookup(BaseModel):
    number: int


@app.handler("/lookup_one")
def lookup_one(call: Call, request: Lookup) -> float | None:
    """The price of an order, found by a query of its own."""
    return _prices(call, [request.number]).get(request.number)


@app.batch_handler("/lookup", max_size=256, max_wait="20ms")
def lookup(calls: list[Call], requests: list[Lookup]) -> list[float | None]:
    """The prices of orders, found by one query for all calls."""
    prices = _prices(calls[0], [request.number for request in requests])
    return [prices.get(request.number) for request in requests]


def _prices(call: Call, numbers: list[int]) -> dict[int, float]:
    orders = call.context.session.table("orders")
    rows = orders.where(orders.o_orderkey.isin(numbers)).select("o_orderkey", "o_totalprice").collect()
    return {row.o_orderkey: float(row.o_totalprice) for row in rows}
