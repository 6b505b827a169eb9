"""A caller is answered at its deadline, whatever its handler does; and what the worker does with such a handler."""

import pytest
from worker_bench import REPLIES, Bench, bench_fixture, serving, until_in_time

from osrdyne.aio.clock import now_ms
from osrdyne.protocol.activity import STUCK_FIELD, Event, text_fingerprint
from osrdyne_worker import App, Call


class DeafBench(Bench):
    """Its handlers ignore that they are cancelled: threads end with `released`, the coroutine with `go`."""

    def make_app(self) -> App:
        app = super().make_app()

        @app.handler("/deaf_thread")
        @app.handler("/abandonable", abandonable=True)
        def wait(call: Call) -> str:
            self.released.wait(600)
            return "too late"

        app.handler("/quick")(lambda call: "done")
        return app

    async def until_answered(self, *statuses: str) -> None:
        await until_in_time(lambda: len(self.statuses()) >= len(statuses))
        assert self.statuses() == list(statuses)

    def soon(self) -> dict[str, object]:
        return {"x-deadline": now_ms(self.clock) + 20}


bench = bench_fixture(DeafBench, max_abandoned=1)


class DirectBench(DeafBench):
    retry_exchange = None


@pytest.mark.parametrize("kind", [DeafBench, DirectBench], ids=["managed", "direct"])
async def test_allowed_skew_prolongs_no_time_out(kind):
    async with serving(kind, max_clock_skew=60.0) as bench:
        await bench.take("/deaf_thread", expiration="20", **bench.soon())
        await bench.until_answered("expired")


@pytest.mark.parametrize("path", ["/deaf_thread", "/deaf", "/abandonable"])
@pytest.mark.proves("workers/handler-never-ends")
async def test_caller_is_answered_at_its_deadline_although_the_handler_goes_on(bench, path):
    await bench.take(path, **bench.soon())
    await bench.until_answered("expired")
    assert bench.processor.in_flight == 1, "its handler is still there"
    assert len(bench.processor.running_requests()) == 1, "reports name it"
    await bench.finish()
    assert bench.statuses() == ["expired"], "what the handler returned is dropped"
    assert (bench.exits, bench.processor.running_requests()) == ([], [])


@pytest.mark.proves("workers/cancelled-handler-continues-requests")
async def test_handler_that_runs_on_keeps_its_slot(bench):
    """With `concurrency` 1 an application may rely on running alone."""
    await bench.take("/deaf_thread", **bench.soon())
    await bench.until_answered("expired")
    await bench.take("/quick", correlation_id="next")
    await bench.clock.settle()
    assert bench.statuses() == ["expired"]
    bench.released.set()
    await bench.until_answered("expired", "ok")


@pytest.mark.proves("workers/cancelled-handler-continues-requests")
async def test_abandoned_handler_holds_up_no_other_until_there_are_too_many(bench):
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


async def test_cancel_reaches_a_later_request_with_the_name_of_one_whose_handler_goes_on(bench):
    await bench.take("/abandonable", **bench.soon())
    await bench.until_answered("expired")
    await bench.begin("/wait")
    bench.processor.cancel("c", REPLIES)
    await bench.until_answered("expired", "cancelled")


@pytest.mark.proves("workers/handler-never-ends")
async def test_worker_ends_when_a_handler_goes_on_for_the_grace():
    async with serving(DeafBench, stuck_grace=0.05) as bench, bench.reporting() as reports:
        await bench.take("/abandonable", **bench.soon())
        await bench.until_answered("expired")
        await until_in_time(lambda: bench.exits)
        bench.reporter.report(Event.FAILED)
        await bench.clock.settle()
        assert "'/abandonable'" in bench.exits[0].reason
        [failed] = [one for one in reports() if one.event is Event.FAILED]
        assert failed.details[STUCK_FIELD] == text_fingerprint("/abandonable", b"")
