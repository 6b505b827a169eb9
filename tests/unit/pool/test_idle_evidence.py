"""Evidence of idleness: queue depths no older than asked for, one listing for all, and the reaper that needs them.

A group ends on evidence, never on the clock alone (lifecycle: idle-needs-a-fresh-total, total-for-hidden-messages).
"""

import asyncio

import pytest

from osrdyne.broker.management.listings import MessageTotal
from osrdyne.broker.management.models import TOTALS_MAX_AGE
from osrdyne.config.models import LifecycleSettings
from osrdyne.errors import BrokerUnavailableError
from osrdyne.pool.groups.idle import IdleReaper
from osrdyne.pool.queues.depths import QueueDepths
from osrdyne.pool.state.groups.tracker import PoolStateTracker
from osrdyne.pool.state.groups.transitions import Delays, GroupStatus
from osrdyne.pool.state.observed import Binding, QueueStatuses, WorkerStatuses
from osrdyne.protocol.names import Key
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.context import make_context

A, B = Key("a"), Key("b")


class Listing:
    """A listing under the control of the test, from samples as old as samples can be."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.messages: dict[Key, int] = {}
        self.asked_at: list[float] = []
        self.failures = 0
        self.allowed = asyncio.Event()
        self.allowed.set()

    async def list_message_totals(self) -> dict[Key, MessageTotal]:
        now = self.clock.monotonic()
        self.asked_at.append(now)
        if self.failures:
            self.failures -= 1
            raise BrokerUnavailableError("down")
        answer = {key: MessageTotal(count, now - TOTALS_MAX_AGE) for key, count in self.messages.items()}
        await self.allowed.wait()
        return answer


@pytest.fixture
def clock():
    return VirtualClock(monotonic=100.0)


@pytest.fixture
def listing(clock):
    return Listing(clock)


@pytest.fixture
async def totals(listing, clock):
    totals = QueueDepths(make_context(clock=clock), listing)
    running = asyncio.create_task(totals.run())
    yield totals
    running.cancel()
    await asyncio.wait({running})


async def test_total_is_sampled_after_the_moment_that_was_asked_for(totals, listing, clock):
    listing.messages = {A: 0}
    assert totals.messages(A, after=100.0) is None
    await clock.advance(TOTALS_MAX_AGE - 0.1)
    assert listing.asked_at == []
    await clock.advance(2.0)
    assert (totals.messages(A, after=100.0), len(listing.asked_at)) == (0, 1)
    assert totals.messages(A, after=clock.monotonic()) is None


@pytest.mark.proves("reference-defects/14-foreign-queue-broke")
async def test_all_who_wait_share_a_listing_and_are_notified(totals, listing, clock):
    listing.messages = {A: 0, B: 3}
    changed = totals.feed.subscribe()
    totals.messages(A, after=100.0)
    totals.messages(B, after=100.5)
    await clock.advance(TOTALS_MAX_AGE + 2.0)
    assert (sorted(changed.take()), len(listing.asked_at)) == ([A, B], 1)
    assert (totals.messages(A, after=100.0), totals.messages(B, after=100.5)) == (0, 3)


async def test_queue_that_is_not_listed_is_asked_for_no_more_often_than_callers_ask(totals, listing, clock):
    totals.messages(A, after=100.0)
    await clock.advance(300.0)
    assert (totals.messages(A, after=100.0), len(listing.asked_at)) == (None, 1)
    await clock.advance(300.0)
    assert len(listing.asked_at) == 2


@pytest.mark.proves("broker/management-api-fails")
async def test_listing_that_fails_is_repeated(totals, listing, clock):
    await clock.advance(1.0)
    assert clock.pending == []
    listing.messages, listing.failures = {A: 0}, 3
    totals.messages(A, after=80.0)
    await clock.advance(30.0)
    assert (totals.messages(A, after=80.0), len(listing.asked_at)) == (0, 4)


SETTLE = 10.0
UNBIND, STOP = 100.0, 50.0


class Setting:
    """A judge with its inputs."""

    def __init__(self) -> None:
        self.clock = VirtualClock(monotonic=0.0)
        self.totals = Listing(self.clock)
        self.totals.messages = {A: 0}
        self.tracker = PoolStateTracker(term=1, delays=Delays(UNBIND, STOP), clock=self.clock)
        self.queue_status = QueueStatuses()
        context = make_context(clock=self.clock, lifecycle=LifecycleSettings(settle_delay=SETTLE))
        depths = QueueDepths(context, self.totals)
        self.reaper = IdleReaper(
            context, tracker=self.tracker, queue_status=self.queue_status, worker_status=WorkerStatuses(), depths=depths
        )
        self.tasks = [asyncio.create_task(loop.run()) for loop in (self.reaper, self.tracker, depths)]

    async def idle_group(self) -> None:
        """A group that has been unbound for the whole of its `stop_delay` but one second."""
        self.tracker.require_worker_group(A)
        await self.clock.advance(UNBIND)
        self.unbind()
        await self.clock.advance(STOP - 1.0)

    def unbind(self) -> None:
        self.queue_status.update(A, exists=True, binding=Binding.UNBOUND, unbound_at=self.clock.monotonic())

    def retire(self) -> None:
        """The group is used, and is to end."""
        self.tracker.require_worker_group(A)
        self.tracker.retire(A)

    async def status_after(self, seconds: float) -> GroupStatus | None:
        await self.clock.advance(seconds)
        return self.tracker.status(A)


@pytest.fixture
async def setting():
    made = Setting()
    yield made
    for task in made.tasks:
        task.cancel()
    await asyncio.wait(made.tasks)


async def test_nothing_is_asked_before_the_unbind_of_this_term(setting):
    """lifecycle: listed-bindings-are-unknown: a listing without the binding does not replace an unbind-ok."""
    setting.queue_status.update(A, exists=True)
    setting.tracker.adopt(A, GroupStatus.UNBOUND)
    assert await setting.status_after(STOP + 500.0) is GroupStatus.UNBOUND
    assert setting.totals.asked_at == []


async def test_sample_is_taken_after_settling_and_the_age_of_a_listing(setting):
    """A `stop_delay` shorter than that does not matter."""
    setting.queue_status.update(A, exists=True)
    setting.retire()
    await setting.clock.advance(7.0)
    setting.unbind()
    assert await setting.status_after(500.0) is None
    [asked_at] = setting.totals.asked_at
    assert asked_at >= 7.0 + SETTLE + TOTALS_MAX_AGE


@pytest.mark.proves("races/reports-activity-lost-late")
async def test_group_with_messages_is_active_again(setting):
    """[stopblind_p4]: a busy worker whose reports were lost is not stopped; unacknowledged messages count."""
    setting.totals.messages = {A: 1}
    await setting.idle_group()
    assert (setting.tracker.status(A), setting.totals.asked_at) == (GroupStatus.UNBOUND, [])
    assert await setting.status_after(3.0) is GroupStatus.ACTIVE


async def test_queue_that_does_not_run_is_not_evidence_and_is_asked_again(setting):
    setting.totals.messages = {}
    await setting.idle_group()
    assert await setting.status_after(60.0) is GroupStatus.UNBOUND
    assert 3 <= len(setting.totals.asked_at) <= 8
    setting.totals.messages = {A: 0}
    assert await setting.status_after(12.0) is None


async def test_group_without_queue_ends_without_a_listing(setting):
    setting.retire()
    assert await setting.status_after(5.0) is None
    assert setting.totals.asked_at == []


@pytest.mark.parametrize("unbound_again", [False, True])
async def test_sample_from_before_another_use_is_not_evidence(setting, unbound_again):
    """[ev4_mgmt]: the group was used, and perhaps unbound again, while a slow listing was under way."""
    setting.totals.allowed.clear()
    await setting.idle_group()
    await setting.clock.advance(3.0)
    setting.tracker.require_worker_group(A)
    if unbound_again:
        setting.tracker.retire(A)
        setting.unbind()
        await setting.clock.settle()
    setting.totals.messages = {A: 1}
    setting.totals.allowed.set()
    await setting.clock.settle()
    assert setting.tracker.status(A) is (GroupStatus.UNBOUND if unbound_again else GroupStatus.ACTIVE)
    assert await setting.status_after(60.0) is GroupStatus.ACTIVE


async def test_group_due_while_another_waits_is_judged_in_its_time(setting):
    setting.totals.messages = {A: 0, B: 0}
    setting.queue_status.update(B, exists=True)
    setting.tracker.adopt(B, GroupStatus.UNBOUND)
    await setting.idle_group()
    assert await setting.status_after(15.0) is None
    assert setting.tracker.status(B) is GroupStatus.UNBOUND
