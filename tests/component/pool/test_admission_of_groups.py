"""Places under `max_groups`, with a real leader on a broker and a driver in memory, in virtual time."""

import pytest

from osrdyne.config.models import LifecycleSettings
from osrdyne.processors.requests.forwarding import CAPACITY_RETRY_AFTER
from osrdyne.protocol.activity import Event
from osrdyne.protocol.messages import Response
from osrdyne.protocol.names import Key
from osrdyne.protocol.statuses import Status
from osrdyne.testing.fakes.stack import Stack, leading, settings_for

REPLIES = "replies"


def limits(**changes: object) -> LifecycleSettings:
    values = {"settle_delay": 1.0, "max_groups": 1, "max_waiting_groups": 1, "make_room_after": 10.0} | changes
    return LifecycleSettings.model_validate(values)


@pytest.fixture
def settings():
    return settings_for(limits())


async def ask(stack: Stack, key: str) -> None:
    await stack.publish(key, key.encode(), reply_to=REPLIES, correlation_id=key)
    await stack.clock.advance(1)


async def is_idle(stack: Stack, key: str) -> None:
    """The worker has served what was there, and reports that it is idle."""
    while stack.waiting(key):
        delivery = await stack.take(key)
        await delivery.ack()
        await delivery.channel.close()
    await worker_is(stack, key, Event.IDLE)


async def worker_is(stack: Stack, key: str, event: Event, **details: object) -> None:
    await stack.report(key, Event.READY)
    await stack.report(key, event, **details)


@pytest.mark.proves("reference-defects/15-confirms-prefetch-back", "requests/more-keys-lifecycle-max")
async def test_group_beyond_the_limit_waits_and_a_further_one_is_answered_capacity(stack):
    stack.broker.declare_queue(REPLIES, {})
    for key in "abc":
        await ask(stack, key)
    assert (stack.is_bound("b"), stack.waiting("b"), stack.waits_for(Key("b"))) == (True, [b"b"], "max_groups")
    assert (stack.running("a"), stack.running("b"), stack.has_queue("c")) == (1, 0, False)
    (answer,) = stack.broker.queues[REPLIES].ready
    response = Response.from_wire(headers=answer.message.headers, body=b"", content_type=None)
    assert (response.status, response.retry_after) == (Status.CAPACITY, CAPACITY_RETRY_AFTER)


async def test_a_key_beyond_the_limit_is_answered_capacity(clock):
    async with leading(clock, settings=settings_for(limits(max_groups=10, max_distinct_keys=2))) as stack:
        for key in "abc":
            await ask(stack, key)
        assert (stack.has_queue("b"), stack.has_queue("c")) == (True, False)
        assert stack.orphans() == []


@pytest.mark.proves("requests/more-keys-lifecycle-max")
async def test_only_an_idle_group_makes_room_for_one_that_waits(stack, clock):
    await ask(stack, "a")
    await worker_is(stack, "a", Event.BUSY, in_flight=1)
    await ask(stack, "b")
    await clock.advance(60)
    assert (stack.running("a"), stack.running("b")) == (1, 0)
    await is_idle(stack, "a")
    await clock.advance(60)
    assert (stack.has_queue("a"), stack.running("b")) == (False, 1)


@pytest.mark.proves("workers/worker-never-reports-request")
async def test_worker_that_never_reports_completion_makes_room_when_its_queue_is_empty(stack):
    await ask(stack, "a")
    delivery = await stack.take("a")
    await worker_is(stack, "a", Event.REQUEST_RECEIVED)
    await ask(stack, "b")
    await stack.clock.advance(60)
    assert (stack.running("a"), stack.running("b")) == (1, 0)  # its request is unacknowledged
    await delivery.ack()
    await delivery.channel.close()
    await stack.clock.advance(60)
    assert not stack.has_queue("a")
    assert stack.running("b") == 1


async def test_pinned_group_makes_no_room(stack, clock):
    stack.pin(Key("a"))
    await clock.advance(1)
    await is_idle(stack, "a")
    await ask(stack, "b")
    await clock.advance(60)
    assert (stack.running("a"), stack.running("b")) == (1, 0)


async def test_a_request_keeps_a_group_that_was_asked_to_end(stack, clock):
    await ask(stack, "a")
    await is_idle(stack, "a")
    await clock.advance(10)
    await ask(stack, "b")
    assert not stack.is_bound("a")
    await ask(stack, "a")
    await worker_is(stack, "a", Event.BUSY, in_flight=1)
    await clock.advance(60)
    assert stack.is_bound("a")
    assert stack.running("a") == 1


@pytest.mark.proves("requests/more-keys-lifecycle-max")
async def test_group_that_waits_is_not_idle_and_ends_when_its_requests_are_gone(clock):
    """Groups are idle after some seconds, long before one that waits gets a place."""
    settings = settings_for(limits(unbind_delay=5.0, stop_delay=5.0, resync_interval=10.0))
    async with leading(clock, settings=settings) as stack:
        stack.pin(Key("kept"))
        await clock.advance(1)
        await ask(stack, "b")
        before = stack.generation_of(Key("b"))
        await clock.advance(300)
        assert (stack.waits_for(Key("b")), stack.waiting("b")) == ("max_groups", [b"b"])
        assert (stack.is_bound("b"), stack.generation_of(Key("b"))) == (True, before)
        expired = await stack.take("b")
        await expired.ack()
        await expired.channel.close()
        await clock.advance(60)
        assert (stack.has_queue("b"), stack.places()) == (False, [Key("kept")])
