"""A caller is answered at its deadline, whatever its handler does; and what the worker does with such a handler."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_worker_processor import PATIENCE, REPLIES, Bench

from osrdyne.aio.clock import now_ms
from osrdyne.protocol.activity import STUCK_FIELD, Event, text_fingerprint
from osrdyne_worker import App, Call
from osrdyne_worker.runtime.reports import Draft
from osrdyne_worker.runtime.settings import RuntimeSettings, runtime_settings


class DeafBench(Bench):
    """Its handlers ignore that they are cancelled: threads end with `released`, the coroutine with `go`."""

    def __init__(self, *arguments: object) -> None:
        self.released = threading.Event()
        super().__init__(*arguments)  # type: ignore[arg-type]

    def make_app(self) -> App:
        app = super().make_app()

        @app.handler("/deaf_thread")
        def deaf_thread(call: Call) -> str:
            self.released.wait(600)
            return "too late"

        @app.handler("/abandonable", abandonable=True)
        def abandonable(call: Call) -> str:
            self.released.wait(600)
            return "too late"

        @app.handler("/quick")
        def quick(call: Call) -> str:
            return "done"

        return app

    async def until_answered(self, *statuses: str) -> None:
        async with asyncio.timeout(PATIENCE):
            while len(self.statuses()) < len(statuses):
                await asyncio.sleep(0.001)
        assert self.statuses() == list(statuses)

    def soon(self) -> dict[str, object]:
        return {"x-deadline": now_ms(self.clock) + 20}


@pytest.fixture
async def bench() -> AsyncIterator[DeafBench]:
    async with asyncio.TaskGroup() as group:
        with ThreadPoolExecutor(4) as threads:
            settings = RuntimeSettings(stuck_grace=3600.0, max_abandoned=1)
            bench = DeafBench(group, threads, settings)
            await bench.open()
            yield bench
            bench.go.set()
            bench.released.set()
            await bench.processor.until_idle()
    assert bench.reporter.in_flight == 0


@pytest.mark.parametrize("path", ["/deaf_thread", "/deaf", "/abandonable"])
@pytest.mark.proves("workers/handler-never-ends")
async def test_caller_is_answered_at_its_deadline_although_the_handler_goes_on(bench: DeafBench, path: str) -> None:
    await bench.take(path, **bench.soon())
    await bench.until_answered("expired")
    assert bench.processor.in_flight == 1, "its handler is still there"
    bench.go.set()
    bench.released.set()
    await bench.processor.until_idle()
    assert bench.statuses() == ["expired"], "what the handler returned is dropped"
    assert bench.exits == []


@pytest.mark.proves("workers/cancelled-handler-continues-requests")
async def test_handler_that_runs_on_keeps_its_slot(bench: DeafBench) -> None:
    """With `concurrency` 1 an application may rely on running alone."""
    await bench.take("/deaf_thread", **bench.soon())
    await bench.until_answered("expired")
    await bench.take("/quick", correlation_id="next")
    await bench.clock.settle()
    assert bench.statuses() == ["expired"]
    bench.released.set()
    await bench.until_answered("expired", "ok")


@pytest.mark.proves("workers/cancelled-handler-continues-requests")
async def test_abandoned_handler_holds_up_no_other_until_there_are_too_many(bench: DeafBench) -> None:
    for expected in (["expired"], ["expired", "ok", "expired"]):
        await bench.take("/abandonable", **bench.soon())
        await bench.until_answered(*expected)
        await bench.take("/quick", correlation_id="next")
        if len(expected) == 1:
            await bench.until_answered("expired", "ok")
    await bench.clock.settle()
    assert bench.statuses() == ["expired", "ok", "expired"], "max_abandoned is 1: the second one keeps its place"
    bench.released.set()
    await bench.until_answered("expired", "ok", "expired", "ok")


async def test_handler_that_goes_on_is_named_in_reports_until_it_ends(bench: DeafBench) -> None:
    await bench.take("/deaf_thread", **bench.soon())
    await bench.until_answered("expired")
    assert len(bench.processor.running_requests()) == 1
    bench.released.set()
    await bench.processor.until_idle()
    assert bench.processor.running_requests() == []


async def test_cancel_reaches_a_later_request_with_the_name_of_one_whose_handler_goes_on(bench: DeafBench) -> None:
    await bench.take("/abandonable", **bench.soon())
    await bench.until_answered("expired")
    await bench.take("/wait")
    await bench.running.wait()
    bench.processor.cancel("c", REPLIES)
    await bench.until_answered("expired", "cancelled")


@pytest.mark.proves("workers/handler-never-ends")
async def test_worker_ends_when_a_handler_goes_on_for_the_grace() -> None:
    async with asyncio.TaskGroup() as group:
        with ThreadPoolExecutor(2) as threads:
            bench = DeafBench(group, threads, RuntimeSettings(stuck_grace=0.05))
            await bench.open()
            await bench.take("/abandonable", **bench.soon())
            await bench.until_answered("expired")
            async with asyncio.timeout(PATIENCE):
                while not bench.exits:
                    await asyncio.sleep(0.001)
            bench.reporter.report(Event.FAILED)
            bench.released.set()
            await bench.processor.until_idle()
    assert "'/abandonable' did not end" in bench.exits[0].reason
    last = bench.reporter._waiting[-1]
    assert isinstance(last, Draft)
    assert last.details[STUCK_FIELD] == text_fingerprint("/abandonable", b"")


def test_number_of_abandoned_handlers_is_a_setting() -> None:
    assert runtime_settings({"runtime": {"max_abandoned": 0}}).max_abandoned == 0
