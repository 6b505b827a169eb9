"""The SQL pipeline, and one handler more that runs the same query without it: the floor of `spark_query`."""

from __future__ import annotations

import time

from pydantic import BaseModel

from osrdyne_worker import App, Call
from osrdyne_worker.pipelines import sql as pipeline
from osrdyne_worker.spark.session import SparkSessions

app = App(sessions=SparkSessions(required=pipeline.REQUIRED_SETTINGS))
app.on_start(pipeline.open_data)
app.handler("/sql")(pipeline.sql)


class InProcess(BaseModel):
    query: str


@app.handler("/in_process")
def in_process(call: Call, request: InProcess) -> float:
    """Milliseconds of the query, as a user with a session would write it."""
    began = time.perf_counter()
    call.context.session.sql(request.query).collect()
    return (time.perf_counter() - began) * 1000
