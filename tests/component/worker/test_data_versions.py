"""Data versions: a request that needs later data waits for a reload, and the others are answered meanwhile."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_worker_dispatch import FakeSessions
from worker_bench import REPLIES, Bench, Reloads, bench_fixture, serving, status_of, until

from osrdyne.aio.clock import now_ms
from osrdyne.errors import ConfigurationError
from osrdyne.protocol.activity import REQUESTS_FIELD
from osrdyne.protocol.data_versions import MAX_DATA_VERSION
from osrdyne.protocol.names import Key
from osrdyne.testing.clock import VirtualClock
from osrdyne_worker import App, Call, Context, DataChangedError, RequestError
from osrdyne_worker.requests import data_versions
from osrdyne_worker.requests.data_versions import CHECK_INTERVAL, FAILURE_PAUSE, DataVersions
from osrdyne_worker.runtime.exit import Unrecoverable
from osrdyne_worker.runtime.loading import Loader
from osrdyne_worker.runtime.settings import RuntimeContext, RuntimeSettings


class Source:
    """Data whose version only the publisher knows. `load` waits in its thread for `released`."""

    def __init__(self) -> None:
        self.published = 0
        self.loads: list[int | None] = []
        self.unloaded: list[object] = []
        self.released = threading.Event()
        self.released.set()
        self.error: Exception | None = None

    def load(self, context: Context) -> int:
        self.loads.append(context.data_version)
        found = self.published
        self.released.wait(600)
        if self.error is not None:
            raise self.error
        return found

    def current(self, *calls: Call) -> int:
        if any(call.context.state != self.published for call in calls):
            raise DataChangedError("The file is gone.")
        return self.published


class DataBench(Bench):
    """The handler `/data` answers with the data; `/changed` raises `DataChangedError` until it has been reloaded."""

    prefetch = 1000
    names_versions = False

    def __init__(self, *arguments: Any) -> None:
        self.source = Source()
        self.newest: int | None = 0
        self.checks = 0
        self.may_check = threading.Event()
        self.may_check.set()
        self.tries = 0
        super().__init__(*arguments)

    def make_app(self) -> App:
        app, source = super().make_app(), self.source
        app.on_start(source.load)
        app.on_unload(lambda context: source.unloaded.append(context.state))

        if self.names_versions:

            @app.newest_version
            def newest(context: Context) -> int | None:
                self.checks += 1
                self.may_check.wait(600)
                return self.newest

        @app.handler("/data")
        async def data(call: Call) -> object:
            return call.context.state

        @app.handler("/held")
        async def held(call: Call) -> object:
            self.running.set()
            await self.go.wait()
            return call.context.state

        @app.handler("/changed")
        async def changed(call: Call) -> int:
            self.tries += 1
            return source.current(call)

        @app.batch_handler("/batch_changed", max_wait=0)
        async def batch_changed(calls: list[Call]) -> list[int]:
            self.tries += 1
            return [source.current(*calls)] * len(calls)

        @app.batch_handler("/batch", max_wait=0)
        async def batch(calls: list[Call]) -> list[object]:
            return [call.context.state for call in calls]

        self.app = app
        return app

    async def open(self) -> None:
        await super().open()
        self.threads = ThreadPoolExecutor(4)
        loader = Loader(self.app, Context(Key("k"), worker_id="w"), self.threads)
        self.processor.data = DataVersions(loader.context, loader, self.runtime)
        self.processor.data.loaded(await loader.start())

    async def finish(self) -> None:
        self.source.released.set()
        self.may_check.set()
        await super().finish()

    def assert_nothing_is_left(self) -> None:
        self.threads.shutdown()
        super().assert_nothing_is_left()
        assert self.unfinished() == 0

    def answers(self) -> dict[str | None, tuple[str, str, object]]:
        """Status, body and version of each reply, by correlation id."""
        return {
            one.correlation_id: (status_of(one), one.body.decode(), one.headers.get("x-data-version"))
            for one in self.replies()
        }

    async def ask(self, path: str = "/data", name: str = "c", **headers: object) -> tuple[str, str, object]:
        """The answer to one request, once no request is in the worker."""
        await self.run(path, correlation_id=name, **headers)
        return self.answers()[name]


class NamingBench(DataBench):
    """The application names the newest version."""

    names_versions = True


bench = bench_fixture(DataBench)


named = pytest.mark.parametrize("bench", [NamingBench], indirect=True)


@pytest.mark.parametrize(
    ("path", "version"),
    [("/data", 3), ("/batch", 2), ("/data", str(MAX_DATA_VERSION))],
    ids=["one", "batch", "largest"],
)
async def test_request_waits_for_the_version_that_it_needs(bench, path, version):
    bench.source.published = 7
    assert await bench.ask(path, **{"x-data-version": version}) == ("ok", "7", int(version))
    for satisfied in (version, b"1", "0"):
        assert (await bench.ask(**{"x-data-version": satisfied}))[2] == int(version)
    assert bench.source.loads == [None, int(version)]


async def test_requests_without_a_later_version_come_from_the_queue_during_the_reload(bench):
    """With a prefetch of one, a request that waits for a reload would otherwise block its queue."""

    async def send(name, **headers):
        await bench.publish("/data", queue="shared", correlation_id=name, **headers)

    await bench.ask(name="first", **{"x-data-version": 1})
    bench.source.released.clear()
    bench.source.published = 2
    async with bench.consuming("shared"):
        for number in range(3):
            await send(f"new {number}", **{"x-data-version": 2})
        await send("old", **{"x-data-version": 1})
        await send("any")
        await until(lambda: sorted(map(str, bench.answers())) == ["any", "first", "old"])
        assert bench.answers()["any"] == bench.answers()["old"] == ("ok", "0", 1)
        bench.source.released.set()
        await until(lambda: len(bench.answers()) == 6)
        assert bench.answers()["new 0"] == ("ok", "2", 2)
        assert bench.source.loads == [None, 1, 2], "one reload for all"
        for number in range(20):  # the prefetch is that of before: one request after the other
            await send(f"last {number}")
        await until(lambda: len(bench.answers()) == 26)
        await bench.processor.until_idle()
    assert bench.unfinished("shared") == 0


async def test_concurrent_versions_share_the_reloads_that_satisfy_them(bench):
    bench.source.released.clear()
    for version in (5, 3, 5):
        await bench.take("/data", correlation_id=f"first {version}", **{"x-data-version": version})
    await until(lambda: len(bench.source.loads) == 2)
    for version in (9, 7, 4):  # 9 and 7 were published after the reload began, 4 before
        bench.source.published = 9
        await bench.take("/data", correlation_id=f"second {version}", **{"x-data-version": version})
    await bench.finish()
    assert bench.source.loads == [None, 5, 9]
    first, second = {"first 5": "0", "first 3": "0"}, {"second 4": "0", "second 9": "9", "second 7": "9"}
    assert bench.bodies() == first | second


@pytest.mark.proves("workers/worker-cannot-load-version")
async def test_failed_reload_answers_those_that_need_it_and_the_former_data_stays(bench):
    assert await bench.ask(**{"x-data-version": 1}) == ("ok", "0", 1)
    bench.source.error, bench.source.published = ValueError("no such table"), 2
    status, body, _ = await bench.ask(name="new", **{"x-data-version": 2})
    assert (status, "reload_failed" in body, "ValueError" in body) == ("error", True, True)
    assert await bench.ask(name="old", **{"x-data-version": 1}) == ("ok", "0", 1)
    bench.source.error = None
    assert await bench.ask(name="again", **{"x-data-version": 2}) == ("ok", "2", 2)


@pytest.mark.parametrize("value", ["", "-1", "1.5", "0x1", "１", " 1", -1, 1.5, True, 2**63, "9" * 20, [1], b"\xff"])
@pytest.mark.proves("workers/header-x-data-version")
async def test_malformed_version_is_an_error_that_names_the_header(bench, value):
    status, body, _ = await bench.ask(**{"x-data-version": value})
    assert (status, "invalid_data_version" in body, "x-data-version" in body) == ("error", True, True)
    assert bench.source.loads == [None]


@pytest.mark.proves("workers/worker-dies-reloads-data")
async def test_request_that_waits_for_a_reload_is_reported_and_can_be_cancelled_and_expire(bench):
    """If the reload ends the worker, the controller knows which requests have caused it."""
    bench.source.released.clear()
    await bench.take("/data", correlation_id="cancelled", **{"x-data-version": 1})
    await bench.take("/data", correlation_id="soon", **{"x-data-version": 1, "x-deadline": now_ms(bench.clock) + 300})
    await bench.take("/data", correlation_id="stays", **{"x-data-version": 1})
    await until(lambda: len(bench.source.loads) == 2)
    bench.processor.cancel("cancelled", REPLIES)
    await until(lambda: {"cancelled", "soon"} <= bench.answers().keys())
    assert bench.by_name() == {"cancelled": "cancelled", "soon": "expired"}
    [running] = bench.processor.running_requests()
    async with bench.reporting() as reports:
        bench.reporter.flush()
        await bench.clock.settle()
        assert reports()[-1].details[REQUESTS_FIELD] == [running]
    await bench.finish()
    assert bench.answers()["stays"] == ("ok", "0", 1)
    assert bench.source.loads == [None, 1]


async def test_former_data_is_unloaded_after_its_last_request(bench):
    await bench.begin("/held", correlation_id="held")
    bench.source.published = 1
    await bench.take("/data", correlation_id="new", **{"x-data-version": 1})
    await until(lambda: bench.processor.data.version == 1)
    assert bench.source.unloaded == []
    await bench.finish()
    await until(lambda: bench.source.unloaded == [0])
    assert bench.answers()["held"] == ("ok", "0", None), "it has kept the data that it began with"
    assert bench.answers()["new"] == ("ok", "1", 1)


@pytest.mark.parametrize(("path", "names"), [("/changed", ["a"]), ("/batch_changed", ["a", "b", "c"])])
async def test_data_that_changed_below_a_handler_is_reloaded_once_and_the_handler_runs_again(bench, path, names):
    bench.source.published = 1
    for name in names:
        await bench.take(path, correlation_id=name)
    await bench.processor.until_idle()
    assert bench.answers() == dict.fromkeys(names, ("ok", "1", None))
    assert (bench.tries, bench.source.loads) == (2, [None, None])
    await bench.ask(path, name="later")
    assert ["x-data-reloaded" in one.headers for one in bench.replies()] == [True] * len(names) + [False]
    bench.source.current = Mock(side_effect=DataChangedError("The file is gone."))  # type: ignore[method-assign]
    status, body, _ = await bench.ask(path, name="changes again")
    assert (status, "data_changed" in body, bench.source.current.call_count) == ("error", True, 2)


@pytest.mark.parametrize(
    ("path", "headers", "tries"),
    [("/data", {"x-data-version": 1}, 0), ("/changed", {}, 1), ("/batch_changed", {}, 1)],
    ids=["needs a version", "changed", "changed in a batch"],
)
async def test_refusal_of_the_application_to_load_is_the_answer(bench, path, headers, tries):
    bench.source.published = 1
    bench.source.error = RequestError("It is being written.", code=503, error_code="dataset_incomplete")
    status, body, _ = await bench.ask(path, **headers)
    assert (status, "dataset_incomplete" in body, bench.tries) == ("error", True, tries)


async def test_waiting_requests_are_requeued_when_the_worker_pauses(bench):
    bench.source.released.clear()
    await bench.take("/data", **{"x-data-version": 1})
    await until(lambda: len(bench.source.loads) == 2)
    bench.processor.requeue()
    await bench.processor.until_idle()
    assert bench.unfinished() == 1
    bench.source.released.set()
    await bench.take("/data", correlation_id="next")  # delivers the first one again
    await bench.accept()
    await bench.processor.until_idle()
    assert len(bench.answers()) == 2


@named
async def test_named_version_is_checked_for_each_request_that_needs_one_and_otherwise_once_in_the_interval(bench):
    assert await bench.ask(name="a", **{"x-data-version": 0}) == ("ok", "0", 0)
    bench.newest, bench.source.published = 5, 50
    assert await bench.ask(name="b", **{"x-data-version": 2}) == ("ok", "50", 5)
    bench.newest, bench.source.published = 6, 60
    assert await bench.ask(name="soon") == ("ok", "50", 5)
    await bench.clock.advance(CHECK_INTERVAL)
    assert await bench.ask(name="later") == ("ok", "60", 6)


@named
async def test_request_without_a_version_is_answered_if_later_data_cannot_be_loaded(bench):
    await bench.ask(name="first")
    bench.newest, bench.source.error = 1, ValueError("no such table")
    for name in "ab":
        await bench.clock.advance(CHECK_INTERVAL)
        assert await bench.ask(name=name) == ("ok", "0", 0)
    assert bench.source.loads == [0, 1], "a reload that fails is not repeated for each request"
    assert (await bench.ask(name="c", **{"x-data-version": 1}))[0] == "error"
    bench.source.error, bench.source.published = None, 1
    await bench.clock.advance(FAILURE_PAUSE + CHECK_INTERVAL)
    assert await bench.ask(name="d") == ("ok", "1", 1)


@named
@pytest.mark.proves("workers/client-names-version-data")
async def test_version_beyond_the_newest_is_an_error_and_changes_nothing(bench):
    status, body, _ = await bench.ask(**{"x-data-version": MAX_DATA_VERSION})
    assert (status, "data_version_unavailable" in body) == ("error", True)
    assert bench.source.loads == [0], "no reload can help"
    bench.newest, bench.source.published = 1, 10
    assert await bench.ask(name="b", **{"x-data-version": 1}) == ("ok", "10", 1)


@pytest.mark.proves("workers/client-names-version-data")
async def test_reload_on_demand_drops_versions_that_clients_have_claimed(bench):
    """A number that is too large would otherwise hide all later versions."""
    await bench.ask(**{"x-data-version": MAX_DATA_VERSION})
    bench.source.published = 1
    assert (await bench.ask(name="stale", **{"x-data-version": 1}))[1] == "0"
    await bench.processor.data.reload(forget=True)
    assert bench.processor.data.version is None
    bench.source.published = 2
    assert await bench.ask(name="fresh", **{"x-data-version": 2}) == ("ok", "2", 2)


@pytest.mark.proves("workers/reload-data-end")
async def test_reload_that_does_not_end_ends_the_worker():
    async with serving(DataBench, processing_timeout=0.05) as bench:
        bench.source.released.clear()
        await bench.take("/data", **{"x-data-version": 1})
        await until(lambda: bench.exits)
        assert isinstance(bench.exits[0], Unrecoverable)
        assert bench.processor.data.has(None), "others are served until then"


ASK, TURN = st.tuples(st.just("ask"), st.integers(0, 3)), st.tuples(st.just("turn"), st.integers(1, 3))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.one_of(st.sampled_from([("publish", 0), ("fail", 0)]), ASK, TURN), max_size=30))
def test_no_answer_is_older_than_its_version(steps):
    """A publisher publishes version n and then asks for it, in any order with reloads that succeed or fail."""

    async def turn(times):
        for _ in range(times):
            await asyncio.sleep(0)

    async def run():
        published, fails = 0, False

        async def reload(version):
            found = published  # read at the beginning: what is published meanwhile may be missing
            await turn(4)
            if fails:
                raise ValueError("no data")
            return Context(Key("k"), state=found, data_version=version)

        async def ask(version):
            try:
                if not data.has(version):
                    await data.prepare(version)
            except ValueError:
                return
            assert data.context.state >= version

        async with asyncio.TaskGroup() as group:
            runtime = RuntimeContext(RuntimeSettings(), VirtualClock(), group.create_task, lambda reason: None)
            data = DataVersions(Context(Key("k"), state=0), Reloads(reload), runtime)
            for step, number in steps:
                match step:
                    case "publish":
                        published += 1
                    case "ask":
                        group.create_task(ask(max(0, published - number)))
                    case "turn":
                        await turn(number)
                    case _:
                        fails = not fails

    asyncio.run(run())


def test_second_hook_of_a_kind_is_refused():
    app = App()
    for register in (app.on_reload, app.on_unload, app.newest_version):
        register(lambda context: None)
        with pytest.raises(ConfigurationError):
            register(lambda context: None)


class RecordedGroups(FakeSessions):
    """A session factory that records the groups of loads. `shares_heap`: as that of a key of a pooled process."""

    run_in_group = None  # a load is no request

    def __init__(self, *, shares_heap: bool) -> None:
        super().__init__()
        self.shares_heap = shares_heap
        self.loads: list[str] = []

    def load_in_group(self, session: str, group_id: str, function: Callable[[], Any]) -> Any:
        self.loads.append(group_id)
        return function()


@pytest.mark.parametrize(
    ("shares_heap", "groups"), [(True, ["w-start", "w-reload-1"]), (False, ["w-reload-1"])], ids=["pooled", "dedicated"]
)
@pytest.mark.proves("spark/start-key-pooled-process")
async def test_reload_gets_the_state_in_use_in_a_group_of_its_own_as_any_load_that_could_fill_the_heap_of_others(
    shares_heap, groups
):
    sessions = RecordedGroups(shares_heap=shares_heap)
    app = App(sessions=cast(Any, sessions))
    app.on_start(lambda context: "first")
    app.on_reload(lambda context: f"{context.state}, then {context.data_version}")
    with ThreadPoolExecutor(1) as threads:
        loader = Loader(app, Context(Key("k"), worker_id="w"), threads)
        assert (await loader.start()).state == "first"
        context = await loader.reload(3)
    assert (context.state, context.data_version, loader.context) == ("first, then 3", 3, context)
    assert sessions.loads == groups


@named
@pytest.mark.proves("workers/check-newest-version-hangs")
async def test_checks_that_hang_hold_one_thread(bench, monkeypatch):
    """In a file system that does not answer. Otherwise the threads of all handlers would hang in such checks."""
    monkeypatch.setattr(data_versions, "CHECK_TIMEOUT", 0.05)
    before = bench.checks
    bench.may_check.clear()
    for number in range(6):
        await bench.clock.advance(CHECK_INTERVAL)
        assert await bench.ask(name=f"any {number}") == ("ok", "0", 0)
    assert (await bench.ask(name="needs 0", **{"x-data-version": 0}))[0] == "error"
    assert bench.checks == before + 1
    bench.newest = bench.source.published = 1
    monkeypatch.undo()  # on a busy machine, a check may last longer than a moment
    bench.may_check.set()
    assert await bench.ask(name="last", **{"x-data-version": 1}) == ("ok", "1", 1)
