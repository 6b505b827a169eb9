"""Circuits that open, let a probe through and close: what the leader does to groups and workers, in virtual time."""

from typing import ClassVar

import pytest
from broker_steps import kill_within
from circuit_pool import CircuitPool
from managed_pool import explained

from osrdyne.errors import BrokerSilentError, BrokerUnavailableError
from osrdyne.protocol.messages import RETRY_AFTER_HEADER
from osrdyne.testing.drivers import FakeDriver

GROUPS = ("a", "b", "c", "d")
REJECT = {"onOpen": "reject"}


@pytest.fixture
async def pool(clock):
    made = CircuitPool(clock)
    async with made.leading():
        await made.begin()
        yield made


@pytest.mark.proves("circuits/requests-route-fail-circuit")
async def test_circuit_opens_at_the_exact_sample_and_pauses_its_groups(pool):
    for key in GROUPS[:3]:
        await pool.publish(key)
        await pool.run(2.0)
    assert pool.state == "closed"
    await pool.publish("d")
    await pool.run(2.0)
    assert (pool.state, pool.paused, pool.circuit.paused) == ("open", list(GROUPS), 4)
    await pool.publish("a", "b", "c", "d", "e")
    await pool.run(5.0)
    # Held: nothing reaches the backend, and no worker is started for the new group.
    assert (len(pool.served), len(pool.workers)) == (4, 4)
    assert sorted(pool.stack.waiting("e") + pool.stack.waiting("a")) == [b"5", b"9"]
    assert pool.stack.metrics.registry.get_sample_value("osrdyne_circuit_state", {"route": "r"}) == 2
    shown = explained(pool.stack, "a")
    assert ("circuit" in str(shown.steps), shown.refused) == (True, None)


async def test_open_circuit_rejects_new_requests_until_it_may_be_half_open(pool):
    await pool.begin(**REJECT)
    assert "circuit" not in str(explained(pool.stack, "a").steps)
    await pool.open(*GROUPS)
    assert explained(pool.stack, "a").refused == "circuit-open"
    await pool.publish("a", "new")
    await pool.run(1.0)
    rejected = [one.message for one in pool.broker.queues["replies"].ready if one.message.correlation_id in {"5", "6"}]
    assert [pool.statuses()[name] for name in ("5", "6")] == ["circuit-open"] * 2
    assert all(0 < float(str(message.headers[RETRY_AFTER_HEADER])) <= 10 for message in rejected)
    assert not pool.stack.has_queue("new")


async def test_exactly_one_request_passes_a_half_open_circuit_and_closes_it(pool):
    """`_published`: the leader does not keep every key that has had a request while its circuit was open."""
    circuits = pool.stack.term.routing.circuits
    await pool.open(*GROUPS)
    await pool.publish(*GROUPS, *GROUPS)
    pool.fails = False
    await pool.run(7.0)
    assert (pool.state, len(pool.served), circuits._published) == ("open", 4, set(GROUPS))
    await pool.run(2.0)
    assert (pool.state, pool.served[4], pool.probes) == ("closed", ("a", "5", True), ["a"])
    # One group after the other, at the interval, in the order in which they were paused.
    paused = []
    for _ in range(6):
        await pool.run(1.0)
        paused.append(tuple(pool.paused))
    assert paused == [("c", "d"), ("d",), (), (), (), ()]
    assert list(dict.fromkeys(key for key, _, _ in pool.served[5:])) == list(GROUPS)
    assert (set(pool.answered.values()), len(pool.answered), circuits._published) == ({1}, 12, set())


async def test_backend_is_spared_and_every_request_is_answered_although_reports_are_lost(pool):
    """A probe whose report is lost opens the circuit again, and the next one is sent."""
    pool.lost_reports = 0.3
    while not pool.paused:
        await pool.publish(*GROUPS)
        await pool.run(1.0)
    await pool.publish(*GROUPS * 5)
    await pool.run(25.0)
    pool.fails = False
    await pool.run(120.0)
    assert (pool.state, pool.paused) == ("closed", [])
    assert (set(pool.answered.values()), len(pool.answered)) == ({1}, pool.published)
    # After the circuit had opened, the backend got only probes until it worked again.
    assert list(pool.statuses().values()).count("error") - len(pool.probes) < 12


@pytest.mark.proves("circuits/probe-hangs-worker-dies")
async def test_probe_without_an_outcome_in_time_opens_the_circuit_again(pool):
    await pool.open(*GROUPS)
    await pool.publish(*GROUPS)
    pool.loses_probes = True
    await pool.run(12.0)
    assert (pool.state, pool.probes) == ("half_open", ["a"])
    await pool.run(4.0)
    assert (pool.state, pool.probes) == ("open", ["a"])
    pool.loses_probes, pool.fails = False, False
    await pool.run(20.0)
    assert (pool.state, pool.probed()) == ("closed", ["b"])


class GroupDriver(FakeDriver):
    """Its instances are groups, as on Kubernetes."""

    instance_is_worker: ClassVar[bool] = False


@pytest.mark.proves("circuits/group-open-circuit-worker")
@pytest.mark.parametrize("driver", [FakeDriver, GroupDriver], ids=["workers", "groups"])
async def test_group_without_a_worker_gets_a_paused_one(clock, driver):
    pool = CircuitPool(clock, make_driver=driver)
    async with pool.leading():
        await pool.begin()
        await pool.open(*GROUPS)
        await pool.publish("new", "new")
        pool.fails = False
        await pool.run(6.0)
        assert "new" not in {worker.key for worker in pool.workers.values()}
        await pool.run(6.0)
        (started,) = [one for one in pool.driver.backend.workers.values() if one.instance.key == "new"]
        assert started.spec.environment.paused
        assert (pool.state, pool.probed()) == ("closed", ["new"])
        await pool.run(6.0)
        assert [key for key, _, _ in pool.served].count("new") == 2


@pytest.mark.proves("circuits/worker-probe-reports-ready")
async def test_probe_waits_for_a_worker_that_gets_no_messages_yet(pool):
    await pool.open(*GROUPS)
    pool.fails, pool.binds_late = False, True
    await pool.publish("new", "new")
    await pool.run(11.0)
    (worker,) = [one for one in pool.workers.values() if one.key == "new"]
    assert (pool.state, worker.paused, len(pool.served)) == ("half_open", True, 4)
    pool.bind(worker)
    await pool.run(1.5)
    assert (pool.state, pool.probed()) == ("closed", ["new"])


@pytest.mark.proves("circuits/worker-receive-message-group")
async def test_worker_that_missed_a_message_gets_it_again(pool):
    await pool.open(*GROUPS)
    await pool.run(6.0)
    for worker in pool.workers.values():
        worker.paused = False
        await worker.report_state()
    await pool.run(1.0)
    assert (pool.state, pool.paused) == ("open", list(GROUPS))


async def test_worker_that_goes_on_in_a_paused_group_is_ended_and_not_replaced(pool):
    await pool.begin(openToHalfOpen={"enabled": False})
    await pool.open(*GROUPS)
    (worker,) = [one for one in pool.workers.values() if one.key == "a"]
    worker.paused, worker.is_deaf = False, True
    await worker.report_state()
    await pool.clock.advance(300.0)
    assert [pool.stack.running(key) for key in ("a", "b")] == [0, 1]


async def test_operator_closes_a_circuit(pool):
    await pool.open(*GROUPS)
    await pool.publish(*GROUPS)
    pool.fails = False
    closed = await pool.stack.term.routing.circuits.close(pool.circuit.hash, author="me")
    assert ([one.status.name for one in closed], pool.state) == (["OPEN"], "closed")
    counts = []
    for _ in range(8):
        counts.append(pool.circuit.paused)
        await pool.run(0.5)
    # The groups that are not resumed yet still wait.
    assert counts[0] == 3
    assert counts == sorted(counts, reverse=True)
    assert pool.circuit.paused == 0
    assert await pool.stack.term.routing.circuits.close(None, author="me") == []
    await pool.run(2.0)
    assert (len(pool.served), pool.probed(), pool.paused) == (8, [], [])


async def test_closing_a_closed_circuit_clears_its_statistics_for_every_leader(clock):
    pool = CircuitPool(clock)
    async with pool.leading():
        await pool.begin()
        await pool.publish("a")
        await pool.run(2.0)
        assert (pool.state, pool.circuit.failures) == ("closed", 1)
        assert await pool.stack.term.routing.circuits.close(None, author="me") == []
        assert (pool.circuit.successes, pool.circuit.failures) == (0, 0)
    async with pool.leading():
        assert (pool.circuit.successes, pool.circuit.failures) == (0, 0)


@pytest.mark.proves("circuits/rabbitmq-store-state-circuits")
async def test_nothing_follows_from_a_state_that_is_not_stored(pool):
    async def confirm_nothing(command):
        if "-snapshot-circuits-" in command.target and not command.done:
            raise BrokerSilentError("no confirm")

    circuits = pool.stack.term.routing.circuits
    pool.broker.hook = confirm_nothing
    await pool.open(*GROUPS)
    assert pool.paused == []
    pool.broker.hook = None
    await pool.run(3.0)
    assert pool.paused == list(GROUPS)
    pool.broker.hook = confirm_nothing
    for _ in range(2):
        with pytest.raises(BrokerUnavailableError):
            await circuits.close(pool.circuit.hash, author="me")
    assert pool.paused == list(GROUPS)
    pool.broker.hook = None
    assert await circuits.close(pool.circuit.hash, author="me") == []
    await pool.run(6.0)
    assert (pool.state, pool.paused) == ("closed", [])


@pytest.mark.proves("circuits/leader-dies-stores-change")
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", range(1, 13))
@pytest.mark.parametrize("what", ["store", "act"])
async def test_leader_killed_at_each_step_loses_nothing(clock, what, number, done):
    pool = CircuitPool(clock)
    killed = 0

    async def kill(command):
        nonlocal killed
        stores = "-snapshot-circuits-" in command.target
        acts = command.target == pool.names.control_exchange
        if command.name != "publish" or command.done is not done or not (stores if what == "store" else acts):
            return
        killed += 1
        if killed == number:
            kill_within(pool.stack)

    published = False
    for life in range(2):
        async with pool.leading():
            if life == 0:
                await pool.begin()
                pool.broker.hook = kill
            for key in GROUPS:
                if life == 0 and not pool.stack.task.done():
                    await pool.publish(key)
                    await pool.run(2.0)
            if not published:
                published = not pool.stack.task.done()
                await pool.publish(*GROUPS, *GROUPS)
            await pool.run(12.0)
            pool.fails = False
            await pool.run(40.0)
    pool.broker.hook = None
    assert killed >= number
    names = {str(one) for one in range(1, pool.published + 1)}
    assert {name for name, _ in pool.answered} == names
    assert set(pool.answered.values()) == {1}
    assert (pool.paused, pool.stack.term.routing.circuits.circuits()[0].status.name) == ([], "CLOSED")
