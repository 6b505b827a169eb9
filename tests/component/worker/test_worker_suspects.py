"""The running requests in a worker's reports, by which its death is attributed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_worker_processor import QUEUE, REPLIES, Bench

from osrdyne.amqp import Message
from osrdyne.protocol.activity import (
    MAX_NAMED_REQUESTS,
    REQUESTS_FIELD,
    Event,
    fingerprint,
    named_requests,
    report_from_wire,
)
from osrdyne_worker import Call
from osrdyne_worker.requests.dispatch import SessionLostError
from osrdyne_worker.requests.scheduling.suspects import ALONE_TIMEOUT, SuspectGate
from osrdyne_worker.runtime.settings import RuntimeSettings

ACTIVITY = "activity"


def print_of(**changes: object) -> str:
    fields = {"key": "k", "path": "/sql", "correlation_id": "c", "reply_to": "r", "message_id": None, "body": b"x"}
    return fingerprint(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [{"key": "K"}, {"path": "/"}, {"correlation_id": None}, {"correlation_id": "-"}, {"message_id": ""}, {"body": b""},
     {"body": b"x" * 5000}, {"correlation_id": "cr", "reply_to": ""}, {"key": "\udcff"}],
    ids=str,
)  # fmt: skip
def test_every_part_of_a_request_counts(changes: dict[str, object]) -> None:
    assert print_of(**changes) != print_of()
    assert print_of(**changes) == print_of(**changes)


@pytest.mark.parametrize("value", [None, 1, {}, "abc", [1, None, ["x"], "y" * 65]], ids=str)
def test_nonsense_names_no_request(value: object) -> None:
    assert named_requests(value) == ()
    assert len(named_requests(["a"] * 1000)) == MAX_NAMED_REQUESTS


class Reports:
    """What the controller would read of the bench's worker."""

    def __init__(self, bench: Bench) -> None:
        self._broker = bench.broker
        bench.broker.declare_queue(ACTIVITY, {})
        bench.broker.declare_exchange(ACTIVITY, "fanout", {})
        bench.broker.bind(ACTIVITY, ACTIVITY, "k")

    def named(self) -> list[tuple[Event, tuple[str, ...]]]:
        found = []
        for stored in self._broker.look_up(ACTIVITY).ready:
            report = report_from_wire(routing_key="k", headers=stored.message.headers, body=stored.message.body)
            assert report is not None
            found.append((report.event, named_requests(report.details.get(REQUESTS_FIELD))))
        return found


class Watched(list[Call]):
    """The calls of a bench; notifies when one begins."""

    def __init__(self, began: Callable[[], None]) -> None:
        super().__init__()
        self._began = began

    def append(self, call: Call) -> None:
        super().append(call)
        self._began()


def sent(path: str) -> str:
    """The fingerprint of the bench's request."""
    return fingerprint(key=QUEUE, path=path, correlation_id="c", reply_to=REPLIES, message_id=None, body=b"")


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with asyncio.TaskGroup() as group:
        with ThreadPoolExecutor(2) as threads:
            bench = Bench(group, threads, RuntimeSettings(stuck_grace=0.0))
            await bench.open()
            yield bench
            bench.go.set()
            await bench.processor.until_idle()


@pytest.fixture
async def reports(bench: Bench) -> AsyncIterator[Reports]:
    reports = Reports(bench)
    sending = asyncio.create_task(bench.reporter.send(bench.connection))
    await bench.clock.settle()
    yield reports
    sending.cancel()
    await asyncio.wait({sending})


async def test_report_names_what_runs(bench: Bench, reports: Reports) -> None:
    await bench.take("/wait")
    await bench.clock.settle()
    assert reports.named() == [(Event.REQUEST_RECEIVED, (sent("/wait"),))]


async def test_report_does_not_name_what_waits_or_is_done(bench: Bench, reports: Reports) -> None:
    await bench.take("/wait")
    await bench.take("/wait", correlation_id="waits")
    await bench.clock.settle()
    assert [requests for _, requests in reports.named()] == [(sent("/wait"),)]
    bench.go.set()
    await bench.processor.until_idle()
    bench.reporter.flush()
    await bench.clock.settle()
    assert reports.named()[-1] == (Event.IDLE, ())


async def test_redelivered_request_is_named_before_its_handler_begins(bench: Bench, reports: Reports) -> None:
    at_start: list[list[tuple[Event, tuple[str, ...]]]] = []
    bench.calls = Watched(lambda: at_start.append(reports.named()))
    message = Message(headers={"x-rpc-path": "/wait"}, correlation_id="c", reply_to=REPLIES)
    await bench.broker.publish(message, exchange="", routing_key=QUEUE)
    await (await bench.consumer.get()).reject()
    bench.processor.accept(await bench.consumer.get(), priority=0, broker=bench.broker_connection)
    await bench.running.wait()
    assert (Event.BUSY, (sent("/wait"),)) in at_start[0]


async def redeliver(bench: Bench, correlation_id: str) -> None:
    """A request comes back whose delivery has failed once."""
    message = Message(headers={"x-rpc-path": "/wait"}, correlation_id=correlation_id, reply_to=REPLIES)
    await bench.broker.publish(message, exchange="", routing_key=QUEUE)
    await (await bench.consumer.get()).reject()
    bench.processor.accept(await bench.consumer.get(), priority=0, broker=bench.broker_connection)


@pytest.mark.proves("pooled/request-ends-each-process")
async def test_suspects_of_workers_in_one_process_run_one_at_a_time(bench: Bench, reports: Reports) -> None:
    """If the process ends, only the suspect that ran can have caused it."""
    gate = bench.processor._suspect_gate
    async with gate.one_at_a_time():  # the suspect of another worker runs
        await redeliver(bench, "c")
        await bench.clock.advance(ALONE_TIMEOUT + 1)
        assert not bench.running.is_set()
        assert bench.processor._evidence.alone == ""
    await bench.running.wait()
    assert bench.processor._evidence.alone
    assert gate._lock.locked()
    bench.go.set()
    await bench.processor.until_idle()
    assert not gate._lock.locked()
    assert bench.statuses() == ["ok"]


async def test_suspect_does_not_wait_without_end_for_that_of_another_worker() -> None:
    gate = SuspectGate()
    async with gate.one_at_a_time():
        async with gate.one_at_a_time(patience=0.01):
            pass
        assert gate._lock.locked()
    assert not gate._lock.locked()


async def test_redelivered_request_runs_without_a_connection_for_reports(bench: Bench) -> None:
    message = Message(headers={"x-rpc-path": "/wait"}, correlation_id="c", reply_to=REPLIES)
    await bench.broker.publish(message, exchange="", routing_key=QUEUE)
    await (await bench.consumer.get()).reject()
    bench.processor.accept(await bench.consumer.get(), priority=0, broker=bench.broker_connection)
    await asyncio.wait_for(bench.running.wait(), 120)


async def test_request_that_took_the_session_along_is_named_to_the_end(
    bench: Bench, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lose(*_: object, **__: object) -> None:
        raise SessionLostError("The session is gone.")

    monkeypatch.setattr(bench.processor._dispatcher, "run", lose)
    await bench.take("/wait")
    await bench.clock.settle()
    bench.reporter.report(Event.FAILED)
    bench.reporter.flush()
    await bench.clock.settle()
    assert {requests for _, requests in reports.named()} == {(sent("/wait"),)}
