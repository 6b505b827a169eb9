"""The SQL pipeline in a pooled process, and the same work in plain PySpark beside it, in the same JVM.

`pooled` compares them.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import BaseModel

from osrdyne_worker import App, Call
from osrdyne_worker.pipelines import sql as pipeline

app = App(sessions=pipeline.sessions, check_config=pipeline.parse_config, poolable=True)
app.on_start(pipeline.open_data)
app.on_stop(pipeline.stop_caching)
app.handler("/sql", abandonable=True)(pipeline.sql)

_sessions: list[Any] = []
"""The sessions of plain PySpark: what belongs to them stays in memory."""


class PlainSessions(BaseModel):
    count: int
    views: dict[str, str]
    query: str


class PlainThreads(BaseModel):
    query: str
    threads: int
    count: int


@app.handler("/plain_sessions")
def plain_sessions(call: Call, request: PlainSessions) -> list[float]:
    """Milliseconds of each new session: its views over Parquet files, and one query."""
    return [_plain_session(call, request) for _ in range(request.count)]


def _plain_session(call: Call, request: PlainSessions) -> float:
    began = time.perf_counter()
    session = call.context.session.newSession()
    for view, path in request.views.items():
        session.read.parquet(path).createOrReplaceTempView(view)
    session.sql(request.query).collect()
    _sessions.append(session)
    return (time.perf_counter() - began) * 1000


@app.handler("/plain_threads")
def plain_threads(call: Call, request: PlainThreads) -> float:
    """Queries per second of so many threads in the first of the plain sessions."""
    session = _sessions[0]
    with ThreadPoolExecutor(request.threads) as threads:
        began = time.perf_counter()
        for done in [threads.submit(lambda: session.sql(request.query).collect()) for _ in range(request.count)]:
            done.result()
        return request.count / (time.perf_counter() - began)
