"""Statistics of circuits: what counts as an outcome, and what survives the leader. A real leader in virtual time."""

import json

import pytest
import structlog
from managed_pool import REST, change, managing, publish_to
from replies import died

from osrdyne.amqp import Message
from osrdyne.errors import StartFailedError
from osrdyne.ingress.circuits.configuration import CircuitConfiguration, load_circuits
from osrdyne.pool.routing.circuits import CircuitView
from osrdyne.protocol.activity import ActivityReport, Event
from osrdyne.protocol.messages import ROUTE_HEADER
from osrdyne.protocol.names import Key
from osrdyne.testing.fakes.stack import Stack

COUNTING = CircuitConfiguration(updates_statistics=True)
BY_GROUP = load_circuits(json.dumps({"statisticsUpdateEnabled": True, "circuitScope": "group"}))


async def count(stack: Stack, configuration: CircuitConfiguration = COUNTING) -> None:
    await stack.term.routing.circuits.change(configuration, author="me")
    stack.require(Key("a"))
    stack.require(Key("b"))
    await stack.clock.settle()


@pytest.fixture
async def counting(stack):
    await change(stack, r=REST)
    await count(stack)
    return stack


async def report(stack: Stack, status: str, *ids: object, route: str | None = "r", key: str = "a", **code: int) -> None:
    """A worker has completed these requests."""
    headers: dict[str, object] = {"x-status": status}
    headers |= ({} if route is None else {"x-route": route}) | {f"x-{name}": value for name, value in code.items()}
    await publish(stack, ActivityReport(key, Event.REQUEST_COMPLETED, "w", {"outcomes": list(ids)}, headers))


async def publish(stack: Stack, sent: ActivityReport) -> None:
    await publish_to(stack, stack.names.activity_exchange, sent.key, sent.wire_body(), headers=sent.wire_headers())


def counted(stack: Stack) -> list[tuple[str | None, str | None, int, int]]:
    """Route, key, failures and successes of each circuit."""

    def shown(one: CircuitView) -> tuple[str | None, str | None, int, int]:
        return one.route, one.key, one.failures, one.successes

    return [shown(one) for one in stack.term.routing.circuits.circuits()]


async def test_each_request_counts_once_with_its_latest_outcome(counting):
    await report(counting, "retried", "1", "2")
    await report(counting, "error", "1", "3", code=500)
    await report(counting, "ok", "2")
    await report(counting, "error", "4", code=409)  # the backend works, and has refused this request
    await report(counting, "cancelled", "5")  # it says nothing about the backend
    assert counted(counting) == [("r", None, 2, 2)]


@pytest.mark.proves("circuits/worker-reports-outcomes-routes")
async def test_circuits_are_those_of_active_routes_and_one_of_no_route(stack, clock):
    await change(stack, r=REST, s=REST)
    await count(stack)
    for route in ("s", "made up", None, "r"):
        await report(stack, "ok", "1", route=route)
    assert counted(stack) == [(None, None, 0, 1), ("r", None, 0, 1), ("s", None, 0, 1)]
    await change(stack, r=REST)
    await clock.advance(2.0)
    assert counted(stack) == [(None, None, 0, 1), ("r", None, 0, 1)]


async def test_each_group_of_a_route_may_have_a_circuit(counting, clock):
    await count(counting, BY_GROUP)
    await report(counting, "ok", "1")
    await report(counting, "error", "2", "3", key="b")
    await clock.advance(2.0)
    assert counted(counting) == [("r", "a", 0, 1), ("r", "b", 2, 0)]
    value = counting.metrics.registry.get_sample_value
    assert value("osrdyne_circuit_fail_ratio", {"route": "r"}) == 100
    assert value("osrdyne_circuit_samples", {"route": "r", "outcome": "failure"}) == 2


async def test_nothing_is_counted_unless_it_is_turned_on(stack, clock, broker):
    await change(stack, r=REST)
    await count(stack, CircuitConfiguration())
    await report(stack, "ok", "1")
    await clock.advance(5.0)
    assert counted(stack) == []
    assert not [name for name in broker.queues if "-snapshot-" in name]


@pytest.mark.proves("circuits/report-worker-lost-worker")
async def test_report_of_a_worker_that_names_no_requests_counts_nothing(counting):
    for invalid in ({}, {"outcomes": "1"}, {"outcomes": [1, None, "x" * 65]}):
        headers = {"x-status": "ok", "x-route": "r"}
        await publish(counting, ActivityReport("a", Event.REQUEST_COMPLETED, "w", invalid, headers))
    assert counted(counting) == []


async def test_dead_letters_of_workers_are_failures(counting, clock):
    queues = {"delivery_limit": "pool-req-a", "expired": "pool-req-a", "rejected": counting.names.orphan_queue}
    for reason, queue in queues.items():
        death = {**died(reason, queue=queue), ROUTE_HEADER: "r"}
        await publish_to(counting, counting.names.dead_letter_exchange, "a", reason.encode(), headers=death)
    await clock.advance(10.0)
    assert counted(counting) == [("r", None, 1, 0)]


async def test_failed_starts_are_failures(counting, clock):
    counting.driver.fail_next_start(StartFailedError("no such image"))
    await counting.publish("c", b"1", correlation_id="c")
    await clock.advance(30.0)
    assert counted(counting) == [("r", None, 1, 0)]


@pytest.mark.proves("circuits/leader-dies-counts-outcomes")
@pytest.mark.parametrize("configuration", [COUNTING, BY_GROUP], ids=["route", "group"])
async def test_statistics_survive_a_killed_leader_but_for_the_last_second(clock, broker, configuration):
    async with managing(clock, broker, r=REST) as stack:
        await count(stack, configuration)
        await report(stack, "error", "1", "2")
        await clock.advance(2.0)
        before = counted(stack)
        await report(stack, "error", "3")
    async with managing(clock, broker) as stack:
        assert counted(stack) == before
        await report(stack, "ok", "2")
        assert [one[2:] for one in counted(stack)] == [(1, 1)]


@pytest.mark.proves("circuits/stored-statistics-damaged")
async def test_damaged_statistics_are_refused_as_a_whole(clock, broker):
    async with managing(clock, broker, r=REST) as stack:
        await count(stack)
        await report(stack, "error", "1")
        await clock.advance(2.0)
        (queue,) = [one for one in broker.queues.values() if "-snapshot-circuits-" in one.name]
    queue.ready[0].message = Message(body=b"damaged", user_id=queue.ready[0].message.user_id)
    with structlog.testing.capture_logs() as logs:
        async with managing(clock, broker) as stack:
            assert counted(stack) == []
    assert "snapshot cannot be read, beginning without it" in [line["event"] for line in logs]
