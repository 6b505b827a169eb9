"""Streamed answers on a fake broker: credit, slots, silence, and what the caller gets in the end."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_bench import PATIENCE, REPLIES, Bench, bench_fixture, until

from osrdyne.errors import QueueFullError
from osrdyne.protocol.messages import ARROW_TYPE
from osrdyne.protocol.streams import MAX_CREDIT, SILENCE_TIMEOUT
from osrdyne_worker import App, Call
from osrdyne_worker.requests.streams import MAX_PAUSED, PAUSE_AFTER, Credit

ASK = {"accept": ARROW_TYPE}


class StreamBench(Bench):
    """`/rows` yields batches of one row without end, `/few` yields three."""

    prefetch = 1000

    def __init__(self, *arguments: Any) -> None:
        self.yielded = 0
        self.closed = 0
        self.loop = asyncio.get_running_loop()
        super().__init__(*arguments)

    def make_app(self) -> App:
        app = super().make_app()

        def batches(count: int) -> Iterator[pa.RecordBatch]:
            try:
                for number in range(count):
                    self.yielded += 1
                    yield pa.record_batch({"number": [number]})
            finally:
                self.closed += 1

        @app.handler("/opening")
        def opening(call: Call) -> Iterator[pa.RecordBatch]:
            self.loop.call_soon_threadsafe(self.running.set)
            self.released.wait(PATIENCE)
            return batches(3)

        @app.handler("/few")
        async def few(call: Call) -> Iterator[pa.RecordBatch]:
            return batches(3)

        app.handler("/rows")(lambda call: batches(1_000_000))
        return app

    async def open(self) -> None:
        await super().open()
        self.processor.streams.listening(True)

    async def ask(self, path: str = "/rows", credit: object = 4, **fields: Any) -> None:
        await self.take(path, **{"x-stream-credit": credit, **ASK, **fields})

    async def ask_for_one(self) -> None:
        """A stream with a credit of one part, which has been sent."""
        await self.ask(credit=1)
        await until(lambda: self.numbers() == [1])

    def parts(self, correlation_id: str = "c") -> list[Any]:
        return [one for one in self.replies() if one.correlation_id == correlation_id]

    def numbers(self, correlation_id: str = "c") -> list[object]:
        """The part numbers that the caller has received; the number of parts, negative, for the final reply."""
        headers: list[Any] = [one.headers for one in self.parts(correlation_id)]
        return [one["x-stream-part"] if "x-stream-part" in one else -one["x-stream-parts"] for one in headers]

    def grant(self, up_to: int, correlation_id: str = "c") -> None:
        stream_id = self.parts(correlation_id)[0].headers["x-stream-id"]
        self.processor.streams.granted({"x-stream-id": stream_id, "x-stream-credit": up_to})

    @property
    def free(self) -> int:
        return self.processor.free_slots

    async def pass_time(self, until: Callable[[], bool]) -> None:
        """Let time pass until the condition holds. Handlers run in threads, for which no virtual time passes."""
        async with asyncio.timeout(PATIENCE):
            while not until():
                await self.clock.advance(0.5)
                await asyncio.sleep(0.001)

    async def finish(self) -> None:
        self.go.set()
        self.released.set()
        self.processor.requeue(also_running=True)
        await super().finish()

    def assert_nothing_is_left(self) -> None:
        super().assert_nothing_is_left()
        assert not self.processor.streams._open


bench = bench_fixture(StreamBench)


@given(steps=st.lists(st.one_of(st.just("send"), st.integers(-5, 300)), max_size=60), first=st.integers(1, MAX_CREDIT))
@pytest.mark.proves("requests/client-reads-streamed-answer")
def test_no_more_is_sent_than_was_granted(steps, first):
    """Messages of credit may be lost, doubled and late, and a client may grant any number."""
    credit, granted = Credit(first), first
    for step in steps:
        if isinstance(step, int):
            granted = max(granted, step)
            credit.grant(step)
        elif credit.is_open:
            credit.sent += 1
        assert credit.sent <= granted
        assert credit.granted - credit.sent <= MAX_CREDIT


async def test_parts_follow_the_credit(bench):
    await bench.ask(credit=2)
    await until(lambda: bench.numbers() == [1, 2])
    bench.grant(5)
    bench.grant(3)  # late
    await until(lambda: bench.numbers() == [1, 2, 3, 4, 5])
    assert (bench.yielded, bench.statuses()) == (5, ["ok"] * 5), "no part is made in advance"
    assert {one.headers["x-stream-attempt"] for one in bench.replies()} == {1}


async def test_request_is_acknowledged_after_its_final_reply(bench):
    await bench.ask("/few")
    await bench.processor.until_idle()
    assert bench.numbers() == [1, 2, 3, -3]
    whole = pa.ipc.open_stream(b"".join(one.body for one in bench.replies())).read_all()
    assert whole["number"].to_pylist() == [0, 1, 2]
    names = [command.name for command in bench.broker.commands if command.name in {"publish", "ack"}]
    assert names[-5:] == ["publish"] * 4 + ["ack"]
    assert bench.closed == 1


@pytest.mark.parametrize("credit", [None, 0, "4"])
async def test_caller_that_asks_for_no_stream_gets_one_answer(bench, credit):
    await bench.ask("/few", credit=credit)
    await bench.processor.until_idle()
    [reply] = bench.replies()
    assert pa.ipc.open_stream(reply.body).read_all().num_rows == 3
    assert "x-stream-id" not in reply.headers


@pytest.mark.proves("requests/client-reads-streamed-answer")
async def test_stream_without_credit_gives_its_slot_to_other_requests(bench):
    async with bench.consuming("shared"):
        await bench.publish("/rows", queue="shared", **{"x-stream-credit": 1, **ASK})
        await bench.publish("/wait", queue="shared", correlation_id="other")
        await until(lambda: bench.numbers() == [1])
        assert (bench.free, bench.running.is_set()) == (0, False), "for a moment it keeps the slot"
        await bench.pass_time(bench.running.is_set)
        bench.grant(2)
        await asyncio.sleep(0.01)
        assert bench.numbers() == [1], "it waits for its slot"
        bench.go.set()
        await until(lambda: bench.numbers() == [1, 2] and bench.unfinished("shared") == 1)
        await bench.pass_time(lambda: bench.free == 1)
        bench.processor.cancel("c", REPLIES)
        await until(lambda: bench.unfinished("shared") == 0 and bench.closed == 1)
    assert bench.by_name() == {"other": "ok", "c": "cancelled"}


async def test_credit_messages_that_grant_nothing_do_not_keep_the_slot(bench):
    await bench.ask_for_one()
    for _ in range(10):
        await bench.clock.advance(PAUSE_AFTER / 4)
        bench.grant(1)
    await until(lambda: bench.free == 1)
    bench.grant(2)
    await until(lambda: bench.numbers() == [1, 2])


async def test_only_some_streams_may_be_without_a_slot(bench):
    for number in range(MAX_PAUSED + 1):
        await bench.ask(credit=1, correlation_id=str(number))
        await until(lambda number=number: bench.numbers(str(number)) == [1])
        if number < MAX_PAUSED:
            await bench.pass_time(lambda: bench.free == 1)
    for _ in range(10):
        await bench.clock.advance(PAUSE_AFTER)
    assert bench.free == 0, "the last one waits in its slot"
    bench.processor.cancel("0", REPLIES)
    await bench.pass_time(lambda: bench.free == 1)


@pytest.mark.proves("requests/client-streamed-answer-goes")
async def test_silent_client_ends_the_stream_with_an_error(bench):
    await bench.ask_for_one()
    for _ in range(3 * int(SILENCE_TIMEOUT)):  # a client that is only slow repeats its credit
        await bench.clock.advance(1)
        bench.grant(1)
    assert bench.processor.in_flight == 1
    await bench.pass_time(lambda: bench.processor.in_flight == 0)
    assert bench.statuses() == ["ok", "error"]
    assert b"stream_without_credit" in bench.replies()[-1].body
    assert (bench.closed, bench.unfinished()) == (1, 0)


@pytest.mark.proves("spark/streamed-query-cancelled-reaches")
async def test_stream_is_closed_if_its_request_is_cancelled_while_the_handler_opens_it(bench):
    """Otherwise the job of a DataFrame would go on, and its rows would stay on the disk until the worker ends."""
    await bench.ask("/opening")
    await bench.running.wait()
    bench.processor.cancel("c", REPLIES)
    await until(lambda: bench.statuses() == ["cancelled"])
    await bench.finish()
    assert (bench.yielded, bench.closed) == (1, 1)


async def test_stopped_worker_returns_the_request(bench):
    await bench.ask_for_one()
    await bench.channel.cancel(bench.consumer)
    bench.processor.requeue(also_running=True)
    await bench.processor.until_idle()
    assert (bench.statuses(), bench.returned()) == (["ok"], [0])


async def test_part_that_the_reply_queue_refuses_returns_the_request_as_failed(bench):
    async def refuse(message):
        if message.headers.get("x-stream-part") == 2:
            raise QueueFullError("full")

    bench.around_replies(before=refuse)
    await bench.ask()
    await bench.channel.cancel(bench.consumer)
    await until(lambda: bench.numbers() == [1])
    await bench.pass_time(lambda: bench.processor.in_flight == 0)
    assert (bench.returned(), bench.closed) == ([1], 1)


async def test_pool_without_credit_messages_answers_at_once(bench):
    bench.processor.streams.listening(None)
    await bench.ask("/few")
    await bench.clock.advance(1)
    assert bench.replies() == []
    bench.processor.streams.listening(False)
    await bench.pass_time(lambda: bench.processor.in_flight == 0)
    assert len(bench.replies()) == 1
