"""These tests can fail: with one decision replaced by a broken one, the loops lose requests or leave something.

Each variant is named as in `tests/model/variants.toml`, where the model finds the same. `given` takes away the other
net where two protect a request (lifecycle: settle), in both runs of a history; `breaks` is the broken decision, in one.
"""

import asyncio
import math
import tomllib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from lifecycle_world import KEY, NAMES, QUEUE, REPLIES, Fault, World

from osrdyne.amqp import Channel, Delivery, Message, QueueInfo
from osrdyne.broker.management.listings import MessageTotal
from osrdyne.broker.queues.safe_delete import DeleteOutcome, judge_look_up
from osrdyne.errors import DriverError, StartFailedError
from osrdyne.pool.queues import plan as queue_plan
from osrdyne.pool.queues.plan import QueueStep
from osrdyne.pool.state.groups.transitions import GroupStatus
from osrdyne.pool.state.observed import Binding, ObservedQueue, QueueStatuses
from osrdyne.pool.workers import plan as worker_plan
from osrdyne.pool.workers.plan import GroupAction, Start
from osrdyne.processors.failures.start_failures import StartFailureResponder
from osrdyne.processors.requests.forwarding import Orphan
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.broker import Command


@dataclass(frozen=True, slots=True)
class Made:
    """A broken decision that is made for one world."""

    make: Callable[[World], Any]


Patch = tuple[str, Any]
"""The target, and what takes its place."""
History = Callable[[World], Awaitable[None]]
Deletion = Callable[[], Awaitable[int]]
MODEL = Path(__file__).parents[2] / "model" / "variants.toml"


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    history: History
    breaks: Sequence[Patch]
    fault: Fault
    given: Sequence[Patch] = ()


# --- broken decisions


async def nothing(*_: object) -> None:
    """A step that is left out."""


def left_out(target: str) -> Patch:
    return target, nothing


def unsettled_plan(*facts: Any, settle_delay: float, **known: Any) -> QueueStep:
    return queue_plan.plan_queue(*facts, settle_delay=0.0, **known)


def unsettled_evidence(*_: object, settle_delay: float) -> float:
    """Any sample will do."""
    return -math.inf


def believed(queue: ObservedQueue) -> ObservedQueue:
    """A binding that was not seen in this term counts as unbound."""
    unseen = queue.exists and queue.binding is Binding.UNKNOWN
    return replace(queue, binding=Binding.UNBOUND, unbound_at=0.0) if unseen else queue


def believing_plan(desired: Any, queue: ObservedQueue, *rest: Any, **times: Any) -> QueueStep:
    return queue_plan.plan_queue(desired, believed(queue), *rest, **times)


def believing_evidence(queue: ObservedQueue, *_: object, settle_delay: float) -> float | None:
    return queue_plan.stop_evidence_after(believed(queue), settle_delay=settle_delay)


def hasty_plan(*facts: Any, **times: Any) -> QueueStep:
    """Binds although a stop is under way."""
    step = queue_plan.plan_queue(*facts, **times)
    return QueueStep.BIND if step is QueueStep.WAIT_FOR_STOP else step


def plan_once(_: World) -> Callable[..., list[GroupAction]]:
    """Remembers that it has started a worker, instead of looking whether there is one."""
    started: list[GroupAction] = []

    def plan(*facts: Any, **limits: Any) -> list[GroupAction]:
        planned = worker_plan.plan_group(*facts, **limits)
        actions = [action for action in planned if not (isinstance(action, Start) and started)]
        started.extend(action for action in actions if isinstance(action, Start))
        return actions

    return plan


def plan_known_only(desired: Any, facts: Any, **limits: Any) -> list[GroupAction]:
    """Stops workers only of groups that it knows."""
    is_unknown = desired is None and not facts.queue_exists
    return [] if is_unknown else worker_plan.plan_group(desired, facts, **limits)


async def everything_is_empty(listing: Any) -> dict[Any, MessageTotal]:
    """The workers of a group are stopped on the timer alone."""
    return {queue.key: MessageTotal(0, math.inf) for queue in await listing.list_request_queues()}


def blind_judge(self: Any) -> None:
    """The workers of every group whose time is over are stopped."""
    for key in self._tracker.stop_due_keys():
        self._tracker.end(key)


def no_last_total(*facts: Any, messages: object, **known: Any) -> QueueStep:
    """The probe alone decides about a queue."""
    return queue_plan.plan_queue(*facts, messages=0, **known)


def busy_not_full(info: QueueInfo) -> DeleteOutcome | None:
    """Requests in the queue of an ended group only delay its deletion."""
    return DeleteOutcome.IN_USE if judge_look_up(info) else None


def cheaply_by_ready(info: QueueInfo) -> DeleteOutcome | None:
    return DeleteOutcome.NOT_EMPTY if info.ready else None


def probe_by_ready(first: QueueInfo, second: QueueInfo, deliveries: Any) -> DeleteOutcome | None:
    return DeleteOutcome.NOT_EMPTY if deliveries or second.ready else None


async def passively(channel: Channel, queue: str, *, delete: Deletion, **_: object) -> DeleteOutcome:
    """Believes a passive declare that returns (0, 0)."""
    refusal = judge_look_up(await channel.declare_queue(queue, passive=True))
    if refusal is None:
        await delete()
    return refusal or DeleteOutcome.DELETED


def copy_of(delivery: Delivery) -> Message:
    return delivery.to_message(headers=delivery.headers, expiration=None)


async def to_the_queue(self: Any, orphan: Orphan, *_: object, **__: object) -> None:
    await self._publisher.publish(copy_of(orphan.delivery), exchange="", routing_key=QUEUE, mandatory=True)


async def acknowledged_first(self: Any, orphan: Orphan, *_: object, **__: object) -> None:
    await orphan.delivery.ack()
    copy = copy_of(orphan.delivery)
    await self._publisher.publish(copy, exchange=NAMES.requests_exchange, routing_key=KEY, mandatory=True)


answer = StartFailureResponder._answer
is_failed = StartFailureResponder._is_failed


async def answer_acknowledged_first(self: Any, key: Any, failure: Any, delivery: Delivery, set_aside: Any) -> None:
    await delivery.ack()
    await answer(self, key, failure, delivery, set_aside)


def always_failed(_: World) -> Callable[..., bool]:
    """Once a start has failed for good, the responder goes on consuming the queue."""
    known: list[bool] = []

    def remember(*facts: Any) -> bool:
        known.append(is_failed(*facts))
        return any(known)

    return remember


def one_board(_: World) -> Callable[[], QueueStatuses]:
    """A new term believes what the one before it believed."""
    board = QueueStatuses()
    return lambda: board


def over_another_channel(world: World) -> Callable[..., Awaitable[Any]]:
    """A command that was sent acts, whatever becomes of the token meanwhile."""

    async def do(_: object, command: Callable[[Channel], Awaitable[Any]], **__: object) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def carry_out() -> None:
            result = await command(FakeChannel(world.broker))
            if not answer.done():
                answer.set_result(result)

        world.do(carry_out())
        return await answer

    return do


async def miss_everything(_: object) -> int:
    """A listing at the start of a term that misses a queue."""
    return 0


SAFE_DELETE = "osrdyne.broker.queues.safe_delete."
REQUEST_QUEUES = "osrdyne.broker.queues.request_queues."
RESPONDER = "osrdyne.processors.failures.start_failures.StartFailureResponder."
FORWARD = "osrdyne.processors.requests.forwarder.Forwarder._send"
PLAN_QUEUE = "osrdyne.pool.queues.loop.plan_queue"
PLAN_GROUP = "osrdyne.pool.workers.loop.plan_group"
DELETE = REQUEST_QUEUES + "delete_if_proven_empty"
HOLD: Patch = ("osrdyne.pool.state.groups.tracker.PoolStateTracker.hold", lambda *_: None)
SEEDED_IDLE: Patch = ("osrdyne.pool.queues.resync.seed_status", lambda _: GroupStatus.UNBOUND)
UNSEEDED: Patch = ("osrdyne.pool.queues.resync.Resync.seed", miss_everything)
STOPBLIND: Patch = ("osrdyne.broker.management.listings.RequestQueueListing.list_message_totals", everything_is_empty)
ALL_STOP: Patch = ("osrdyne.pool.groups.idle.IdleReaper.reap", blind_judge)
ONE_BOARD: Patch = ("osrdyne.daemon.wiring.QueueStatuses", Made(one_board))
UNFENCED: Patch = ("osrdyne.broker.leadership.token.TokenChannel.do", Made(over_another_channel))
BY_READY = [(SAFE_DELETE + "judge_look_up", cheaply_by_ready), (SAFE_DELETE + "judge_probe", probe_by_ready)]


def decided_by(plan: object, evidence: object) -> list[Patch]:
    """All that depends on the time of an unbind."""
    stop, delete = "osrdyne.pool.groups.idle.stop_evidence_after", "osrdyne.pool.queues.loop.delete_evidence_after"
    return [(PLAN_QUEUE, plan), (stop, evidence), (delete, evidence)]


# --- histories


def before(name: str, target: str = QUEUE) -> Callable[[Command], bool]:
    return lambda command: command == (name, target, False)


def forward_in(world: World) -> Callable[[Command], bool]:
    """The forward of an orphan: only the leader publishes to a group that is bound."""
    return lambda command: (
        command.name == "publish"
        and not command.done
        and command.target in {QUEUE, NAMES.requests_exchange}
        and world.leader.is_bound(KEY)
    )


async def serve_one(world: World) -> None:
    """A group comes up and serves its first request."""
    await world.lead()
    world.send(b"1")
    await world.clock.advance(5)


def send_at_deletion(world: World) -> None:
    """A client publishes when the deletion has been decided; the request reaches its queue a little later."""

    async def send() -> None:
        world.broker.transit = 0.5
        world.send(b"2")
        await world.pass_on()

    world.once(before("delete"), send)


async def publish_under_way_at_unbind(world: World) -> None:
    await serve_one(world)
    world.broker.transit = 5.0
    world.send(b"2")
    await world.pass_on()
    world.retire()


async def request_after_the_last_check(world: World) -> None:
    await serve_one(world)
    send_at_deletion(world)
    world.retire()


async def forward_held_up_until_the_deletion(world: World) -> None:
    go_on = asyncio.Event()

    async def stop_serving() -> None:
        go_on.set()
        await world.pass_on()

    await world.lead()
    world.once(forward_in(world), go_on.wait)
    world.once(before("delete"), stop_serving)
    world.broker.transit = 0.5
    world.send(b"1")
    await world.clock.advance(5)
    world.retire()
    await world.clock.advance(120)
    go_on.set()


async def leader_lost_while_forwarding(world: World) -> None:
    await world.lead()
    world.once(forward_in(world), world.cut)
    world.send(b"1")
    await world.clock.advance(5)


async def declare_slower_than_the_idle_time(world: World) -> None:
    await world.lead()
    world.once(before("declare"), lambda: world.clock.sleep(25))
    world.send(b"1")
    await world.clock.advance(60)


async def idle_before_it_is_bound_again(world: World) -> None:
    """The next leader finds the group bound, and it goes idle before that has been confirmed."""
    await serve_one(world)
    await world.kill()
    send_at_deletion(world)
    await world.lead()
    await world.clock.advance(60)


async def answer_of_bind_lost(world: World) -> None:
    await serve_one(world)
    world.retire()
    await world.clock.advance(5)
    world.once(lambda command: command == ("bind", QUEUE, True), world.cut)
    world.leader.require(KEY)
    await world.clock.advance(1)
    send_at_deletion(world)
    await world.lead()
    await world.clock.advance(60)


async def worker_busy_beyond_the_idle_times(world: World) -> None:
    world.hold.add(b"1")
    await serve_one(world)
    await world.clock.advance(300)


async def request_while_the_worker_is_stopped(world: World) -> None:
    await serve_one(world)
    world.worker.stubborn = True
    world.hold.add(b"2")
    world.retire()
    await world.clock.advance(25)
    world.send(b"2")
    await world.clock.advance(60)


async def worker_dies(world: World) -> None:
    await serve_one(world)
    world.crash()
    await world.clock.advance(5)
    world.send(b"2")


def start_no_worker(world: World) -> None:
    for _ in range(30):
        world.driver.fail_next_start(DriverError("The engine is busy."))


async def no_worker_until_later(world: World) -> None:
    start_no_worker(world)
    await serve_one(world)
    world.retire()
    await world.clock.advance(120)


async def queue_unavailable_at_deletion(world: World) -> None:
    stopped = asyncio.Event()

    def stop_running() -> None:
        stopped.set()
        world.broker.set_running(QUEUE, False)

    start_no_worker(world)
    await serve_one(world)
    world.retire()
    await world.clock.advance(15)
    world.once(before("look_up"), stop_running)
    await world.clock.advance(30)
    assert stopped.is_set(), "the queue was not looked up before its deletion"
    if world.leader.has_queue(KEY):
        world.broker.set_running(QUEUE, True)


async def worker_dies_unnoticed(world: World) -> None:
    """Its request stays with a connection that the broker has not given up yet."""
    world.hold.add(b"1")
    await serve_one(world)
    world.crash(unnoticed=True)
    await world.clock.advance(5)
    world.retire()
    await world.clock.advance(120)


async def dead_letter_without_a_taker(world: World) -> None:
    """A request expires, and stays in its queue for as long as dead letters are not taken."""
    start_no_worker(world)
    await serve_one(world)
    world.broker.retains_dead_letters = True
    world.broker.expire(QUEUE)
    world.retire()
    await world.clock.advance(120)


async def found_without_a_worker(world: World) -> None:
    await serve_one(world)
    await world.kill()
    world.crash()
    await world.clock.settle()
    world.driver.backend.workers.clear()
    world.send(b"2")
    await world.clock.settle()
    await world.lead()


async def worker_of_an_unknown_group(world: World) -> None:
    await serve_one(world)
    await world.kill()
    world.broker.delete_queue(QUEUE)
    await world.lead()


async def deletion_sent_before_the_token_moved(world: World) -> None:
    arrived, thaw = asyncio.Event(), asyncio.Event()

    async def freeze() -> None:
        arrived.set()
        await thaw.wait()

    await serve_one(world)
    world.once(before("delete"), freeze)
    world.retire()
    await world.clock.advance(60)
    assert arrived.is_set()
    world.cut()
    await world.clock.settle()
    await world.lead()
    world.hold.add(b"2")
    world.send(b"2")
    await world.clock.advance(5)
    thaw.set()
    await world.clock.advance(5)
    world.crash()


async def leader_lost_while_answering(world: World) -> None:
    await world.lead()
    world.driver.fail_next_start(StartFailedError("There is no such image."))
    world.once(before("publish", REPLIES), world.cut)
    world.send(b"1")
    await world.clock.advance(5)


async def group_ends_after_its_start_failed(world: World) -> None:
    world.driver.fail_next_start(StartFailedError("There is no such image."))
    await serve_one(world)
    world.retire()


LOST, NO_OUTCOME, BUSY_STOPPED, WRONG_END = Fault
VARIANTS = [
    Variant("nosettle", publish_under_way_at_unbind, decided_by(unsettled_plan, unsettled_evidence), LOST),
    Variant("delbound", request_after_the_last_check, [left_out(REQUEST_QUEUES + "RequestQueueCommands.unbind")], LOST),
    Variant("fwd", forward_held_up_until_the_deletion, [HOLD, (FORWARD, to_the_queue)], LOST),
    Variant("ackfirst", leader_lost_while_forwarding, [(FORWARD, acknowledged_first)], LOST),
    Variant("nopin", declare_slower_than_the_idle_time, [HOLD], NO_OUTCOME),
    Variant(
        "assumeunb", idle_before_it_is_bound_again, decided_by(believing_plan, believing_evidence), LOST, [SEEDED_IDLE]
    ),
    Variant("keepstate", answer_of_bind_lost, [ONE_BOARD], LOST, [SEEDED_IDLE]),
    Variant("stopblind", worker_busy_beyond_the_idle_times, [STOPBLIND], BUSY_STOPPED),
    Variant("bindrace", request_while_the_worker_is_stopped, [(PLAN_QUEUE, hasty_plan)], BUSY_STOPPED),
    Variant("edge", worker_dies, [(PLAN_GROUP, Made(plan_once))], NO_OUTCOME),
    Variant(
        "noreact", no_worker_until_later, [(SAFE_DELETE + "judge_look_up", busy_not_full)], NO_OUTCOME, [STOPBLIND]
    ),
    Variant("ev1_ready", worker_dies_unnoticed, BY_READY, LOST, [STOPBLIND]),
    Variant("ev2_passive", queue_unavailable_at_deletion, [(DELETE, passively)], LOST, [STOPBLIND]),
    Variant("retain", dead_letter_without_a_taker, [(PLAN_QUEUE, no_last_total)], LOST, [ALL_STOP]),
    Variant(
        "misslist",
        found_without_a_worker,
        [left_out("osrdyne.pool.queues.resync.Resync.compare")],
        NO_OUTCOME,
        [UNSEEDED],
    ),
    Variant("listonly", worker_of_an_unknown_group, [(PLAN_GROUP, plan_known_only)], WRONG_END),
    Variant("unfenced", deletion_sent_before_the_token_moved, [UNFENCED], LOST),
    Variant(
        "startfail_ackfirst", leader_lost_while_answering, [(RESPONDER + "_answer", answer_acknowledged_first)], LOST
    ),
    Variant(
        "startfail_keep",
        group_ends_after_its_start_failed,
        [(RESPONDER + "_is_failed", Made(always_failed))],
        WRONG_END,
    ),
]
BY_NAME = pytest.mark.parametrize("variant", VARIANTS, ids=[variant.name for variant in VARIANTS])


@pytest.fixture
async def world():
    world = World()
    yield world
    await world.close()


def replace_decisions(world: World, patches: Sequence[Patch], patch: pytest.MonkeyPatch) -> None:
    for target, broken in [(target, one.make(world) if isinstance(one, Made) else one) for target, one in patches]:
        patch.setattr(target, broken)


async def faults_of(world: World, history: History, patches: Sequence[Patch]) -> set[Fault]:
    """Run a history with these decisions replaced; return what is wrong in the end."""
    with pytest.MonkeyPatch.context() as patch:
        replace_decisions(world, patches, patch)
        await history(world)
        await world.rest()
    return world.faults()


@pytest.mark.proves("broker/dead-letters-consumer")
@BY_NAME
async def test_history_with_a_broken_decision_loses_a_request(world, variant):
    assert variant.fault in await faults_of(world, variant.history, [*variant.given, *variant.breaks])


@pytest.mark.proves("races/request-arrives-between-last")
@BY_NAME
async def test_same_history_with_the_real_decision_loses_no_request(world, variant):
    assert await faults_of(world, variant.history, variant.given) == set()
    assert world.confirmed


def test_variants_are_named_as_in_the_model():
    rows = tomllib.loads(MODEL.read_text("utf-8"))["run"]
    assert {variant.name for variant in VARIANTS} <= {row["name"] for row in rows}
