"""Created queues expire, are renewed and removed: a real leader in virtual time, killed at each step of a removal."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from broker_steps import kill_within, refuse
from inspectors import inspector_of
from managed_pool import managed
from replies import REPLIES, answers, broker_with_replies

from osrdyne.daemon.inspector import MAX_EXAMINED, DaemonInspector
from osrdyne.errors import BrokerAccessError, NoSuchQueueError, PoolConflictError, QueueFullError
from osrdyne.ingress.documents.problems import InvalidDocumentError
from osrdyne.ingress.policies.lifetimes import CreatedQueue
from osrdyne.ingress.policies.manifest import load_proposal
from osrdyne.ingress.policies.policy import Discoverability
from osrdyne.ingress.policies.table import shown
from osrdyne.pool.queues.lifetimes import QueueLifetimes
from osrdyne.processors.failures.removals import PREFETCH
from osrdyne.protocol.names import Key
from osrdyne.testing.fakes.broker import Command, FakeBroker
from osrdyne.testing.fakes.stack import POOL, Stack, leading

A = Key("a")
DAY = 86400.0
LIFETIME = 60.0
WAITING = [str(number) for number in range(5)]
QUEUES = f"osrdyne-{POOL}-queues"


@pytest.fixture
def broker(clock):
    return broker_with_replies(clock)


@pytest.fixture
def settings():
    return managed()


def lifetimes(stack: Stack) -> QueueLifetimes:
    return stack.term.routing.lifetimes


async def create(stack: Stack, *, lifetime: float = LIFETIME, **elements: object) -> None:
    """A short lifetime: the workers of these tests never report that they are ready, and would be given up."""
    expires = datetime.fromtimestamp(stack.clock.time() + lifetime, UTC).isoformat()
    proposal = load_proposal(json.dumps({"ExpirationInstant": expires, **elements}))
    await lifetimes(stack).create(A, proposal, author="me")


async def send(stack: Stack, *bodies: str) -> None:
    for body in bodies:
        await stack.publish("a", body.encode(), reply_to=REPLIES, correlation_id=body)
    await stack.clock.settle()


def answered(broker: FakeBroker) -> set[tuple[str | None, str | None]]:
    """A request may be answered twice, always with the same status."""
    return set(answers(broker))


def is_clean(stack: Stack) -> bool:
    """Neither queue, worker nor record is left."""
    left = stack.has_queue("a") or stack.running("a") or stack.broker.parameters.get(QUEUES)
    return not left and stack.created_queues.get(A) is None


GONE = {(body, "gone") for body in WAITING}


@pytest.mark.parametrize("by", ["expiry", "expiry of a pinned one", "deletion"])
@pytest.mark.proves("managed/created-queue-expires-deleted")
async def test_waiting_requests_are_answered_gone_and_nothing_is_left(stack, by):
    await create(stack)
    await send(stack, *WAITING)
    if by == "deletion":
        await lifetimes(stack).remove(A, author="me")
    elif by != "expiry":
        stack.pin(A)
    await stack.clock.advance(60.0 if by == "deletion" else LIFETIME + 60.0)
    assert answered(stack.broker) == GONE
    assert is_clean(stack)


@pytest.mark.parametrize("error", [QueueFullError("nack"), BrokerAccessError("refused")], ids=["full", "no permission"])
@pytest.mark.proves("requests/reply-queue-full")
async def test_removal_waits_for_its_answers_and_later_callers_do_not(stack, error):
    is_refused, broker = True, stack.broker
    refuse(broker, error, ("publish", "full", False), when=lambda: is_refused)
    broker.declare_queue("full", {})
    await create(stack)
    for number in range(PREFETCH + 1):
        await stack.publish("a", reply_to="full", correlation_id=str(number))
    await send(stack, *WAITING)
    await lifetimes(stack).remove(A, author="me")
    await stack.clock.advance(60.0)
    assert (answered(broker), broker.bodies("full"), stack.has_queue("a")) == (GONE, [], True)
    is_refused = False
    await stack.clock.advance(60.0)
    found = answers(broker, "full")
    assert (len(found), {status for _, status in found}, is_clean(stack)) == (PREFETCH + 1, {"gone"}, True)


@pytest.mark.proves("managed/created-queue-expires-deleted")
async def test_requests_that_wait_for_room_are_answered_gone(stack):
    bodies = [str(number) for number in range(40)]
    await create(stack, MaxQueueLength=1, EnqueueTimeout=1)
    await send(stack, *bodies)
    await lifetimes(stack).remove(A, author="me")
    await stack.clock.advance(60.0)
    assert answered(stack.broker) == {(body, "gone") for body in bodies}
    assert is_clean(stack)


@pytest.mark.parametrize("end", ["finishes", "dies"])
async def test_running_request_is_finished_by_its_worker_or_answered_gone(stack, end):
    await create(stack)
    await send(stack, *WAITING)
    running = await stack.take("a")
    await lifetimes(stack).remove(A, author="me")
    await stack.clock.advance(120.0)
    assert (stack.has_queue("a"), answered(stack.broker)) == (True, GONE - {("0", "gone")})
    if end == "finishes":
        await running.ack()
    await running.channel.close()
    await stack.clock.advance(120.0)
    assert answered(stack.broker) == (GONE - {("0", "gone")} if end == "finishes" else GONE)
    assert is_clean(stack)


async def test_new_requests_are_answered_gone_until_the_queue_is_removed(stack, clock):
    await create(stack)
    await send(stack, "0")
    await lifetimes(stack).remove(A, author="me")
    await clock.advance(2.0)
    await send(stack, "1")
    await clock.advance(60.0)
    assert answered(stack.broker) == {("0", "gone"), ("1", "gone")}
    await send(stack, "2")
    await clock.settle()
    assert stack.waiting("a") == [b"2"]


async def test_renewal_moves_the_expiration_and_takes_the_effective_policy(stack, clock):
    await create(stack, MaxMessageSize=10_000, MaxQueueLength=3)
    await clock.advance(LIFETIME - 1.0)
    renewed = await lifetimes(stack).renew(A, None, author="me")
    proposal = {"MaxMessageSize": 10_000, "MaxQueueLength": 3}
    assert (renewed.proposal, renewed.expires_at) == (proposal, clock.time() + DAY)
    returned = stack.created_queues.policy(A)
    assert returned is not None
    await lifetimes(stack).renew(A, load_proposal(json.dumps(shown(returned.policy))), author="me")
    again = stack.created_queues.policy(A)
    assert again is not None
    assert replace(again.policy, origins={}) == replace(returned.policy, origins={})
    with pytest.raises(InvalidDocumentError):
        await lifetimes(stack).renew(A, load_proposal('{"MaxQueueCapacity": 1}'), author="me")
    await clock.advance(DAY - 60.0)
    assert not stack.created_queues.is_ending(A)
    await clock.advance(120.0)
    assert is_clean(stack)


@pytest.mark.proves("managed/clock-leader-jumps-forward")
async def test_wall_clock_that_jumps_forward_removes_no_queue(stack, clock):
    await create(stack)
    await send(stack, "0")
    clock._epoch_offset += 2 * DAY
    await clock.advance(LIFETIME - 1.0)
    assert answers(stack.broker) == []
    await clock.advance(120.0)
    assert is_clean(stack)


async def test_what_cannot_be_created_renewed_or_removed(stack, clock):
    proposal = load_proposal("{}")
    with pytest.raises(NoSuchQueueError):
        await lifetimes(stack).renew(A, None, author="me")
    with pytest.raises(NoSuchQueueError):
        await lifetimes(stack).remove(A, author="me")
    past = datetime.fromtimestamp(clock.time(), UTC).isoformat()
    with pytest.raises(InvalidDocumentError, match="ExpirationInstant"):
        await create(stack, ExpirationInstant=past)
    await create(stack)
    with pytest.raises(PoolConflictError):
        await create(stack)
    await lifetimes(stack).remove(A, author="me")
    with pytest.raises(PoolConflictError):
        await lifetimes(stack).renew(A, proposal, author="me")


@pytest.mark.proves("managed/stored-record-created-queue")
async def test_damaged_record_is_left_out_and_ends_no_term(clock, broker, settings):
    broker.parameters[QUEUES] = [{"key": "a"}, 5, {"key": "b", "state": "alive"}]
    async with leading(clock, broker=broker, settings=settings) as stack:
        await create(stack)
        assert [record.key for record in stack.created_queues.all()] == [A]


# --- the leader is killed at each step

STEPS = [
    ("put_global_parameter", False),
    *((name, done) for name in ("unbind", "consume", "delete") for done in (False, True)),
    ("publish", True),
    ("ack", False),
    ("cancel", True),
]


@asynccontextmanager
async def killed_at(stack: Stack, step: tuple[str, bool]) -> AsyncIterator[None]:
    """The connections of the leader are lost when it reaches this step of the removal."""
    targets = (QUEUES, REPLIES, stack.names.request_queue(A))

    async def kill(command: Command) -> None:
        if not stack.killed and (command.name, command.done) == step and command.target in targets:
            kill_within(stack)
            stack.management.available = False

    stack.broker.hook = kill
    yield
    stack.broker.hook = None
    assert stack.killed, "the removal has no such step"


@pytest.mark.parametrize("step", STEPS, ids=[f"{'after' if done else 'before'} {name}" for name, done in STEPS])
@pytest.mark.proves("managed/leader-dies-created-queue")
async def test_killed_leader_leaves_no_request_unanswered_and_no_queue_half_deleted(
    clock, broker, driver, settings, step
):
    async with leading(clock, broker=broker, driver=driver, settings=settings) as stack:
        await create(stack)
        await send(stack, *WAITING)
        async with killed_at(stack, step):
            await clock.advance(LIFETIME + 60.0)
    async with leading(clock, broker=broker, driver=driver, settings=settings) as successor:
        await clock.advance(LIFETIME + 120.0)
        assert answered(broker) == GONE
        assert is_clean(successor)


@pytest.mark.proves("api/clients-without-token-read")
async def test_page_of_the_registry_examines_a_bounded_number_of_keys(stack, clock):
    """Readers without a token see public queues only, so most of the work for them is in vain."""
    keys = [Key(f"{number:05d}") for number in range(2 * MAX_EXAMINED + 500)]
    inspector = inspector_of(stack, DaemonInspector)
    now = clock.time()
    public = {keys[0], keys[MAX_EXAMINED + 7], keys[-1]}
    stack.created_queues.replace(
        CreatedQueue(key, {"Discoverability": "Public"} if key in public else {}, "me", now, now, now + DAY)
        for key in keys
    )
    examined: list[Key] = []

    def is_public(key, policy):
        examined.append(key)
        return policy is not None and policy.policy.discoverability is Discoverability.PUBLIC

    turns = itertools.count()

    async def take_turns():
        for _ in turns:
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    page = await inspector.queues(after=None, limit=1, is_visible=is_public)
    found = [page.queues]
    while page.following is not None:
        page = await inspector.queues(after=page.following, limit=100, is_visible=is_public)
        found.append(page.queues)
    other.cancel()
    assert [[one.key for one in queues] for queues in found] == [[keys[0]], [], [keys[MAX_EXAMINED + 7]], [keys[-1]]]
    assert examined == keys
    assert next(turns) >= len(keys) / 10 - len(found)  # other tasks run between small steps
