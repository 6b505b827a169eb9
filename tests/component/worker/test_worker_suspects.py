"""The running requests in a worker's reports, by which its death is attributed."""

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
from test_worker_dispatch import LostSession
from worker_bench import PATIENCE, QUEUE, REPLIES, Bench, bench_fixture, until_in_time

from osrdyne.protocol.activity import (
    ALONE_FIELD,
    MAX_NAMED_REQUESTS,
    REQUESTS_FIELD,
    Event,
    fingerprint,
    named_requests,
)
from osrdyne_worker.requests.scheduling.suspects import ALONE_TIMEOUT, SuspectGate


def print_of(**changes: object) -> str:
    fields = {"key": "k", "path": "/sql", "correlation_id": "c", "reply_to": "r", "message_id": None, "body": b"x"}
    return fingerprint(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [{"key": "K"}, {"path": "/"}, {"correlation_id": None}, {"correlation_id": "-"}, {"message_id": ""}, {"body": b""},
     {"body": b"x" * 5000}, {"correlation_id": "cr", "reply_to": ""}, {"key": "\udcff"}],
    ids=str,
)  # fmt: skip
def test_every_part_of_a_request_counts(changes):
    assert print_of(**changes) != print_of()
    assert print_of(**changes) == print_of(**changes)


@pytest.mark.parametrize("value", [None, 1, {}, "abc", [1, None, ["x"], "y" * 65]], ids=str)
def test_nonsense_names_no_request(value):
    assert named_requests(value) == ()
    assert len(named_requests(["a"] * 1000)) == MAX_NAMED_REQUESTS


def sent(path: str) -> str:
    """The fingerprint of the bench's request."""
    return fingerprint(key=QUEUE, path=path, correlation_id="c", reply_to=REPLIES, message_id=None, body=b"")


def named(reports: list[Any]) -> list[tuple[Event, tuple[str, ...]]]:
    return [(one.event, named_requests(one.details.get(REQUESTS_FIELD))) for one in reports]


bench = bench_fixture(Bench, stuck_grace=0.0)


@pytest.fixture
async def reports(bench):
    async with bench.reporting() as reports:
        yield reports


async def test_report_names_what_runs_and_not_what_waits_or_is_done(bench, reports):
    await bench.take("/wait")
    await bench.take("/wait", correlation_id="waits")
    await bench.clock.settle()
    assert named(reports()) == [(Event.REQUEST_RECEIVED, (sent("/wait"),))]
    await bench.finish()
    bench.reporter.flush()
    await bench.clock.settle()
    assert named(reports())[-1] == (Event.IDLE, ())


async def test_redelivered_request_is_named_before_its_handler_begins(bench, reports):
    at_start: list[object] = []
    bench.calls = Mock(append=lambda call: at_start.extend(named(reports())))
    await bench.take_again()
    await bench.running.wait()
    assert (Event.BUSY, (sent("/wait"),)) in at_start


def alone(reports: list[Any]) -> object:
    """The suspect that runs alone, in the last report."""
    return reports[-1].details.get(ALONE_FIELD)


def entering(gate: SuspectGate) -> asyncio.Task[None]:
    """The suspect of another worker, which ends at once."""

    async def enter() -> None:
        async with gate.one_at_a_time():
            pass

    return asyncio.create_task(enter())


@pytest.mark.proves("pooled/request-ends-each-process")
async def test_suspects_of_workers_in_one_process_run_one_at_a_time(bench, reports):
    """If the process ends, only the suspect that ran can have caused it."""
    async with bench.suspect_gate.one_at_a_time():  # the suspect of another worker runs
        await bench.take_again()
        await bench.clock.advance(ALONE_TIMEOUT + 1)
        assert not bench.running.is_set()
        assert not alone(reports())
    await bench.running.wait()
    assert alone(reports())
    other = entering(bench.suspect_gate)
    await bench.clock.settle()
    assert not other.done()
    await bench.finish()
    await other
    assert bench.statuses() == ["ok"]


async def test_suspect_does_not_wait_without_end_for_that_of_another_worker():
    gate = SuspectGate()
    async with gate.one_at_a_time():
        async with gate.one_at_a_time(patience=0.01):
            pass
        other = entering(gate)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not other.done()
    await other


@pytest.mark.parametrize("was_connected", [False, True])
async def test_redelivered_request_runs_without_a_connection_for_reports(bench, was_connected):
    if was_connected:
        async with bench.reporting():
            await bench.reporter.confirm_running()
            assert bench.broker.count("ping") == 1
    await bench.take_again()
    await asyncio.wait_for(bench.running.wait(), PATIENCE)


@pytest.mark.parametrize("bench", [LostSession], indirect=True)
async def test_request_that_took_the_session_along_is_named_to_the_end(bench, reports):
    await bench.take("/lose")
    await until_in_time(lambda: bench.exits)
    bench.reporter.report(Event.FAILED)
    bench.reporter.flush()
    await bench.clock.settle()
    assert {requests for _, requests in named(reports())} == {(sent("/lose"),)}
