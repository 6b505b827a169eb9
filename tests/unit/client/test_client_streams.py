"""A streamed answer in the client: no row twice, none missing, whatever happens to the workers."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.client import AsyncClient
from osrdyne.client.errors import ConnectionLostError, StreamInterruptedError
from osrdyne.client.reply import Reply
from osrdyne.client.session import Session
from osrdyne.client.streams import BatchDecoder, PartQueue
from osrdyne.errors import InvalidMessageError
from osrdyne.protocol.statuses import Status
from osrdyne.protocol.streams import ATTEMPT_HEADER, PART_HEADER, PARTS_HEADER, STREAM_HEADER, Grant, read_wanted_credit

FIRST, SECOND = "a" * 32, "b" * 32


def part(number: int, stream: str = FIRST, attempt: int = 1) -> Reply:
    headers = {STREAM_HEADER: stream, PART_HEADER: number, ATTEMPT_HEADER: attempt}
    return Reply(progress=True, body=f"{stream[0]}{number}".encode(), headers=headers, worker_id=stream[0])


def last(parts: int, stream: str = FIRST, attempt: int = 1, status: Status = Status.OK) -> Reply:
    return Reply(status, headers={STREAM_HEADER: stream, PARTS_HEADER: parts, ATTEMPT_HEADER: attempt})


@pytest.fixture
def queue():
    return PartQueue(credit=4)


async def received(queue: PartQueue) -> list[bytes]:
    """All parts, once the call has ended."""
    queue.end()
    found = []
    while (one := await queue.next()) is not None:
        found.append(one)
    return found


async def waiting_part(queue: PartQueue) -> list[bytes]:
    """The next part, if there is one already."""
    with suppress(TimeoutError):
        async with asyncio.timeout(0):
            found = await queue.next()
            queue.consumed()
            return [] if found is None else [found]
    return []


async def test_parts_are_handed_out_in_order_and_credit_follows_their_consumption(queue):
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


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "never seen before"])
async def test_stream_that_begins_anew_before_the_first_row_replaces_the_former_one(queue, seen):
    if seen:
        queue.arrived(part(1))
    queue.arrived(part(1, SECOND, attempt=2))
    queue.arrived(part(2) if seen else part(1))
    assert not queue.ends(last(2)), "the first worker was cut off and wakes up again"
    queue.arrived(part(2, SECOND, attempt=2))
    assert queue.worker_id == "b"
    assert queue.ends(last(2, SECOND, attempt=2))
    assert await received(queue) == [b"b1", b"b2"]


async def test_lost_part_and_stream_that_begins_anew_after_the_first_row_end_the_call(queue):
    queue.arrived(Reply(progress=True, body=b"50 %"))  # of a handler: no part
    queue.arrived(part(1))
    for error in (Reply(Status.EXPIRED), last(7, status=Status.ERROR)):
        assert queue.ends(error)
    with pytest.raises(StreamInterruptedError):
        queue.arrived(part(3))
    with pytest.raises(StreamInterruptedError):
        queue.ends(last(2))
    assert await queue.next() == b"a1"
    with pytest.raises(StreamInterruptedError):
        queue.arrived(part(1, SECOND, attempt=2))
    with pytest.raises(StreamInterruptedError):
        queue.ends(Reply(content_type="application/json"))


async def test_request_that_is_sent_again_counts_its_attempts_from_the_beginning(queue):
    """With `idempotent=True`, after the connection was lost before the first row."""
    queue.repeat()
    queue.arrived(part(1, FIRST, attempt=2))
    queue.repeat()
    assert queue.grant is None, "the worker of the lost connection gets no more credit"
    queue.arrived(part(1, SECOND, attempt=1))
    assert queue.ends(last(1, SECOND, attempt=1))
    assert await received(queue) == [b"b1"]


@given(
    size=st.integers(0, 6),
    attempts=st.lists(st.integers(0, 6), max_size=3),
    taken=st.lists(st.booleans(), min_size=40, max_size=40),
)
async def test_caller_gets_every_part_once_or_an_error(size, attempts, taken):
    """Workers stream the numbers 1 to n, and each may be lost at any moment; RabbitMQ keeps the order. `attempts`: how
    many parts each lost worker has sent; `taken`: whether the caller takes a part between two."""
    replies: list[Reply] = []
    for attempt, sent in enumerate([*attempts, size], start=1):
        replies += [part(number, f"{attempt:x}" * 32, attempt) for number in range(1, min(sent, size) + 1)]
    attempt = len(attempts) + 1
    replies.append(last(size, f"{attempt:x}" * 32, attempt))
    queue, found, ended = PartQueue(credit=64), [], False
    try:
        for reply, takes in zip(replies, taken, strict=False):
            if reply.progress:
                queue.arrived(reply)
            else:
                ended = queue.ends(reply)
            if takes:
                found += await waiting_part(queue)
        found += await received(queue)
    except StreamInterruptedError:
        ended = False
    numbers = [int(one[1:]) for one in found]
    assert numbers == list(range(1, len(numbers) + 1)), "a beginning, without gaps and repetitions"
    assert len({one[:1] for one in found}) <= 1, "of one worker"
    assert not ended or len(numbers) == size


def test_credit_messages_are_read_from_the_wire_unless_they_are_malformed():
    for value, credit in ((4, 4), (1000, 64), (0, None), (-1, None), ("4", None), (True, None), (None, None)):
        assert read_wanted_credit({"x-stream-credit": value}) == credit
    for stream, wanted in ((None, None), (FIRST, None), ("x" * 32, 1), (FIRST, -1), (FIRST, "9"), (1, 1)):
        assert Grant.from_wire({STREAM_HEADER: stream, "x-stream-credit": wanted}) is None
    grant = Grant(FIRST, 7)
    assert Grant.from_wire(grant.wire_headers()) == grant
    with pytest.raises(InvalidMessageError):
        list(BatchDecoder().decode(b"{}{}{}{}{}{}"))


class LossySession(Session):
    """Its connection is lost with the first part of the first call; the next one answers in another stream."""

    def __init__(self) -> None:
        self.calls = 0

    @property
    def is_over(self) -> bool:
        return False

    async def call(self, request: Any, on_progress: Any = None, on_starting: Any = None, ends: Any = None) -> Reply:
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
async def test_stream_of_a_repeated_request_ends_its_call():
    client = AsyncClient("amqp://localhost:1/", "pool")
    client._state.set(LossySession())
    async with asyncio.timeout(120):
        found = [one async for one in client.call_parts("k", idempotent=True)]
    assert found == [b"b1"]
