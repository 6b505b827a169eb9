"""Batch handlers: many requests in one call, each with its own answer, deadline, cancel, retry and acknowledgement."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator
from test_worker_dispatch import FakeSessions
from test_worker_processor import QUEUE, REPLIES, RETRIES, Bench, until
from test_worker_retries import TERMS, WAIT

from osrdyne.aio.clock import now_ms
from osrdyne.aio.signals import WatchCell
from osrdyne.amqp import Message
from osrdyne.errors import ConfigurationError
from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key, QueueName
from osrdyne.protocol.retries import TERMS_HEADER
from osrdyne_worker import App, Call, Context, RequestError
from osrdyne_worker.requests.dispatch import Dispatcher, SessionLostError
from osrdyne_worker.runtime.settings import RuntimeSettings


class BatchBench(Bench):
    """Its batch handlers answer with the correlation id, and fail if that of one of their calls begins with `poison`.

    `/batch` waits in its thread for `released`, `/patient` (a coroutine) for `go`.
    """

    def __init__(self, *arguments: object) -> None:
        self.sizes: list[int] = []
        self.released = threading.Event()
        self.released.set()
        self.ended: list[str] = []
        super().__init__(*arguments)  # type: ignore[arg-type]

    def make_app(self) -> App:
        app = super().make_app()

        @app.batch_handler("/batch", max_size=256, max_wait=0)
        def batch(calls: list[Call]) -> list[object]:
            self.sizes.append(len(calls))
            self.calls += calls
            self.released.wait(600)
            if any(name_of(call).startswith("poison") for call in calls):
                raise ValueError("one call is poison")
            return [busy if name_of(call) == "busy" else name_of(call) for call in calls]

        busy = RequestError("Too much to do.", code=503)

        @app.batch_handler("/patient", max_size=2, max_wait="10s")
        async def patient(calls: list[Call]) -> list[str]:
            self.sizes.append(len(calls))
            self.running.set()
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.ended.append("cancelled")
                raise
            return [name_of(call) for call in calls]

        return app

    async def open(self) -> None:
        await super().open()
        await self.channel.cancel(self.consumer)
        self.consumer = await self.channel.consume(QUEUE, prefetch=1000)

    async def hold_slot(self) -> None:
        """Requests that come from now on wait until `go` is set."""
        await self.take("/wait", correlation_id="holds the slot")
        await self.running.wait()

    def replies(self) -> dict[str | None, str]:
        """Status of each reply, by the correlation id of its request."""
        stored = self.broker.look_up(REPLIES).ready
        return {one.message.correlation_id: status for one, status in zip(stored, self.statuses(), strict=True)}


def name_of(call: Call) -> str:
    assert call.correlation_id is not None
    return call.correlation_id


@pytest.fixture
async def bench() -> AsyncIterator[BatchBench]:
    async with asyncio.TaskGroup() as group:
        with ThreadPoolExecutor(4) as threads:
            bench = BatchBench(group, threads, RuntimeSettings(stuck_grace=3600.0))
            await bench.open()
            yield bench
            bench.go.set()
            bench.released.set()
            await bench.processor.until_idle()
    assert bench.reporter.in_flight == 0
    assert bench.processor._slots.free == 1


@pytest.mark.proves("spark/one-request-batch-makes")
async def test_one_poison_call_among_256_fails_alone(bench: BatchBench) -> None:
    await bench.hold_slot()
    names = [f"request {number}" for number in range(255)]
    for name in [*names[:100], "poison", *names[100:]]:
        await bench.take("/batch", correlation_id=name)
    bench.go.set()
    await bench.processor.until_idle()
    replies = bench.replies()
    assert replies.pop("holds the slot") == replies.pop("request 0") == "ok"
    assert replies.pop("poison") == "error"
    assert replies == dict.fromkeys(names[1:], "ok")
    assert bench.sizes[0] == 256
    assert len(bench.sizes) == 1 + 2 * 8, "each failing batch was halved, and no other"
    assert bench.broker.look_up(QUEUE).messages == 0
    texts = set(bench.reply_texts())
    assert set(names) < texts, "each answer went to its own caller"


async def test_only_requests_of_batches_are_taken_in_advance(bench: BatchBench) -> None:
    """Others wait in the queue: there they expire, and other workers can take them."""
    queue = QueueName("shared")
    bench.broker.declare_queue(queue, {})
    stored = bench.broker.look_up(queue)
    intake = asyncio.create_task(bench.intake(queue, WatchCell((queue,))).run())
    for _ in range(5):
        await bench.publish("/wait", queue=queue)
    await until(bench.running.is_set)
    await asyncio.sleep(0.01)
    assert (bench.processor.in_flight, len(stored.ready)) == (1, 4)
    bench.go.set()
    await until(lambda: stored.messages == 0 and not bench.processor.in_flight)

    for _ in range(2):  # also after the large prefetch has been taken back
        bench.released.clear()
        bench.go.clear()
        for _ in range(50):
            await bench.publish("/batch", queue=queue)
        await until(lambda: bench.processor.in_flight == 50)
        await bench.publish("/wait", queue=queue)
        await until(lambda: bench.processor.in_flight == 51)
        await asyncio.sleep(0.01)
        for _ in range(5):
            await bench.publish("/wait", queue=queue)
        await asyncio.sleep(0.01)
        assert (bench.processor.in_flight, len(stored.ready)) == (51, 5)
        bench.released.set()
        bench.go.set()
        await until(lambda: stored.messages == 0 and not bench.processor.in_flight)
    assert set(bench.statuses()) == {"ok"}
    assert len(bench.statuses()) == 5 + 2 * 56
    intake.cancel()
    await asyncio.wait({intake})


async def test_batch_has_at_most_its_size_and_begins_when_it_is_full(bench: BatchBench) -> None:
    """The clock is not advanced: a batch that is not full would wait without end."""
    bench.go.set()
    for name in ("a", "b", "c", "d"):
        await bench.take("/patient", correlation_id=name)
    await bench.processor.until_idle()
    assert bench.sizes == [2, 2]


async def test_batch_that_is_not_full_begins_after_its_time(bench: BatchBench) -> None:
    bench.go.set()
    await bench.take("/patient")
    await until(lambda: bool(bench.clock.pending))
    assert bench.sizes == []
    await bench.clock.advance(10.0)
    await bench.processor.until_idle()
    assert (bench.sizes, bench.statuses()) == ([1], ["ok"])


async def test_cancel_of_a_request_that_waits_in_a_batch_leaves_the_others(bench: BatchBench) -> None:
    await bench.hold_slot()
    for name in ("a", "b", "c"):
        await bench.take("/batch", correlation_id=name)
    bench.processor.cancel("b", REPLIES)
    bench.go.set()
    await bench.processor.until_idle()
    assert bench.replies() == {"holds the slot": "ok", "a": "ok", "b": "cancelled", "c": "ok"}
    assert bench.sizes == [2]


async def test_cancel_of_a_request_that_runs_in_a_batch_is_answered_at_once_and_leaves_the_others(
    bench: BatchBench,
) -> None:
    for name in ("a", "b"):
        await bench.take("/patient", correlation_id=name)
    await bench.running.wait()
    bench.processor.cancel("a", REPLIES)
    await until(lambda: bench.replies() == {"a": "cancelled"})
    await until(lambda: bench.processor.in_flight == 1)
    bench.go.set()
    await bench.processor.until_idle()
    assert (bench.replies(), bench.ended) == ({"a": "cancelled", "b": "ok"}, [])


async def test_batch_whose_requests_are_all_cancelled_ends(bench: BatchBench) -> None:
    for name in ("a", "b"):
        await bench.take("/patient", correlation_id=name)
    await bench.running.wait()
    for name in ("a", "b"):
        bench.processor.cancel(name, REPLIES)
    await bench.processor.until_idle()
    assert (bench.replies(), bench.ended) == ({"a": "cancelled", "b": "cancelled"}, ["cancelled"])


async def test_batch_whose_requests_all_left_while_it_waited_gives_its_slot_back(bench: BatchBench) -> None:
    await bench.hold_slot()
    await bench.take("/batch", correlation_id="a")
    bench.processor.cancel("a", REPLIES)
    await until(lambda: "a" in bench.replies())
    bench.go.set()
    await bench.take("/batch", correlation_id="b")
    await bench.processor.until_idle()
    assert (bench.replies()["b"], bench.sizes) == ("ok", [1])


async def test_deadline_of_one_request_of_a_batch_is_its_own(bench: BatchBench) -> None:
    bench.released.clear()
    await bench.hold_slot()
    await bench.take("/batch", correlation_id="soon", **{"x-deadline": now_ms(bench.clock) + 300})
    await bench.take("/batch", correlation_id="later")
    bench.go.set()
    await until_in_time(lambda: bench.replies().get("soon") == "expired")
    assert "later" not in bench.replies()
    bench.released.set()
    await bench.processor.until_idle()
    assert bench.replies() == {"holds the slot": "ok", "soon": "expired", "later": "ok"}


async def until_in_time(condition: Callable[[], bool]) -> None:
    """As `until`, for a condition that real time brings about."""
    async with asyncio.timeout(120.0):
        while not condition():
            await asyncio.sleep(0.001)


async def test_request_is_acknowledged_after_its_own_reply_and_not_that_of_another(bench: BatchBench) -> None:
    """If the worker dies before a reply is confirmed, its request is still in RabbitMQ; others are not run again."""
    publish, confirmed = bench.broker_connection.replies.publish, asyncio.Event()

    async def slow(message: Message, *, exchange: str, routing_key: str, mandatory: bool = False) -> None:
        if message.correlation_id == "slow":
            await confirmed.wait()
        await publish(message, exchange=exchange, routing_key=routing_key)

    bench.broker_connection.replies.publish = slow  # type: ignore[method-assign]
    await bench.hold_slot()
    for name in ("a", "slow", "b"):
        await bench.take("/batch", correlation_id=name)
    bench.go.set()
    await until_in_time(lambda: bench.processor.in_flight == 1)
    assert (set(bench.replies()), bench.broker.look_up(QUEUE).messages) == ({"holds the slot", "a", "b"}, 1)
    confirmed.set()
    await bench.processor.until_idle()
    assert bench.broker.look_up(QUEUE).messages == 0


@pytest.mark.proves("spark/worker-dies-batch-runs")
async def test_connection_lost_between_the_replies_of_a_batch_loses_no_request(bench: BatchBench) -> None:
    publish, published = bench.broker_connection.replies.publish, list[str | None]()

    async def cut(message: Message, *, exchange: str, routing_key: str, mandatory: bool = False) -> None:
        await publish(message, exchange=exchange, routing_key=routing_key)
        published.append(message.correlation_id)
        if len(published) == 2:
            bench.connection.cut()

    await bench.hold_slot()
    bench.broker_connection.replies.publish = cut  # type: ignore[method-assign]
    names = [f"request {number}" for number in range(6)]
    for name in names:
        await bench.take("/batch", correlation_id=name)
    bench.go.set()
    await bench.processor.until_idle()
    waiting = {one.message.correlation_id for one in bench.broker.look_up(QUEUE).ready}
    assert set(names) <= waiting | set(bench.replies())


async def test_one_request_of_a_batch_is_retried_and_the_others_are_answered(bench: BatchBench) -> None:
    bench.broker.declare_exchange(RETRIES, "direct", {})
    bench.broker.declare_queue(WAIT, {})
    bench.broker.bind(WAIT, RETRIES, QUEUE)
    await bench.hold_slot()
    for name in ("a", "busy", "b"):
        await bench.take("/batch", correlation_id=name, **{TERMS_HEADER: TERMS})
    bench.go.set()
    await bench.processor.until_idle()
    assert bench.replies() == {"holds the slot": "ok", "a": "ok", "b": "ok"}
    assert [one.message.correlation_id for one in bench.broker.look_up(WAIT).ready] == ["busy"]


async def test_priority_levels_are_not_mixed_and_the_higher_one_is_first(bench: BatchBench) -> None:
    await bench.hold_slot()
    for number in range(4):
        await bench.take("/batch", correlation_id=f"{'low' if number % 2 else 'high'} {number}", priority=number % 2)
    bench.go.set()
    await bench.processor.until_idle()
    assert bench.sizes == [2, 2]
    assert [name_of(call) for call in bench.calls[1:]] == ["high 0", "high 2", "low 1", "low 3"]


async def test_waiting_requests_of_a_batch_are_requeued_and_running_ones_finish(bench: BatchBench) -> None:
    for name in ("a", "b", "c"):
        await bench.take("/patient", correlation_id=name)
    await bench.running.wait()
    await bench.channel.cancel(bench.consumer)
    bench.processor.requeue()
    bench.go.set()
    await bench.processor.until_idle()
    assert (bench.replies(), bench.returned()) == ({"a": "ok", "b": "ok"}, [0])


async def test_two_queues_fill_a_batch_each(bench: BatchBench) -> None:
    """Without batch handlers, one request of each of several queues may wait in a worker."""
    high, low = QueueName("high_Pri0"), QueueName("low")
    for queue in (high, low):
        bench.broker.declare_queue(queue, {})
        for number in range(5):
            await bench.publish("/batch", queue=queue, correlation_id=f"{queue} {number}")
    await bench.hold_slot()
    intakes = [
        asyncio.create_task(bench.intake(queue, WatchCell[tuple[QueueName, ...]]((high, low))).run())
        for queue in (high, low)
    ]
    await until(lambda: bench.processor.in_flight == 11)
    bench.go.set()
    await bench.processor.until_idle()
    for intake in intakes:
        intake.cancel()
    await asyncio.wait(intakes)
    assert bench.sizes == [5, 5]
    assert [name_of(call).split()[0] for call in bench.calls[1:]] == ["high_Pri0"] * 5 + ["low"] * 5


# -- the dispatcher ----------------------------------------------------------------------------------------------------


def call_of(body: bytes) -> Call:
    return Call(Context(Key("k"), session="session"), Request("k", body, path="/p"))


def handle(calls: list[Call], requests: list[int]) -> list[object]:
    """Doubles; numbers from 90 on fail the whole call, those from 80 on only their own."""
    if any(number >= 95 for number in requests):
        raise RequestError("above 95", code=503, error_code="busy")
    if any(number >= 90 for number in requests):
        raise ValueError("above 90")
    return [KeyError(number) if number >= 80 else 2 * number for number in requests]


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from([b"1", b"2", b"3", b'"no number"', b"{", b"85", b"91", b"97"]), min_size=1, max_size=40)
)
def test_answers_of_a_batch_are_those_of_its_calls_one_by_one(bodies: list[bytes]) -> None:
    async def ask() -> None:
        app = App()
        app.batch_handler("/p")(handle)
        with ThreadPoolExecutor(1) as threads:
            dispatcher = Dispatcher(app, threads=threads, side_threads=threads)
            together = await dispatcher.run_batch([call_of(body) for body in bodies], group_id="g")
            alone = [await dispatcher.run(call_of(body), group_id="g") for body in bodies]
        assert together == alone

    asyncio.run(ask())


@pytest.mark.parametrize("result", [None, [], ["one", "two"], "ab"], ids=repr)
async def test_batch_handler_without_an_answer_for_each_call_is_not_called_again(result: Any) -> None:
    called = list[int]()

    def wrong(calls: list[Call]) -> Any:
        called.append(len(calls))
        return result

    app = App()
    app.batch_handler("/p")(wrong)
    with ThreadPoolExecutor(1) as threads:
        dispatcher = Dispatcher(app, threads=threads, side_threads=threads)
        responses = await dispatcher.run_batch([call_of(b"") for _ in range(3)], group_id="g")
    errors = [json.loads(response.body)["error"]["code"] for response in responses if response is not None]
    assert (errors, called) == (["invalid_answer"] * 3, [3])


async def test_cancelled_call_is_left_out_of_the_halves(bench: BatchBench) -> None:
    called = list[int]()
    calls = [call_of(b"") for _ in range(4)]

    def failing(part: list[Call]) -> Any:
        called.append(len(part))
        calls[0].cancel()
        raise ValueError

    app = App()
    app.batch_handler("/p")(failing)
    with ThreadPoolExecutor(1) as threads:
        responses = await Dispatcher(app, threads=threads, side_threads=threads).run_batch(calls, group_id="g")
    assert (responses[0], called) == (None, [4, 1, 2, 1, 1])


DECODED_IN = set[int]()
"""The threads that have decoded a `Noted`."""


def note_thread(value: str) -> str:
    DECODED_IN.add(threading.get_ident())
    return value


Noted = Annotated[str, AfterValidator(note_thread)]


@pytest.mark.parametrize("size", [10, 40_000])
async def test_large_bodies_are_decoded_beside_the_event_loop(size: int) -> None:
    """The worker sends no heartbeat while the event loop decodes."""

    def lengths(calls: list[Call], texts: list[Noted]) -> list[int]:
        return [len(text) for text in texts]

    DECODED_IN.clear()
    app = App()
    app.batch_handler("/p")(lengths)
    bodies = [json.dumps("x" * size).encode(), b"{", json.dumps("y" * size).encode()]
    with ThreadPoolExecutor(1) as threads:
        dispatcher = Dispatcher(app, threads=threads, side_threads=threads)
        responses = await dispatcher.run_batch([call_of(body) for body in bodies], group_id="g")
    assert [one.code for one in responses if one is not None] == [200, 400, 200]
    assert [one.body for one in responses if one is not None][::2] == [str(size).encode()] * 2
    assert (threading.get_ident() in DECODED_IN) == (size == 10)


async def test_lost_session_is_not_the_fault_of_a_call() -> None:
    called = list[int]()

    def failing(calls: list[Call]) -> Any:
        called.append(len(calls))
        raise ValueError

    sessions = FakeSessions()
    sessions.alive = False
    app = App(sessions=sessions)
    app.batch_handler("/p")(failing)
    with ThreadPoolExecutor(2) as threads, pytest.raises(SessionLostError):
        dispatcher = Dispatcher(app, threads=threads, side_threads=threads)
        await dispatcher.run_batch([call_of(b"") for _ in range(4)], group_id="g")
    assert called == [4]


@pytest.mark.parametrize(
    "options",
    [{"max_size": 0}, {"max_size": 10_001}, {"max_wait": "soon"}, {"max_wait": -1}, {"max_wait": "11s"}],
    ids=str,
)
def test_invalid_options_of_a_batch_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="batch handler of '/p'"):
        App().batch_handler("/p", **options)


@pytest.mark.parametrize("wait", ["20ms", "0.02s", 0.02])
def test_time_of_a_batch_is_text_or_seconds(wait: str | float) -> None:
    app = App()
    app.batch_handler("/p", max_wait=wait)(lambda calls: [])
    batch = app.registered_handlers()["/p"].batch
    assert batch is not None
    assert batch.max_wait == 0.02


def test_requests_of_a_batch_must_be_a_list() -> None:
    def handler(calls: list[Call], requests: dict[str, int]) -> None: ...

    app = App()
    app.batch_handler("/p")(handler)
    with pytest.raises(ConfigurationError, match=r"list\[Request\]"):
        app.registered_handlers()
