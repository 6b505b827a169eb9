"""Quotas at the ingress of a managed pool: a real leader on a broker in memory, in virtual time."""

import json
from collections import Counter

import pytest
from managed_pool import managing, publish_to, waiting
from replies import REPLIES, answers

from osrdyne.ingress.quotas.document import load_quotas
from osrdyne.ingress.quotas.quotas import MeterUsage
from osrdyne.ingress.quotas.window import DAY
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import Stack

NOON = 1_700_049_600.0  # 2023-11-15T12:00:00Z


@pytest.fixture
def clock():
    return VirtualClock(time=NOON)


async def limit(stack: Stack, **document: object) -> None:
    await stack.term.routing.quotas.change(load_quotas(json.dumps(document)), author="me")


async def ask(stack: Stack, times: int = 1, key: str = "a", **properties: object) -> None:
    for _ in range(times):
        await stack.publish(key, b"x", reply_to=REPLIES, correlation_id=key, **properties)
    await stack.clock.settle()


def meter(stack: Stack) -> MeterUsage:
    """The use of the first quota."""
    usage = stack.term.routing.quotas.usage()
    assert usage is not None
    return usage.meters[0]


def statuses(broker: FakeBroker) -> Counter[str | None]:
    return Counter(status for _, status in answers(broker))


@pytest.mark.proves("quotas/clients-send-more-daily")
async def test_quota_runs_out_at_the_exact_message_and_callers_learn_until_when(stack):
    await limit(stack, pool={"messages_per_day": 10})
    await ask(stack, 13)
    assert (len(waiting(stack, None)), statuses(stack.broker)) == (10, {"quota-exceeded": 3})
    refused = stack.broker.queues[REPLIES].ready
    assert [stored.message.headers.get("x-retry-after") for stored in refused] == [DAY / 2] * 3
    await stack.clock.advance(DAY / 2)
    refused.clear()
    await ask(stack, 11)
    assert statuses(stack.broker)["quota-exceeded"] == 1


@pytest.mark.proves("quotas/leader-killed-counts-what")
@pytest.mark.parametrize(("kills", "known"), [(True, (6, 7)), (False, (7,))], ids=["killed", "orderly end"])
async def test_killed_leader_loses_at_most_the_counts_of_a_second(stack, broker, kills, known):
    """The name of the application is not UTF-8, as the AMQP library reads the byte FF. Any client can send it."""
    await limit(stack, pool={"messages_per_day": 10, "share": "principal"})
    await ask(stack, 6, app_id="app \udcff")
    await stack.clock.advance(1.0)
    await ask(stack, 1, app_id="app \udcff")  # in the last second
    if kills:
        await stack.kill()
    else:
        stack.stop.requested.set()
        await stack.clock.settle()
    async with managing(stack.clock, broker) as following:
        used = meter(following).used
        assert used in known
        assert meter(following).largest == (("app \\udcff", used),)
        await ask(following, 6)
        assert len(waiting(following, None)) == 7 + (10 - used)


async def test_request_that_returns_from_its_group_counts_once(stack, broker):
    await limit(stack, pool={"messages_per_day": 1})
    await ask(stack)
    # As when its group was unbound meanwhile.
    await publish_to(stack, stack.names.work_exchange(None), "b", b"x", reply_to=REPLIES)
    assert (len(waiting(stack, None, "b")), answers(broker)) == (1, [])


async def test_change_is_live_and_keeps_the_counts(stack, broker):
    await limit(stack, pool={"messages_per_day": 3})
    await ask(stack, 4)
    await limit(stack, pool={"messages_per_day": 5})
    await ask(stack, 3)
    assert (len(waiting(stack, None)), statuses(broker)) == (5, {"quota-exceeded": 2})
    await stack.term.routing.quotas.clear(author="me")
    await ask(stack, 3)
    assert len(waiting(stack, None)) == 8
