"""Users of workers: when they are made and removed, in virtual time, with RabbitMQ's HTTP API made up."""

import asyncio
import json
import re
from dataclasses import dataclass, field
from urllib.parse import unquote

import httpx
import pytest
from pydantic import SecretStr

from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.management.credentials import (
    ScopedCredentials,
    control_topics,
    process_permissions,
    user_prefix,
    worker_permissions,
)
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.config.models import BrokerSettings
from osrdyne.errors import BrokerUnavailableError
from osrdyne.protocol.names import Key, PoolNames, WorkerId
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.keys import ODD_KEYS

NAMES = PoolNames("pool")
PREFIX = "osrdyne-pool-prod-"
KEY, ME, OTHER = Key("k"), WorkerId("me"), WorkerId("other")


@dataclass
class Api:
    """Users and nothing else; `fail_at` is the part of the API that does not answer."""

    users: dict[str, list[str]] = field(default_factory=dict)
    fail_at: str | None = None
    listings: int = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = [unquote(part) for part in request.url.raw_path.decode().partition("?")[0].split("/")[2:]]
        self.listings += path == ["users"]
        if path[0] == self.fail_at:
            return httpx.Response(503, json={"reason": "not now"})
        if path == ["users"]:
            return httpx.Response(200, json=[{"name": name} for name in self.users])
        if path[0] == "queues":
            return httpx.Response(200, json={"items": [], "filtered_count": 0, "page_count": 0})
        if path[0] == "exchanges":
            return httpx.Response(200, json=[])
        if request.method == "DELETE":
            self.users.pop(path[1])
            return httpx.Response(204)
        user = path[1] if path[0] in {"users", "user-limits"} else path[2]
        self.users.setdefault(user, []).append(path[0])
        assert path[0] != "users" or json.loads(request.content)["tags"] == ""
        return httpx.Response(204)


@dataclass
class Scene:
    api: Api = field(default_factory=Api)
    clock: VirtualClock = field(default_factory=VirtualClock)
    alive: set[WorkerId] = field(default_factory=set)

    def __post_init__(self) -> None:
        settings = BrokerSettings(uri=SecretStr("amqp://boss:secret@rabbit/prod"))
        self.credentials = ScopedCredentials(
            names=NAMES,
            layout=QueueLayout(NAMES),
            management=ManagementClient(settings, clock=self.clock, transport=httpx.MockTransport(self.api)),
            uri="amqps://boss:secret@rabbit/prod?cacertfile=/ca.pem",
            alive=lambda: self.alive,
            start_timeout=300.0,
            interval=60.0,
            clock=self.clock,
        )


@pytest.fixture
def scene():
    return Scene()


@pytest.mark.parametrize("of_process", [False, True], ids=["worker", "process"])
async def test_uri_has_a_password_of_its_own_and_names_a_user_that_gets_its_rights_last(scene, of_process):
    async def make():
        return await (scene.credentials.uri_for_process(ME) if of_process else scene.credentials.uri_for(KEY, ME))

    uri = await make()
    assert re.fullmatch(r"amqps://osrdyne-pool-prod-me:[\w-]{43}@rabbit/prod\?cacertfile=/ca\.pem", uri)
    made = scene.api.users[f"{PREFIX}me"]
    assert set(made) == {"users", "user-limits", "topic-permissions", "permissions"}
    assert made[-1] == "permissions"  # a user that is made by half may do nothing
    assert await make() != uri
    scene.credentials.release(ME)
    await scene.credentials.tidy()
    assert scene.api.users == {}


def test_process_of_pooled_workers_may_report_and_be_asked_and_nothing_else():
    rights, control = process_permissions(NAMES, ME), NAMES.control_queue(ME)
    allowed = {
        "configure": {control},
        "write": {control, NAMES.activity_exchange},
        "read": {control, NAMES.control_exchange},
    }
    others = {
        NAMES.request_queue(KEY), NAMES.requests_exchange, NAMES.retry_exchange, NAMES.control_queue(OTHER),
        NAMES.activity_queue, "amq.default", f"x{control}", f"{control}x",
    }  # fmt: skip
    for kind, names in allowed.items():
        every = others.union(*allowed.values())
        assert {name for name in every if re.search(getattr(rights, kind), name)} == names, kind


async def test_half_made_user_is_removed(scene):
    scene.api.fail_at = "permissions"
    with pytest.raises(BrokerUnavailableError):
        await scene.credentials.uri_for(KEY, ME)
    await scene.credentials.tidy()
    assert scene.api.users == {}


async def test_user_is_kept_while_its_worker_starts_and_lives(scene):
    await scene.credentials.uri_for(KEY, ME)
    for _ in range(2):  # the second time for a start that is repeated
        await scene.clock.advance(299.0)
        await scene.credentials.tidy()
        assert (scene.credentials.keep(ME), list(scene.api.users)) == (True, [f"{PREFIX}me"])
    scene.alive.add(ME)
    await scene.clock.advance(1000.0)
    await scene.credentials.tidy()
    assert list(scene.api.users) == [f"{PREFIX}me"]
    scene.alive.clear()
    await scene.credentials.tidy()
    assert (scene.credentials.keep(ME), scene.api.users) == (False, {})


async def test_ended_worker_is_noticed_at_once_and_its_user_not_used_again(scene):
    await scene.credentials.uri_for(KEY, ME)
    task = asyncio.create_task(scene.credentials.run())
    await scene.clock.settle()
    scene.credentials.release(ME)
    assert not scene.credentials.keep(ME)
    await scene.clock.settle()
    task.cancel()
    assert scene.api.users == {}


async def test_left_overs_of_an_earlier_leader_are_removed_and_no_others(scene):
    others = ["osrdyne-pool_b-prod-x", "osrdyne-pool-+2F-x", "boss"]
    scene.api.users = {name: [] for name in [f"{PREFIX}other", f"{PREFIX}me", *others]}
    scene.alive.add(ME)
    await scene.credentials.tidy()
    assert sorted(scene.api.users) == sorted([f"{PREFIX}me", *others])


async def test_api_that_fails_is_asked_again_with_growing_pauses(scene):
    scene.api.fail_at = "users"
    task = asyncio.create_task(scene.credentials.run())
    await scene.clock.advance(60.0)
    assert 2 <= scene.api.listings <= 8
    scene.api.fail_at, scene.api.users = None, {f"{PREFIX}other": []}
    await scene.clock.advance(60.0)
    task.cancel()
    assert scene.api.users == {}


def test_keys_and_virtual_hosts_are_kept_apart():
    for key in ODD_KEYS.values():
        read = re.compile(worker_permissions(NAMES, [NAMES.request_queue(key)], ME).read)
        allowed = [other for other in ODD_KEYS.values() if read.search(NAMES.request_queue(other))]
        topics = re.compile(control_topics(NAMES, key, ME))
        heard = [other for other in ODD_KEYS.values() if topics.search(NAMES.control_group_routing_key(other))]
        assert allowed == heard == [key]
    assert len({user_prefix("pool", vhost) for vhost in ("/", "prod", "a-b", "a/b", "")}) == 5


@pytest.mark.parametrize(("replicas", "allowed"), [(False, ["me"]), (True, ["me.pod-1"])], ids=["one", "replicas"])
def test_user_may_use_the_names_of_its_own_workers_only(replicas, allowed):
    configure = re.compile(worker_permissions(NAMES, [], ME, replicas=replicas).configure)
    topics = re.compile(control_topics(NAMES, KEY, ME, replicas=replicas))
    ids = ["me", "me.pod-1", "me.", "me.-", "me.a.b", "mex", "me-pod", "other", "other.me", "me.a b"]
    assert [one for one in ids if configure.search(NAMES.control_queue(WorkerId(one)))] == allowed
    assert [one for one in ids if topics.search(NAMES.control_worker_routing_key(WorkerId(one)))] == allowed


def test_worker_may_write_reports_replies_its_own_queue_and_what_waits_in_a_managed_pool_only():
    write = re.compile(worker_permissions(NAMES, [NAMES.request_queue(KEY)], ME).write)
    names = ["pool-activity-xchg", "pool-ctl-me", "amq.default"]
    refused = ["pool-req-k", "pool-req-xchg", "pool-ctl-xchg", "pool-ctl-other", "amqXdefault", "xamq.default", ""]
    assert [name for name in names + refused if write.search(name)] == names
    with_retries = re.compile(worker_permissions(NAMES, [], ME, has_retries=True).write)
    waiting = ["pool-retry-xchg", "pool-retried-xchg", "pool-work-xchg", "pool-retry-1000", "pool-retry-xchg-more"]
    found = [[name for name in waiting if pattern.search(name)] for pattern in (write, with_retries)]
    assert found == [[], ["pool-retry-xchg"]]
