"""The request queues loop: a real leader on a broker in memory, in virtual time; the order of its steps."""

import asyncio
from collections.abc import Callable

import pytest

from osrdyne.amqp import Message
from osrdyne.config.models import LifecycleSettings
from osrdyne.errors import BrokerConflictError, DriverError
from osrdyne.pool.state.groups.transitions import GroupStatus
from osrdyne.protocol.activity import Event
from osrdyne.protocol.names import Key
from osrdyne.testing.fakes.broker import Command, FakeBroker, Hook
from osrdyne.testing.fakes.stack import Stack, leading, settings_for

A = Key("a")
QUEUE = "pool-req-a"
OURS = {"x-queue-type": "quorum", "x-osrdyne-key": "a"}
CHANGES = ("declare", "bind", "unbind", "delete")


@pytest.fixture
def settings():
    """Unbound after 20 s, to be judged after 10 s more."""
    return settings_for(LifecycleSettings(unbind_delay=20.0, stop_delay=10.0, settle_delay=10.0))


class Released(asyncio.Event):
    """Lets go of what is held. `reached`: whether anything was held."""

    reached = False


def hold(name: str, target: str = QUEUE, *, done: bool = False) -> tuple[Released, Hook]:
    """A hook that holds one kind of command, before it takes effect or before its answer, until it is released."""
    released = Released()

    async def hook(command: Command) -> None:
        if command == (name, target, done):
            released.reached = True
            await released.wait()

    return released, hook


def steps(stack: Stack, queue: str = QUEUE) -> list[str]:
    """What was done to the queue, in order."""
    return [command.name for command in stack.broker.commands if command.target == queue and command.name in CHANGES]


async def require(stack: Stack, *keys: str) -> None:
    for key in keys or ("a",):
        stack.require(Key(key))
    await stack.clock.settle()


async def until(stack: Stack, condition: Callable[[], bool], *, seconds: int = 300) -> float:
    """Let time pass until the condition is true; when that was."""
    for _ in range(seconds):
        if condition():
            return stack.clock.monotonic()
        await stack.clock.advance(1.0)
    raise AssertionError("it never became true")


async def idle_until(stack: Stack, command: str) -> Released:
    """A group is idle until its end reaches this command, which is held."""
    await require(stack)
    released, stack.broker.hook = hold(command)
    await until(stack, lambda: released.reached)
    return released


def put(broker: FakeBroker) -> None:
    """A request arrives in the queue, whatever is bound."""
    broker.queues[QUEUE].put(Message(body=b"1"), exchange="", routing_key="a")


async def serve(stack: Stack) -> None:
    """A worker answers the request that waits."""
    delivery = await stack.take("a")
    await delivery.ack()
    await delivery.channel.close()


class TestActivation:
    @pytest.mark.proves("reference-defects/3-one-busy-key")
    async def test_bound_is_believed_after_the_answer_and_withdrawn_before_unbind_is_sent(self, stack, clock):
        """lifecycle: bound-is-reported-late."""
        released, stack.broker.hook = hold("bind", done=True)
        await require(stack)
        assert (stack.is_bound("a"), stack.queue_of(A).is_bound) == (True, False)
        released.set()
        await clock.settle()
        assert stack.queue_of(A).is_bound
        released, stack.broker.hook = hold("unbind")
        await clock.advance(20.0)
        assert (stack.is_bound("a"), stack.queue_of(A).is_bound) == (True, False)
        released.set()

    async def test_listed_binding_is_not_believed(self, clock, broker, settings):
        """lifecycle: listed-bindings-are-unknown [assumeunb], always-unbind: bound or not, each term does it again."""
        async with leading(clock, broker=broker, settings=settings) as stack:
            await require(stack)
        broker.commands.clear()
        async with leading(clock, broker=broker, settings=settings) as stack:
            assert steps(stack) == ["bind"]
            await until(stack, lambda: not stack.is_bound("a"))
        broker.commands.clear()
        async with leading(clock, broker=broker, settings=settings) as stack:
            assert (stack.status_of(A), steps(stack)) == (GroupStatus.UNBOUND, ["unbind"])

    async def test_desired_state_that_changes_during_a_command_is_followed_after_it(self, stack):
        """lifecycle: one-actor-per-key: one command at a time, the newest desired state is read between commands."""
        released, stack.broker.hook = hold("bind")
        await require(stack)
        stack.retire(A)
        await stack.clock.settle()
        assert steps(stack) == ["declare"]
        released.set()
        await stack.clock.settle()
        assert steps(stack) == ["declare", "bind", "unbind"]


class TestOrder:
    """What comes first; not how long it takes."""

    async def test_key_is_bound_before_the_queues_of_all_new_keys_are_declared(self, stack):
        keys = [f"k{number}" for number in range(100)]
        await require(stack, *keys)
        names = {stack.names.request_queue(Key(key)) for key in keys}
        done = [command.name for command in stack.broker.commands if command.target in names]
        assert done.count("bind") == 100
        assert done.index("bind") < 50

    @pytest.mark.parametrize("key", ["new", "k299"], ids=["new", "binding is gone"])
    @pytest.mark.proves("controller/new-leader-finds-thousands")
    async def test_new_key_does_not_wait_for_those_that_a_new_leader_binds_again(self, clock, broker, key):
        """Nor does one whose request is an orphan, although it was to be bound again as the last one."""
        async with leading(clock, broker=broker) as stack:
            await require(stack, *(f"k{number:03}" for number in range(300)))
            await stack.kill()
        broker.commands.clear()
        if key == "k299":
            broker.unbind(str(stack.names.request_queue(Key(key))), stack.names.requests_exchange, key)
        await stack.publish(key, b"1")

        async def take_a_while(command):
            if command.name == "bind" and not command.done:
                await clock.sleep(0.1)

        broker.hook = take_a_while
        async with leading(clock, broker=broker) as stack:
            await until(stack, lambda: stack.waiting(key) == [b"1"])
            again = [command for command in broker.commands if command.name == "bind" and "-req-k" in command.target]
            assert len(again) < (100 if key == "new" else 150)
            await until(stack, lambda: len(stack.existing_queues()) == (301 if key == "new" else 300))
            await until(stack, lambda: all(stack.queue_of(one).is_bound for one in stack.existing_queues()))

    @pytest.mark.proves("controller/leader-deposed-declares-queue")
    async def test_late_declaration_of_a_deposed_leader_is_adopted_and_deleted(self, stack):
        """It is empty and unbound: a listing finds it, and it ends without a worker having been started."""
        stack.broker.declare_queue(QUEUE, OURS)
        await until(stack, lambda: stack.queue_of(A).exists)
        await until(stack, lambda: not stack.has_queue("a"), seconds=600)
        assert (stack.driver.most_starts_under_way, steps(stack)) == (0, ["unbind", "delete"])


class TestEnd:
    async def test_end_goes_unbind_settle_stop_delete(self, stack, clock):
        """lifecycle: "Unbinding an idle group", "Deleting a queue"."""
        await require(stack)
        began = clock.monotonic()
        unbound = await until(stack, lambda: not stack.is_bound("a"))
        stopped = await until(stack, lambda: stack.running("a") == 0)
        deleted = await until(stack, lambda: not stack.has_queue("a"))
        assert (unbound - began, stopped - unbound >= 20.0, deleted >= stopped) == (20.0, True, True)
        assert steps(stack) == ["declare", "bind", "unbind", "delete"]

    async def test_one_listing_proves_the_end_of_many(self, stack):
        before = stack.broker.count("list_queues")
        await require(stack, *(f"k{number}" for number in range(50)))
        await until(stack, lambda: not stack.existing_queues())
        # Before the stops, before the deletions, and at most two of the resync.
        assert stack.broker.count("list_queues") - before <= 4

    @pytest.mark.proves("races/request-reaches-queue-decision", "requests/request-arrives-group-ends")
    async def test_request_that_came_at_the_last_moment_brings_the_group_back_and_is_served(self, stack, clock):
        """lifecycle: settle [nosettle]: routed before the unbind, in the queue 8 s after it."""
        stack.broker.transit = 8.0
        await require(stack)
        await clock.advance(19.0)
        publishing = asyncio.create_task(stack.publish("a", b"1"))
        await until(stack, lambda: stack.waiting("a") == [b"1"])
        await until(stack, lambda: stack.is_bound("a"))
        assert (publishing.done(), stack.waiting("a"), stack.running("a")) == (True, [b"1"], 1)
        stack.broker.transit = 0.0
        await serve(stack)
        await until(stack, lambda: not stack.is_bound("a"))
        await stack.publish("a", b"2")
        await clock.settle()
        assert (stack.is_bound("a"), stack.waiting("a")) == (True, [b"2"])

    async def test_queue_of_a_worker_that_goes_on_consuming_is_kept(self, stack, clock):
        """lifecycle: ready-brings-back: in use; checked again, at growing intervals."""
        await require(stack)
        await stack.consume("a")
        await clock.advance(600.0)
        assert (stack.has_queue("a"), steps(stack)) == (True, ["declare", "bind", "unbind"])
        assert 15 <= stack.metrics.registry.get_sample_value("osrdyne_queue_deletes_refused_total") <= 35

    @pytest.mark.proves("races/worker-alive-but-disconnected", "reference-defects/7-queue-deleted-under")
    async def test_unacknowledged_request_of_a_dead_host_is_not_deleted(self, stack, clock):
        """lifecycle: probe [ev1_ready, ev6_drain]: the worker is gone, its connection is not noticed dead yet."""
        await stack.publish("a", b"1")
        await clock.settle()
        delivery = await stack.take("a")
        stack.retire(A)
        await clock.advance(120.0)
        assert stack.waiting("a") == [b"1"]
        await delivery.nack()
        await clock.settle()
        assert stack.waiting("a") == [b"1"]

    async def test_retired_group_at_work_ends_when_its_work_is_done(self, stack, clock):
        """`groups stop` of a group with a stuck query: it stays unbound. Only a request brings it back."""
        await stack.publish("a", b"stuck")
        await clock.settle()
        delivery = await stack.take("a")
        stack.retire(A)
        for _ in range(60):
            await stack.report("a", Event.BUSY, in_flight=1)
            await clock.advance(5.0)
        assert (stack.status_of(A), stack.running("a")) == (GroupStatus.UNBOUND, 1)
        await stack.publish("a", b"next")
        await clock.settle()
        assert (stack.is_bound("a"), stack.waiting("a")) == (True, [b"stuck", b"next"])
        await delivery.ack()
        await delivery.channel.close()
        await serve(stack)
        stack.retire(A)
        await until(stack, lambda: not stack.has_queue("a"))

    async def test_requests_of_a_retired_group_without_a_worker_are_not_lost(self, stack):
        stack.driver.fail_next_start(DriverError("The engine is busy."))
        await stack.publish("a", b"1")
        await stack.clock.settle()
        stack.retire(A)
        await stack.clock.advance(60.0)
        assert (stack.running("a"), stack.waiting("a")) == (1, [b"1"])

    @pytest.mark.parametrize("step", ["look_up", "consume"])
    @pytest.mark.proves("races/request-reaches-queue-decision", "races/request-reaches-deletion-s")
    async def test_message_found_before_the_deletion_reactivates_the_group(self, stack, step):
        """lifecycle: ready-brings-back [noreact], by the passive declare; probe, delete-under-probe."""
        released = await idle_until(stack, step)
        put(stack.broker)
        released.set()
        await stack.clock.settle()
        assert (stack.status_of(A), stack.running("a"), stack.waiting("a")) == (GroupStatus.ACTIVE, 1, [b"1"])
        assert (stack.is_bound("a"), "delete" in steps(stack)) == (True, False)

    @pytest.mark.proves("races/request-arrives-between-last")
    async def test_group_wanted_again_while_its_queue_is_deleted_gets_a_new_one(self, stack):
        """lifecycle: delete-runs-to-its-end."""
        released = await idle_until(stack, "delete")
        await stack.publish("a", b"1")
        await stack.clock.settle()
        assert stack.orphans() == [b"1"]
        released.set()
        await stack.clock.settle()
        assert (steps(stack)[-3:], stack.waiting("a")) == (["delete", "declare", "bind"], [b"1"])

    @pytest.mark.proves("races/activity-workers-stopped")
    async def test_bind_waits_until_a_stop_in_flight_has_ended(self, stack, clock):
        """lifecycle: bind-waits-for-stop [bindrace_p4]: the stop would hit a worker that has just got a request."""
        await require(stack)
        await stack.report("a", Event.READY)
        (worker,) = stack.driver.workers_of(A)
        worker.stubborn = True
        await until(stack, lambda: worker.instance.state == "stopping")
        await stack.publish("a", b"1")
        await clock.advance(10.0)
        assert (stack.is_bound("a"), stack.orphans()) == (False, [b"1"])
        await clock.advance(25.0)
        assert (stack.waiting("a"), stack.running("a")) == ([b"1"], 1)
        assert stack.driver.workers_of(A)[0] is not worker


class TestFaults:
    @pytest.mark.parametrize("ends", ["queue is gone", "not needed"])
    @pytest.mark.proves("reference-defects/6-one-failed-queue")
    async def test_foreign_queue_of_the_name_is_a_fault_of_its_key_alone(self, stack, ends):
        """lifecycle: token-channel-never-fails: other arguments are found without asking on T."""
        stack.broker.declare_queue(QUEUE, {"x-queue-type": "classic"})
        await require(stack, "a", "b")
        assert isinstance(stack.fault_of(A), BrokerConflictError)
        assert (stack.is_bound("a"), stack.is_bound("b"), stack.running("a")) == (False, True, 0)
        if ends == "queue is gone":
            stack.broker.delete_queue(QUEUE)
            await stack.clock.advance(10.0)
            assert (stack.is_bound("a"), stack.fault_of(A)) == (True, None)
        else:
            await stack.clock.advance(200.0)
            assert (stack.known_queues(), stack.groups()) == ([], [])

    @pytest.mark.proves("broker/management-api-fails")
    async def test_failed_http_api_ends_no_term_and_holds_up_the_queue_that_has_to_be_compared_only(self, stack):
        """The name of a queue holds a short key whole; the argument that holds a long one is compared."""
        long = "a" * 300
        stack.broker.declare_queue(stack.names.request_queue(Key(long)), OURS | {"x-osrdyne-key": long})
        stack.management.available = False
        await require(stack, long, "b")
        await stack.clock.advance(10.0)
        assert (stack.is_bound(long), stack.is_bound("b")) == (False, True)
        stack.management.available = True
        await until(stack, lambda: stack.is_bound(long))
        await require(stack)
        await stack.report("a", Event.READY)
        stack.management.available = False
        await stack.clock.advance(300.0)
        assert (stack.task.done(), stack.running("a")) == (False, 1)
        stack.management.available = True
        await until(stack, lambda: not stack.has_queue("a"))

    async def test_hanging_declaration_of_one_key_delays_no_other(self, stack):
        released, stack.broker.hook = hold("declare")
        keys = [f"k{number}" for number in range(200)]
        await require(stack, "a", *keys)
        assert [key for key in keys if not stack.is_bound(key)] == []
        assert not stack.is_bound("a")
        released.set()

    async def test_hanging_probes_delay_no_new_key(self, stack, clock):
        """Queues on a dead node: their probes wait for time-outs, new keys must not queue behind them."""
        dead = [f"dead{number}" for number in range(20)]
        await require(stack, *dead)

        async def hang(command):
            if command.name == "consume" and "dead" in command.target:
                await asyncio.Event().wait()

        stack.broker.hook = hang
        await until(stack, lambda: all(stack.status_of(Key(key)) is None for key in dead))
        await clock.advance(30.0)
        await require(stack, "new")
        assert stack.is_bound("new")

    async def test_error_on_t_ends_the_term(self, clock, broker, settings):
        """lifecycle: term-ends-whole: the bind to a queue that another client deleted closes T; the next term knows."""
        with pytest.raises(BaseExceptionGroup):
            async with leading(clock, broker=broker, settings=settings) as stack:
                await require(stack)
                await until(stack, lambda: not stack.is_bound("a"))
                broker.delete_queue(QUEUE)
                await require(stack)
        async with leading(clock, broker=broker) as stack:
            await stack.publish("a", b"1")
            await clock.settle()
            assert stack.waiting("a") == [b"1"]


class TestResync:
    @pytest.fixture
    def settings(self):
        """Nothing ends before it is listed."""
        return settings_for()

    @pytest.mark.proves("broker/request-queue-binding-deleted")
    async def test_deleted_queue_or_binding_comes_back_while_wanted(self, stack):
        await require(stack, "a", "b")
        stack.broker.delete_queue(QUEUE)
        stack.broker.unbind(stack.names.request_queue(Key("b")), stack.names.requests_exchange, "b")
        await stack.clock.advance(61.0)
        assert (stack.is_bound("a"), stack.is_bound("b"), stack.task.done()) == (True, True, False)

    async def test_key_with_a_command_since_the_listing_began_is_left_alone(self, stack):
        """lifecycle: resync: the listing is older than the command."""
        released, stack.broker.hook = hold("list_bindings", stack.names.requests_exchange)
        await stack.clock.advance(60.0)  # the queues are listed, the bindings are not yet
        await require(stack)
        assert stack.is_bound("a")
        stack.broker.commands.clear()
        released.set()
        await stack.clock.settle()
        assert (steps(stack), stack.queue_of(A).is_bound) == ([], True)

    async def test_queue_made_and_deleted_during_a_listing_is_not_adopted(self, clock):
        """A bind to a queue that is not there would depose the leader."""
        lifecycle = LifecycleSettings(unbind_delay=1.0, stop_delay=1.0, settle_delay=1.0, resync_interval=60.0)
        async with leading(clock, settings=settings_for(lifecycle)) as stack:
            released, stack.broker.hook = hold("list_bindings", stack.names.requests_exchange)
            listing = asyncio.create_task(stack.term.groups.resync.compare())
            await clock.settle()
            await require(stack)
            await until(stack, lambda: not stack.has_queue("a"))
            released.set()
            await listing
            await clock.settle()
            assert (stack.task.done(), stack.groups()) == (False, [])

    async def test_foreign_queues_of_other_kinds_are_passed_over(self, clock, broker):
        """defects: foreign-queues; a queue with other arguments is not ours to use."""
        foreign = {"pool-req-%": {}, "pool-req-x": {"x-queue-type": "classic", "x-odd": True}, "pool-requests": {}}
        for name, arguments in foreign.items():
            broker.declare_queue(name, arguments)
        async with leading(clock, broker=broker) as stack:
            await clock.advance(61.0)
            assert (stack.groups(), sorted(broker.queues)[-3:]) == ([], list(foreign))


class TestSeed:
    async def test_unbound_queue_with_requests_is_served(self, clock, broker):
        """lifecycle: listed-bindings-are-unknown."""
        broker.declare_queue(QUEUE, OURS)
        put(broker)
        async with leading(clock, broker=broker) as stack:
            assert (stack.status_of(A), stack.running("a")) == (GroupStatus.ACTIVE, 1)

    async def test_queue_that_a_worker_was_found_for_keeps_it_for_its_time(self, clock, broker, driver):
        async with leading(clock, broker=broker, driver=driver) as stack:
            await require(stack)
            stack.retire(A)
            await clock.advance(1.0)
        async with leading(clock, broker=broker, driver=driver) as stack:
            await clock.advance(500.0)
            assert (stack.has_queue("a"), stack.running("a")) == (True, 1)

    @pytest.mark.proves("broker/rabbitmq-stops-killed-restarts", "reference-defects/17-restart-loading-workers")
    async def test_clocks_start_with_the_term(self, clock, broker, driver, settings):
        """defects: ready-after-restart: the idle clock ran without a leader, and then stopped every group at once."""
        async with leading(clock, broker=broker, driver=driver, settings=settings) as stack:
            await require(stack)
        await clock.advance(10_000.0)
        async with leading(clock, broker=broker, driver=driver, settings=settings) as stack:
            await clock.advance(19.0)
            assert (stack.is_bound("a"), stack.running("a")) == (True, 1)
