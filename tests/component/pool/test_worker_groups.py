"""The worker groups loop: a real leader on a broker and a driver in memory, in virtual time."""

import asyncio

import pytest
from structlog.testing import capture_logs

from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.config.models import LifecycleSettings, ScalingSettings, Settings
from osrdyne.drivers.base import Exit, InstanceState, WorkerSpec
from osrdyne.errors import DriverUnavailableError, SlotTakenError, StartFailedError
from osrdyne.pool.state.workers.worker_reports import WorkerState
from osrdyne.pool.workers.specs import worker_environment
from osrdyne.protocol.activity import Event
from osrdyne.protocol.control import Generation
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.testing.drivers import FakeDriver, FakeWorker
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import POOL, Stack, leading, settings_for
from osrdyne.testing.keys import ODD_KEYS

A = Key("a")
UNAVAILABLE = DriverUnavailableError("The engine does not answer.")


def with_lifecycle(**changes: object) -> Settings:
    values = {"unbind_delay": 600.0, "stop_delay": 600.0, "settle_delay": 10.0, "start_timeout": 300.0} | changes
    return settings_for(LifecycleSettings.model_validate(values))


def running_worker(driver: FakeDriver, key: Key = A) -> FakeWorker:
    """A worker that was there before this leader."""
    spec = WorkerSpec(worker_environment(settings_for(), key, QueueLayout(PoolNames(POOL))), Generation(1, 1))
    return driver.backend.add(spec, spec_hash="spec", started_at=0.0)


async def ready(stack: Stack, key: str = "a") -> None:
    await stack.report(key, Event.STARTED)
    await stack.report(key, Event.READY)


async def earlier_leader(broker: FakeBroker, driver: FakeDriver, *keys: str) -> None:
    """Leave a bound queue and a loading worker for each key, and no leader."""
    async with leading(broker.clock, broker=broker, driver=driver) as stack:
        await require(stack, *keys)
    driver.calls.clear()


async def consume_by_priority(stack: Stack) -> None:
    """One worker is ready, and has several consumers of its queue: with priorities and a concurrency above 1."""
    serving = FakeChannel(stack.broker)
    for _ in range(3):
        await serving.consume(stack.names.request_queue(A), prefetch=1)
    await stack.report("a", Event.READY)


def end_worker(stack: Stack, code: int, *lines: str) -> None:
    stack.driver.exit_instance(stack.driver.workers_of(A)[0].instance.instance_id, code, lines=lines)


async def require(stack: Stack, *keys: str) -> None:
    for key in keys or ("a",):
        stack.require(Key(key))
    await stack.clock.settle()


class TestStart:
    async def test_worker_starts_only_once_its_queue_exists(self, stack, clock):
        """ARCHITECTURE: a group starts only once its queue exists."""
        released = asyncio.Event()

        async def hold_declare(command):
            if command[:2] == ("declare", "pool-req-a") and not command.done:
                await released.wait()

        stack.broker.hook = hold_declare
        await require(stack)
        assert stack.driver.calls == []
        released.set()
        await clock.settle()
        assert stack.running("a") == 1

    @pytest.mark.parametrize("key", ODD_KEYS.values(), ids=ODD_KEYS)
    async def test_worker_is_given_the_raw_key_and_the_generation(self, stack, key):
        """lifecycle: generations."""
        await require(stack, key)
        (worker,) = stack.driver.workers_of(key)
        assert (worker.spec.environment.key, worker.spec.generation) == (key, stack.generation_of(key))
        assert worker.spec.environment.requests_queue in stack.broker.queues

    @pytest.mark.proves("reference-defects/11-reconnection-restarted-every")
    async def test_worker_found_at_the_start_of_a_term_is_kept(self, clock, broker, driver):
        await earlier_leader(broker, driver, "a")
        async with leading(clock, broker=broker, driver=driver) as stack:
            await stack.publish("a", b"1")
            await clock.advance(100.0)
            assert (stack.running("a"), driver.calls, stack.waiting("a")) == (1, [], [b"1"])

    async def test_slot_taken_by_a_rival_start_is_taken_over(self, stack, clock):
        """lifecycle: unique-instance-names: the start of an earlier leader lands between our listing and our start."""
        stack.driver.hang_starts()
        await require(stack)
        rival = running_worker(stack.driver)
        stack.driver.release_starts()
        await clock.advance(100.0)
        assert [entry.instance for entry in stack.instances_of(A)] == [rival.instance]
        assert stack.driver.count("start") == 1

    async def test_name_taken_by_something_unlisted_is_tried_again_slowly(self, stack):
        for _ in range(1_000):
            stack.driver.fail_next_start(SlotTakenError("A container of that name exists."))
        await require(stack)
        await stack.clock.advance(20.0)
        assert 5 <= stack.driver.count("start") <= 12


class TestEnds:
    @pytest.mark.proves("reference-defects/15-confirms-prefetch-back")
    async def test_worker_that_ends_is_replaced_at_once_if_it_was_ready_and_otherwise_after_a_pause(self, stack, clock):
        """[edge]: remembering "started" would leave the request waiting endlessly."""
        await require(stack)
        await ready(stack)
        before = clock.monotonic()
        end_worker(stack, 137)
        await clock.settle()
        assert (stack.running("a"), stack.driver.count("start"), clock.monotonic()) == (1, 2, before)
        end_worker(stack, 1)
        for seconds, starts in ((0.8, 2), (0.4, 3)):
            await clock.advance(seconds)
            assert stack.driver.count("start") == starts

    async def test_crash_loop_after_ready_backs_off_and_does_not_keep_the_group(self, stack):
        async def crash_whenever_ready(*, seconds):
            for _ in range(seconds):
                if stack.driver.workers_of(A):
                    await ready(stack)
                    end_worker(stack, 1)
                await stack.clock.advance(1.0)

        await require(stack)
        await crash_whenever_ready(seconds=200)
        assert 6 <= stack.driver.count("start") <= 12
        await crash_whenever_ready(seconds=1100)
        assert (stack.status_of(A), stack.has_queue("a")) == (None, False)

    async def test_worker_that_an_earlier_leader_has_stopped_is_not_a_failed_start(self, clock, broker, driver):
        await earlier_leader(broker, driver, "a")
        settings = with_lifecycle(start_attempts=1)
        async with leading(clock, broker=broker, driver=driver, settings=settings) as stack:
            end_worker(stack, 0)
            await clock.settle()
            assert (stack.running("a"), stack.failure_of(A)) == (1, None)

    async def test_last_attempt_that_fails_is_final_and_quotes_its_worker(self, stack, clock):
        await require(stack)
        for _ in range(2):
            assert stack.failure_of(A) is None
            await stack.report("a", Event.FAILED, reason="the bucket is gone")
            end_worker(stack, 3, "no such table")
            await clock.advance(2.0)
        await clock.advance(120.0)
        failure = stack.failure_of(A)
        reason = "the worker ended with exit code 3: the bucket is gone"
        assert (failure.reason, failure.log_lines, stack.driver.count("start")) == (reason, ("no such table",), 2)

    async def test_refused_start_is_final_at_once_unless_the_group_is_pinned(self, stack):
        stack.driver.fail_next_start(StartFailedError("no such image", log_lines=("pull denied",)))
        await require(stack)
        failure = stack.failure_of(A)
        assert (failure.reason, failure.log_lines, failure.attempts) == ("no such image", ("pull denied",), 1)
        await stack.clock.advance(30.0)
        assert stack.running("a") == 0
        stack.pin(A)
        await stack.clock.advance(12.0)
        assert (stack.running("a"), stack.failure_of(A)) == (1, None)

    async def test_instance_that_vanished_without_a_word_counts_as_ended(self, stack):
        await require(stack)
        stack.driver.backend.workers.clear()
        await stack.clock.advance(60.0 + 2.0)  # no event reports it: the slow listing does
        assert (stack.running("a"), stack.driver.count("start")) == (1, 2)


class TestOverdue:
    async def test_worker_that_is_not_ready_in_time_is_stopped_and_counted(self, stack):
        await require(stack)
        stack.pin(A)
        await stack.clock.advance(299.0)
        assert stack.driver.count("stop") == 0
        await stack.clock.advance(3.0)
        assert (stack.driver.count("stop"), stack.driver.count("start")) == (1, 2)
        await stack.clock.advance(302.0)
        assert "start_timeout" in stack.failure_of(A).reason

    async def test_worker_that_consumes_without_reporting_is_left_alone_for_good(self, stack):
        """A worker of another make that only knows part of the protocol."""
        await require(stack)
        stack.pin(A)
        await stack.consume("a")
        for body in (b"1", b"2"):
            await stack.publish("a", body)
        await stack.clock.advance(301.0)
        assert [worker.state for worker in stack.reports_of(A)] == [WorkerState.READY]
        await stack.clock.advance(700.0)
        assert (stack.driver.count("stop"), stack.waiting("a")) == (0, [b"1", b"2"])
        stack.broker.set_running(stack.names.request_queue(A), False)  # a queue without a leader proves nothing
        await stack.clock.advance(310.0)
        assert stack.driver.count("stop") == 0

    @pytest.mark.parametrize("said_ready", [False, True])
    @pytest.mark.proves("workers/worker-sends-reports-counts")
    async def test_worker_counted_as_ready_because_of_a_dead_consumer_is_replaced_if_requests_wait(
        self, stack, said_ready
    ):
        """Of a host that died: RabbitMQ keeps its connection until heartbeats are missed."""
        await require(stack)
        stack.pin(A)
        dead = FakeChannel(stack.broker)
        await dead.consume(stack.names.request_queue(A), prefetch=1)
        await stack.clock.advance(301.0)
        if said_ready:
            await stack.report("a", Event.READY)
        dead.end(None)
        await stack.publish("a", b"1")
        await stack.clock.advance(310.0)
        assert stack.driver.count("stop") == (0 if said_ready else 1)


class TestConsumersOfTwoWorkers:
    """With priorities and a concurrency above 1, a worker has several consumers of a queue."""

    @pytest.fixture
    def settings(self):
        settings = with_lifecycle()
        worker = settings.worker.model_copy(update={"scaling": ScalingSettings(min=2, max=2)})
        return settings.model_copy(update={"worker": worker})

    @pytest.fixture
    async def stack(self, stack):
        await require(stack)
        stack.pin(A)
        return stack

    @pytest.mark.parametrize(("other", "stops"), [("silent", 1), ("consumes", 0), ("not listed", 0), ("dies", 1)])
    @pytest.mark.proves("workers/worker-become-ready-worker")
    async def test_consumers_of_one_worker_do_not_pass_for_another(self, stack, other, stops):
        channel = FakeChannel(stack.broker)
        if other in {"consumes", "dies"}:
            await channel.consume(stack.names.request_queue(A), prefetch=1)
        await consume_by_priority(stack)
        stack.management.available = other != "not listed"
        await stack.clock.advance(320.0)
        if other == "dies":  # it was counted as ready
            assert stack.driver.count("stop") == 0
            channel.end(None)
            for number in range(5):
                await stack.publish("a", str(number).encode())
            await stack.clock.advance(320.0)
        assert stack.driver.count("stop") == stops


class TestStops:
    async def test_stop_that_an_earlier_leader_did_not_finish_is_finished(self, clock, driver):
        """Its key would wait endlessly: no start while the slot is taken, no bind while a stop is in flight."""
        worker = running_worker(driver)
        worker.stubborn = True
        dying = asyncio.create_task(driver.stop(worker.instance.instance_id, grace=1e9))
        await clock.settle()
        assert worker.instance.state is InstanceState.STOPPING
        async with leading(clock, driver=driver) as stack:
            await stack.publish("a", b"1")
            await clock.advance(31.0)
            assert (stack.running("a"), stack.waiting("a")) == (1, [b"1"])
        dying.cancel()

    async def test_driver_that_cannot_stop_is_asked_again_slowly_and_logged_once(self, stack, clock):
        busy = DriverUnavailableError("The engine is busy.")
        for error in [*[UNAVAILABLE] * 20, *[busy] * 20]:
            stack.driver.fail_next_stop(error)
        with capture_logs() as logs:
            running_worker(stack.driver)
            await clock.advance(60.0)
        errors = [entry["error"] for entry in logs if entry["event"].startswith("driver call failed")]
        assert errors == [str(UNAVAILABLE), str(busy)]
        assert (21 <= stack.driver.count("stop") <= 40, stack.running("a")) == (True, 1)
        await clock.advance(600.0)
        assert stack.running("a") == 0

    async def test_stop_is_known_before_it_is_asked_for(self, stack, driver):
        """lifecycle: bind-waits-for-stop: a stop that is decided must be seen, not only one that has begun."""
        seen, stop = [], driver.stop

        async def look_and_stop(instance_id, *, grace):
            seen.append(stack.workers_of(A).stopping)
            await stop(instance_id, grace=grace)

        driver.stop = look_and_stop
        running_worker(driver)
        await stack.clock.settle()
        assert seen == [True]

    async def test_lost_leader_decides_no_driver_call(self, clock, driver):
        """lifecycle: lease."""
        running_worker(driver)
        with pytest.raises(BaseExceptionGroup):
            async with leading(clock, driver=driver) as stack:
                await clock.advance(30.0)
                stack.connections[0].cut()
                running_worker(driver, Key("stray"))
        assert [call for call in driver.calls if call.key == "stray"] == []


class TestRoom:
    @pytest.fixture
    def settings(self):
        return with_lifecycle(max_concurrent_starts=1)

    async def test_groups_get_room_in_the_order_they_came(self, clock):
        async with leading(clock, settings=with_lifecycle(max_concurrent_starts=3)) as stack:
            keys = [f"k{number:02}" for number in range(10)]
            for key in keys:
                await require(stack, key)
            assert (stack.driver.count("start"), stack.waits_for(Key("k05"))) == (3, "max_concurrent_starts")
            for key in keys:
                await require(stack, f"late {key}")
                await ready(stack, key)
            started = [call.key for call in stack.driver.calls if call.method == "start"]
            assert started == [*keys, *(f"late {key}" for key in keys[:3])]

    async def test_failed_start_gives_its_room_back(self, stack):
        stack.driver.fail_next_start(StartFailedError("no"))
        await require(stack, "a", "b")
        await stack.clock.settle()
        assert stack.driver.count("start") == 2

    async def test_group_does_not_overtake_one_that_waits(self, stack):
        """It needs a worker in the moment in which room comes free."""
        probed = Key("probed")
        stack.pause(probed)
        await require(stack, probed)
        await require(stack)
        await require(stack, "waits")
        stack.probe({probed})
        stack.assume_ready(stack.driver.workers_of(A)[0].spec.worker_id, A)
        await stack.clock.settle()
        assert [call.key for call in stack.driver.calls] == ["a", "waits"]


class TestDriverFaults:
    @pytest.mark.proves("workers/platform-answer-start-worker")
    async def test_driver_that_does_not_answer_is_asked_again_and_delays_no_other_key(self, stack):
        stack.driver.fail_next_start(UNAVAILABLE)
        await require(stack, "a")
        await require(stack, "b")
        assert (stack.running("a"), stack.running("b")) == (0, 1)
        for _ in range(3):
            stack.driver.fail_next_list(UNAVAILABLE)
        await stack.clock.advance(30.0)
        assert (stack.running("a"), stack.failure_of(A)) == (1, None)

    async def test_broken_event_stream_is_opened_again(self, clock, driver):
        events, opened = driver.events, []

        def break_once():
            opened.append(None)
            if len(opened) == 1:
                raise UNAVAILABLE
            return events()

        driver.events = break_once
        async with leading(clock, driver=driver):
            await clock.advance(2.0)
            stray = running_worker(driver, Key("absent"))
            await clock.settle()
            assert (len(opened), stray.instance.state) == (2, InstanceState.EXITED)

    async def test_listing_from_before_a_start_does_not_make_the_new_worker_a_failure(self, stack):
        stack.driver.hang_lists()
        stack.term.workers.loop.relist()
        await stack.clock.settle()
        await require(stack)
        stack.driver.release_lists()
        await stack.clock.settle()
        assert (stack.running("a"), stack.driver.count("start"), stack.failure_of(A)) == (1, 1, None)

    async def test_listing_from_before_an_end_does_not_bring_the_instance_back(self, stack):
        """An old listing would count one end of a worker twice, and call the group failed too early."""
        await require(stack)
        logs, allowed = stack.driver.logs, asyncio.Event()

        async def slow_logs(instance_id, *, lines=50):
            await allowed.wait()
            return await logs(instance_id, lines=lines)

        stack.driver.logs = slow_logs
        end_worker(stack, 1)
        await stack.clock.settle()  # its removal has begun
        stack.driver.hang_lists()
        stack.term.workers.loop.relist()
        await stack.clock.settle()  # a listing that still has it is under way
        allowed.set()
        await stack.clock.settle()  # removed, and its end counted
        stack.driver.release_lists()
        await stack.clock.advance(0.5)
        assert stack.metrics.registry.get_sample_value("osrdyne_worker_exits_total") == 1.0

    async def test_burst_of_events_causes_one_listing(self, stack, driver):
        listings = count_listings(stack, seconds=1.0)
        for _ in range(40):
            driver.backend.changed()
            await stack.clock.advance(0.5)
        assert len(listings) <= 6
        stray = running_worker(driver, Key("absent"))
        await stack.clock.advance(10.0)
        assert stray.instance.state is InstanceState.EXITED

    async def test_event_during_an_action_is_not_lost(self, stack, driver):
        """The listing that it causes leaves out a group with a command under way: another must follow."""
        driver.on_start = lambda worker: driver.backend.end(worker, Exit(code=9)) if len(driver.calls) == 1 else None
        await require(stack)
        await stack.clock.advance(2.0)
        assert (stack.running("a"), driver.count("start")) == (1, 2)


def count_listings(stack: Stack, *, seconds: float = 0.0) -> list[None]:
    """Gets an item with each listing from now on, which takes some seconds."""
    listings: list[None] = []
    list_instances = stack.driver.list_instances

    async def count():
        listings.append(None)
        await stack.clock.sleep(seconds)
        return await list_instances()

    stack.driver.list_instances = count
    return listings


async def test_worker_groups_loop_checks_nothing_while_nothing_happens(clock, driver):
    """Idle daemon with many groups: nothing polls faster than every few seconds."""
    async with leading(clock, driver=driver, settings=with_lifecycle(max_concurrent_starts=200)) as stack:
        keys = [f"k{number}" for number in range(100)]
        await require(stack, *keys)
        for key in keys:
            await ready(stack, key)
        await clock.advance(1.0)
        listings, commands = count_listings(stack), len(stack.broker.commands)
        await clock.advance(300.0)
        assert (len(listings) <= 6, len(stack.broker.commands) - commands <= 40) == (True, True)


async def test_facts_of_listed_workers_are_known_at_once(stack, driver):
    """lifecycle: bind-waits-for-stop: nothing may be bound before a stop of an earlier leader is known."""
    found = running_worker(driver, Key("b"))
    await stack.term.workers.loop.list_instances()
    assert stack.workers_of(Key("b")).instances == (found.instance,)
