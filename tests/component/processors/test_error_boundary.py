"""An unexpected error fails one message, not the leader's term."""

from __future__ import annotations

import pytest
from managed_pool import REST, managing, waiting
from replies import REPLIES, answers

from osrdyne.amqp import Message
from osrdyne.errors import StartFailedError
from osrdyne.pool.views import PoisonQuery
from osrdyne.processors.poison.entries import finding, key_of
from osrdyne.protocol.activity import Event
from osrdyne.protocol.names import Key
from osrdyne.protocol.statuses import decode_text
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.drivers import FakeDriver
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import POOL, Stack, leading


def break_(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(f"osrdyne.processors.{what}", lambda *_, **__: 1 / 0)


async def send(stack: Stack, exchange: str, **properties: object) -> None:
    message = Message(b"1", **properties)  # type: ignore[arg-type]
    await FakeChannel(stack.broker).publish(message, exchange=exchange, routing_key="a")
    await stack.clock.advance(1.0)


@pytest.mark.parametrize("step", ["refuse_orphan", "direct_message", "parse_key"])
@pytest.mark.proves("controller/defect-controller-fails-one")
async def test_orphan_that_cannot_be_processed_is_answered_rejected_and_others_go_on(
    clock: VirtualClock, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async with leading(clock, broker=broker) as stack:
        with monkeypatch.context() as broken:
            break_(broken, f"requests.orphans.{step}")
            await stack.publish("a", reply_to=REPLIES, correlation_id="c")
            await clock.settle()
        await stack.publish("b", b"2")
        await clock.settle()
        assert (answers(broker), stack.orphans(), stack.waiting("b")) == ([("c", "rejected")], [], [b"2"])


async def test_answer_reports_that_it_was_the_controller(
    clock: VirtualClock, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leading(clock, broker=broker) as stack:
        break_(monkeypatch, "requests.orphans.direct_message")
        await stack.publish("a", reply_to=REPLIES)
        await clock.settle()
        [answer] = broker.queues[REPLIES].ready
        assert "controller failed" in (decode_text(answer.message.headers["x-status-detail"]) or "")


@pytest.mark.proves("controller/defect-controller-fails-one")
async def test_orphan_without_a_caller_is_kept_in_the_poison_inventory(
    clock: VirtualClock, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leading(clock, broker=broker) as stack:
        break_(monkeypatch, "requests.orphans.direct_message")
        await stack.publish("a", b"one way")
        await clock.settle()
        [entry] = (await stack.term.processors.poison.page(PoisonQuery(bodies=True))).entries
        assert (entry.key, entry.body, entry.reason, entry.deliveries) == ("a", b"one way", "rejected", 0)
        assert entry.finding == finding(0, ())


@pytest.mark.proves("controller/defect-controller-fails-one")
async def test_error_after_the_answer_to_a_dead_letter_does_not_answer_it_again(
    clock: VirtualClock, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leading(clock, broker=broker) as stack:
        break_(monkeypatch, "failures.dead_letters.priority_of")
        death = {"x-first-death-reason": "expired"}
        await send(stack, stack.names.dead_letter_exchange, headers=death, reply_to=REPLIES, correlation_id="c")
        assert (answers(broker), broker.bodies("pool-dl"), broker.bodies("pool-poison")) == ([("c", "expired")], [], [])
        assert not stack.task.done()


@pytest.mark.parametrize("step", ["ingress.accept", "ingress.managed_message", "forwarder.refuse_for"])
@pytest.mark.proves("controller/defect-controller-fails-one")
async def test_request_that_the_ingress_fails_on_is_answered_rejected_and_others_go_on(
    clock: VirtualClock, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async with managing(clock, broker, rest=REST) as stack:
        with monkeypatch.context() as broken:
            break_(broken, f"requests.{step}")
            await stack.publish("a", reply_to=REPLIES, correlation_id="c")
            await stack.publish("a", b"one way")
            await clock.settle()
        await stack.publish("b", b"2")
        await clock.settle()
        assert (answers(broker), stack.orphans(), waiting(stack, None, "b")) == ([("c", "rejected")], [], [b"2"])
        assert (broker.bodies("pool-poison"), stack.is_held(Key("a"))) == ([b"one way"], False)


@pytest.mark.proves("controller/defect-controller-fails-one")
async def test_dead_letter_that_cannot_be_processed_is_kept_and_answered(
    clock: VirtualClock, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leading(clock, broker=broker) as stack:
        break_(monkeypatch, "failures.dead_letters.death_reason")
        await send(stack, stack.names.dead_letter_exchange, reply_to=REPLIES, correlation_id="c")
        [kept] = broker.queues[stack.names.poison_queue].ready
        assert (kept.message.body, key_of(kept.message.headers)) == (b"1", "a")
        assert (answers(broker), broker.bodies("pool-dl"), stack.task.done()) == ([("c", "rejected")], [], False)


@pytest.mark.parametrize("what", ["activity.report_from_wire", "activity.parse_key"])
async def test_report_that_cannot_be_processed_is_counted(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async with leading(clock) as stack:
        break_(monkeypatch, what)
        await stack.report("a", Event.READY, "w")
        counted = stack.metrics.registry.get_sample_value("osrdyne_invalid_messages_total", {"queue": "activity"})
        assert (counted, stack.broker.bodies("pool-activity"), stack.task.done()) == (1.0, [], False)


async def test_cancel_that_cannot_be_processed_is_counted(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with leading(clock) as stack:
        break_(monkeypatch, "requests.cancellations.parse_key")
        await send(stack, stack.names.cancel_exchange, reply_to=REPLIES, correlation_id="c")
        counted = stack.metrics.registry.get_sample_value("osrdyne_invalid_messages_total", {"queue": "cancel"})
        assert (counted, stack.broker.bodies("pool-cancel"), stack.task.done()) == (1.0, [], False)


async def test_request_of_a_failed_group_that_cannot_be_answered_as_such_is_answered_rejected(
    clock: VirtualClock, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver(clock, pool=POOL)
    driver.fail_next_start(StartFailedError("no such image"))
    async with leading(clock, broker=broker, driver=driver) as stack:
        break_(monkeypatch, "failures.start_failures.describe_failure")
        await stack.publish("a", reply_to=REPLIES, correlation_id="c")
        await clock.settle()
        assert (answers(broker), stack.waiting("a"), stack.task.done()) == ([("c", "rejected")], [], False)
