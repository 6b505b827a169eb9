"""Tokens of requests at the ingress of a managed pool: a real leader on a broker in memory, in virtual time."""

import asyncio
import json
from typing import Any

import pytest
import structlog
from managed_pool import change, explained, heard, listen, managed, publish_to, send, waiting
from replies import REPLIES, answers

from osrdyne.auth.decision import KEYS_RETRY_AFTER, AccessRefusal
from osrdyne.auth.grants import Grant, Principal, grants_of, parse_scope
from osrdyne.broker.management.credentials import SharedCredentials
from osrdyne.config.models import ApiSettings, Settings
from osrdyne.daemon import wiring
from osrdyne.ingress.documents.problems import InvalidDocumentError
from osrdyne.ingress.policies.manifest import load_policies, load_proposal
from osrdyne.ingress.quotas.document import load_quotas
from osrdyne.ingress.splitter.manifest import load_splitter
from osrdyne.pool.views import PoisonQuery
from osrdyne.protocol.control import Command
from osrdyne.protocol.messages import PRINCIPAL_HEADER
from osrdyne.protocol.names import Key
from osrdyne.testing.drivers import FakeDriver
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import Stack, leading

SEND_ALL = Principal("alice", grants_of(None, [Grant.SEND]))
SECRET = "osr-secret"
DEMANDING = load_proposal('{"Authorization": "RequiredToSend"}')


class Verifier:
    """Tokens by their text. Those of `slow` are verified only when `released` is set, as in a thread."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Principal | AccessRefusal] = {
            SECRET: SEND_ALL,
            f"{SECRET}-b": Principal("bob", grants_of(None, [Grant.SEND], keys=parse_scope("b/{x}"))),
            f"{SECRET}-viewer": Principal("eve", grants_of(None, [Grant.VIEW])),
            f"{SECRET}-late": AccessRefusal.EXPIRED,
            f"{SECRET}-keyless": AccessRefusal.KEYS_UNAVAILABLE,
            f"{SECRET}-slow": Principal("sam", grants_of(None, [Grant.SEND])),
        }
        self.slow = {f"{SECRET}-slow"}
        self.workers: Principal | AccessRefusal = Principal(
            "crew", grants_of(None, [Grant.LISTEN], keys=parse_scope("a/{x}"))
        )
        self.released = asyncio.Event()
        self.verified: list[str] = []

    def identify_cached(self, token: str) -> Principal | AccessRefusal | None:
        return None if token in self.slow else self.outcomes.get(token, AccessRefusal.UNKNOWN)

    async def identify(self, token: str) -> Principal | AccessRefusal:
        await self.released.wait()
        self.verified.append(token)
        return self.outcomes.get(token, AccessRefusal.UNKNOWN)

    async def named(self, name: str) -> Principal | AccessRefusal:
        return self.workers if name == "crew" else AccessRefusal.UNKNOWN


@pytest.fixture
def verifier():
    return Verifier()


def with_keys() -> Settings:
    return managed().model_copy(update={"api": ApiSettings(tokens_file="tokens.json")})


async def demand(stack: Stack, *policies: dict[str, object]) -> None:
    text = json.dumps({"policies": policies})
    await stack.term.routing.policies.change(load_policies(text), author="me")


async def ask(stack: Stack, key: str, token: str | None = None, body: bytes = b"x", **headers: object) -> None:
    given = headers if token is None else {**headers, "authorization": f"Bearer {token}"}
    await send(stack, key, body, headers=given, reply_to=REPLIES, correlation_id=key)


def forwarded(stack: Stack, key: str = "a", priority: int | None = None) -> list[dict[str, object]]:
    """The headers of the requests that wait for a key."""
    queue = stack.broker.queues[stack.names.request_queue(Key(key), priority)]
    return [dict(stored.message.headers) for stored in queue.ready]


def everything(broker: FakeBroker) -> str:
    """All messages in all queues, with their headers."""
    return "".join(
        f"{stored.message} {dict(stored.message.headers)}" for queue in broker.queues.values() for stored in queue.ready
    )


@pytest.fixture
async def stack(clock, broker, verifier):
    """A leader whose pool demands tokens for all keys."""
    async with leading(clock, broker=broker, settings=with_keys(), verifier=verifier) as stack:
        await demand(stack, {"match": "{key}", "Authorization": "RequiredToSend"})
        yield stack


@pytest.mark.parametrize(
    ("token", "status"),
    [
        *[(one, "unauthorized") for one in (None, "unknown", f"{SECRET}-late", f"{SECRET}-keyless", "two words")],
        *[(one, "forbidden") for one in (f"{SECRET}-viewer", f"{SECRET}-b")],
    ],
    ids=str,
)
@pytest.mark.proves("managed/client-sends-token-one", "managed/keys-verify-jwts-cannot")
async def test_request_without_a_valid_token_starts_nothing(stack, token, status):
    """Where keys cannot be read, the caller learns when to try again."""
    with structlog.testing.capture_logs() as logs:
        await ask(stack, "a", token)
    assert (answers(stack.broker), stack.has_queue("a"), stack.orphans()) == ([("a", status)], False, [])
    [stored] = stack.broker.queues[REPLIES].ready
    again = KEYS_RETRY_AFTER if token == f"{SECRET}-keyless" else None
    assert stored.message.headers.get("x-retry-after") == again
    assert SECRET not in everything(stack.broker) + str(logs)


async def test_other_schemes_and_several_tokens_do_not_count(stack, broker):
    await ask(stack, "a", None, authorization=f"Basic {SECRET}")
    await ask(stack, "b", SECRET, Authorization=f"Bearer {SECRET}")
    await ask(stack, "c", None, authorization=17)
    await ask(stack, "d", None, authorization=bytearray(f"Bearer {SECRET}", "ascii"))
    await ask(stack, "e", None, **{"x-osrdyne-replay": 1})
    assert answers(broker) == [(key, "unauthorized") for key in "abce"]
    assert waiting(stack, None, "d") == [b"x"]


async def test_accepted_request_carries_its_own_principal_and_no_token(stack, broker):
    await demand(stack, {"match": "a", "Authorization": "NotRequired"})
    forged: dict[str, Any] = {PRINCIPAL_HEADER: "admin", PRINCIPAL_HEADER.title(): "admin", "traceparent": "t"}
    with structlog.testing.capture_logs() as logs:
        await ask(stack, "a", None, **forged, **{"x-osrdyne-replay": 1})
        for key, token in (("a", SECRET), ("a", "unknown"), ("b/1", f"{SECRET}-b")):
            await ask(stack, key, token, **forged)
    assert answers(broker) == []
    found = [*forwarded(stack), *forwarded(stack, "b/1")]
    assert [headers.get(PRINCIPAL_HEADER) for headers in found] == [None, "alice", None, "bob"]
    assert {headers["traceparent"] for headers in found} == {"t"}
    assert "admin" not in everything(broker)
    assert SECRET not in everything(broker) + str(logs)


@pytest.mark.proves("managed/keys-verify-jwts-cannot")
async def test_slow_token_keeps_the_order_of_its_key_and_delays_no_other(stack, verifier):
    await ask(stack, "a", SECRET, b"1")
    await ask(stack, "a", f"{SECRET}-slow", b"2")
    await ask(stack, "a", SECRET, b"3")
    await ask(stack, "a", None, b"4")
    await ask(stack, "b", SECRET, b"5")
    assert (waiting(stack, None), waiting(stack, None, "b"), answers(stack.broker)) == ([b"1"], [b"5"], [])
    verifier.released.set()
    await stack.clock.settle()
    assert (waiting(stack, None), answers(stack.broker)) == ([b"1", b"2", b"3"], [("a", "unauthorized")])
    await ask(stack, "a", SECRET, b"6")
    assert waiting(stack, None) == [b"1", b"2", b"3", b"6"]


@pytest.mark.proves("managed/leader-dies-verifies-token")
async def test_leader_killed_while_it_verifies_leaves_the_request_to_the_next(stack, verifier):
    await ask(stack, "a", f"{SECRET}-slow", b"1")
    await ask(stack, "a", SECRET, b"2")
    await stack.kill()
    verifier.released.set()
    async with leading(stack.clock, broker=stack.broker, settings=with_keys(), verifier=verifier) as following:
        await stack.clock.settle()
        assert (waiting(following, None), following.orphans(), answers(stack.broker)) == ([b"1", b"2"], [], [])
        assert [headers[PRINCIPAL_HEADER] for headers in forwarded(following)] == ["sam", "alice"]


async def test_verifier_that_fails_dead_letters_the_request_and_ends_no_term(stack, broker, verifier, monkeypatch):
    async def fail(token):
        raise RuntimeError("unexpected")

    monkeypatch.setattr(verifier, "identify", fail)
    await ask(stack, "a", f"{SECRET}-slow")
    assert (answers(broker), stack.orphans(), stack.task.done()) == ([("a", "rejected")], [], False)
    await ask(stack, "a", SECRET)
    assert waiting(stack, None) == [b"x"]
    assert SECRET not in everything(broker)


async def test_accepted_request_is_not_checked_again(stack, broker):
    for exchange in (stack.names.work_exchange(None), stack.names.retried_exchange):
        await publish_to(stack, exchange, "a", b"1", headers={PRINCIPAL_HEADER: "alice"}, reply_to=REPLIES)
    assert answers(broker) == []
    assert [headers[PRINCIPAL_HEADER] for headers in forwarded(stack)] == ["alice", "alice"]


async def test_poison_keeps_the_principal_and_is_replayed_without_a_token(stack, broker):
    """With the key of its client, of which the splitter makes that of its group again."""
    rules = json.dumps({"a": {"postfixFromRequest": {"header": "h"}}})
    await stack.term.routing.splitter.change(load_splitter(rules), author="me")
    await ask(stack, "a", SECRET, h="x")
    consumer = await stack.consume("a-x")
    while broker.bodies(stack.names.poison_queue) == []:
        await (await consumer.get()).reject()
        await stack.clock.settle()
    assert SECRET not in everything(broker)
    [entry] = (await stack.term.processors.poison.page(PoisonQuery())).entries
    broker.queues[REPLIES].ready.clear()
    await stack.term.processors.poison.replay([entry.id])
    await stack.clock.settle()
    assert answers(broker) == []
    assert (await consumer.get()).headers[PRINCIPAL_HEADER] == "alice"


async def test_key_that_the_splitter_makes_is_checked_too(stack, broker):
    inner = {"match": "tenant-{name}", "Authorization": "RequiredToSend"}
    await demand(stack, inner)
    rules = json.dumps({"tenant": {"postfixFromRequest": {"header": "h"}}})
    await stack.term.routing.splitter.change(load_splitter(rules), author="me")
    await ask(stack, "tenant", None, h="x")
    await ask(stack, "tenant", f"{SECRET}-b", h="x")
    await ask(stack, "tenant", SECRET, h="x")
    assert answers(broker) == [("tenant", "unauthorized"), ("tenant", "forbidden")]
    assert waiting(stack, None, "tenant-x") == [b"x"]


async def test_group_that_a_route_names_is_open_to_what_the_route_sends(stack, broker):
    await demand(stack, {"match": "vault", "Authorization": "RequiredToSend"})
    await change(stack, away="FROM /* INTO BrokeredEndpoint('/modules/vault/inputs/store')")
    await ask(stack, "a")
    await ask(stack, "vault")
    assert (waiting(stack, None, "vault"), answers(broker)) == ([b"x"], [("vault", "unauthorized")])


async def test_routes_splitter_and_quotas_know_the_principal(stack, verifier):
    """Conditions see no token, and no principal that a client names."""
    leak = f"{{authorization}} = 'Bearer {SECRET}' OR {{{PRINCIPAL_HEADER}}} = 'root'"
    leaked = {"route": f"FROM /* WHERE {leak} INTO $upstream", "priority": 1}
    first = {"route": "FROM /* WHERE {$principal} = 'alice' INTO $upstream", "priority": 2}
    await change(stack, leaked=leaked, first=first, rest="FROM /* INTO $upstream")
    await ask(stack, "a", SECRET, b"1", **{PRINCIPAL_HEADER: "root"})
    verifier.slow.clear()
    await ask(stack, "a", f"{SECRET}-slow", b"2", **{"$principal": "alice"})
    assert [waiting(stack, level) for level in (1, 2, None)] == [[], [b"1"], [b"2"]]
    rules = json.dumps({"s": {"postfixFromRequest": {"header": "{$principal}"}}})
    await stack.term.routing.splitter.change(load_splitter(rules), author="me")
    await ask(stack, "s", SECRET)
    assert waiting(stack, 2, "s-alice") == [b"x"]
    quota = {"rules": [{"name": "r", "per": "principal", "messages_per_day": 1}]}
    await stack.term.routing.quotas.change(load_quotas(json.dumps(quota)), author="me")
    for token in (SECRET, SECRET, f"{SECRET}-slow"):
        await ask(stack, "q", token)
    assert answers(stack.broker) == [("q", "quota-exceeded")]


async def test_policies_that_demand_tokens_need_a_verifier(clock, broker):
    async with leading(clock, broker=broker, settings=managed()) as stack:
        with pytest.raises(InvalidDocumentError, match=r"policies\.0\.Authorization"):
            await demand(stack, {"match": "a", "Authorization": "RequiredToSend"})
        with pytest.raises(InvalidDocumentError, match="Authorization"):
            await stack.term.routing.lifetimes.create(Key("a"), DEMANDING, author="me")
        await ask(stack, "a", SECRET)
        assert (waiting(stack, None), SECRET in everything(broker)) == ([b"x"], False)


@pytest.mark.proves("managed/policies-demand-tokens-configuration")
async def test_stored_policies_refuse_everything_once_the_keys_are_gone(stack, broker):
    await stack.term.routing.lifetimes.create(Key("c"), DEMANDING, author="me")
    await stack.kill()
    with structlog.testing.capture_logs() as logs:
        async with leading(stack.clock, broker=broker, settings=managed()) as following:
            for key in ("a", "c"):
                await ask(following, key, SECRET)
            assert answers(broker) == [("a", "unauthorized"), ("c", "unauthorized")]
    assert len([entry for entry in logs if entry["log_level"] == "error"]) == 2


async def test_explanation_shows_the_check(stack):
    found = [explained(stack, "a", principal=name, authorization=f"Bearer {SECRET}") for name in (None, "alice")]
    assert [one.refused for one in found] == ["unauthorized", None]
    assert "alice" in {step.name: step.text for step in found[1].steps}["authorization"]
    assert SECRET not in str(found)


# --- workers that need the grant `listen`


@pytest.fixture
def _shared_credentials(monkeypatch):
    """The users of workers need a real RabbitMQ."""
    monkeypatch.setattr(wiring, "choose_credentials", lambda *_, **__: SharedCredentials("amqp://h"))


def with_worker_principal() -> Settings:
    base = with_keys()
    broker = base.broker.model_copy(update={"scoped_credentials": True})
    worker = base.worker.model_copy(update={"principal": "crew"})
    return base.model_copy(update={"broker": broker, "worker": worker})


@pytest.fixture
async def receiving(clock, broker, verifier, _shared_credentials):
    """A leader whose pool demands the grant `listen` of all workers."""
    async with leading(clock, broker=broker, settings=with_worker_principal(), verifier=verifier) as stack:
        await demand(stack, {"match": "open"}, {"match": "{any}/{key}", "Authorization": "RequiredToReceive"})
        yield stack


async def test_only_keys_whose_workers_may_listen_get_workers_and_requests(receiving):
    for key in ("a/1", "b/1", "open"):
        await ask(receiving, key)
    await receiving.clock.advance(5.0)
    assert answers(receiving.broker) == [("b/1", "forbidden")]
    assert [receiving.running(key) for key in ("a/1", "b/1", "open")] == [1, 0, 1]


@pytest.mark.proves("managed/principal-workers-loses-grant")
@pytest.mark.parametrize("identity", [AccessRefusal.UNKNOWN, AccessRefusal.EXPIRED, Principal("crew", {})], ids=str)
async def test_workers_end_when_their_principal_loses_the_grant_and_start_when_it_returns(
    receiving, verifier, identity
):
    await ask(receiving, "a/1")
    await receiving.clock.advance(5.0)
    (worker,) = receiving.driver.workers_of(Key("a/1"))
    listen(receiving, receiving.names.control_worker_routing_key(worker.instance.worker_id))
    had, verifier.workers = verifier.workers, identity
    await receiving.clock.advance(20.0)
    assert {order.command for order in heard(receiving)} == {Command.DRAIN}
    receiving.driver.exit_instance(worker.instance.instance_id, 0)
    await receiving.clock.advance(60.0)
    assert receiving.running("a/1") == 0
    await ask(receiving, "a/1")
    assert answers(receiving.broker) == [("a/1", "forbidden")]
    verifier.workers = had
    await receiving.clock.advance(60.0)
    assert (receiving.running("a/1"), len(forwarded(receiving, "a/1"))) == (1, 1)


@pytest.mark.proves("managed/principal-workers-loses-grant")
async def test_next_leader_keeps_the_workers_that_may_listen_and_lets_nothing_pass_without_the_settings(
    receiving, clock, broker, verifier
):
    await ask(receiving, "a/1")
    await clock.advance(5.0)
    await receiving.kill()
    driver, settings = receiving.driver, receiving.settings
    async with leading(clock, broker=broker, driver=driver, settings=settings, verifier=verifier) as stack:
        await clock.advance(30.0)
        assert (stack.running("a/1"), driver.count("start"), driver.count("stop")) == (1, 1, 0)
        await stack.kill()
    async with leading(clock, broker=broker, settings=with_keys(), verifier=verifier) as stack:
        await ask(stack, "a/1")
        await clock.advance(5.0)
        assert (answers(broker), stack.running("a/1")) == ([("a/1", "forbidden")], 0)


@pytest.mark.usefixtures("_shared_credentials")
@pytest.mark.parametrize(
    ("section", "changed"),
    [("worker", {"principal": None}), ("broker", {"scoped_credentials": False}), (None, {})],
    ids=["principal", "credentials", "driver"],
)
async def test_grant_of_workers_that_could_not_be_enforced_is_not_accepted(
    clock, broker, verifier, monkeypatch, section, changed
):
    settings = with_worker_principal()
    if section is None:
        monkeypatch.setattr(FakeDriver, "instance_is_worker", False)
    else:
        settings = settings.model_copy(update={section: getattr(settings, section).model_copy(update=changed)})
    async with leading(clock, broker=broker, settings=settings, verifier=verifier) as stack:
        for authorization in ("Required", "RequiredToReceive"):
            with pytest.raises(InvalidDocumentError, match=r"worker\.principal"):
                await demand(stack, {"match": "a", "Authorization": authorization})
        await demand(stack, {"match": "a", "Authorization": "RequiredToSend"})
