"""The rates of workers at the leader: who gets which rate, and when, in virtual time."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from managed_pool import managing

from osrdyne.ingress.quotas.document import load_quotas
from osrdyne.pool.routing.rates import SEND_AGAIN_AFTER
from osrdyne.protocol.activity import Event
from osrdyne.protocol.control import Command, control_from_wire
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.names import Key
from osrdyne.protocol.rates import EventRate, rate_from_wire
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import Stack

CONTROL = "control"


@asynccontextmanager
async def leader(clock: VirtualClock, broker: FakeBroker) -> AsyncIterator[Stack]:
    """A leader, and a queue that receives the control messages of the group `k`."""
    async with managing(clock, broker) as stack:
        broker.declare_queue(CONTROL, {})
        broker.bind(CONTROL, stack.names.control_exchange, stack.names.control_group_routing_key(Key("k")))
        await stack.publish("k", b"x")  # reports of unknown groups do not count
        await clock.advance(1.0)
        yield stack


@pytest.fixture
async def stack(clock, broker):
    async with leader(clock, broker) as stack:
        yield stack


async def use(stack: Stack, *rates: dict[str, object]) -> None:
    await stack.term.routing.quotas.change(load_quotas(json.dumps({"rates": rates})), author="me")
    await stack.clock.settle()


async def report(stack: Stack, worker: str, rate: EventRate | None, *, event: Event = Event.READY) -> None:
    wire = None if rate is None else rate.to_wire()
    await stack.report("k", event, worker, in_flight=0, paused=False, generation=[1, 0], rate=wire)


def sent(broker: FakeBroker) -> list[EventRate | None]:
    """The rates that were sent since the last call."""
    messages = [control_from_wire(body) for body in broker.bodies(CONTROL)]
    broker.queues[CONTROL].ready.clear()
    return [rate_from_wire(one.details["rate"]) for one in messages if one and one.command is Command.RATE]


@pytest.mark.proves("quotas/message-new-rate-lost")
async def test_rate_is_sent_until_the_worker_reports_it(stack, clock):
    rate = EventRate(720, 1024)
    await report(stack, "w", None)
    assert sent(stack.broker) == []
    await use(stack, {"name": "r", "preset": "store-s1"})
    assert sent(stack.broker) == [rate]
    await clock.advance(SEND_AGAIN_AFTER + 1)
    assert sent(stack.broker) == [rate]  # the first message was lost
    await report(stack, "w", rate)
    await clock.advance(2 * SEND_AGAIN_AFTER)
    assert sent(stack.broker) == []
    await stack.term.routing.quotas.clear(author="me")
    await clock.settle()
    assert sent(stack.broker) == [None]


async def test_workers_of_a_group_share_its_units(stack):
    await use(stack, {"name": "r", "preset": "store-s1", "max_units": 1})
    await report(stack, "w1", EventRate(720, 1024))
    assert sent(stack.broker) == []
    await report(stack, "w2", EventRate(720, 1024))
    assert sent(stack.broker) == [EventRate(360, 1024)]
    await report(stack, "w1", EventRate(360, 1024))
    await report(stack, "w2", EventRate(360, 1024), event=Event.STOPPING)
    assert sent(stack.broker) == [EventRate(720, 1024)]


@pytest.mark.proves("quotas/message-new-rate-lost")
async def test_next_leader_corrects_the_rate_of_a_worker(clock, broker):
    async with leader(clock, broker) as stack:
        await use(stack, {"name": "r", "preset": "store-s1"})
        await stack.kill()
    async with leader(clock, broker) as stack:
        await report(stack, "w", EventRate(7200, 1024))
        assert sent(broker) == [EventRate(720, 1024)]


async def test_new_worker_starts_with_its_rate_which_is_explained(stack):
    await use(stack, {"name": "r", "keys": "new", "units": 2, "events_per_minute": 300})
    for key in ("new", "other"):
        await stack.publish(key, b"x")
    await stack.clock.advance(10.0)
    found = {one.instance.key: one.spec.environment for one in stack.driver.backend.workers.values()}
    read = {key: WorkerEnvironment.from_variables(one.to_variables()).rate for key, one in found.items()}
    assert read == {"k": None, "new": EventRate(600, 1024), "other": None}
    assert stack.rates.describe(Key("other")) is None
    assert re.findall(r"\d+", stack.rates.describe(Key("new")) or "") == ["600", "1024"]
