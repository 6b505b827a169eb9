"""One worker of a pooled process, without RabbitMQ: its end, and what it leaves behind."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs
from test_worker_dispatch import FakeSessions
from worker_bench import PATIENCE, environment
from worker_bench import until_in_time as until

from osrdyne.protocol.activity import Event, text_fingerprint
from osrdyne.protocol.messages import Request, Status
from osrdyne.protocol.names import Key
from osrdyne.protocol.pooled import AssignmentExit
from osrdyne.protocol.rates import EventRate
from osrdyne_worker import App, Call, Context, RequestError
from osrdyne_worker.bootstrap import build_parts
from osrdyne_worker.pooled import assigned_worker as module
from osrdyne_worker.pooled.assigned_worker import TIDY_INTERVAL, AssignedWorker
from osrdyne_worker.pooled.handler_loop import HandlerLoop
from osrdyne_worker.requests.dispatch import HandlerExitError
from osrdyne_worker.requests.scheduling.suspects import SuspectGate
from osrdyne_worker.runtime.exit import ExitCode, LoopBlocked
from osrdyne_worker.runtime.reports import Reporter
from osrdyne_worker.runtime.settings import RuntimeContext


class Sessions(FakeSessions):
    """Records what is built and closed."""

    def __init__(self) -> None:
        super().__init__()
        self.closed: list[str] = []
        self.threads: list[str] = []

    def enter_thread(self) -> None:
        self.threads.append(threading.current_thread().name)

    def build(self, context: Context) -> str:
        return f"session of {context.key}"

    def close(self, session: str) -> None:
        self.closed.append(session)


@pytest.fixture
def sessions():
    return Sessions()


@pytest.fixture
def assigned(sessions, clock):
    """Makes the worker of an application."""
    with ThreadPoolExecutor(2) as side_threads:

        def assigned(app=None, made=None):
            return AssignedWorker(
                app or App(),
                made or environment(),
                sessions=sessions,  # type: ignore[arg-type]
                side_threads=side_threads,
                suspect_gate=SuspectGate(),
                clock=clock,
            )

        yield assigned


@pytest.mark.proves("pooled/requests-released-worker-end")
async def test_worker_cut_off_while_it_loads_leaves_a_thread_whose_session_is_closed_later(assigned, sessions, clock):
    app, loading, go_on = App(), threading.Event(), threading.Event()

    @app.on_start
    def load(context: Context) -> None:
        loading.set()
        go_on.wait(PATIENCE)

    worker = assigned(app)
    running = asyncio.create_task(worker.run())
    await until(loading.is_set)
    await worker.cut_off("It did not end.")
    assert await running == AssignmentExit(ExitCode.UNRECOVERABLE, "It did not end.")
    assert (worker.left_behind, sessions.closed) == (1, [])
    go_on.set()
    await until(lambda: not worker.left_behind and clock.pending)
    await clock.advance(TIDY_INTERVAL)
    await until(lambda: sessions.closed)
    assert (sessions.closed, bool(sessions.threads)) == (["session of k"], True)


async def test_worker_that_cannot_be_built_ends_alone_and_gives_the_reason(assigned, monkeypatch):
    how = await assigned(made=environment(config={"runtime": {"concurrency": 0}})).run()
    assert how.code == ExitCode.INVALID_CONFIGURATION
    assert "WORKER_CONFIG.runtime.concurrency" in str(how.reason)
    monkeypatch.setattr(module, "build_parts", Mock(side_effect=LookupError("no such thing")))
    with capture_logs() as logs:
        how = await assigned().run()
    assert (how.code, "LookupError" in str(how.reason)) == (ExitCode.UNRECOVERABLE, True)
    assert len(logs) == 1


async def test_parts_of_the_start_of_a_key_are_complete(assigned):
    app = App()
    app.on_start(lambda context: "loaded")
    worker = assigned(app)
    running = asyncio.create_task(worker.run())
    await until(lambda: worker._parts and "load" in worker._parts.start_times.milliseconds())
    assert worker._parts is not None
    assert list(worker._parts.start_times.milliseconds()) == ["python", "session", "load"]
    await worker.cut_off("the test is over")
    await running


async def test_rate_of_a_key_limits_this_key_of_the_process_only(assigned, clock):
    rate = EventRate(60, 1024)
    async with asyncio.TaskGroup() as group:

        def processor_of(key, rate):
            made = environment(key=key, rate=rate)
            parts = build_parts(App(), made, clock=clock, host=assigned(made=made))
            runtime = RuntimeContext(parts.settings, clock, group.create_task, lambda reason: None)
            return parts.make_processor(runtime, Context(Key(key), worker_id="w"), on_alone=lambda: None)

        limited, free = processor_of("limited", rate), processor_of("free", None)
        assert (limited.budget.rate, free.budget.rate) == (rate, None)
        for one in (limited, free):
            one.budget.take(60)
        assert (limited.budget.wait() > 0, free.budget.wait()) == (True, 0)
        limited.budget.use(None)
        free.budget.use(rate)
        assert (limited.budget.wait(), limited.budget.rate, free.budget.rate) == (0, None, rate)


@pytest.mark.parametrize(
    ("error", "refusal"),
    [
        (RequestError("No.", 404, "no_text", {"folder": "/a"}), {"error_code": "no_text", "details": {"folder": "/a"}}),
        (RequestError("No.", 404, "gone", {"of": object()}), {"error_code": "gone", "details": {}}),
        (ValueError("no text"), None),
    ],
    ids=["request-error", "details-without-json", "other-error"],
)
async def test_start_that_refuses_the_key_is_reported_with_its_code(assigned, clock, monkeypatch, error, refusal):
    app, reports = App(), []

    @app.on_start
    def load(context: Context) -> None:
        raise error

    monkeypatch.setattr(Reporter, "_add", lambda self, draft: reports.append(draft))
    running = asyncio.create_task(assigned(app).run())
    while not running.done():
        await asyncio.sleep(0.01)
        await clock.advance(1.0)
    how = await running
    [failed] = [draft for draft in reports if draft.event is Event.FAILED]
    expected = refusal and {"message": "No.", "code": 404, **refusal}
    assert (how.code, failed.details.get("refusal")) == (ExitCode.START_FAILED, expected)


@pytest.mark.proves("pooled/coroutine-blocks")
async def test_coroutine_that_blocks_its_key_ends_this_worker_and_no_other(assigned, clock):
    app, blocking, go_on = App(), threading.Event(), threading.Event()

    @app.handler("/block")
    async def block_for_long(call: Call) -> None:
        blocking.set()
        go_on.wait(PATIENCE)

    @app.handler("/ask")
    async def ask(call: Call) -> str:
        return call.context.key

    async def send(worker, path, key):
        made = environment(key=key, config={"runtime": {"blocked_timeout": 0.2}})
        parts = worker._parts = build_parts(app, made, clock=clock, host=worker)
        call = Call(Context(Key(key), session=f"session of {key}"), Request(key=key, body=b"", path=path))
        return await parts.dispatcher.run(call, group_id=key)

    blocked, other = assigned(app), assigned(app)
    blocks = asyncio.create_task(send(blocked, "/block", "a"))
    try:
        await until(blocking.is_set)
        answer = await send(other, "/ask", "b")
        assert (answer.status, answer.body) == (Status.OK, b"b")
        await until(lambda: blocked._reason is not None)
        assert isinstance(blocked._reason, LoopBlocked)
        assert "block_for_long" in blocked._reason.reason
        assert blocked._reason.text == text_fingerprint("/block", b"")
    finally:
        go_on.set()
        await blocks
        for worker in (blocked, other):
            worker._coroutines.close()


@pytest.mark.proves("pooled/on-start-blocks")
async def test_on_start_that_blocks_its_key_is_logged_and_goes_on(assigned):
    app, go_on = App(), threading.Event()

    @app.on_start
    async def load_for_long(context: Context) -> str:
        go_on.wait(PATIENCE)
        return "loaded"

    with capture_logs() as logs:
        worker = assigned(app, environment(config={"runtime": {"blocked_timeout": 0.2}}))
        running = asyncio.create_task(worker.run())
        try:
            await until(lambda: [line for line in logs if line["event"] == "event loop blocked"])
        finally:
            go_on.set()
        await until(lambda: worker._worker is not None and not worker._worker.is_loading)
        assert (worker._worker._exit_reason, worker._worker._processor.context.state) == (None, "loaded")
        await worker.cut_off("the test is over")
        await running
    assert "load_for_long" in str([line.get("name") for line in logs])


class TestHandlerLoop:
    @pytest.fixture
    def loop(self):
        loop = HandlerLoop(enter=lambda: self.enter(), on_blocked=lambda reason: None)
        yield loop
        loop.close()

    def enter(self) -> None:
        """Called first in the thread of the loop."""

    async def test_thread_that_cannot_be_entered_fails_its_coroutine_and_the_next_one_has_another(self, loop):
        async def answer():
            return "answered"

        entries = iter([LookupError("no session"), None])
        self.enter = Mock(side_effect=entries)
        with pytest.raises(LookupError):
            await asyncio.wait_for(loop.run(answer()), PATIENCE)
        assert (loop.running, await loop.run(answer())) == (0, "answered")

    @pytest.mark.parametrize("begun", [False, True])
    async def test_closed_loop_runs_nothing_and_does_not_wait(self, loop, begun):
        async def answer():
            return "answered"

        if begun:
            await loop.run(answer())
        loop.close()
        for _ in range(2):  # perhaps before and certainly after the thread has ended
            with pytest.raises(RuntimeError, match="has ended"):
                await asyncio.wait_for(loop.run(answer()), PATIENCE)
            await until(lambda: loop._loop is None or loop._loop.is_closed())

    async def test_loop_that_is_closed_while_its_thread_is_entered_runs_nothing(self, loop):
        async def answer():
            return "answered"

        entering, go_on = threading.Event(), threading.Event()
        self.enter = lambda: (entering.set(), go_on.wait(PATIENCE))
        running = asyncio.create_task(loop.run(answer()))
        await until(entering.is_set)
        loop.close()
        go_on.set()
        with pytest.raises(RuntimeError):
            await asyncio.wait_for(running, PATIENCE)

    async def test_cancelled_coroutine_is_waited_for(self, loop):
        started, cleaned = threading.Event(), threading.Event()

        async def clean_up():
            started.set()
            try:
                await asyncio.sleep(PATIENCE)
            finally:
                await asyncio.sleep(0)
                cleaned.set()

        running = asyncio.create_task(loop.run(clean_up()))
        await until(started.is_set)
        assert loop.running == 1
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert cleaned.is_set()
        assert loop.running == 0

    async def test_exit_of_a_handler_is_its_own_error_and_the_loop_goes_on(self, loop):
        async def leave():
            raise SystemExit(3)

        async def answer():
            return asyncio.get_running_loop()

        with pytest.raises(HandlerExitError):
            await loop.run(leave())
        assert await loop.run(answer()) is await loop.run(answer()) is not asyncio.get_running_loop()
