"""Texts that have ended workers: what the leader counts, what workers learn of it, and what a group may cost."""

import asyncio
import math

import pytest
from managed_pool import heard, listen

from osrdyne.drivers.base import Exit
from osrdyne.pool.state.workers.crashes import BLOCKED_TIME, MAX_KEYS, MAX_OF_KEY, PoisonTexts
from osrdyne.pool.state.workers.restart_backoff import (
    FREE_RESTARTS,
    RESTART,
    STABLE_AFTER,
    RestartBackoff,
    worker_ended,
)
from osrdyne.protocol.activity import ALONE_FIELD, BLOCKED_FIELD, STUCK_FIELD, Event, text_fingerprint
from osrdyne.protocol.control import Command
from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.stack import Stack, leading
from osrdyne_worker.requests.scheduling.priorities import Slots
from osrdyne_worker.requests.scheduling.suspects import MAX_TEXTS, SUSPECT_PRIORITY, RefusedTexts

A = Key("a")


@pytest.fixture
def stack(direct):
    return direct


async def test_text_is_refused_for_its_time_and_the_oldest_make_room(clock):
    texts = PoisonTexts(clock, seconds=600)
    assert texts.note(A, "first")
    await clock.advance(400)
    assert texts.note(A, "second")
    assert texts.of_key(A) == {"first": 200.0, "second": 600.0}
    assert texts.of_key(Key("b")) == {}
    await clock.advance(200)
    assert texts.of_key(A) == {"second": 400.0}
    for number in range(MAX_OF_KEY):
        texts.note(A, str(number))
    assert list(texts.of_key(A)) == [str(number) for number in range(MAX_OF_KEY)]
    for number in range(MAX_KEYS):
        texts.note(Key(f"key {number}"), "text")
    assert texts.of_key(A) == {}
    assert texts.of_key(Key("key 0")) == {"text": 600.0}
    assert not PoisonTexts(clock, seconds=0).note(A, "never")


async def test_text_counts_as_stuck_with_the_second_worker_within_its_time(clock):
    texts = PoisonTexts(clock, seconds=600)
    assert not texts.note_stuck(A, "text")
    assert not texts.note_stuck(A, "other")
    assert not texts.note_stuck(Key("b"), "text")
    await clock.advance(601)
    assert not texts.note_stuck(A, "text"), "the first one is too long ago"
    assert texts.note_stuck(A, "text")
    assert not texts.note_stuck(A, "text"), "the count begins again"
    never = PoisonTexts(clock, seconds=0)
    assert not (never.note_stuck(A, "text") or never.note_stuck(A, "text"))


async def test_text_that_blocks_is_refused_shortly_and_longer_when_it_blocks_again(clock):
    texts = PoisonTexts(clock, seconds=600)
    assert texts.note_blocked(A, "text")
    assert texts.of_key(A) == {"text": BLOCKED_TIME}
    await clock.advance(BLOCKED_TIME + 1)
    assert texts.of_key(A) == {}
    assert texts.note_blocked(A, "text")
    assert texts.of_key(A) == {"text": 600.0}
    assert not PoisonTexts(clock, seconds=0).note_blocked(A, "never")


async def test_worker_refuses_a_text_until_its_time_is_over(clock):
    request = Request("k", b"body", path="/sql")
    texts = RefusedTexts(clock, {text_fingerprint("/sql", b"body"): 10.0})
    assert texts.seconds_left(request) == 10.0
    assert texts.seconds_left(Request("k", b"other", path="/sql")) == 0.0
    texts.add({"a": True, "b": math.inf, "c": math.nan, "d": -1, "e": "x", 1: 5.0})  # nothing of that counts
    texts.add(["not a mapping"])
    await clock.advance(10)
    assert texts.seconds_left(request) == 0.0
    texts.add({str(number): 600.0 for number in range(MAX_TEXTS)})
    texts.add({text_fingerprint("/sql", b"body"): 600.0})
    assert texts.seconds_left(request) == 0.0, "there is no room"


async def worker_dies(stack: Stack, clock: VirtualClock, **details: object) -> None:
    """The group's worker gets ready, reports this last, and ends."""
    await stack.report("a", Event.STARTED)
    await stack.report("a", Event.READY, in_flight=0)
    await stack.report("a", Event.FAILED, requests=["0123456789abcdef"], **details)
    stack.driver.backend.end(stack.driver.workers_of(A)[0], Exit(code=4))
    await clock.advance(5.0)
    assert stack.running("a") == 1


@pytest.mark.parametrize(
    ("details", "deaths", "seconds"),
    [({STUCK_FIELD: "text"}, 2, 600.0), ({ALONE_FIELD: "text"}, 1, 600.0), ({BLOCKED_FIELD: "text"}, 1, BLOCKED_TIME)],
    ids=["stuck", "alone", "blocked"],
)
@pytest.mark.proves("workers/handler-never-ends", "workers/coroutine-handler-blocks-worker")
async def test_text_that_ended_workers_is_refused_by_new_and_by_running_workers(stack, details, deaths, seconds):
    listen(stack, "group.a")
    stack.require(A)
    await stack.clock.settle()
    for _ in range(deaths):
        assert stack.driver.workers_of(A)[0].spec.environment.poison == {}
        await worker_dies(stack, stack.clock, **details)
    [worker] = stack.driver.workers_of(A)
    assert list(worker.spec.environment.poison) == ["text"]
    [command] = [message for message in heard(stack) if message.command is Command.POISON]
    assert command.details == {"texts": {"text": seconds}}


async def test_successor_refuses_the_text_of_a_suspect_that_ends_a_worker_in_its_term(clock):
    """A worker knows a suspect by RabbitMQ's count, and reports it to whichever leader there is."""
    async with leading(clock) as former:
        former.require(A)
        await clock.settle()
        await worker_dies(former, clock)
    async with leading(clock, broker=former.broker, driver=former.driver) as stack:
        stack.require(A)
        await clock.advance(5.0)
        await worker_dies(stack, clock, **{ALONE_FIELD: "text"})
        assert list(stack.driver.workers_of(A)[0].spec.environment.poison) == ["text"]
    async with leading(clock, broker=former.broker, driver=former.driver) as stack:
        stack.require(A)
        await clock.advance(5.0)
        await worker_dies(stack, clock)
        assert stack.driver.workers_of(A)[0].spec.environment.poison == {}, "refused by the leader before"


async def test_texts_of_different_handlers_that_are_stuck_are_not_refused(stack, clock):
    stack.require(A)
    await clock.settle()
    for text in ("one", "two", None, 7, "x" * 65, "x" * 65):
        await worker_dies(stack, clock, **{STUCK_FIELD: text})
    assert stack.driver.workers_of(A)[0].spec.environment.poison == {}


def after_deaths(count: int, **how: object) -> RestartBackoff:
    record = RestartBackoff()
    for _ in range(count):
        facts = {"served": True, "lived": 1.0, "had_requests": True, "had_completed": False, **how}
        record = worker_ended(record, reason="x", log_lines=(), attempts_allowed=2, now=100.0, **facts)  # type: ignore[arg-type]
    return record


def test_group_backs_off_after_its_free_restarts():
    """Workers that die with requests are replaced at once; ten in a row that answered none are not."""
    assert [after_deaths(count).back_off_until for count in (1, FREE_RESTARTS)] == [100.0, 100.0]
    late = after_deaths(FREE_RESTARTS + 2).back_off_until
    assert late is not None
    assert 100.0 < late <= 100.0 + RESTART.maximum
    for honest in ({"had_completed": True}, {"lived": STABLE_AFTER}):
        assert after_deaths(3 * FREE_RESTARTS, **honest).back_off_until == 100.0
    crashes = after_deaths(2, had_requests=False).back_off_until
    assert crashes is not None
    assert crashes > 100.0, "a worker that dies without any request backs off with the second one"


async def test_suspect_runs_after_its_patience_although_others_wait():
    """In real time, with a short patience: requests of a higher rank come without end."""
    slots = Slots(2)
    order: list[str] = []

    async def suspect():
        await slots.acquire_all(SUSPECT_PRIORITY, patience=0.05)
        order.append("suspect")
        slots.release(all_slots=True)

    async def others():
        while "suspect" not in order:
            await slots.acquire(0)
            order.append("other")
            await asyncio.sleep(0.001)
            slots.release()

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for _ in range(3):  # more than there are places: one always waits
            group.create_task(others())
        await asyncio.sleep(0)
        group.create_task(suspect())
    assert order.index("suspect") > 3
