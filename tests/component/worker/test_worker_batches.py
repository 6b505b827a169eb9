"""Batch handlers: many requests in one call, each with its own answer, deadline, cancel, retry and acknowledgement."""

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_worker_dispatch import THREADS, FakeSessions, Noted, text_of
from test_worker_retries import TERMS
from worker_bench import QUEUE, REPLIES, WAIT, Bench, bench_fixture, until, until_in_time

from osrdyne.aio.clock import now_ms
from osrdyne.errors import ConfigurationError
from osrdyne.protocol.messages import Request, Response
from osrdyne.protocol.names import Key
from osrdyne.protocol.retries import TERMS_HEADER
from osrdyne_worker import App, Call, Context, RequestError
from osrdyne_worker.requests.dispatch import Dispatcher, SessionLostError


class BatchBench(Bench):
    """Its batch handlers answer with the correlation id, and fail if that of one of their calls begins with `poison`.

    `/batch` waits in its thread for `released`, `/patient` (a coroutine) for `go`.
    """

    prefetch = 1000

    def __init__(self, *arguments: Any) -> None:
        self.sizes: list[int] = []
        self.ended: list[str] = []
        super().__init__(*arguments)
        self.released.set()

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

    async def take_all(self, path: str, *names: str, **headers: object) -> None:
        for name in names:
            await self.take(path, correlation_id=name, **headers)


def name_of(call: Call) -> str:
    assert call.correlation_id is not None
    return call.correlation_id


bench = bench_fixture(BatchBench)


@pytest.mark.proves("spark/one-request-batch-makes")
async def test_one_poison_call_among_256_fails_alone(bench):
    await bench.hold_slot()
    names = [f"request {number}" for number in range(255)]
    await bench.take_all("/batch", *names[:100], "poison", *names[100:])
    await bench.finish()
    replies = bench.by_name()
    assert replies.pop("holds the slot") == replies.pop("request 0") == "ok"
    assert replies.pop("poison") == "error"
    assert replies == dict.fromkeys(names[1:], "ok")
    assert bench.sizes[0] == 256
    assert len(bench.sizes) == 1 + 2 * 8, "each failing batch was halved, and no other"
    assert bench.unfinished() == 0
    assert {name: body for name, body in bench.bodies().items() if name in names} == {name: name for name in names}


async def test_only_requests_of_batches_are_taken_in_advance(bench):
    """Others wait in the queue: there they expire, and other workers can take them."""

    async def take(path, count, *, in_flight):
        for _ in range(count):
            await bench.publish(path, queue="shared")
        await until(lambda: bench.processor.in_flight == in_flight)
        await asyncio.sleep(0.01)
        assert bench.processor.in_flight == in_flight

    async def go_on():
        bench.released.set()
        bench.go.set()
        await until(lambda: bench.unfinished("shared") == 0 and not bench.processor.in_flight)

    async with bench.consuming("shared"):
        await take("/wait", 5, in_flight=1)
        await go_on()
        for _ in range(2):  # also after the large prefetch has been taken back
            bench.released.clear()
            bench.go.clear()
            await take("/batch", 50, in_flight=50)
            await take("/wait", 1, in_flight=51)
            await take("/wait", 5, in_flight=51)
            await go_on()
    assert bench.statuses() == ["ok"] * (5 + 2 * 56)


async def test_batch_begins_when_it_is_full_or_after_its_time(bench):
    bench.go.set()
    await bench.take_all("/patient", "a", "b", "c", "d", "e")
    await until(lambda: bench.processor.in_flight == 1)
    await until(lambda: bool(bench.clock.pending))
    assert bench.sizes == [2, 2], "the fifth waits"
    await bench.clock.advance(10.0)
    await bench.processor.until_idle()
    assert (bench.sizes, bench.statuses()) == ([2, 2, 1], ["ok"] * 5)


@pytest.mark.parametrize(("last", "ended"), [("ok", []), ("cancelled", ["cancelled"])])
async def test_request_of_a_running_batch_leaves_alone_and_the_last_one_ends_it(bench, last, ended):
    await bench.take("/patient", correlation_id="soon", **{"x-deadline": now_ms(bench.clock) + 300})
    await bench.take("/patient", correlation_id="a")
    await bench.running.wait()
    await until_in_time(lambda: bench.by_name() == {"soon": "expired"})
    await until(lambda: bench.processor.in_flight == 1)
    assert bench.ended == []
    if last == "cancelled":
        bench.processor.cancel("a", REPLIES)
    else:
        bench.go.set()
    await bench.processor.until_idle()
    assert (bench.by_name(), bench.ended) == ({"soon": "expired", "a": last}, ended)


async def test_requests_that_leave_while_their_batch_waits_hold_up_no_other(bench):
    """Those of the same batch run, and a batch without requests gives its slot back."""
    await bench.hold_slot()
    await bench.take_all("/patient", "alone")
    await bench.take_all("/batch", "a", "b", "c")
    for name in ("alone", "b"):
        bench.processor.cancel(name, REPLIES)
    await until(lambda: {"alone", "b"} <= bench.by_name().keys())
    await bench.finish()
    left, served = {"alone": "cancelled", "b": "cancelled"}, {"holds the slot": "ok", "a": "ok", "c": "ok"}
    assert (bench.by_name(), bench.sizes) == (left | served, [2])


async def test_request_is_acknowledged_after_its_own_reply_and_not_that_of_another(bench):
    """If the worker dies before a reply is confirmed, its request is still in RabbitMQ; others are not run again."""
    confirmed = asyncio.Event()

    async def confirm(message):
        if message.correlation_id == "slow":
            await confirmed.wait()

    bench.around_replies(before=confirm)
    await bench.hold_slot()
    await bench.take_all("/batch", "a", "slow", "b")
    bench.go.set()
    await until_in_time(lambda: bench.processor.in_flight == 1)
    assert (set(bench.by_name()), bench.unfinished()) == ({"holds the slot", "a", "b"}, 1)
    confirmed.set()
    await bench.processor.until_idle()
    assert bench.unfinished() == 0


@pytest.mark.proves("spark/worker-dies-batch-runs")
async def test_connection_lost_between_the_replies_of_a_batch_loses_no_request(bench):
    published = list[str | None]()

    async def cut(message):
        published.append(message.correlation_id)
        if len(published) == 2:
            bench.connection.cut()

    await bench.hold_slot()
    bench.around_replies(after=cut)
    names = [f"request {number}" for number in range(6)]
    await bench.take_all("/batch", *names)
    await bench.finish()
    waiting = {one.message.correlation_id for one in bench.broker.look_up(QUEUE).ready}
    assert set(names) <= waiting | set(bench.by_name())


async def test_one_request_of_a_batch_is_retried_and_the_others_are_answered(bench):
    bench.declare_wait()
    await bench.hold_slot()
    await bench.take_all("/batch", "a", "busy", "b", **{TERMS_HEADER: TERMS})
    await bench.finish()
    assert bench.by_name() == {"holds the slot": "ok", "a": "ok", "b": "ok"}
    assert [one.message.correlation_id for one in bench.broker.look_up(WAIT).ready] == ["busy"]


async def test_waiting_requests_of_a_batch_are_requeued_and_running_ones_finish(bench):
    await bench.take_all("/patient", "a", "b", "c")
    await bench.running.wait()
    await bench.channel.cancel(bench.consumer)
    bench.processor.requeue()
    await bench.finish()
    assert (bench.by_name(), bench.returned()) == ({"a": "ok", "b": "ok"}, [0])


async def test_two_queues_fill_a_batch_each(bench):
    """Without batch handlers, one request of each of several queues may wait in a worker."""
    await bench.hold_slot()
    async with bench.consuming("high_Pri0", "low"):
        for queue in ("high_Pri0", "low"):
            for number in range(5):
                await bench.publish("/batch", queue=queue, correlation_id=f"{queue} {number}")
        await until(lambda: bench.processor.in_flight == 11)
        await bench.finish()
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


def app_of(handler: Callable[..., Any], *, sessions: FakeSessions | None = None) -> App:
    app = App(sessions=sessions)
    app.batch_handler("/p")(handler)
    return app


async def run_batch(app: App, calls: list[Call]) -> list[Response | None]:
    with ThreadPoolExecutor(2) as threads:
        return await Dispatcher(app, threads=threads, side_threads=threads).run_batch(calls, group_id="g")


class Recorded:
    """A batch handler that notes how many calls it gets."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.sizes = list[int]()
        self.answer = answer

    def __call__(self, calls: list[Call]) -> Any:
        self.sizes.append(len(calls))
        return self.answer()


def fail() -> None:
    raise ValueError


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from([b"1", b"2", b"3", b'"no number"', b"{", b"85", b"91", b"97"]), min_size=1, max_size=40)
)
def test_answers_of_a_batch_are_those_of_its_calls_one_by_one(bodies):
    async def ask():
        app = app_of(handle)
        together = await run_batch(app, [call_of(body) for body in bodies])
        with ThreadPoolExecutor(1) as threads:
            dispatcher = Dispatcher(app, threads=threads, side_threads=threads)
            assert together == [await dispatcher.run(call_of(body), group_id="g") for body in bodies]

    asyncio.run(ask())


@pytest.mark.parametrize("result", [None, [], ["one", "two"], "ab"], ids=repr)
async def test_batch_handler_without_an_answer_for_each_call_is_not_called_again(result):
    wrong = Recorded(lambda: result)
    responses = await run_batch(app_of(wrong), [call_of(b"") for _ in range(3)])
    errors = [json.loads(response.body)["error"]["code"] for response in responses if response is not None]
    assert (errors, wrong.sizes) == (["invalid_answer"] * 3, [3])


async def test_cancelled_call_is_left_out_of_the_halves():
    calls = [call_of(b"") for _ in range(4)]

    def cancel_and_fail():
        calls[0].cancel()
        raise ValueError

    failing = Recorded(cancel_and_fail)
    responses = await run_batch(app_of(failing), calls)
    assert (responses[0], failing.sizes) == (None, [4, 1, 2, 1, 1])


@pytest.mark.parametrize("size", [10, 40_000])
async def test_large_bodies_are_decoded_beside_the_event_loop(size):
    """The worker sends no heartbeat while the event loop decodes."""

    def lengths(calls: list[Call], requests: list[Noted]) -> list[int]:
        return [len(one.text) for one in requests]

    THREADS.clear()
    bodies = [text_of(size), b"{", text_of(size)]
    responses = await run_batch(app_of(lengths), [call_of(body) for body in bodies])
    assert [one.code for one in responses if one is not None] == [200, 400, 200]
    assert [one.body for one in responses if one is not None][::2] == [str(size).encode()] * 2
    assert (threading.current_thread().name in THREADS) == (size == 10)


async def test_lost_session_is_not_the_fault_of_a_call():
    failing, sessions = Recorded(fail), FakeSessions()
    sessions.alive = False
    with pytest.raises(SessionLostError):
        await run_batch(app_of(failing, sessions=sessions), [call_of(b"") for _ in range(4)])
    assert failing.sizes == [4]


@pytest.mark.parametrize(
    "options",
    [{"max_size": 0}, {"max_size": 10_001}, {"max_wait": "soon"}, {"max_wait": -1}, {"max_wait": "11s"}],
    ids=str,
)
def test_invalid_options_of_a_batch_are_refused(options):
    with pytest.raises(ConfigurationError, match="batch handler of '/p'"):
        App().batch_handler("/p", **options)


def test_requests_of_a_batch_must_be_a_list():
    def handler(calls: list[Call], requests: dict[str, int]) -> None: ...

    app = App()
    app.batch_handler("/p")(handler)
    with pytest.raises(ConfigurationError, match=r"list\[Request\]"):
        app.registered_handlers()
