"""Queue policies at the ingress of a managed pool: a real leader on a broker in memory, in virtual time."""

import json

import pytest
from managed_pool import TO_B, change, managing, send, waiting
from replies import REPLIES, answers

from osrdyne.errors import PoolConflictError
from osrdyne.ingress.circuits.configuration import load_circuits
from osrdyne.ingress.policies.manifest import load_policies
from osrdyne.ingress.quotas.document import load_quotas
from osrdyne.ingress.routes.manifest import load_manifest
from osrdyne.ingress.splitter.manifest import load_splitter
from osrdyne.pool.routing.manifest_store import ManifestChange
from osrdyne.protocol.deadlines import DEADLINE_HEADER
from osrdyne.protocol.names import Key
from osrdyne.testing.fakes.stack import Stack


async def limit(stack: Stack, *policies: dict[str, object], **document: object) -> ManifestChange:
    text = json.dumps({"policies": policies, **document})
    return await stack.term.routing.policies.change(load_policies(text), author="me")


async def ask(stack: Stack, key: str, body: bytes = b"", **properties: object) -> None:
    await send(stack, key, body, reply_to=REPLIES, correlation_id=key, **properties)


@pytest.mark.proves("managed/client-sends-requests-too", "managed/policy-values-beyond-bounds")
async def test_request_beyond_the_size_is_answered_too_large(stack, broker):
    change = await limit(stack, {"match": "a", "MaxMessageSize": 10_000}, {"match": "c", "MaxMessageSize": 1})
    assert [str(warning).partition(":")[0] for warning in change.warnings] == ["policies.1.MaxMessageSize"]
    await ask(stack, "a", b"x" * 10_000)
    await ask(stack, "b", b"x" * 10_001)
    assert (answers(broker), len(waiting(stack, None, "b")), len(waiting(stack, None))) == ([], 1, 1)
    await ask(stack, "a", b"x" * 9_990, headers={"name": "1234567"})
    assert (answers(broker), stack.orphans(), len(waiting(stack, None))) == ([("a", "too-large")], [], 1)


async def test_age_is_the_upper_limit_of_the_time_to_live(stack, broker):
    await limit(stack, {"match": "a", "MaxMessageAge": "1m"}, default={"MaxMessageAge": "1d"})
    now = round(stack.clock.time() * 1000)
    for key in "ab":
        await ask(stack, key)
    deadlines = [broker.queues[stack.names.request_queue(Key(key))].ready[0].message.headers for key in "ab"]
    assert [headers[DEADLINE_HEADER] for headers in deadlines] == [now + 60_000, now + 600_000]


async def test_group_made_by_a_route_has_its_own_policy(stack, broker):
    await change(stack, away=TO_B)
    await limit(stack, {"match": "b", "MaxMessageAge": 0})
    await ask(stack, "a")
    assert (answers(broker), stack.has_queue("b")) == ([("a", "expired")], False)


@pytest.mark.parametrize(
    ("kind", "document"),
    [
        ("routes", load_manifest('{"routes": {}}')),
        ("splitter", load_splitter("{}")),
        ("policies", load_policies('{"policies": []}')),
        ("quotas", load_quotas('{"pool": {"messages_per_day": 1}}')),
        ("circuits", load_circuits("{}")),
    ],
)
async def test_direct_pool_takes_no_document(direct, kind, document):
    with pytest.raises(PoolConflictError, match=r"pool\.kind"):
        await getattr(direct.term.routing, kind).change(document, author="me")


@pytest.mark.proves("managed/client-sends-requests-too", "managed/leader-dies-change-queue")
async def test_age_of_zero_answers_every_request_also_by_the_next_leader(stack, broker):
    await limit(stack, default={"MaxMessageAge": 0})
    await ask(stack, "a")
    assert (answers(broker), stack.has_queue("a")) == ([("a", "expired")], False)
    await stack.kill()
    async with managing(stack.clock, broker) as following:
        await ask(following, "b")
        assert answers(broker) == [("a", "expired"), ("b", "expired")]
