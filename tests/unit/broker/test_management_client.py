"""The HTTP API client against made-up answers: what it sends, what it survives, and how it fails."""

import json
from collections.abc import Callable

import httpx
import pytest
from pydantic import SecretStr

from osrdyne.broker.management.client import ManagementClient, vhost_of
from osrdyne.broker.topology.policies import PolicySpec
from osrdyne.config.models import BrokerSettings
from osrdyne.errors import BrokerAccessError, BrokerError, BrokerNotFoundError, ManagementUnavailableError, OsrdyneError

Handler = Callable[[httpx.Request], httpx.Response]
NO_QUEUES = {"items": [], "filtered_count": 0, "page_count": 0}

URI = "amqp://us%40er:s%2Fecret@rabbit.example/a%2Fb"


def client(handler: Handler, *, uri: str = URI) -> ManagementClient:
    return ManagementClient(BrokerSettings(uri=SecretStr(uri)), transport=httpx.MockTransport(handler))


def answering(status: int, body: object = None, *, text: str | None = None) -> Handler:
    return lambda _: httpx.Response(status, text=text) if text is not None else httpx.Response(status, json=body)


def answering_gzip(content: bytes) -> Handler:
    return lambda _: httpx.Response(200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(content))


def raising(error: Exception) -> Handler:
    def handler(_: httpx.Request) -> httpx.Response:
        raise error

    return handler


def noting(seen: list[httpx.Request], body: object) -> Handler:
    """Gives the same answer to every request, and notes them."""

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json=body)

    return handler


@pytest.fixture
def seen():
    return []


def test_virtual_host_is_read_from_the_amqp_uri():
    hosts = {"": "/", "/": "/", "/%2F": "/", "/prod": "prod", "/a%2Fb%25": "a/b%", ":5672/%C3%A9?heartbeat=1": "é"}
    assert {rest: vhost_of(f"amqp://user:p%2Fw@host{rest}") for rest in hosts} == hosts


@pytest.mark.parametrize(
    ("management_uri", "asked"),
    [
        (None, "http://rabbit.example:15672/api/whoami"),
        ("http://u:p@[::1]:15672", "http://[::1]:15672/api/whoami"),
        ("https://u:p@proxy.example/rabbit/", "https://proxy.example/rabbit/api/whoami"),
    ],
    ids=["derived", "ipv6", "behind-a-proxy"],
)
async def test_the_api_is_asked_below_its_own_address(seen, management_uri, asked):
    secret = None if management_uri is None else SecretStr(management_uri)
    settings = BrokerSettings(uri=SecretStr(URI), management_uri=secret)
    await ManagementClient(settings, transport=httpx.MockTransport(noting(seen, {}))).whoami()
    assert [str(request.url) for request in seen] == [asked]


async def test_credentials_travel_in_the_header_only_and_names_are_escaped(seen):
    whoami = await client(noting(seen, {"name": "us@er", "tags": "administrator,monitoring"})).whoami()
    assert seen[0].headers["authorization"] == httpx.BasicAuth("us@er", "s/ecret")._auth_header
    assert "ecret" not in str(seen[0].url)
    assert whoami.tags == {"administrator", "monitoring"}
    await client(noting(seen, {})).put_policy(PolicySpec("p/%41 é", "x", "queues", {}))
    assert seen[1].url.raw_path == b"/api/policies/a%2Fb/p%2F%2541%20%C3%A9"
    assert await client(noting(seen, NO_QUEUES)).list_queues("p.x-") == []
    parameters = seen[2].url.params
    assert parameters["disable_stats"] == parameters["enable_queue_totals"] == "true"
    assert parameters["name"] == r"^p\.x\-"


@pytest.mark.parametrize(
    ("handler", "kind"),
    [
        (answering(401, {"error": "not_authorized", "reason": "Login failed"}), BrokerAccessError),
        (answering(403, {"error": "not_authorised", "reason": "no"}), BrokerAccessError),
        (answering(404, {"error": "Object Not Found"}), BrokerNotFoundError),
        (answering(400, {"error": "bad_request", "reason": "bad"}), BrokerError),
        (answering(503, text="<html>down</html>"), ManagementUnavailableError),
        (answering(200, text="<html>hello</html>"), BrokerError),
        (answering(404, text="<html>no such page</html>"), BrokerError),
        (answering(200, ["a list"]), BrokerError),
        (raising(httpx.ConnectError("refused")), ManagementUnavailableError),
        (raising(httpx.ReadTimeout("slow")), ManagementUnavailableError),
        (raising(httpx.RemoteProtocolError("not HTTP")), ManagementUnavailableError),
        (answering_gzip(b"junk"), ManagementUnavailableError),
    ],
    ids=["401", "403", "404", "400", "503", "html", "html-404", "wrong-json", "refused", "slow", "not-http", "gzip"],
)
async def test_failures_are_translated_without_secrets(handler, kind):
    api = client(handler)
    with pytest.raises(OsrdyneError) as raised:
        await api.overview()
    assert type(raised.value) is kind
    assert "ecret" not in f"{raised.value!r} {api!r} {raised.value.fields}"


async def test_listing_survives_odd_queues_and_leaves_bindings_of_exchanges_out():
    items = [
        {"name": "a", "arguments": {"x": True, "y": [1, {"z": None}], "w": 1.5}, "messages": 3, "state": "running"},
        {"name": "b", "arguments": [], "messages": None, "state": "down"},
        {"name": "c", "arguments": "?", "messages": True, "policy": ""},
        {"arguments": {}},
        "what",
    ]
    queues = await client(answering(200, {"items": items, "filtered_count": 3, "page_count": 1})).list_queues("")
    found = [(queue.name, queue.messages, queue.is_running) for queue in queues]
    assert found == [("a", 3, True), ("b", None, False), ("c", None, False)]
    body = [
        {"destination": "q", "destination_type": "queue", "routing_key": "é/%41", "arguments": {}},
        {"destination": "x", "destination_type": "exchange", "routing_key": "k", "arguments": []},
    ]
    bindings = await client(answering(200, body)).list_bindings("p-req-xchg")
    assert [(binding.queue, binding.routing_key) for binding in bindings] == [("q", "é/%41")]
    assert await client(answering(404, {"error": "Object Not Found"})).get_policy("p") is None


@pytest.mark.proves("broker/program-declares-queue-whose")
async def test_deeply_nested_arguments_and_names_that_are_not_utf8_do_not_break_a_listing():
    """defects: foreign-queues. Any user of the virtual host who may declare a queue can do that."""
    deep = "[" * 20_000 + '"]"' + "]" * 20_000
    own = {"name": "p-req-a", "arguments": {"k": '["\\{'}}
    raw = f'{{"items": [{{"name": "x", "arguments": {{"d": {deep}}}}}, {json.dumps(own)}], "page_count": 1}}'
    queues = await client(lambda _: httpx.Response(200, content=raw)).list_queues("")
    assert [queue.name for queue in queues] == ["x", "p-req-a"]
    assert queues[1].arguments == own["arguments"]
    named = b'{"items": [{"name": "a\xff"}], "filtered_count": 1, "page_count": 1}'
    queues = await client(lambda _: httpx.Response(200, content=named)).list_queues("")
    assert [queue.name for queue in queues] == ["a\ufffd"]


async def test_listing_of_more_than_a_page_comes_in_one_answer():
    """Pages of a list that changes do not fit together: what moves from one page to another is missed."""
    names = [f"p-req-{number}" for number in range(1200)]
    asked: list[bool] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append("page" in request.url.params)
        items = [{"name": name} for name in ["other", *names]]
        if asked[-1]:
            return httpx.Response(200, json={"items": items[1:501], "filtered_count": 1200, "page_count": 3})
        return httpx.Response(200, json=items)

    management = client(handler)
    for _ in range(2):
        assert [queue.name for queue in await management.list_queues("p-req-")] == names
    assert asked == [True, False, False]
    names = names[:10]
    assert len(await management.list_queues("p-req-")) == 10
    assert not asked[-1]


async def test_clock_is_compared_and_users_are_asked_for_again_when_one_was_deleted_meanwhile():
    headers = {"date": "Thu, 01 Jan 1970 00:00:10 GMT", "content-type": "application/json"}
    answer = httpx.Response(200, headers=headers, content=json.dumps({"rabbitmq_version": "3.10.8"}))
    overview = await client(lambda _: answer).overview()
    assert overview.clock_offset is not None and overview.clock_offset < -1_000_000_000
    answers = [httpx.Response(500), httpx.Response(200, json=[{"name": "p-a"}, {"name": "other"}])]
    assert await client(lambda _: answers.pop(0)).list_users("p-") == ["p-a"]
    with pytest.raises(ManagementUnavailableError):
        await client(answering(500)).list_users("p-")
