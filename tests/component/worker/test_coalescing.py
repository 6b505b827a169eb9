"""Coalescing: identical requests in flight run once, and each has its own answer, deadline, cancel and
acknowledgement."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_worker_dispatch import LostSession
from worker_bench import REPLIES, Bench, Reloads, bench_fixture, serving, until

from osrdyne.aio.clock import now_ms
from osrdyne.protocol.messages import COALESCE_HEADER, PRINCIPAL_HEADER
from osrdyne.protocol.names import Key
from osrdyne_worker import App, Call, Context, DataChangedError, RequestError
from osrdyne_worker.requests.data_versions import DataVersions
from osrdyne_worker.requests.inflight import Phase


class SharingBench(Bench):
    """The handler `/same` waits for `go`, and answers with its body and the data."""

    prefetch = 1000

    def __init__(self, *arguments: Any) -> None:
        self.runs: list[Call] = []
        self.ended: list[str] = []
        self.fail: Exception | None = None
        super().__init__(*arguments)

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

        def decide(call: Call) -> bool | None:
            if call.body == b"broken":
                raise ValueError("a fault of the application")
            return {b"shared": True, b"alone": False}.get(call.body)

        @app.handler("/decided", coalesce=decide)
        @app.handler("/open")
        async def note(call: Call) -> str:
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
        await self.take(path, correlation_id=name, body=body, priority=priority, **headers)
        await asyncio.sleep(0)

    async def ask_all(self, names: Iterable[str], **request: Any) -> None:
        for name in names:
            await self.ask(name, **request)

    async def fill_slots(self) -> None:
        """Requests that come from now on wait until `go` is set."""
        await self.ask_all("xy", path="/wait")
        await until(lambda: len(self.calls) == 2)

    def use_data(self, state: object, reload: Callable[[int | None], Awaitable[Context]]) -> None:
        self.processor.data = DataVersions(Context(Key("k"), state=state), Reloads(reload), self.runtime)

    def answers(self) -> dict[str | None, tuple[str, str]]:
        return {name: (status, self.bodies()[name]) for name, status in self.by_name().items()}

    def assert_nothing_is_left(self) -> None:
        super().assert_nothing_is_left()
        assert self.processor._coalescing._runs == {}


class DirectBench(SharingBench):
    retry_exchange = None


bench = bench_fixture(SharingBench, concurrency=2)


async def test_requests_that_differ_do_not_share(bench):
    bench.go.set()
    await bench.ask("a", b"x")
    await bench.ask("b", b"y")
    await bench.ask("c", b"x", accept="text/csv")
    await bench.ask("d", b"x", path="/steps")
    for name, principal in (("e", "alice"), ("f", "bob"), ("g", "alice")):
        await bench.ask(name, b"x", **{PRINCIPAL_HEADER: principal})
    await bench.processor.until_idle()
    assert [bench.bodies()[name].split()[:2] for name in "abc"] == [["x", "None"], ["y", "None"], ["x", "text/csv"]]
    assert bench.bodies()["d"] == "whole"
    assert [call.principal for call in bench.runs] == [None, None, None, "alice", "bob"]


@pytest.mark.proves("workers/first-caller-shared-run")
async def test_cancel_of_one_leaves_the_run_and_that_of_the_last_one_ends_it(bench):
    await bench.ask_all(("first", "second", "third"))
    await until(lambda: len(bench.runs) == 1)
    bench.processor.cancel("first", REPLIES)
    await until(lambda: bench.by_name() == {"first": "cancelled"})
    assert (bench.ended, bench.runs[0].cancelled) == ([], False)
    for name in ("second", "third"):
        bench.processor.cancel(name, REPLIES)
    await bench.processor.until_idle()
    assert (bench.ended, bench.runs[0].cancelled) == (["cancelled"], True)
    assert bench.by_name() == dict.fromkeys(("first", "second", "third"), "cancelled")
    bench.go.set()
    await bench.ask("new")
    await bench.processor.until_idle()
    assert bench.by_name()["new"] == "ok"


async def test_requests_that_leave_while_they_wait_give_no_run(bench):
    await bench.fill_slots()
    await bench.ask_all("ab")
    for name in "ab":
        bench.processor.cancel(name, REPLIES)
    await until(lambda: {"a", "b"} <= bench.by_name().keys())
    await bench.finish()
    assert (bench.runs, bench.by_name()["a"]) == ([], "cancelled")


async def test_deadline_of_one_is_its_own_and_the_handler_has_the_last_one(bench):
    await bench.ask("soon", **{"x-deadline": now_ms(bench.clock) + 300})
    await bench.ask("later", **{"x-deadline": now_ms(bench.clock) + 60_000})
    await until(lambda: bench.by_name() == {"soon": "expired"})
    assert bench.runs[0].deadline > 50
    await bench.finish()
    assert bench.by_name()["later"] == "ok"


async def test_error_is_the_answer_of_all(bench):
    bench.fail = RequestError("no", code=403, error_code="refused")
    bench.go.set()
    await bench.ask_all("ab")
    await bench.processor.until_idle()
    assert bench.by_name() == {"a": "error", "b": "error"}
    assert all("refused" in body for body in bench.bodies().values())


@pytest.mark.parametrize("bench", [LostSession], indirect=True)
async def test_lost_session_returns_all_requests(bench):
    for name in "abc":
        await bench.take("/lose_together", correlation_id=name)
    await bench.processor.until_idle()
    assert (bench.statuses(), bench.unfinished(), len(bench.exits)) == ([], 3, 3)


@pytest.mark.proves("workers/worker-dies-shared-run")
async def test_lost_channel_between_the_replies_loses_no_request(bench):
    """Each request is acknowledged after its own reply: those that are not acknowledged are delivered again."""
    await bench.ask_all("abc")
    await until(lambda: len(bench.runs) == 1)
    await bench.channel.close()
    bench.processor.lose(bench.channel)
    await bench.finish()
    assert (bench.answers(), bench.unfinished()) == ({}, 3)


async def test_progress_reaches_those_that_want_it(bench):
    await bench.ask("wants", path="/steps", **{"x-progress": True})
    await bench.ask("does not", path="/steps")
    await bench.ask("wants too", path="/steps", **{"x-progress": True})
    await bench.finish()
    stored = sorted((str(one.correlation_id), one.body) for one in bench.replies())
    of_each = (("wants", b"half"), ("wants", b"whole"), ("wants too", b"half"), ("wants too", b"whole"))
    assert stored == [("does not", b"whole"), *of_each]


async def test_urgent_request_does_not_wait_behind_an_identical_one_of_a_lower_priority(bench):
    await bench.fill_slots()
    for name, body, priority in (("low", b"q", 5), ("other", b"z", 3), ("high", b"q", 0), ("lowest", b"q", 9)):
        await bench.ask(name, body, priority=priority)
    await bench.finish()
    assert [call.correlation_id for call in bench.runs] == ["high", "other", "low"]
    assert set(bench.by_name().values()) == {"ok"}


async def test_changed_data_is_reloaded_once_for_all(bench):
    loads = []

    async def reload(version):
        loads.append(version)
        bench.fail = None
        return Context(Key("k"), state="new")

    bench.use_data("old", reload)
    bench.fail = DataChangedError("The file is gone.")
    bench.go.set()
    await bench.ask_all("abc")
    await bench.processor.until_idle()
    assert bench.answers() == dict.fromkeys("abc", ("ok", " None new"))
    assert (loads, len(bench.runs)) == ([None], 2)


async def test_identical_requests_come_from_the_queue_while_one_runs_and_share_it(bench):
    """And different ones wait in the queue, where other workers find them."""
    async with bench.consuming("shared"):
        for _ in range(20):
            await bench.publish("/same", queue="shared", body=b"x")
        await until(lambda: bench.processor.in_flight == 20)
        for _ in range(20):
            await bench.publish("/wait", queue="shared", correlation_id="other")
        await until(lambda: len(bench.calls) == 1)
        await asyncio.sleep(0.01)
        assert len(bench.broker.look_up("shared").ready) >= 17
        bench.go.set()
        await until(lambda: bench.unfinished("shared") == 0)
        await bench.processor.until_idle()
    assert bench.answers() == {"c": ("ok", "x None None"), "other": ("ok", "done")}
    assert (len(bench.runs), bench.statuses()) == (1, ["ok"] * 40)
    await bench.ask("later", b"x")
    await bench.processor.until_idle()
    assert len(bench.runs) == 2, "only requests in flight are shared"


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
async def test_handler_decides_and_otherwise_the_route(bench, path, body, route_says, runs):
    said = {} if route_says is None else {COALESCE_HEADER: route_says}
    bench.go.set()
    await bench.ask_all("abc", body=body, path=path, **said)
    await bench.processor.until_idle()
    assert bench.answers() == dict.fromkeys("abc", ("ok", body.decode()))
    assert len(bench.runs) == runs


@pytest.mark.parametrize("bench", [DirectBench], indirect=True)
async def test_headers_of_the_ingress_are_ignored_in_a_direct_pool(bench):
    """There nothing removes what a client writes."""
    bench.go.set()
    forged = {PRINCIPAL_HEADER: "forged", "authorization": "Bearer secret", COALESCE_HEADER: True}
    await bench.ask_all("ab", path="/open", **forged)
    await bench.processor.until_idle()
    assert [call.principal for call in bench.runs] == [None, None]
    assert {name for call in bench.runs for name in call.headers} & {PRINCIPAL_HEADER, "authorization"} == set()


async def test_abandoned_run_frees_its_slot_while_its_handler_goes_on(bench):
    """As for a request that runs by itself: a query that Spark cannot cancel holds up no other caller."""
    await bench.ask_all("ab", path="/deaf_same")
    await until(lambda: len(bench.runs) == 1)
    bench.processor.cancel("a", REPLIES)
    await until(lambda: "a" in bench.answers())
    assert bench.processor.free_slots == 1, "the other caller still needs the run"
    bench.processor.cancel("b", REPLIES)
    await until(lambda: "b" in bench.answers())
    await until(lambda: bench.processor.in_flight == 1)
    assert bench.processor.free_slots == 2, "although the handler goes on"
    await bench.ask("next", path="/deaf_same")
    await until(lambda: len(bench.runs) == 2)
    bench.released.set()
    await bench.processor.until_idle()
    assert [status for status, _ in bench.answers().values()] == ["cancelled", "cancelled", "ok"]


KINDS = st.sampled_from([*["ask"] * 4, "cancel", "expire", "late", "write", "turn", "go"])
STEPS = st.lists(st.tuples(KINDS, st.integers(0, 2), st.integers(0, 2), st.booleans()), max_size=30)


@settings(deadline=None, max_examples=60)
@given(steps=STEPS, concurrency=st.integers(1, 2))
def test_results_equal_those_of_one_by_one(steps, concurrency):
    """Whatever is asked, written, cancelled and expires in whatever order: each request gets exactly one answer, the
    one that it would get alone, from data that is not older than it demands."""

    async def run():
        asked: dict[str, tuple[bytes, int]] = {}
        stopped: dict[str, str] = {}
        version = 0

        async def reload(wanted):
            await asyncio.sleep(0)
            return Context(Key("k"), state=version, data_version=wanted)

        async with serving(SharingBench, concurrency=concurrency) as bench:
            bench.use_data(0, reload)

            def one(number):
                jobs = list(bench.processor._jobs.values())
                return jobs[number % len(jobs)] if jobs else None

            for step, number, priority, flag in steps:
                match step:
                    case "ask" | "late":
                        name = f"request {len(asked)}"
                        headers: dict[str, Any] = {"x-data-version": version} if flag else {}
                        if step == "late":
                            stopped[name] = "expired"
                            headers["x-deadline"] = now_ms(bench.clock) - 1
                        asked[name] = (f"{number}".encode(), version if flag else 0)
                        await bench.ask(name, asked[name][0], priority=priority, **headers)
                    case "cancel" | "expire" if (job := one(number * 7 + priority)) is not None:
                        assert job.request.correlation_id is not None
                        if job.phase is not Phase.SETTLING and job.interruption is None:
                            status = "expired" if step == "expire" else "cancelled"
                            stopped.setdefault(job.request.correlation_id, status)
                        if step == "expire":
                            bench.processor._expire(job)
                        else:
                            bench.processor.cancel(job.request.correlation_id, REPLIES)
                    case "write":
                        version += 1
                    case "turn":
                        await bench.clock.settle()
                    case "go":
                        await bench.finish()
                        bench.go.clear()
            await bench.finish()
            replies = bench.answers()
            assert replies.keys() == asked.keys()
            assert bench.unfinished() == 0
            assert len(bench.statuses()) == len(asked), "each exactly once"
            for name, (body, needed) in asked.items():
                status, text = replies[name]
                assert status == stopped.get(name, "ok")
                if status == "ok":
                    answered, _, state = text.split(" ")
                    assert answered == body.decode()
                    assert needed <= int(state) <= version

    asyncio.run(run())
