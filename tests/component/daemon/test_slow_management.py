"""RabbitMQ's HTTP API does not answer: no term ends, and the leader goes on with what it knows."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from osrdyne.broker.session import LeaderSession
from osrdyne.config.models import LifecycleSettings, PoolSettings
from osrdyne.errors import ManagementUnavailableError
from osrdyne.testing.fakes.amqp import connect_to
from osrdyne.testing.fakes.stack import POOL, Stack, make_stack, settings_for

pytestmark = pytest.mark.proves("broker/management-api-fails")
# Everything that is done at intervals is done within the minutes of a test.
OFTEN = LifecycleSettings(
    unbind_delay=20.0, stop_delay=20.0, settle_delay=1.0, resync_interval=10.0, topology_interval=5.0
)
SETTINGS = settings_for(OFTEN)
MANAGED = SETTINGS.model_copy(update={"pool": PoolSettings(id=POOL, kind="managed")})


@asynccontextmanager
async def beginning(stack: Stack) -> AsyncIterator[None]:
    """A leader whose term has begun, and that may not lead yet."""
    stack.task = asyncio.create_task(stack.lead())
    await stack.clock.advance(60.0)
    yield
    stack.task.cancel()
    await asyncio.wait({stack.task})


@pytest.mark.parametrize("stops", [False, True])
async def test_term_waits_for_the_api_unless_the_daemon_is_to_stop(clock, stops):
    stack = make_stack(clock, settings=SETTINGS)
    stack.management.available = False
    async with beginning(stack):
        assert (stack.leading.is_set(), stack.task.done()) == (False, False)
        if stops:
            stack.stop.requested.set()
            await clock.advance(1.0)
            error = stack.task.exception()
            assert isinstance(error, ExceptionGroup) and error.subgroup(ManagementUnavailableError)
            return
        stack.management.available = True
        await clock.advance(20.0)
        await stack.publish("a", b"1")
        await clock.advance(1.0)
        assert (stack.leading.is_set(), stack.waiting("a")) == (True, [b"1"])


async def test_no_call_that_fails_once_ends_the_term(clock, broker):
    failed: set[str] = set()

    async def fail_first(command):
        if command.name in calls and command.name not in failed:
            failed.add(command.name)
            raise ManagementUnavailableError("too late")

    stack = make_stack(clock, broker=broker, settings=MANAGED)
    calls = {name for name in dir(stack.management) if not name.startswith("_")}
    broker.hook = fail_first
    async with beginning(stack):
        for key in "ab":
            await stack.publish(key, b"1")
        await clock.advance(300.0)
        assert not stack.task.done()
    assert {"list_queues", "list_bindings", "get_policy", "put_policy", "get_global_parameter"} <= failed


async def unavailable() -> int | None:
    raise ManagementUnavailableError("too late")


async def test_term_of_a_token_is_used_if_the_announced_one_is_unknown_and_an_earlier_leader_outwaited(clock, broker):
    heartbeat, terms = SETTINGS.broker.leader_heartbeat, []
    for _ in range(2):
        async with LeaderSession(SETTINGS, clock=clock, connect=connect_to(broker), last_term=unavailable) as session:
            acquiring = asyncio.create_task(session.acquire())
            await clock.advance(2 * heartbeat)
            assert acquiring.done() is bool(terms), "the first one has a new queue"
            await clock.advance(2 * heartbeat)
            _, own = await acquiring
        terms.append(own.term)
    assert terms[0] > math.floor(clock.time()) - 60 - 4 * heartbeat
    assert terms[1] == terms[0] + 1
