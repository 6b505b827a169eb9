"""The splitter within the ingress: a real leader of a managed pool on a broker in memory, in virtual time."""

import json

from managed_pool import cancel, change, publish_to
from managed_pool import waiting as pool_waiting
from replies import REPLIES, answers

from osrdyne.ingress.splitter.manifest import load_splitter
from osrdyne.protocol.messages import SPLIT_HEADER
from osrdyne.protocol.names import Key
from osrdyne.testing.fakes.stack import Stack

TURNS = {"camera": {"postfixFromStatic": ["A", "B"]}}
BY_HEADER = {"camera.*": {"postfixFromRequest": {"header": "h"}}}


async def split_by(stack: Stack, rules: object) -> None:
    await stack.term.routing.splitter.change(load_splitter(json.dumps(rules)), author="me")


async def publish(stack: Stack, key: str, *bodies: bytes, **properties: object) -> None:
    for body in bodies:
        await stack.publish(key, body, **properties)
    await stack.clock.settle()


def waiting(stack: Stack, key: str) -> list[bytes]:
    return stack.waiting(key) if stack.has_queue(key) else []


def own_keys(stack: Stack, key: str) -> list[object]:
    """The client keys in the requests of a group."""
    ready = stack.broker.queues[stack.names.request_queue(Key(key))].ready
    return [stored.message.headers.get(SPLIT_HEADER) for stored in ready]


async def test_requests_of_one_key_go_to_several_groups_in_turn(stack):
    """A request that is refused in any case takes no turn, and clients cannot forge the key that they named."""
    await split_by(stack, TURNS)
    await publish(stack, "camera", b"old", headers={"x-deadline": 1})
    await publish(stack, "camera", b"1", b"2", b"3", b"4", headers={SPLIT_HEADER: "forged"})
    await publish(stack, "other", b"1", headers={SPLIT_HEADER: "forged"})
    assert [waiting(stack, key) for key in ("camera", "camera-A", "camera-B")] == [[], [b"1", b"3"], [b"2", b"4"]]
    assert {stack.running(key) for key in ("camera-A", "camera-B")} == {1}
    assert (own_keys(stack, "camera-A"), own_keys(stack, "other")) == (["camera", "camera"], [None])


async def test_group_that_has_to_wait_holds_back_no_other_group_of_its_key(stack, clock):
    """lifecycle: bind-waits-for-stop: the worker of the one group is just being stopped, so that its bind has to
    wait."""
    slow = Key("camera-A")
    await split_by(stack, TURNS)
    stack.require(slow)
    await clock.settle()
    stack.driver.workers_of(slow)[0].stubborn = True
    stack.retire(slow)
    while not stack.workers_of(slow).stopping:
        await clock.advance(0.5)
    await publish(stack, "camera", b"1", b"2", b"3", b"4")
    assert (waiting(stack, "camera-A"), waiting(stack, "camera-B")) == ([], [b"2", b"4"])
    await clock.advance(60.0)
    assert waiting(stack, "camera-A") == [b"1", b"3"]


async def test_request_that_comes_back_from_its_group_is_not_split_again(stack):
    await split_by(stack, BY_HEADER)
    headers = {"h": "x", SPLIT_HEADER: "camera"}
    await publish_to(stack, stack.names.work_exchange(None), "camera-x", b"1", headers=headers)
    assert (waiting(stack, "camera-x"), own_keys(stack, "camera-x")) == ([b"1"], ["camera"])


async def test_key_that_becomes_too_long_is_answered(stack, broker):
    await split_by(stack, BY_HEADER)
    for header in ("x", "x" * 250):
        await publish(stack, "camera", b"1", headers={"h": header}, correlation_id="c", reply_to=REPLIES)
    assert (answers(broker), stack.orphans(), stack.task.done()) == ([("c", "invalid")], [], False)
    found = {"rule": "camera.*", "outcome": "split"}
    assert stack.metrics.registry.get_sample_value("osrdyne_splits_total", found) == 2.0


async def test_no_activation_is_about_the_group_of_the_split_key(stack, broker):
    await split_by(stack, BY_HEADER)
    await publish(stack, "camera-x", b"1")
    asked: dict[str, object] = {"h": "x", "x-no-activate": True}
    await publish(stack, "camera", b"2", headers=asked, correlation_id="up", reply_to=REPLIES)
    await publish(stack, "camera", b"3", headers={**asked, "h": "y"}, correlation_id="down", reply_to=REPLIES)
    assert (waiting(stack, "camera-x"), answers(broker)) == ([b"1", b"2"], [("down", "not-running")])


async def test_routes_see_the_split_key(stack):
    first = {"route": "FROM /* WHERE $key = 'camera-A' INTO $upstream", "priority": 3}
    await split_by(stack, TURNS)
    await change(stack, first=first, rest="FROM /* INTO $upstream")
    await publish(stack, "camera", b"1", b"2")
    assert (pool_waiting(stack, 3, "camera-A"), waiting(stack, "camera-B")) == ([b"1"], [b"2"])


async def test_request_that_the_splitter_fails_on_ends_no_term(stack, monkeypatch):
    await split_by(stack, TURNS)
    monkeypatch.setattr(stack.term.routing.splitter.splitter, "split", lambda _: [][1])
    await publish(stack, "camera", b"1", correlation_id="c", reply_to=REPLIES)
    assert (answers(stack.broker), stack.task.done()) == ([("c", "rejected")], False)


async def test_cancel_reaches_every_group_that_may_have_the_request(stack, broker):
    await split_by(stack, TURNS)
    await publish(stack, "camera", b"1", b"2")
    await publish(stack, "cam", b"3")
    await change(stack, r='FROM /* INTO BrokeredEndpoint("/modules/named/inputs/x")')
    for key in ("camera", "camera-A", "camera-B", "named", "cam"):
        broker.declare_queue(f"ctl {key}", {})
        broker.bind(f"ctl {key}", stack.names.control_exchange, stack.names.control_group_routing_key(Key(key)))
    await cancel(stack, "camera", correlation_id="c", reply_to="r")
    heard = [len(broker.bodies(f"ctl {key}")) for key in ("camera", "camera-A", "camera-B", "named", "cam")]
    assert heard == [1, 1, 1, 1, 0]
