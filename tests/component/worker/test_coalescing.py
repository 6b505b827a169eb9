"""Coalescing: identical requests in flight run once, and each has its own answer, deadline, cancel and
acknowledgement."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_worker_processor import PATIENCE, QUEUE, REPLIES, Bench, until

from osrdyne.aio.clock import now_ms
from osrdyne.aio.signals import WatchCell
from osrdyne.amqp import Message
from osrdyne.protocol.messages import COALESCE_HEADER, PRINCIPAL_HEADER
from osrdyne.protocol.names import Key, QueueName
from osrdyne_worker import App, Call, Context, DataChangedError, RequestError
from osrdyne_worker.requests.data_versions import DataVersions
from osrdyne_worker.requests.dispatch import SessionLostError
from osrdyne_worker.requests.inflight import InFlight, Phase
from osrdyne_worker.requests.retries import Retries
from osrdyne_worker.runtime.settings import RuntimeSettings


class SharingBench(Bench):
    """The handler `/same` waits for `go`, and answers with its body and the data."""

    def __init__(self, *arguments: object) -> None:
        self.runs: list[Call] = []
        self.ended: list[str] = []
        self.fail: Exception | None = None
        self.released = threading.Event()
        super().__init__(*arguments)  # type: ignore[arg-type]

    def make_app(self) -> App:
        app = super().make_app()

        @app.handler("/same", coalesce=True)
        async def same(call: Call) -> str:
            self.runs.append(call)
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.ended.append("cancelled")
                raise
            if self.fail is not None:
                raise self.fail
            return f"{call.body.decode()} {call.accept} {call.context.state}"

        @app.handler("/open")
        async def as_the_route_says(call: Call) -> str:
            self.runs.append(call)
            await self.go.wait()
            return call.body.decode()

        def decide(call: Call) -> bool | None:
            if call.body == b"broken":
                raise ValueError("a fault of the application")
            return {b"shared": True, b"alone": False}.get(call.body)

        @app.handler("/decided", coalesce=decide)
        async def decided(call: Call) -> str:
            self.runs.append(call)
            await self.go.wait()
            return call.body.decode()

        @app.handler("/deaf_same", coalesce=True, abandonable=True)
        def deaf_same(call: Call) -> str:
            self.runs.append(call)
            self.released.wait(600)
            return "too late"

        @app.handler("/steps", coalesce=True)
        async def steps(call: Call) -> str:
            await self.go.wait()
            call.progress("half")
            return "whole"

        return app

    async def ask(
        self, name: str, body: bytes = b"", *, path: str = "/same", priority: int = 0, **headers: Any
    ) -> None:
        message = Message(body=body, headers={"x-rpc-path": path, **headers}, correlation_id=name, reply_to=REPLIES)
        await self.broker.publish(message, exchange="", routing_key=QUEUE)
        self.processor.accept(await self.consumer.get(), priority=priority, broker=self.broker_connection)
        await asyncio.sleep(0)

    async def open(self) -> None:
        await super().open()
        await self.channel.cancel(self.consumer)
        self.consumer = await self.channel.consume(QUEUE, prefetch=1000)

    def replies(self) -> dict[str | None, tuple[str, str]]:
        stored = self.broker.look_up(REPLIES).ready
        return {
            one.message.correlation_id: (status, one.message.body.decode())
            for one, status in zip(stored, self.statuses(), strict=True)
        }


@pytest.fixture
async def bench() -> AsyncIterator[SharingBench]:
    async with asyncio.TaskGroup() as group:
        with ThreadPoolExecutor(4) as threads:
            bench = SharingBench(group, threads, RuntimeSettings(stuck_grace=3600.0, concurrency=2))
            await bench.open()
            yield bench
            bench.go.set()
            bench.released.set()
            async with asyncio.timeout(PATIENCE):
                await bench.processor.until_idle()
    assert bench.reporter.in_flight == 0
    assert bench.processor._slots.free == 2
    assert bench.processor._coalescing._runs == {}


async def test_identical_requests_run_once_and_all_are_answered(bench: SharingBench) -> None:
    names = [f"request {number}" for number in range(50)]
    for name in names[:25]:
        await bench.ask(name, b"x")
    await until(lambda: len(bench.runs) == 1)
    for name in names[25:]:  # while it runs
        await bench.ask(name, b"x")
    bench.go.set()
    await bench.processor.until_idle()
    assert bench.replies() == dict.fromkeys(names, ("ok", "x None None"))
    assert len(bench.runs) == 1
    assert bench.broker.look_up(QUEUE).messages == 0
    await bench.ask("later", b"x")
    await bench.processor.until_idle()
    assert len(bench.runs) == 2, "only requests in flight are shared"


async def test_requests_that_differ_do_not_share(bench: SharingBench) -> None:
    bench.go.set()
    await bench.ask("a", b"x")
    await bench.ask("b", b"y")
    await bench.ask("c", b"x", accept="application/vnd.apache.arrow.stream")
    await bench.ask("d", b"x", path="/steps")
    await bench.processor.until_idle()
    assert len(bench.runs) == 3
    assert [bench.replies()[name][1] for name in "abcd"] == [
        "x None None",
        "y None None",
        "x application/vnd.apache.arrow.stream None",
        "whole",
    ]


@pytest.mark.proves("workers/first-caller-shared-run")
async def test_cancel_of_one_leaves_the_run_also_of_the_one_that_came_first(bench: SharingBench) -> None:
    for name in ("first", "second", "third"):
        await bench.ask(name)
    await until(lambda: len(bench.runs) == 1)
    bench.processor.cancel("first", REPLIES)
    await until(lambda: bench.replies().keys() == {"first"})
    assert (bench.replies()["first"][0], bench.ended, bench.runs[0].cancelled) == ("cancelled", [], False)
    bench.go.set()
    await bench.processor.until_idle()
    assert [bench.replies()[name][0] for name in ("second", "third")] == ["ok", "ok"]
    assert len(bench.runs) == 1


@pytest.mark.proves("workers/first-caller-shared-run")
async def test_run_ends_when_all_its_callers_are_gone(bench: SharingBench) -> None:
    for name in ("a", "b"):
        await bench.ask(name)
    await until(lambda: len(bench.runs) == 1)
    for name in ("a", "b"):
        bench.processor.cancel(name, REPLIES)
    await bench.processor.until_idle()
    assert (bench.ended, bench.runs[0].cancelled) == (["cancelled"], True)
    assert {status for status, _ in bench.replies().values()} == {"cancelled"}
    bench.go.set()
    await bench.ask("new")
    await bench.processor.until_idle()
    assert bench.replies()["new"][0] == "ok"


async def test_requests_that_leave_while_they_wait_give_no_run(bench: SharingBench) -> None:
    for name in ("x", "y"):
        await bench.ask(name, path="/wait")
    await until(lambda: len(bench.calls) == 2)
    await bench.ask("a")
    await bench.ask("b")
    for name in ("a", "b"):
        bench.processor.cancel(name, REPLIES)
    await until(lambda: {"a", "b"} <= bench.replies().keys())
    bench.go.set()
    await bench.processor.until_idle()
    assert bench.runs == []


async def test_deadline_of_one_is_its_own_and_the_handler_has_the_last_one(bench: SharingBench) -> None:
    await bench.ask("soon", **{"x-deadline": now_ms(bench.clock) + 300})
    await bench.ask("later", **{"x-deadline": now_ms(bench.clock) + 60_000})
    await until(lambda: bench.replies().get("soon") is not None)
    assert bench.replies()["soon"][0] == "expired"
    assert bench.runs[0].deadline > 50
    bench.go.set()
    await bench.processor.until_idle()
    assert bench.replies()["later"][0] == "ok"


async def test_error_is_the_answer_of_all(bench: SharingBench) -> None:
    bench.fail = RequestError("no", code=403, error_code="refused")
    bench.go.set()
    for name in ("a", "b"):
        await bench.ask(name)
    await bench.processor.until_idle()
    assert {status for status, _ in bench.replies().values()} == {"error"}
    assert all("refused" in body for _, body in bench.replies().values())


async def test_lost_session_returns_all_requests(bench: SharingBench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(*_: object, **__: object) -> None:
        raise SessionLostError("gone")

    monkeypatch.setattr(bench.processor._dispatcher, "run", lost)
    for name in ("a", "b", "c"):
        await bench.ask(name)
    await bench.processor.until_idle()
    assert bench.replies() == {}
    assert bench.broker.look_up(QUEUE).messages == 3
    assert len(bench.exits) == 3


@pytest.mark.proves("workers/worker-dies-shared-run")
async def test_lost_channel_between_the_replies_loses_no_request(bench: SharingBench) -> None:
    """Each request is acknowledged after its own reply: those that are not acknowledged are delivered again."""
    for name in ("a", "b", "c"):
        await bench.ask(name)
    await until(lambda: len(bench.runs) == 1)
    await bench.channel.close()
    bench.processor.lose(bench.channel)
    bench.go.set()
    await bench.processor.until_idle()
    assert bench.replies() == {}
    assert bench.broker.look_up(QUEUE).messages == 3


async def test_progress_reaches_those_that_want_it(bench: SharingBench) -> None:
    await bench.ask("wants", path="/steps", **{"x-progress": True})
    await bench.ask("does not", path="/steps")
    await bench.ask("wants too", path="/steps", **{"x-progress": True})
    bench.go.set()
    await bench.processor.until_idle()
    stored = [(one.message.correlation_id, one.message.body.decode()) for one in bench.broker.look_up(REPLIES).ready]
    assert Counter(stored) == Counter(
        {
            ("wants", "half"): 1,
            ("wants too", "half"): 1,
            **{(n, "whole"): 1 for n in ("wants", "wants too", "does not")},
        }
    )


async def test_urgent_request_does_not_wait_behind_an_identical_one_of_a_lower_priority(bench: SharingBench) -> None:
    for name in ("x", "y"):
        await bench.ask(name, path="/wait")
    await until(lambda: len(bench.calls) == 2)
    await bench.ask("low", b"q", priority=5)
    await bench.ask("other", b"z", priority=3)
    await bench.ask("high", b"q", priority=0)
    await bench.ask("lowest", b"q", priority=9)
    bench.go.set()
    await bench.processor.until_idle()
    assert [call.body for call in bench.runs] == [b"q", b"z", b"q"]
    assert [call.correlation_id for call in bench.runs] == ["high", "other", "low"]
    assert {status for status, _ in bench.replies().values()} == {"ok"}


async def test_request_after_a_reload_gets_a_run_on_the_new_data(bench: SharingBench) -> None:
    class Loading:
        names_versions = False

        async def newest_version(self) -> int | None:
            return None

        async def reload(self, version: int | None) -> Context:
            return Context(Key("k"), state="new", data_version=version)

        async def unload(self, context: Context) -> None:
            pass

    bench.processor.data = DataVersions(Context(Key("k"), state="old"), Loading(), bench.runtime)
    await bench.ask("before")
    await until(lambda: len(bench.runs) == 1)
    await bench.ask("versioned", **{"x-data-version": 1})
    await bench.ask("after", **{"x-data-version": 1})
    await until(lambda: len(bench.runs) == 2)
    bench.go.set()
    await bench.processor.until_idle()
    assert {name: body for name, (_, body) in bench.replies().items()} == {
        "before": " None old",
        "versioned": " None new",
        "after": " None new",
    }


async def test_changed_data_is_reloaded_once_for_all(bench: SharingBench) -> None:
    loads = []

    class Loading:
        names_versions = False

        async def newest_version(self) -> int | None:
            return None

        async def reload(self, version: int | None) -> Context:
            loads.append(version)
            bench.fail = None
            return Context(Key("k"), state="new")

        async def unload(self, context: Context) -> None:
            pass

    bench.processor.data = DataVersions(Context(Key("k"), state="old"), Loading(), bench.runtime)
    bench.fail = DataChangedError("The file is gone.")
    bench.go.set()
    for name in ("a", "b", "c"):
        await bench.ask(name)
    await bench.processor.until_idle()
    assert bench.replies() == dict.fromkeys(("a", "b", "c"), ("ok", " None new"))
    assert (loads, len(bench.runs)) == ([None], 2)


async def test_identical_requests_come_from_the_queue_while_one_runs(bench: SharingBench) -> None:
    """And different ones wait in the queue, where other workers find them."""
    queue = QueueName("shared")
    bench.broker.declare_queue(queue, {})
    intake = asyncio.create_task(bench.intake(queue, WatchCell((queue,))).run())
    for _ in range(20):
        await bench.publish("/same", queue=queue)
    await until(lambda: bench.processor.in_flight == 20)
    for _ in range(20):
        await bench.publish("/wait", queue=queue)
    await until(lambda: len(bench.calls) == 1)
    await asyncio.sleep(0.01)
    waiting = len(bench.broker.look_up(queue).ready)
    assert waiting >= 17
    bench.go.set()
    await until(lambda: bench.broker.look_up(queue).messages == 0)
    await bench.processor.until_idle()
    assert len(bench.runs) == 1
    assert bench.statuses() == ["ok"] * 40
    intake.cancel()
    await asyncio.wait({intake})


@pytest.mark.parametrize(
    ("path", "body", "route_says", "runs"),
    [
        ("/open", b"", None, 3),
        ("/open", b"", True, 1),
        ("/open", b"", b"true", 3),
        ("/decided", b"shared", None, 1),
        ("/decided", b"alone", True, 3),
        ("/decided", b"other", None, 3),
        ("/decided", b"other", True, 1),
        ("/decided", b"broken", True, 3),
    ],
)
async def test_handler_decides_and_otherwise_the_route(
    bench: SharingBench, path: str, body: bytes, route_says: object, runs: int
) -> None:
    said = {} if route_says is None else {COALESCE_HEADER: route_says}
    bench.go.set()
    for name in ("a", "b", "c"):
        await bench.ask(name, body, path=path, **said)
    await bench.processor.until_idle()
    assert bench.replies() == dict.fromkeys(("a", "b", "c"), ("ok", body.decode()))
    assert len(bench.runs) == runs


async def test_requests_of_different_principals_do_not_share(bench: SharingBench) -> None:
    bench.go.set()
    for name, principal in (("a", "alice"), ("b", "bob"), ("c", "alice")):
        await bench.ask(name, **{PRINCIPAL_HEADER: principal})
    await bench.processor.until_idle()
    assert sorted(str(call.principal) for call in bench.runs) == ["alice", "bob"]


async def test_direct_pool_knows_no_principal(bench: SharingBench) -> None:
    """There nothing removes what a client writes."""
    bench.processor._retries = Retries(None)
    bench.go.set()
    await bench.ask("a", **{PRINCIPAL_HEADER: "forged", "authorization": "Bearer secret"})
    await bench.processor.until_idle()
    [call] = bench.runs
    assert (call.principal, [name for name in call.headers if name in (PRINCIPAL_HEADER, "authorization")]) == (
        None,
        [],
    )


async def test_header_of_a_client_is_ignored_in_a_direct_pool(bench: SharingBench) -> None:
    bench.processor._retries = Retries(None)
    bench.go.set()
    for name in ("a", "b"):
        await bench.ask(name, path="/open", **{COALESCE_HEADER: True})
    await bench.processor.until_idle()
    assert len(bench.runs) == 2


async def test_abandoned_run_frees_its_slot_while_its_handler_goes_on(bench: SharingBench) -> None:
    """As for a request that runs by itself: a query that Spark cannot cancel holds up no other caller."""
    for name in ("a", "b"):
        await bench.ask(name, path="/deaf_same")
    await until(lambda: len(bench.runs) == 1)
    bench.processor.cancel("a", REPLIES)
    await until(lambda: "a" in bench.replies())
    assert bench.processor.free_slots == 1, "the other caller still needs the run"
    bench.processor.cancel("b", REPLIES)
    await until(lambda: "b" in bench.replies())
    await until(lambda: bench.processor.in_flight == 1)
    assert bench.processor.free_slots == 2, "although the handler goes on"
    await bench.ask("next", path="/deaf_same")
    await until(lambda: len(bench.runs) == 2)
    bench.released.set()
    await bench.processor.until_idle()
    assert [status for status, _ in bench.replies().values()] == ["cancelled", "cancelled", "ok"]


class Source:
    """Data that a publisher writes; the worker loads it when a request names a later version."""

    names_versions = False

    def __init__(self) -> None:
        self.version = 0

    async def newest_version(self) -> int | None:
        return None

    async def reload(self, version: int | None) -> Context:
        await asyncio.sleep(0)
        return Context(Key("k"), state=self.version, data_version=version)

    async def unload(self, context: Context) -> None:
        pass


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["ask", "ask", "ask", "ask", "cancel", "expire", "late", "write", "turn", "go"]),
            st.integers(0, 2),
            st.integers(0, 2),
            st.booleans(),
        ),
        max_size=30,
    ),
    concurrency=st.integers(1, 2),
)
def test_results_equal_those_of_one_by_one(steps: list[tuple[str, int, int, bool]], concurrency: int) -> None:
    """Whatever is asked, written, cancelled and expires in whatever order: each request gets exactly one answer, the
    one that it would get alone, from data that is not older than it demands."""

    async def run() -> None:
        asked: dict[str, tuple[bytes, int]] = {}
        stopped: dict[str, str] = {}
        source = Source()
        async with asyncio.TaskGroup() as group:
            with ThreadPoolExecutor(1) as threads:
                bench = SharingBench(group, threads, RuntimeSettings(concurrency=concurrency))
                await bench.open()
                bench.processor.data = DataVersions(Context(Key("k"), state=0), source, bench.runtime)

                def one(number: int) -> InFlight | None:
                    jobs = list(bench.processor._jobs.values())
                    return jobs[number % len(jobs)] if jobs else None

                for step, number, priority, flag in steps:
                    match step:
                        case "ask" | "late":
                            name = f"request {len(asked)}"
                            headers: dict[str, Any] = {"x-data-version": source.version} if flag else {}
                            if step == "late":
                                stopped[name] = "expired"
                                headers["x-deadline"] = now_ms(bench.clock) - 1
                            asked[name] = (f"{number}".encode(), source.version if flag else 0)
                            await bench.ask(name, asked[name][0], priority=priority, **headers)
                        case "cancel" if (job := one(number * 7 + priority)) is not None:
                            assert job.request.correlation_id is not None
                            if job.phase is not Phase.SETTLING and job.interruption is None:
                                stopped.setdefault(job.request.correlation_id, "cancelled")
                            bench.processor.cancel(job.request.correlation_id, REPLIES)
                        case "expire" if (job := one(number * 7 + priority)) is not None:
                            assert job.request.correlation_id is not None
                            if job.phase is not Phase.SETTLING and job.interruption is None:
                                stopped.setdefault(job.request.correlation_id, "expired")
                            bench.processor._expire(job)
                        case "write":
                            source.version += 1
                        case "turn":
                            await bench.clock.settle()
                        case "go":
                            bench.go.set()
                            await bench.processor.until_idle()
                            bench.go.clear()
                bench.go.set()
                await bench.processor.until_idle()
                replies = bench.replies()
                assert replies.keys() == asked.keys()
                assert bench.broker.look_up(QUEUE).messages == 0
                assert len(bench.broker.look_up(REPLIES).ready) == len(asked), "each exactly once"
                for name, (body, needed) in asked.items():
                    status, text = replies[name]
                    assert status == stopped.get(name, "ok")
                    if status == "ok":
                        answered, _, state = text.split(" ")
                        assert answered == body.decode()
                        assert needed <= int(state) <= source.version
                assert bench.processor._slots.free == concurrency
                assert bench.processor._coalescing._runs == {}

    asyncio.run(run())
