"""Requests of a group that cannot start are answered: a real leader in memory, in virtual time."""

import asyncio
import json

import pytest
import replies
from broker_steps import hold, refuse
from managed_pool import send

from osrdyne.config.models import LifecycleSettings
from osrdyne.errors import BrokerAccessError, QueueFullError, StartFailedError
from osrdyne.protocol.activity import Event
from osrdyne.protocol.names import Key
from osrdyne.protocol.statuses import decode_text
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.drivers import FakeDriver
from osrdyne.testing.fakes.broker import FakeBroker, Stored
from osrdyne.testing.fakes.stack import POOL, Stack, leading, settings_for

A = Key("a")
REPLIES = "replies"
PATIENCE = 60.0


def broken_driver(clock: VirtualClock, *, starts: int = 1, log_lines: tuple[str, ...] = ("pull denied",)) -> FakeDriver:
    driver = FakeDriver(clock, pool=POOL)
    for _ in range(starts):
        driver.fail_next_start(StartFailedError("no such image", log_lines=log_lines))
    return driver


def answers(broker: FakeBroker) -> list[Stored]:
    return broker.queues[REPLIES].ready


def statuses(broker: FakeBroker) -> list[str | None]:
    return [decode_text(stored.message.headers.get("x-status")) for stored in answers(broker)]


@pytest.fixture
async def stack(clock, broker):
    """A leader whose first start fails."""
    async with leading(clock, broker=broker, driver=broken_driver(clock)) as stack:
        yield stack


async def ask(stack: Stack, key: str = "a") -> None:
    await send(stack, key, reply_to=REPLIES, correlation_id="c")


@pytest.mark.proves("reference-defects/12-failed-start-blocked")
async def test_requests_are_answered_with_the_last_words_until_the_back_off_is_over(stack):
    await ask(stack)
    await stack.clock.advance(5.0)
    await ask(stack)
    assert (statuses(stack.broker), stack.waiting("a"), stack.driver.count("start")) == (["start-failed"] * 2, [], 1)
    first, second = (answer.message for answer in answers(stack.broker))
    error = json.loads(first.body)["error"]
    assert (first.correlation_id, error["code"], error["log_lines"]) == ("c", "start-failed", ["pull denied"])
    retry_after = second.headers["x-retry-after"]
    assert isinstance(retry_after, float)
    assert 3.0 <= retry_after <= 7.0
    await stack.clock.advance(15.0)
    await ask(stack)
    assert (len(answers(stack.broker)), stack.running("a"), len(stack.waiting("a"))) == (2, 1, 1)


async def test_group_that_fails_again_answers_the_request_it_put_back(clock, broker):
    async with leading(clock, broker=broker, driver=broken_driver(clock, starts=2)) as stack:
        await ask(stack)
        await clock.advance(20.0)
        await ask(stack)
        await clock.advance(2.0)
        assert (statuses(broker), stack.driver.count("start")) == (["start-failed"] * 2, 2)


async def test_failed_group_without_requests_is_not_started_again_and_ends(stack, clock):
    await ask(stack)
    await clock.advance(1_900.0)
    assert stack.driver.count("start") == 1
    assert (stack.has_queue("a"), stack.known_workers(), stack.groups()) == (False, [], [])


async def test_answer_under_way_when_the_group_recovers_is_finished(stack, broker):
    """Answered and then served as well, one request would have two different outcomes."""
    allowed = hold(broker, ("publish", REPLIES, True))
    await ask(stack)
    stack.pin(A)  # pinned, it starts again by itself
    await stack.clock.advance(12.0)
    assert stack.running("a") == 1
    allowed.set()
    await stack.clock.advance(5.0)
    assert (statuses(broker), stack.waiting("a")) == (["start-failed"], [])


@pytest.mark.parametrize("error", [QueueFullError("nack"), BrokerAccessError("refused")], ids=["full", "no permission"])
@pytest.mark.proves("requests/reply-queue-full")
async def test_answers_of_a_failed_group_wait_and_hold_up_nothing(stack, clock, broker, error):
    """Neither other callers nor the next worker; no delivery of their requests is counted meanwhile."""
    is_refused = True
    refuse(broker, error, ("publish", "full", False), when=lambda: is_refused)
    broker.declare_queue("full", {})
    for number in range(3):
        await stack.publish("a", reply_to="full", correlation_id=str(number))
    await ask(stack)
    queue = broker.look_up("pool-req-a")
    assert (statuses(broker), len(queue.ready), queue.messages) == (["start-failed"], 0, 3)
    await clock.advance(20.0)
    await ask(stack)
    await clock.advance(60.0)
    assert (stack.running("a"), len(queue.ready), broker.bodies("full")) == (1, 1, [])
    is_refused = False
    await clock.advance(15.0)
    assert sorted(replies.answers(broker, "full")) == [(str(number), "start-failed") for number in range(3)]
    assert (queue.messages, [one.returns for one in queue.ready]) == (1, [0])


async def test_deleted_queue_ends_no_term(stack, clock, broker):
    """defects: one-failure-for-all."""
    await ask(stack)
    broker.delete_queue("pool-req-a")
    await clock.advance(10.0)
    assert not stack.task.done()


async def test_endless_last_words_are_cut(clock, broker):
    """They travel in a header, which must fit into one frame."""
    async with leading(clock, broker=broker, driver=broken_driver(clock, log_lines=("\ud800" * 1_000_000,))) as stack:
        await ask(stack)
        (answer,) = answers(broker)
        words = str(answer.message.headers["x-status-detail"]).encode()
        assert max(len(words), len(answer.message.body)) < 10_000


async def test_too_many_failed_groups_take_turns(clock, broker, monkeypatch):
    monkeypatch.setattr("osrdyne.processors.failures.start_failures.MAX_ATTACHED", 2)
    async with leading(clock, broker=broker, driver=broken_driver(clock, starts=100)) as stack:
        for number in range(7):
            await stack.publish(str(number), reply_to=REPLIES, correlation_id=str(number))
        await clock.advance(60.0)
        assert set(statuses(broker)) == {"start-failed"}
        assert {answer.message.correlation_id for answer in answers(broker)} == {str(number) for number in range(7)}


async def test_thousand_failed_groups_do_not_take_all_channels(clock, broker):
    async with leading(clock, broker=broker, driver=broken_driver(clock, starts=1_000)) as stack:
        for number in range(1_000):
            stack.require(Key(str(number)))
        await clock.settle()
        assert len([channel for channel in stack.connections[0].channels if not channel.is_closed]) < 600


REFUSAL = {"code": 404, "error_code": "no_text", "message": "There is no text for a.", "details": {"folder": "/a"}}


async def refuse_key(stack: Stack, key: str = "a", **refusal: object) -> None:
    """The worker of the key reports that its `on_start` has raised a `RequestError`."""
    await stack.report(key, Event.STARTED)
    await stack.report(key, Event.FAILED, reason="There is no text.", refusal={**REFUSAL, **refusal})


@pytest.mark.proves("workers/key-refused-start")
async def test_key_that_its_application_refuses_is_answered_likewise(direct, clock, broker):
    await ask(direct)
    await refuse_key(direct)
    await clock.advance(1.0)
    (answer,) = answers(broker)
    assert (statuses(broker), answer.message.headers["x-code"]) == (["error"], 404)
    error = {"code": "no_text", "message": "There is no text for a.", "path": "", "folder": "/a"}
    assert json.loads(answer.message.body)["error"] == error
    assert direct.waiting("a") == []


@pytest.mark.parametrize(("code", "starts"), [(404, [1, 2]), (410, [1, 2]), (503, [2, 2])], ids=str)
async def test_refused_key_starts_no_worker(direct, clock, code, starts):
    found = []
    await ask(direct)
    await refuse_key(direct, code=code)
    for seconds in (30.0, 40.0):
        await clock.advance(seconds)
        await ask(direct)
        found.append(direct.driver.count("start"))
    assert found == starts


async def test_end_of_the_group_does_not_forget_the_refusal(clock, broker):
    """Otherwise each request for such a key would start a worker once its group has ended."""
    lifecycle = LifecycleSettings(unbind_delay=1.0, stop_delay=1.0, settle_delay=1.0, refused_key_time=3600.0)
    async with leading(clock, broker=broker, settings=settings_for(lifecycle)) as stack:
        await ask(stack)
        await refuse_key(stack)
        await clock.advance(60.0)
        assert (stack.groups(), stack.has_queue("a")) == ([], False)
        await ask(stack)
        await clock.advance(5.0)
        assert (statuses(broker), stack.driver.count("start")) == (["error"] * 2, 1)
        await clock.advance(3600.0)
        await ask(stack)
        assert stack.driver.count("start") == 2


@pytest.mark.parametrize("late", [False, True], ids=["report-first", "end-first"])
async def test_platform_that_restarts_workers_is_stopped(direct, clock, broker, late):
    """Kubernetes starts a worker that ends again. A report may also arrive after the end of its worker is known."""
    await ask(direct)
    (worker,) = direct.driver.workers_of(A)
    if late:
        direct.driver.exit_instance(worker.instance.instance_id, 1)
        await clock.settle()
    await direct.report("a", Event.FAILED, str(worker.instance.worker_id), refusal=REFUSAL)
    await clock.advance(5.0)
    assert (statuses(broker), direct.driver.workers_of(A)) == (["error"], [])


@pytest.mark.parametrize("refusal", [{}, "404", {**REFUSAL, "code": 200}, {**REFUSAL, "code": "404"}], ids=str)
async def test_malformed_refusal_is_a_failed_start(direct, clock, broker, refusal):
    await ask(direct)
    for _ in range(direct.settings.lifecycle.start_attempts):
        (worker,) = direct.driver.workers_of(A)
        await direct.report("a", Event.FAILED, str(worker.instance.worker_id), refusal=refusal)
        direct.driver.exit_instance(worker.instance.instance_id, 1)
        await clock.advance(5.0)
    assert statuses(broker) == ["start-failed"]


@pytest.mark.proves("workers/key-exists-check")
async def test_key_that_does_not_exist_starts_no_worker(clock, broker, tmp_path):
    (tmp_path / "b").mkdir()
    settings = settings_for()
    worker = settings.worker.model_copy(update={"key_exists": f"{tmp_path}/{{key}}"})
    async with leading(clock, broker=broker, settings=settings.model_copy(update={"worker": worker})) as stack:
        for key in ("a", "b"):
            await stack.publish(key, reply_to=REPLIES)
        async with asyncio.timeout(PATIENCE):
            while not (answers(broker) and stack.running("b")):
                await asyncio.sleep(0.01)  # the check is in a thread
                await clock.settle()
        (answer,) = answers(broker)
        assert (statuses(broker), answer.message.headers["x-code"]) == (["error"], 404)
        assert (stack.driver.count("start", A), stack.driver.count("start", Key("b"))) == (0, 1)
