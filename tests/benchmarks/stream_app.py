"""Large results: streamed, and collected as a whole. `streams` compares the memory that they need."""

from typing import Any

from pydantic import BaseModel

from osrdyne_worker import App, Call
from osrdyne_worker.spark.session import SparkSessions

app = App(sessions=SparkSessions())


class Result(BaseModel):
    """A row has 64 bytes."""

    rows: int
    partitions: int = 8


@app.handler("/rows")
def rows(call: Call, request: Result) -> Any:
    columns = ["id", *(f"rand({number}) as r{number}" for number in range(7))]
    return call.session.range(0, request.rows, 1, request.partitions).selectExpr(*columns)


@app.handler("/collected")
def collected(call: Call, request: Result) -> int:
    """The same with plain `toArrow`; its bytes."""
    size: int = rows(call, request).toArrow().nbytes
    return size
