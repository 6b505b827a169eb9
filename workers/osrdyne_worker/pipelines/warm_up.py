"""Warms up a pooled process: opens small tables and answers queries as keys will, until the first key arrives.

Java loads a class and compiles a method when it is used first, so the first key of a process would wait seconds for it.
Each round runs the code that a key runs, from its session to the bytes of the answer; the first key waits for the
classes that no round has used. The rounds run in a thread, and the process is ready meanwhile: a spare process gets
warm, and a key that waits for the process does not wait for the rounds.
"""

from __future__ import annotations

import datetime
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from osrdyne.logs import get_logger
from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key
from osrdyne_worker.app.app import Context, KeySessions
from osrdyne_worker.app.call import Call
from osrdyne_worker.app.codec import answer_to_response
from osrdyne_worker.pipelines.views.datasets import parse_config
from osrdyne_worker.spark.plans import load_plan_walker

if TYPE_CHECKING:
    from osrdyne_worker.pipelines.sql import SqlData

log = get_logger(__name__)

ROUNDS = 12
"""New sessions, one after the other: later ones gain little."""
ROWS = 100
END_TIMEOUT = 30.0
"""Seconds that `close` waits for the step that runs."""
KEY = Key("warm-up")
MAX_BYTES = 2**24
TABLES = ("orders", "customers", "parts", "regions")
"""As many as a key opens at the same time."""
QUERIES = (
    "select * from orders limit 10",
    "select count(*), sum(price), max(day) from orders where number > 10 and name like 'order%'",
    "select name, sum(price) as total from orders where day >= date'2024-01-02' group by name order by total desc",
    "select c.name, o.price from orders o join customers c on o.number = c.number where c.number between 5 and 50",
)


class WarmUp:
    """Runs its rounds in a thread, until `stop` at the latest. A failure is logged; the first key is then slower.

    `sessions`: the session factory of a key. `context`: of the process.
    """

    def __init__(self, sessions: KeySessions, context: Context) -> None:
        self.rounds = 0
        """Rounds that have ended."""
        self._sessions = sessions
        self._context = context
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="warm-up", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the current step, which takes less than a second. Does not wait."""
        self._stopped.set()

    def close(self) -> None:
        """Stop, and wait for the end: no thread may call a JVM that is ending."""
        self.stop()
        self._thread.join(END_TIMEOUT)

    def wait(self, timeout: float) -> bool:
        """Wait for the end; False after `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._sessions.enter_thread()
            with tempfile.TemporaryDirectory(prefix="osrdyne-warm-up-") as directory:
                _write_tables(Path(directory))
                context = replace(self._context, key=KEY, worker_id=f"{self._context.worker_id}-{KEY}")
                context = replace(context, config=_config(directory))
                while self.rounds < ROUNDS and self._round(context):
                    self.rounds += 1
        except Exception as error:
            log.warning("warm-up failed", reason=type(error).__name__)

    def _round(self, context: Context) -> bool:
        """Do in a new session what a new key does; False if it was stopped meanwhile."""
        from osrdyne_worker.pipelines.sql import SqlData

        session = self._sessions.build(context)
        try:
            # A key whose files are new reads their footers, and so does every round.
            data = SqlData(session, parse_config(context.config), context.key, remembers_schemas=False)
            context = replace(context, session=session, state=data)
            return self._answer_queries(context, data)
        finally:
            self._sessions.close(session)

    def _answer_queries(self, context: Context, data: SqlData) -> bool:
        from osrdyne_worker.pipelines.sql import SqlRequest, sql

        load_plan_walker(context.session)
        data.load()
        for query in QUERIES:
            if self._stopped.is_set():
                return False
            call = Call(context, Request(key=KEY, body=b""), max_bytes=MAX_BYTES)
            request = SqlRequest(query=query)
            answer = self._sessions.run_in_group(context.session, context.worker_id, lambda: sql(call, request))  # noqa: B023
            answer_to_response(answer)
        return True


def _write_tables(directory: Path) -> None:
    numbers = list(range(ROWS))
    columns = {
        "number": pa.array(numbers, pa.int64()),
        "name": pa.array([f"order {number % 7}" for number in numbers]),
        "price": pa.array([number * 1.5 for number in numbers]),
        "day": pa.array([datetime.date(2024, 1, 1 + number % 28) for number in numbers]),
    }
    for table in TABLES:
        pq.write_table(pa.table(columns), directory / f"{table}.parquet")


def _config(directory: str) -> dict[str, object]:
    tables = [{"view": table, "path": f"{directory}/{table}.parquet"} for table in TABLES]
    return {"datasets": [{"key": KEY, "tables": tables}]}
