"""The SQL pipeline, a handler that runs the same query without it, and look-ups one by one.

`spark_query` compares them.
"""

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
app.batch_handler("/lookup", max_size=MAX_BATCH, max_wait="10ms")(pipeline.lookup)


class InProcess(BaseModel):
    query: str


@app.handler("/in_process")
def in_process(call: Call, request: InProcess) -> float:
    """Milliseconds of the query, as a user with a session would write it."""
    began = time.perf_counter()
    call.context.session.sql(request.query).collect()
    return (time.perf_counter() - began) * 1000


@app.handler("/lookup_one")
def lookup_one(call: Call, request: LookupRequest) -> object:
    """`/lookup` of the SQL pipeline with one request."""
    [answer] = pipeline.lookup([call], [request])
    return answer
