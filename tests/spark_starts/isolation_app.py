"""Keys of one Spark process that keep a value in every place that belongs to a key, and keys that misbehave."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType

from osrdyne_worker import App, Call, Context
from osrdyne_worker.spark.session import SparkSessions

HEAVY_ROWS = 500
"""Rows of 64 KiB, all different, so that no encoding makes them smaller: 31 MiB."""
SCAN = "select count(*) from range(0, 100000000000, 1, 1000) where id % 7 = 8"
"""Many tasks of about a tenth of a second: Spark gives a processor to another key only between two tasks."""
STOPS: tuple[Callable[[Call], Any], ...] = (
    lambda call: call.session.stop(),
    lambda call: call.context.session.stop(),
    lambda call: call.session.sparkContext.stop(),
    lambda call: SparkSession.builder.getOrCreate().stop(),
)
FAILURES: tuple[type[BaseException], ...] = (RuntimeError, SystemExit, MemoryError, KeyboardInterrupt, StopIteration)

app = App(sessions=SparkSessions(), poolable=True)


@dataclass
class State:
    key: str
    values: dict[str, str] = field(default_factory=dict)


class Write(BaseModel):
    place: str
    value: str


class Read(BaseModel):
    place: str
    own_session: bool = False


class Numbered(BaseModel):
    number: int


class Leak(BaseModel):
    views: int
    cached: int


@app.on_start
def prepare(context: Context) -> State:
    match context.config.get("behaviour"):
        case "fails":
            raise RuntimeError(f"there is no data for {context.key}")
        case "blocks":
            threading.Event().wait()
        case "loads 30 MB":
            own = F.concat(F.lit(context.key), "id", F.repeat(F.lit("x"), 2**16))
            rows = context.session.range(0, HEAVY_ROWS, 1, 8).select(own)
            rows.createOrReplaceTempView("heavy")
            context.session.catalog.cacheTable("heavy")
            context.session.table("heavy").count()
    state = State(context.key)
    for place in ("state", "view", "function", "setting"):
        _write(context.session, state, place, f"first of {context.key}")
    context.session.udf.register("python_owner", lambda: f"python of {state.key}", StringType())
    return state


def _write(session: Any, state: State, place: str, value: str) -> None:
    match place:
        case "state":
            state.values["value"] = value
        case "view":
            session.sql(f"select * from values ('{value}') as t(owner)").createOrReplaceTempView("own")
        case "function":
            session.sql("drop temporary function if exists owner")  # Spark would warn that it is replaced
            session.sql(f"create temporary function owner() returns string return '{value}'")
        case "setting":
            session.conf.set("osrdyne.test.owner", value)


@app.handler("/write")
def write(call: Call, request: Write) -> dict[str, Any]:
    _write(call.context.session, call.context.state, request.place, request.value)
    return _identity(call)


@app.handler("/read")
def read(call: Call, request: Read) -> dict[str, Any]:
    session = call.session if request.own_session else call.context.session
    match request.place:
        case "view":
            [[value]] = session.sql("select owner from own").collect()
        case "function":
            [[value]] = session.sql("select owner() as value from own").collect()
        case "python":
            [[value]] = session.sql("select python_owner() as value from own").collect()
        case "setting":
            value = session.conf.get("osrdyne.test.owner")
        case _:
            value = call.context.state.values["value"]
    return {**_identity(call), "value": value}


def _identity(call: Call) -> dict[str, Any]:
    return {
        "keys": [call.context.key, call.context.state.key, call.context.config.get("name")],
        "header": call.headers.get("x-test"),
    }


@app.handler("/leak")
def leak(call: Call, request: Leak) -> int:
    """Views and cached data that the application never removes."""
    session = call.context.session
    for number in range(request.views):
        session.range(1).createOrReplaceTempView(f"leaked_{number}")
    for number in range(request.cached):
        session.range(number, number + 1000).createOrReplaceTempView(f"cached_{number}")
        session.catalog.cacheTable(f"cached_{number}")
        session.table(f"cached_{number}").count()
    return len(session.catalog.listTables())


@app.handler("/block")
def block(call: Call) -> None:
    threading.Event().wait()


@app.handler("/block_loop")
async def block_loop(call: Call) -> None:
    threading.Event().wait()


@app.handler("/scan")
def scan(call: Call) -> Any:
    return call.session.sql(SCAN)


@app.handler("/hog")
def hog(call: Call) -> int:
    return int(call.session.table("heavy").toArrow().nbytes)


@app.handler("/stop")
def stop(call: Call, request: Numbered) -> None:
    STOPS[request.number % len(STOPS)](call)


@app.handler("/raise")
def fail(call: Call, request: Numbered) -> None:
    raise FAILURES[request.number % len(FAILURES)]("as it does each time")


@app.handler("/raise_in_loop")
async def fail_in_loop(call: Call, request: Numbered) -> None:
    raise FAILURES[request.number % len(FAILURES)]("as it does each time")


@app.handler("/flood")
def flood(call: Call) -> bytes:
    return bytes(2**23)


@app.handler("/views")
def views(call: Call) -> dict[str, Any]:
    """The views of the key, and the number of tables that Spark has in memory for all keys."""
    session = call.context.session
    names = sorted(table.name for table in session.catalog.listTables())
    return {"views": names, "in_memory": len(session.sparkContext._jsc.sc().getRDDStorageInfo())}
