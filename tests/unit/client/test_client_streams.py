"""A streamed answer in the client: no row twice, none missing, whatever happens to the workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.client import AsyncClient
from osrdyne.client.errors import ConnectionLostError, StreamInterruptedError
from osrdyne.client.progress import StartCallback
from osrdyne.client.reply import Reply
from osrdyne.client.request import OutgoingRequest
from osrdyne.client.session import ProgressCallback, Session
from osrdyne.client.streams import BatchDecoder, PartQueue
from osrdyne.errors import InvalidMessageError
from osrdyne.protocol.statuses import Status
from osrdyne.protocol.streams import (
    ATTEMPT_HEADER,
    PART_HEADER,
    PARTS_HEADER,
    STREAM_HEADER,
    Grant,
    read_wanted_credit,
)

FIRST, SECOND = "a" * 32, "b" * 32


def part(number: int, stream: str = FIRST, attempt: int = 1) -> Reply:
    headers = {STREAM_HEADER: stream, PART_HEADER: number, ATTEMPT_HEADER: attempt}
    return Reply(progress=True, body=f"{stream[0]}{number}".encode(), headers=headers, worker_id=stream[0])


def last(parts: int, stream: str = FIRST, attempt: int = 1, status: Status = Status.OK) -> Reply:
    return Reply(status, headers={STREAM_HEADER: stream, PARTS_HEADER: parts, ATTEMPT_HEADER: attempt})


async def received(queue: PartQueue) -> list[bytes]:
    """All parts, once the call has ended."""
    queue.end()
    found = []
    while (one := await queue.next()) is not None:
        found.append(one)
    return found


async def test_parts_are_handed_out_in_order_and_credit_follows_their_consumption() -> None:
    queue = PartQueue(credit=4)
    assert queue.grant is None
    for number in (1, 2):
        queue.arrived(part(number))
    assert queue.grant == Grant(FIRST, 4)
    assert await queue.next() == b"a1"
    assert queue.grant == Grant(FIRST, 4), "the part is still being processed"
    queue.consumed()
    assert queue.grant == Grant(FIRST, 5)
    assert queue.ends(last(2))
    assert await received(queue) == [b"a2"]
    assert queue.grant is None


async def test_stream_that_begins_anew_before_the_first_row_replaces_the_former_one() -> None:
    queue = PartQueue(credit=4)
    queue.arrived(part(1))
    queue.arrived(part(1, SECOND, attempt=2))
    queue.arrived(part(2))
    assert not queue.ends(last(2)), "the first worker was cut off and wakes up again"
    queue.arrived(part(2, SECOND, attempt=2))
    assert queue.worker_id == "b"
    assert queue.ends(last(2, SECOND, attempt=2))
    assert await received(queue) == [b"b1", b"b2"]


async def test_stream_that_begins_anew_after_the_first_row_ends_the_call() -> None:
    queue = PartQueue(credit=4)
    queue.arrived(part(1))
    await queue.next()
    with pytest.raises(StreamInterruptedError, match="started again"):
        queue.arrived(part(1, SECOND, attempt=2))
    with pytest.raises(StreamInterruptedError, match="started again"):
        queue.ends(Reply(content_type="application/json"))


async def test_parts_of_an_earlier_attempt_that_were_never_seen_before_are_ignored() -> None:
    queue = PartQueue(credit=4)
    queue.arrived(part(1, SECOND, attempt=2))
    queue.arrived(part(1, FIRST, attempt=1))
    assert queue.ends(last(1, SECOND, attempt=2))
    assert await received(queue) == [b"b1"]


async def test_request_that_is_sent_again_counts_its_attempts_from_the_beginning() -> None:
    """With `idempotent=True`, after the connection was lost before the first row."""
    queue = PartQueue(credit=4)
    queue.repeat()
    queue.arrived(part(1, FIRST, attempt=2))
    queue.repeat()
    assert queue.grant is None, "the worker of the lost connection gets no more credit"
    queue.arrived(part(1, SECOND, attempt=1))
    assert queue.ends(last(1, SECOND, attempt=1))
    assert await received(queue) == [b"b1"]


def test_lost_part_ends_the_call() -> None:
    queue = PartQueue(credit=4)
    queue.arrived(part(1))
    with pytest.raises(StreamInterruptedError, match="lost"):
        queue.arrived(part(3))
    with pytest.raises(StreamInterruptedError, match="lost"):
        queue.ends(last(2))


def test_progress_of_a_handler_and_errors_are_no_parts() -> None:
    queue = PartQueue(credit=4)
    queue.arrived(Reply(progress=True, body=b"50 %"))
    queue.arrived(part(1))
    assert queue.ends(Reply(Status.EXPIRED))
    assert queue.ends(last(7, status=Status.ERROR))


@dataclass
class World:
    """Workers that stream the numbers 1 to n, of which each may be lost at any moment; RabbitMQ keeps the order."""

    replies: list[Reply] = field(default_factory=list)

    def stream(self, attempt: int, sent: int, size: int, *, ends: bool) -> None:
        name = f"{attempt:x}" * 32
        self.replies += [part(number, name, attempt) for number in range(1, sent + 1)]
        if ends:
            self.replies.append(last(size, name, attempt))


@given(
    size=st.integers(0, 6),
    attempts=st.lists(st.integers(0, 6), max_size=3),
    taken=st.lists(st.booleans(), min_size=40, max_size=40),
)
async def test_caller_gets_every_part_once_or_an_error(size: int, attempts: list[int], taken: list[bool]) -> None:
    """`attempts`: how many parts each lost worker has sent; `taken`: whether the caller takes a part between two."""
    world = World()
    for number, sent in enumerate(attempts, start=1):
        world.stream(number, min(sent, size), size, ends=False)
    world.stream(len(attempts) + 1, size, size, ends=True)
    queue, found, ended = PartQueue(credit=64), [], False
    try:
        for reply, takes in zip(world.replies, taken, strict=False):
            if reply.progress:
                queue.arrived(reply)
            else:
                ended = queue.ends(reply)
            if takes and queue._parts:
                found.append(await queue.next())
                queue.consumed()
        found += await received(queue)
    except StreamInterruptedError:
        ended = False
    numbers = [int(one[1:]) for one in found if one is not None]
    assert numbers == list(range(1, len(numbers) + 1)), "a beginning, without gaps and repetitions"
    assert len({one[:1] for one in found if one is not None}) <= 1, "of one worker"
    assert not ended or len(numbers) == size


def test_body_that_is_no_arrow_stream_is_an_error() -> None:
    with pytest.raises(InvalidMessageError, match="not an Arrow stream"):
        list(BatchDecoder().decode(b"{}{}{}{}{}{}"))


@pytest.mark.parametrize(
    ("value", "credit"), [(4, 4), (1000, 64), (0, None), (-1, None), ("4", None), (True, None), (None, None)]
)
def test_wanted_credit_is_a_positive_number(value: object, credit: int | None) -> None:
    assert read_wanted_credit({"x-stream-credit": value}) == credit


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {STREAM_HEADER: FIRST},
        {STREAM_HEADER: "x" * 32, "x-stream-credit": 1},
        {STREAM_HEADER: FIRST, "x-stream-credit": -1},
        {STREAM_HEADER: FIRST, "x-stream-credit": "9"},
        {STREAM_HEADER: 1, "x-stream-credit": 1},
    ],
)
def test_malformed_credit_message_is_none(headers: dict[str, object]) -> None:
    assert Grant.from_wire(headers) is None


def test_credit_message_survives_the_wire() -> None:
    grant = Grant(FIRST, 7)
    assert Grant.from_wire(grant.wire_headers()) == grant


class LossySession(Session):
    """Its connection is lost with the first part of the first call; the next one answers in another stream."""

    def __init__(self) -> None:
        self.calls = 0

    @property
    def is_over(self) -> bool:
        return False

    async def call(
        self,
        request: OutgoingRequest,
        on_progress: ProgressCallback | None = None,
        on_starting: StartCallback | None = None,
        ends: Callable[[Reply], bool] | None = None,
    ) -> Reply:
        assert on_progress is not None and ends is not None
        self.calls += 1
        request.sent = True
        if self.calls == 1:
            on_progress(part(1, FIRST, attempt=2))
            raise ConnectionLostError("lost")
        on_progress(part(1, SECOND, attempt=1))
        end = last(1, SECOND, attempt=1)
        while not ends(end):
            await asyncio.Event().wait()  # as a client that waits for the last reply of its call
        return end

    async def grant(self, grant: Grant, worker_id: str) -> None: ...


@pytest.mark.proves("requests/client-loses-connection-first")
async def test_stream_of_a_repeated_request_ends_its_call() -> None:
    client = AsyncClient("amqp://localhost:1/", "pool")
    client._state.set(LossySession())
    async with asyncio.timeout(120):
        found = [one async for one in client.call_parts("k", idempotent=True)]
    assert found == [b"b1"]
