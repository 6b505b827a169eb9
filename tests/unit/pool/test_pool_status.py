"""Restart back-off, the inventory of instances, and the observed status of queues and workers."""

import asyncio
import traceback
from dataclasses import replace

import pytest

from osrdyne.drivers.base import Instance, InstanceId, InstanceState
from osrdyne.errors import BrokerConflictError
from osrdyne.pool.state.observed import (
    Binding,
    ObservedQueue,
    ObservedWorkers,
    QueueStatuses,
    StartFailure,
    WorkerStatuses,
)
from osrdyne.pool.state.workers import restart_backoff
from osrdyne.pool.state.workers.instances import InstanceInventory
from osrdyne.pool.state.workers.restart_backoff import RestartBackoff, RestartBackoffs
from osrdyne.protocol.names import Key, WorkerId

A, B = Key("a"), Key("b")


def ended(
    record: RestartBackoff, *, served: bool = False, lived: float = 1.0, now: float = 0.0, with_others: bool = False
) -> RestartBackoff:
    return restart_backoff.worker_ended(
        record,
        served=served,
        lived=lived,
        reason="exit code 1",
        log_lines=("last",),
        attempts_allowed=2,
        now=now,
        with_others=with_others,
    )


class TestStartRecord:
    def test_ends_with_a_process_of_other_keys_are_no_failed_starts_until_there_are_many(self):
        record = RestartBackoff()
        for _ in range(restart_backoff.FREE_RESTARTS - 1):
            record = ended(record, with_others=True, now=5.0)
            assert (record.failures, record.failure, record.back_off_until) == (0, None, 5.0)
        assert ended(ended(record, with_others=True), with_others=True).failure is not None

    def test_failed_starts_back_off_the_last_attempt_is_final_and_every_further_round_waits_longer(self):
        record = ended(RestartBackoff())
        assert (record.failures, record.failure) == (1, None)
        assert 0.9 <= (record.back_off_until or 0.0) <= 1.1
        record = ended(record)
        assert record.failure is not None
        assert (record.failure.attempts, record.failure.log_lines, record.back_off_until) == (2, ("last",), None)
        assert 9.0 <= record.failure.retry_at <= 11.0
        record = restart_backoff.retry_allowed(record)
        assert (record.failures, record.failure, record.rounds) == (0, None, 1)
        record = ended(ended(record))
        assert record.failure is not None
        assert 18.0 <= record.failure.retry_at <= 22.0

    def test_crash_loop_backs_off_longer_each_time_until_a_long_service(self):
        record, waits = RestartBackoff(), []
        for _ in range(4):
            record = restart_backoff.became_ready(ended(record, served=True))
            waits.append(round(record.back_off_until or 0.0))
        assert waits == [0, 1, 2, 4]
        assert ended(record, served=True, lived=restart_backoff.STABLE_AFTER).crashes == 1

    def test_group_without_history_takes_no_memory(self):
        records = RestartBackoffs()
        records.apply(A, ended)
        records.apply(A, restart_backoff.became_ready)
        records.apply(A, lambda record: replace(record, back_off_until=None))
        assert records._records == {}


def instance(name: str, key: Key = A, state: InstanceState = InstanceState.RUNNING) -> Instance:
    return Instance(InstanceId(name), key, 0, WorkerId(name), state, "s", 0.0, name)


class TestInstanceInventory:
    def test_listing_tells_which_keys_changed_and_which_instances_vanished(self):
        inventory = InstanceInventory()
        assert inventory.apply_listing([instance("1"), instance("2", B)], now=0.0) == ({A, B}, [])
        assert inventory.apply_listing([instance("1"), instance("2", B)], now=1.0) == (set(), [])
        ended = instance("1", state=InstanceState.EXITED)
        assert inventory.apply_listing([ended, instance("2", B)], now=2.0) == ({A}, [])
        assert [entry.seen_at for entry in inventory.of_key(A)] == [0.0]
        changed, vanished = inventory.apply_listing([instance("2", B)], now=3.0)
        assert (changed, [entry.instance for entry in vanished], inventory.of_key(A)) == ({A}, [ended], [])

    def test_listing_is_ignored_for_keys_that_changed_meanwhile(self):
        inventory = InstanceInventory()
        inventory.note(instance("new"), now=0.0)
        assert inventory.apply_listing([instance("old")], now=1.0, ignoring={A}) == (set(), [])
        assert [entry.instance.instance_id for entry in inventory.of_key(A)] == ["new"]

    def test_only_our_own_starts_count_as_loading(self):
        inventory = InstanceInventory()
        inventory.apply_listing([instance("adopted")], now=0.0)
        inventory.note(instance("ours", B), now=0.0, started_here=True)
        assert inventory.loading() == 1
        inventory.mark_served(InstanceId("ours"))
        assert inventory.loading() == 0


class TestQueueStatuses:
    async def test_new_waiters_do_not_overtake_earlier_ones(self):
        status, gone = QueueStatuses(), list[int]()

        async def go(number):
            await status.wait_bound(A)
            gone.append(number)

        async with asyncio.TaskGroup() as group:
            for number in (1, 2):
                group.create_task(go(number))
            status.update(A, exists=True)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            status.update(A, binding=Binding.BOUND)
            assert gone == []
            group.create_task(go(3))
        assert gone == [1, 2, 3]
        await status.wait_bound(A)  # waits no longer

    async def test_cancelled_waiter_cancels_no_other(self):
        status = QueueStatuses()
        first, second = (asyncio.create_task(status.wait_bound(A)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        status.update(A, exists=True, binding=Binding.BOUND)
        await second
        assert first.cancelled()

    async def test_fault_is_raised_to_present_and_later_waiters_and_does_not_grow(self):
        """One error object is raised to every orphan of the key: its traceback must not collect their frames."""
        status = QueueStatuses()
        waiting = asyncio.create_task(status.wait_bound(A))
        await asyncio.sleep(0)
        status.update(A, fault=BrokerConflictError("The queue exists with other arguments."))
        with pytest.raises(BrokerConflictError):
            await waiting
        for _ in range(1_000):
            with pytest.raises(BrokerConflictError) as raised:
                await status.wait_bound(A)
        assert len(traceback.extract_tb(raised.value.__traceback__)) < 10

    async def test_fault_without_a_waiter_is_not_an_unseen_error(self):
        status, fault = QueueStatuses(), BrokerConflictError("taken")
        waiting = asyncio.create_task(status.wait_bound(A))
        await asyncio.sleep(0)
        waiting.cancel()
        status.update(A, fault=fault)
        await asyncio.sleep(0)
        assert status[A].fault is fault

    async def test_key_without_facts_takes_no_memory(self):
        status = QueueStatuses()
        status.update(A, exists=True, binding=Binding.BOUND, bound_at=1.0, unbound_at=2.0, disposable=(3,))
        status.update(A, exists=False)
        assert (status.keys(), status[A]) == ([], ObservedQueue())
        changes = status.feed.subscribe()
        status.update(A, exists=False)
        assert changes.take() == []


def test_worker_statuses_forget_groups_without_facts():
    status = WorkerStatuses()
    changes = status.feed.subscribe()
    status.set(A, ObservedWorkers(starting=True))
    status.set(A, ObservedWorkers())
    assert (status.keys(), changes.take()) == ([], [A])


@pytest.mark.parametrize(
    ("facts", "is_empty"),
    [
        (ObservedWorkers(instances=(instance("1"),)), False),
        (ObservedWorkers(stopping=True), False),
        (ObservedWorkers(starting=True), False),
        (ObservedWorkers(failure=StartFailure("no", (), 1, 0.0), waiting_for="room"), True),
    ],
    ids=["an instance", "a stop under way", "a start under way", "only a failure"],
)
def test_group_is_empty_without_instance_start_and_stop(facts, *, is_empty):
    """lifecycle: delete-preconditions."""
    assert facts.is_empty is is_empty
