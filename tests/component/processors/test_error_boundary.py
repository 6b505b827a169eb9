"""An unexpected error fails one message, not the leader's term."""

import pytest
from managed_pool import REST, cancel, change, publish_to, send, waiting
from replies import REPLIES, answers, died

from osrdyne.errors import StartFailedError
from osrdyne.pool.views import PoisonQuery
from osrdyne.processors.poison.entries import finding, key_of
from osrdyne.protocol.activity import Event
from osrdyne.protocol.names import Key
from osrdyne.protocol.statuses import decode_text
from osrdyne.testing.drivers import FakeDriver
from osrdyne.testing.fakes.stack import POOL, leading


def break_(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(f"osrdyne.processors.{what}", lambda *_, **__: 1 / 0)


@pytest.mark.proves("controller/defect-controller-fails-one")
@pytest.mark.parametrize("step", ["refuse_orphan", "direct_message", "parse_key"])
async def test_orphan_that_cannot_be_processed_is_answered_rejected_and_others_go_on(direct, monkeypatch, step):
    with monkeypatch.context() as broken:
        break_(broken, f"requests.orphans.{step}")
        await send(direct, "a", reply_to=REPLIES, correlation_id="c")
    [answer] = direct.broker.queues[REPLIES].ready
    assert "controller" in str(decode_text(answer.message.headers["x-status-detail"]))
    await send(direct, "b", b"2")
    assert (answers(direct.broker), direct.orphans(), direct.waiting("b")) == ([("c", "rejected")], [], [b"2"])


@pytest.mark.proves("controller/defect-controller-fails-one")
async def test_orphan_without_a_caller_is_kept_as_poison(direct, monkeypatch):
    break_(monkeypatch, "requests.orphans.direct_message")
    await send(direct, "a", b"one way")
    [entry] = (await direct.term.processors.poison.page(PoisonQuery(bodies=True))).entries
    assert (entry.key, entry.body, entry.reason, entry.deliveries) == ("a", b"one way", "rejected", 0)
    assert entry.finding == finding(0, ())


@pytest.mark.parametrize(
    ("step", "death", "status", "kept"),
    [("priority_of", died("expired"), "expired", []), ("last_death", {}, "rejected", [b"1"])],
    ids=["after the answer", "before the answer"],
)
@pytest.mark.proves("controller/defect-controller-fails-one")
async def test_dead_letter_that_cannot_be_processed_is_answered_once_and_kept_unless_it_was_answered(
    direct, monkeypatch, step, death, status, kept
):
    break_(monkeypatch, f"failures.dead_letters.{step}")
    exchange = direct.names.dead_letter_exchange
    await publish_to(direct, exchange, "a", b"1", headers=death, reply_to=REPLIES, correlation_id="c")
    await direct.clock.advance(1.0)
    assert (answers(direct.broker), direct.task.done()) == ([("c", status)], False)
    assert (direct.broker.bodies("pool-dl"), direct.broker.bodies("pool-poison")) == ([], kept)
    assert all(key_of(poison.message.headers) == "a" for poison in direct.broker.queues["pool-poison"].ready)


@pytest.mark.proves("controller/defect-controller-fails-one")
@pytest.mark.parametrize("step", ["ingress.accept", "ingress.managed_message", "forwarder.refuse_for"])
async def test_request_that_the_ingress_fails_on_is_answered_rejected_and_others_go_on(stack, monkeypatch, step):
    await change(stack, rest=REST)
    with monkeypatch.context() as broken:
        break_(broken, f"requests.{step}")
        await stack.publish("a", reply_to=REPLIES, correlation_id="c")
        await send(stack, "a", b"one way")
    await send(stack, "b", b"2")
    assert (answers(stack.broker), stack.orphans(), waiting(stack, None, "b")) == ([("c", "rejected")], [], [b"2"])
    assert (stack.broker.bodies("pool-poison"), stack.is_held(Key("a"))) == ([b"one way"], False)


@pytest.mark.parametrize(
    ("step", "queue"),
    [("activity.report_from_wire", "activity"), ("activity.parse_key", "activity"),
     ("requests.cancellations.parse_key", "cancel")],
)  # fmt: skip
async def test_report_or_cancel_that_cannot_be_processed_is_counted(direct, monkeypatch, step, queue):
    break_(monkeypatch, step)
    await direct.report("a", Event.READY, "w")
    await cancel(direct, reply_to=REPLIES, correlation_id="c")
    invalid = direct.metrics.registry.get_sample_value("osrdyne_invalid_messages_total", {"queue": queue})
    assert (invalid, direct.broker.bodies(f"pool-{queue}"), direct.task.done()) == (1.0, [], False)


async def test_request_of_a_failed_group_that_cannot_be_answered_as_such_is_answered_rejected(
    clock, broker, monkeypatch
):
    driver = FakeDriver(clock, pool=POOL)
    driver.fail_next_start(StartFailedError("no such image"))
    async with leading(clock, broker=broker, driver=driver) as stack:
        break_(monkeypatch, "failures.start_failures.describe_failure")
        await send(stack, "a", reply_to=REPLIES, correlation_id="c")
        assert (answers(broker), stack.waiting("a"), stack.task.done()) == ([("c", "rejected")], [], False)
