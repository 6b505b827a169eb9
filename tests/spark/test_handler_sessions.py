"""The session of each request, and errors of Spark in handlers, on a real Spark."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pandas as pd
import pytest
from asking import SLOW, active_jobs, wait_for

from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key
from osrdyne_worker import App, Call, Context
from osrdyne_worker.requests.dispatch import Dispatcher

Handler = Callable[..., Any]


@pytest.fixture
def shared(spark):
    """The shared session of one worker."""
    return spark.newSession()


@pytest.fixture
def dispatcher(sessions):
    with ThreadPoolExecutor(4) as threads:

        def make(handler):
            app = App(sessions=sessions)
            app.handler("/p")(handler)
            return Dispatcher(app, threads=threads, side_threads=threads)

        yield make


def call_of(session: Any, body: bytes = b"") -> Call:
    return Call(Context(Key("k"), session=session), Request("k", body, path="/p"))


@pytest.mark.proves("spark/handlers-run-once-use")
def test_views_of_one_name_in_two_requests_at_once_are_two_views(dispatcher, shared):
    both = threading.Barrier(2)

    def handler(call: Call, rows: int) -> Any:
        assert call.session is call.session is not call.context.session
        call.session.range(rows).createOrReplaceTempView("mine")
        both.wait(120)  # both views exist now
        return call.session.table("mine")

    async def ask():
        made = dispatcher(handler)
        bodies = (b"2", b"3")
        return await asyncio.gather(*(made.run(call_of(shared, body), group_id=body.decode()) for body in bodies))

    answers = [json.loads(response.body)["rows"] for response in asyncio.run(ask())]
    assert answers == [[[0], [1]], [[0], [1], [2]]]
    assert not shared.catalog.tableExists("mine")


def test_session_of_a_request_has_what_the_start_has_made_and_changes_only_itself(sessions, shared):
    shared.range(4).createOrReplaceTempView("loaded")
    shared.udf.register("doubled", lambda number: number * 2, "bigint")
    shared.conf.set("spark.sql.shuffle.partitions", "3")
    own = sessions.request_session(shared)
    assert own.sql("select sum(doubled(id)) from loaded").first()[0] == 12
    assert own.conf.get("spark.sql.shuffle.partitions") == "3"
    own.conf.set("spark.sql.shuffle.partitions", "5")
    own.range(1).createOrReplaceTempView("loaded")
    assert (shared.conf.get("spark.sql.shuffle.partitions"), shared.table("loaded").count()) == ("3", 4)


async def cancel_at_work(work: Coroutine[Any, Any, object], is_at_work: Callable[[], bool]) -> None:
    running = asyncio.ensure_future(work)
    async with asyncio.timeout(120):
        while not is_at_work():
            await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()


def test_cancel_ends_the_jobs_of_the_session_of_a_request(dispatcher, sessions, spark, shared):
    def handler(call: Call) -> Any:
        return call.session.sql(SLOW)

    running = dispatcher(handler).run(call_of(shared), group_id="own session")
    asyncio.run(cancel_at_work(running, lambda: sessions.progress(spark, "own session")["jobs"] == 1))
    wait_for(lambda: not active_jobs(spark))


def test_cancel_ends_the_jobs_of_a_batch(sessions, spark, shared):
    def look_up(calls: list[Call]) -> Any:
        return calls[0].session.sql(SLOW).collect()

    app = App(sessions=sessions)
    app.batch_handler("/p")(look_up)
    with ThreadPoolExecutor(4) as threads:
        made = Dispatcher(app, threads=threads, side_threads=threads)
        running = made.run_batch([call_of(shared) for _ in range(3)], group_id="batch")
        asyncio.run(cancel_at_work(running, lambda: sessions.progress(spark, "batch")["jobs"] == 1))
    wait_for(lambda: not active_jobs(spark))


def in_column(call: Call) -> Any:
    return call.session.sql("select nowhere from range(1)")


def in_data(call: Call) -> Any:
    return call.session.sql("select 1 / id from range(1)")


async def in_coroutine(call: Call) -> Any:
    return await asyncio.to_thread(in_column, call)


def in_function(call: Call) -> Any:
    from pyspark.sql import functions as F

    @F.udf("bigint")
    def broken(number):  # type: ignore[no-untyped-def]  # Spark would look at the types to choose the kind of function
        try:
            return int({}["absent"])
        except KeyError as error:
            raise ValueError(f"no price for {number}\nsee amqp://user:hunter2@host/") from error

    return call.session.range(1).select(broken("id"))


def in_function_of_pandas(call: Call) -> Any:
    from pyspark.sql import functions as F

    @F.pandas_udf("bigint")
    def broken(number: pd.Series) -> pd.Series:
        raise LookupError("no model")

    return call.session.range(1).select(broken("id"))


def in_rows(call: Call) -> Any:
    return call.session.sparkContext.parallelize([0]).map(lambda number: 1 // number).collect()


ERRORS: list[tuple[Handler, int, dict[str, str]]] = [
    (in_column, 400, {"code": "UNRESOLVED_COLUMN.WITH_SUGGESTION", "sql_state": "42703"}),
    (in_coroutine, 400, {"code": "UNRESOLVED_COLUMN.WITH_SUGGESTION", "sql_state": "42703"}),
    (in_data, 400, {"code": "DIVIDE_BY_ZERO", "sql_state": "22012"}),
    (
        in_function,
        500,
        {
            "code": "PYTHON_EXCEPTION",
            "sql_state": "38000",
            "exception": "ValueError",
            "message": "ValueError: no price for 0 see amqp://user:***@host/",
        },
    ),
    (in_function_of_pandas, 500, {"exception": "LookupError", "message": "LookupError: no model"}),
    (in_rows, 500, {"code": "PYTHON_EXCEPTION", "exception": "ZeroDivisionError"}),
]


@pytest.mark.parametrize(("handler", "code", "fields"), ERRORS, ids=[case[0].__name__ for case in ERRORS])
@pytest.mark.proves("spark/python-function-spark-raises")
def test_error_of_spark_in_a_handler_has_its_class(dispatcher, shared, handler, code, fields):
    response = asyncio.run(dispatcher(handler).run(call_of(shared), group_id="failing"))
    error = json.loads(response.body)["error"]
    assert response.code == code, error
    assert {name: error[name] for name in fields} == fields, error
    assert "\n" not in error["message"]
    assert "Traceback" not in error["message"]


def test_wrong_use_of_spark_is_an_error_of_the_handler(dispatcher, shared):
    """py4j raises the base class of its network errors for a call that Java does not have; Spark is well."""
    response = asyncio.run(
        dispatcher(lambda call: shared._jvm.java.lang.Math.abs("x")).run(call_of(shared), group_id="x")
    )
    assert json.loads(response.body)["error"]["code"] == "internal_error"
