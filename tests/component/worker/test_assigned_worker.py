"""One worker of a pooled process, without RabbitMQ: its end, and what it leaves behind."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.names import Key, QueueName, WorkerId
from osrdyne.protocol.pooled import AssignmentExit
from osrdyne.protocol.rates import EventRate
from osrdyne.testing.clock import VirtualClock
from osrdyne_worker import App, Context
from osrdyne_worker.bootstrap import build_parts
from osrdyne_worker.pooled import assigned_worker as module
from osrdyne_worker.pooled.assigned_worker import TIDY_INTERVAL, AssignedWorker
from osrdyne_worker.requests.scheduling.suspects import SuspectGate
from osrdyne_worker.runtime.exit import ExitCode
from osrdyne_worker.runtime.settings import RuntimeContext

PATIENCE = 120.0


class Sessions:
    """Records what is built and closed."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.entered: list[str] = []

    def enter_thread(self) -> None:
        self.entered.append(threading.current_thread().name)

    def build(self, context: Context) -> str:
        return f"session of {context.key}"

    def close(self, session: str) -> None:
        self.closed.append(session)


def environment(**config: Any) -> WorkerEnvironment:
    return WorkerEnvironment(
        worker_id=WorkerId("w"),
        key=Key("k"),
        pool="p",
        amqp_uri="amqp://127.0.0.1:1",
        requests_queues=(QueueName("p-req-k"),),
        activity_exchange="a",
        control_exchange="c",
        config=config,
    )


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def sessions() -> Sessions:
    return Sessions()


def assigned(
    app: App, environment: WorkerEnvironment, sessions: Sessions, side_threads: ThreadPoolExecutor, clock: VirtualClock
) -> AssignedWorker:
    return AssignedWorker(
        app,
        environment,
        sessions=sessions,  # type: ignore[arg-type]
        side_threads=side_threads,
        suspect_gate=SuspectGate(),
        clock=clock,
    )


@pytest.mark.proves("pooled/requests-released-worker-end")
async def test_worker_cut_off_while_it_loads_leaves_a_thread_whose_session_is_closed_later(sessions: Sessions) -> None:
    app, clock = App(), VirtualClock()
    loading, go_on = threading.Event(), threading.Event()

    @app.on_start
    def load(context: Context) -> None:
        loading.set()
        go_on.wait(PATIENCE)

    with ThreadPoolExecutor(2) as side_threads:
        worker = assigned(app, environment(), sessions, side_threads, clock)
        running = asyncio.create_task(worker.run())
        await until(loading.is_set)
        await worker.cut_off("It did not end.")
        assert await running == AssignmentExit(ExitCode.UNRECOVERABLE, "It did not end.")
        assert (worker.left_behind, sessions.closed) == (1, [])
        go_on.set()
        await until(lambda: not worker.left_behind)
        await until(lambda: clock.pending)
        await clock.advance(TIDY_INTERVAL)
        await until(lambda: sessions.closed)
    assert sessions.closed == ["session of k"]
    assert sessions.entered


async def test_worker_with_invalid_settings_ends_alone_and_names_them(sessions: Sessions) -> None:
    with ThreadPoolExecutor(2) as side_threads:
        made = environment(runtime={"concurrency": 0})
        worker = assigned(App(), made, sessions, side_threads, VirtualClock())
        how = await worker.run()
    assert how.code == ExitCode.INVALID_CONFIGURATION
    assert "WORKER_CONFIG.runtime.concurrency" in str(how.reason)


async def test_worker_that_cannot_be_built_ends_alone_and_gives_the_reason(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise LookupError("no such thing")

    monkeypatch.setattr(module, "build_parts", fail)
    with ThreadPoolExecutor(2) as side_threads:
        worker = assigned(App(), environment(), sessions, side_threads, VirtualClock())
        with capture_logs() as logs:
            how = await worker.run()
    assert (how.code, str(how.reason)[:28]) == (ExitCode.UNRECOVERABLE, "LookupError: no such thing (")
    assert [entry["event"] for entry in logs] == ["worker cannot be built"]


async def test_parts_of_the_start_of_a_key_are_complete(sessions: Sessions) -> None:
    app, loaded = App(), threading.Event()
    app.on_start(lambda context: loaded.set())
    with ThreadPoolExecutor(2) as side_threads:
        worker = assigned(app, environment(), sessions, side_threads, VirtualClock())
        running = asyncio.create_task(worker.run())
        await until(loaded.is_set)
        assert worker._parts is not None
        times = worker._parts.start_times
        await until(lambda: "load" in times.milliseconds())
        assert list(times.milliseconds()) == ["python", "session", "load"]
        await worker.cut_off("the test is over")
        await running


async def test_rate_of_a_key_limits_this_key_of_the_process_only(sessions: Sessions) -> None:
    clock, rate, processors = VirtualClock(), EventRate(60, 1024), []
    with ThreadPoolExecutor(2) as side_threads:
        async with asyncio.TaskGroup() as group:
            for key, first in (("limited", rate), ("free", None)):
                made = replace(environment(), key=Key(key), rate=first)
                host = assigned(App(), made, sessions, side_threads, clock)
                parts = build_parts(App(), made, clock=clock, host=host)
                runtime = RuntimeContext(parts.settings, clock, group.create_task, lambda reason: None)
                context = Context(Key(key), worker_id="w")
                processors.append(parts.make_processor(runtime, context, on_alone=lambda: None))
            limited, free = processors
            assert (limited.budget.rate, free.budget.rate) == (rate, None)
            for one in processors:
                await one._slots.acquire(0, events=60)
                one._slots.release()
            assert limited.budget.wait() > 0
            assert not limited._slots.try_acquire()
            assert free._slots.try_acquire()
            free.budget.use(rate)
            limited.budget.use(None)
            assert limited._slots.try_acquire()
            assert (limited.budget.rate, free.budget.rate) == (None, rate)
