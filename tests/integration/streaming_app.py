"""A worker whose answers are streams: `/rows` yields batches of numbers, as many and as slowly as a request wants."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from pydantic import BaseModel

from osrdyne_worker import App, Call, RequestError

app = App()
SCHEMA = pa.schema([("number", pa.int64()), ("worker", pa.int64())])


class Rows(BaseModel):
    """`gate`: a file that must exist before the batch of this number is yielded."""

    batches: int
    rows: int = 1000
    fail_after: int | None = None
    gate: str | None = None
    gate_at: int = 0
    seconds: float = 0.0


@app.handler("/rows")
def rows(call: Call, request: Rows) -> Iterator[pa.RecordBatch]:
    """Numbers from 0, in batches; `worker` is the process id of the worker."""
    state: dict[str, int] = call.context.state
    state["open"] += 1
    try:
        for batch in range(request.batches):
            if batch == request.fail_after:
                raise RequestError(f"failed after {batch} batches", code=503, error_code="as_requested")
            while request.gate is not None and batch == request.gate_at and not Path(request.gate).exists():
                call.raise_if_cancelled()
                time.sleep(0.02)
            time.sleep(request.seconds)
            state["yielded"] += 1
            numbers = np.arange(batch * request.rows, (batch + 1) * request.rows)
            yield pa.record_batch([numbers, np.full(request.rows, os.getpid())], schema=SCHEMA)
    finally:
        state["open"] -= 1


@app.handler("/table")
def table(call: Call, request: Rows) -> pa.Table:
    return pa.Table.from_batches(list(rows(call, request)), SCHEMA)


@app.handler("/json")
def json(call: Call) -> dict[str, str]:
    return {"answer": "no table"}


@app.handler("/state")
async def state(call: Call) -> dict[str, int]:
    """How many streams are open, and how many batches they have yielded so far."""
    found: dict[str, int] = call.context.state
    return found


@app.on_start
def load(context: object) -> dict[str, int]:
    return {"open": 0, "yielded": 0}
