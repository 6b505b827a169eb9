"""Inquiries about starting keys: a real leader on a broker and a driver in memory, in virtual time."""

import pytest
from broker_steps import refuse
from managed_pool import ALERTS, REST, change, managed, publish_to
from replies import REPLIES

from osrdyne.config.models import LifecycleSettings, Settings
from osrdyne.errors import BrokerAccessError, StartFailedError
from osrdyne.protocol.activity import Event
from osrdyne.protocol.messages import PROGRESS_HEADER
from osrdyne.protocol.progress import StartProgress, not_starting
from osrdyne.testing.fakes.stack import Stack, leading, settings_for

PARTS = {"process": 500, "jvm": 9_500}


def one_at_a_time(**limits: object) -> Settings:
    return settings_for(LifecycleSettings.model_validate({"settle_delay": 1.0, "max_concurrent_starts": 1} | limits))


@pytest.fixture
async def stack(clock, broker):
    async with leading(clock, broker=broker, settings=one_at_a_time()) as stack:
        yield stack


async def inquire(stack: Stack, key: str, reply_to: str | None = REPLIES) -> None:
    exchange = stack.names.progress_exchange
    await publish_to(stack, exchange, key, reply_to=reply_to, correlation_id="7", persistent=False)


async def ask(stack: Stack, key: str) -> StartProgress | None:
    """Inquire; the start in the answer, None for a key that is not starting."""
    await stack.clock.advance(1)  # the order of the starts is computed at most twice a second
    await inquire(stack, key)
    [stored] = list(stack.broker.queues[REPLIES].ready)
    stack.broker.queues[REPLIES].ready.clear()
    assert (stored.message.correlation_id, stored.message.headers[PROGRESS_HEADER]) == ("7", True)
    return StartProgress.from_json(stored.message.body)


async def starting(stack: Stack, *keys: str) -> list[StartProgress]:
    """The answers about keys that are starting."""
    found = [await ask(stack, key) for key in keys]
    return [start for start in found if start is not None]


async def positions(stack: Stack, *keys: str) -> list[int]:
    return [start.position for start in await starting(stack, *keys)]


async def require(stack: Stack, *keys: str) -> None:
    for key in keys:
        await stack.publish(key, b"request")
        await stack.clock.advance(0.1)


async def becomes_ready(stack: Stack, key: str) -> None:
    await stack.report(key, Event.READY, cold_start=PARTS)
    await stack.clock.advance(0.1)


async def test_keys_learn_their_position_in_the_order_of_arrival(stack):
    await require(stack, "a", "b", "c")
    assert await ask(stack, "a") == StartProgress(0)
    assert await ask(stack, "b") == StartProgress(1, None, "max_concurrent_starts")
    assert await ask(stack, "c") == StartProgress(2, None, "max_concurrent_starts")
    await becomes_ready(stack, "a")
    assert await ask(stack, "a") is None
    assert await positions(stack, "b", "c") == [0, 1]


async def test_expected_time_is_that_of_the_latest_starts(clock, broker):
    async with leading(clock, broker=broker, settings=one_at_a_time(max_concurrent_starts=2)) as stack:
        await require(stack, "first")
        await clock.advance(20)
        await becomes_ready(stack, "first")
        await require(stack, "a", "b", "c", "d", "e")
        starts = await starting(stack, *"abcde")
        assert [start.position for start in starts] == [0, 0, 1, 2, 3]
        assert [start.eta_s for start in starts] == pytest.approx([20, 20, 40, 40, 60], abs=6)
        # Later than the others: when it ends is unknown, and is not said.
        await clock.advance(30)
        assert await ask(stack, "a") == StartProgress(0)


async def test_key_with_urgent_requests_starts_first(clock, broker):
    settings = managed().model_copy(update={"lifecycle": one_at_a_time().lifecycle})
    async with leading(clock, broker=broker, settings=settings) as stack:
        await change(stack, alerts=ALERTS, rest=REST)
        await require(stack, "first", "early", "late")
        await stack.publish("urgent", headers={"level": "alert"})
        await clock.advance(1)
        assert await positions(stack, "urgent", "early", "late") == [1, 2, 3]
        # A key that waits already moves forward with its first urgent request, among equals by its arrival.
        await stack.publish("late", headers={"level": "alert"})
        assert await positions(stack, "urgent", "early", "late") == [2, 3, 1]
        for current, following in [("first", "late"), ("late", "urgent"), ("urgent", "early")]:
            assert (stack.running(current), stack.running(following)) == (1, 0)
            await becomes_ready(stack, current)
            assert stack.running(following) == 1


async def test_key_that_waits_for_a_group_to_end_learns_its_place(clock, broker):
    settings = one_at_a_time(max_groups=1, max_waiting_groups=5)
    async with leading(clock, broker=broker, settings=settings) as stack:
        await require(stack, "a", "b", "c")
        await becomes_ready(stack, "a")
        assert [await ask(stack, key) for key in "abc"] == [
            None, StartProgress(1, None, "max_groups"), StartProgress(2, None, "max_groups"),
        ]  # fmt: skip


@pytest.mark.proves("requests/leader-killed-callers-wait")
@pytest.mark.parametrize("answered", [False, True], ids=["before the answer", "before the acknowledgement"])
async def test_leader_killed_while_it_answers_costs_one_answer(clock, broker, answered):
    async with leading(clock, broker=broker, settings=one_at_a_time()) as first:
        await require(first, "a")
        killed = []

        async def kill(command):
            if command == ("publish", REPLIES, answered) and not killed:
                killed.append(command)
                await first.kill()

        broker.hook = kill
        await inquire(first, "a")
        driver = first.driver
    assert len(killed) == 1
    async with leading(clock, broker=broker, driver=driver, settings=one_at_a_time()) as second:
        broker.queues[REPLIES].ready.clear()
        [start] = await starting(second, "a")
        assert (start.position, broker.bodies(second.names.progress_queue)) == (0, [])


async def test_worker_that_waits_for_executors_says_so(stack):
    await require(stack, "a")
    await stack.report("a", Event.STARTED, waiting_for="executors")
    assert await ask(stack, "a") == StartProgress(0, None, "executors")
    await becomes_ready(stack, "a")
    await stack.report("a", Event.BUSY, in_flight=1, jobs_without_executors=1)
    assert [worker.waiting_for for worker in stack.reports_of()] == ["executors"]
    await stack.report("a", Event.BUSY, in_flight=1, jobs_without_executors=0)
    assert [worker.waiting_for for worker in stack.reports_of()] == [None]


async def test_inquiry_without_permission_to_answer_it_ends_no_term(stack, broker):
    refuse(broker, BrokerAccessError("refused"), ("publish", REPLIES, False), times=1)
    await inquire(stack, "a")
    assert (await ask(stack, "a"), stack.task.done()) == (None, False)


async def test_key_whose_start_failed_is_not_starting(stack):
    stack.driver.fail_next_start(StartFailedError("no such image"))
    await require(stack, "a")
    assert await ask(stack, "a") is None


@pytest.mark.parametrize(
    ("key", "reply_to", "answered"),
    [
        *[(key, REPLIES, [not_starting()]) for key in ("never used", "", "infra=42\x00", "ü" * 127)],
        ("\udcff", REPLIES, []),
        *[("a", reply_to, []) for reply_to in (None, "pool-dl", "pool-progress")],
    ],
)
async def test_any_key_is_answered_at_any_address_but_the_queues_of_the_pool(direct, key, reply_to, answered):
    await inquire(direct, key, reply_to)
    queues = (REPLIES, direct.names.progress_queue, direct.names.dead_letter_queue)
    assert [direct.broker.bodies(queue) for queue in queues] == [answered, [], []]
    assert not direct.task.done()
