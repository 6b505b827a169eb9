"""The queues of keys over HTTP, over a fake pool: life cycle, registry, Atom feed. No socket."""

from urllib.parse import quote
from xml.etree import ElementTree as xml

import httpx
import pytest

from osrdyne.api.app import create_app
from osrdyne.api.endpoints.manifests import KeyPolicy
from osrdyne.api.endpoints.queues import Queue
from osrdyne.auth.grants import Grant, KeyScope, Principal
from osrdyne.ingress.policies.authorization import Claim, may_discover
from osrdyne.ingress.policies.manifest import ANSWER
from osrdyne.ingress.policies.policy import Discoverability
from osrdyne.metrics import Metrics
from osrdyne.testing.fakes.inspector import FakeInspector

ATOM = "{http://www.w3.org/2005/Atom}"
POLICY = "{https://schemas.microsoft.com/ws/2007/08/connect}"
ME = {"author": "me"}
SHOWN = {"Discoverability": "Public", "EnqueueTimeout": "PT10S", "MaxMessageAge": "PT90.5S", "MaxMessageSize": "61440"}


@pytest.fixture
async def api():
    app = create_app(FakeInspector(), Metrics(), version="1.2.3")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as client:
        yield client


async def create(api: httpx.AsyncClient, key: str, **elements: object) -> httpx.Response:
    return await api.post("/v1/queues", json=elements, params={**ME, "key": key})


async def test_queue_is_created_renewed_and_removed(api):
    headers, queue = {"content-type": "application/json"}, {**ME, "key": "a/b"}
    for method in ("GET", "PUT", "DELETE"):
        unknown = await api.request(method, "/v1/queue", params=queue, headers=headers)
        assert (unknown.status_code, unknown.json()["code"]) == (404, "not-found")
    answer = await create(api, "a/b", MaxMessageSize=1, MaxConcurrentReaders=3)
    assert (answer.status_code, answer.headers["location"]) == (201, "/v1/queue?key=a%2Fb")
    elements = answer.json()["elements"]
    names = ("MaxMessageSize", "MaxConcurrentReaders", "MaxQueueCapacity", "ExpirationInstant")
    assert [elements[name]["origin"] for name in names] == ["clamped", "proposed", "computed", "default"]
    assert (await api.get(answer.headers["location"])).json() == answer.json()
    assert (await create(api, "a/b")).status_code == 409
    kept = await api.put("/v1/queue", params=queue, headers=headers)
    assert (kept.status_code, kept.json()["proposal"]) == (200, {"MaxMessageSize": 1, "MaxConcurrentReaders": 3})
    changed = await api.put("/v1/queue", params=queue, json={"MaxDequeueRetries": 7})
    assert changed.json()["proposal"] == {"MaxDequeueRetries": 7}
    removed = await api.delete("/v1/queue", params=queue)
    assert (removed.status_code, removed.json()["state"], removed.json()["reason"]) == (202, "ending", "deleted")


@pytest.mark.parametrize(
    "sent",
    [
        lambda answer: answer,
        lambda answer: answer["elements"],
        lambda answer: {name: element["value"] for name, element in answer["elements"].items()},
        lambda answer: {"MaxQueueLength": 7, "MaxQueueCapacity": answer["elements"]["MaxQueueCapacity"]["value"]},
        lambda answer: {"MaxQueueLength": 7, "MaxMessageSize": 10_000, "MaxQueueCapacity": 70_000},
    ],
    ids=["whole answer", "elements", "values", "another length", "computed"],
)
async def test_effective_policy_is_a_proposal_of_a_renewal(api, sent):
    def values(answer):
        return {name: one["value"] for name, one in answer["elements"].items()}

    created = (await create(api, "a", MaxMessageSize=1, EnqueueTimeout="PT20S")).json()
    proposal = sent(created)
    renewed = await api.put("/v1/queue", params={**ME, "key": "a"}, json=proposal)
    assert (renewed.status_code, "MaxQueueCapacity" in renewed.json()["proposal"]) == (200, False)
    assert "MaxQueueLength" in dict(proposal) or values(renewed.json()) == values(created)


async def test_renewal_that_changes_what_is_computed_or_unknown_is_refused(api):
    await create(api, "a")
    for document, places in (
        ({"MaxQueueCapacity": 5}, ["MaxQueueCapacity"]),
        ({"elements": {"MaxQueueCapacity": {"value": 5}}}, ["MaxQueueCapacity"]),
        ({"elements": {"MaxMessageAge": {"value": "soon"}, "Nope": 1}}, ["elements.Nope", "elements.MaxMessageAge"]),
        ({"elements": {}, "MaxMessageAge": 1}, ["MaxMessageAge"]),
        ({"elements": []}, ["elements"]),
    ):
        answer = await api.put("/v1/queue", params={**ME, "key": "a"}, json=document)
        assert (answer.status_code, [one["path"] for one in answer.json()["problems"]]) == (422, places)


def test_answers_with_an_effective_policy_have_only_members_that_a_proposal_may_have():
    assert {*Queue.model_fields, *KeyPolicy.model_fields} <= ANSWER


async def test_registry_has_pages_and_json_comes_first_where_both_are_accepted(api):
    keys = ["a", "b/c", "d e"]
    for key in keys:
        await create(api, key)
    found, path = [], "/v1/queues?limit=1"
    while path:
        page = (await api.get(path, headers={"accept": "application/json, application/atom+xml"})).json()
        found += [queue["key"] for queue in page["queues"]]
        path = page["next"]
    assert found == keys


async def test_registry_is_an_atom_feed_for_clients_that_accept_it(api):
    for key in ["a\x01<", "b"]:
        await create(api, key, Discoverability="Public", MaxMessageAge="PT1M30.5S")
    answer = await api.get("/v1/queues?limit=1", headers={"accept": "application/atom+xml"})
    assert answer.headers["content-type"] == "application/atom+xml;type=feed"
    feed = xml.fromstring(answer.content)
    assert [name for name in ("id", "title", "updated", "author") if feed.find(f"{ATOM}{name}") is None] == []

    def links(element):
        return {link.get("rel"): link.get("href") for link in element.findall(f"{ATOM}link")}

    key = quote("a\x01<")
    assert links(feed) == {"self": "/v1/queues?limit=1", "next": f"/v1/queues?limit=1&after={key}"}
    (entry,) = feed.findall(f"{ATOM}entry")
    assert links(entry) == {
        "self": f"/v1/queue?key={key}",
        "alternate": f"/v1/group?key={key}",
        "queuehead": "amqp:/queues/fake-req-a%2B01%2B3C",
    }
    assert (await api.get(f"/v1/queue?key={key}")).json()["links"] == links(entry)
    assert entry.findtext(f"{ATOM}title") == "a\ufffd<"
    assert {name: entry.findtext(f"{POLICY}QueuePolicy/{POLICY}{name}") for name in SHOWN} == SHOWN


ENTRY = f'<entry xmlns="{ATOM[1:-1]}">{{}}</entry>'
QUEUE_POLICY = f'<QueuePolicy xmlns="{POLICY[1:-1]}">{{}}</QueuePolicy>'
ADDRESS = "<Address xmlns='http://www.w3.org/2005/08/addressing'>77</Address>"
SENT_ATOM = {"content-type": "application/atom+xml;type=entry;charset=utf-8"}


async def test_effective_policy_in_xml_is_a_proposal_of_a_renewal(api):
    url, text = (
        "/v1/queues?key=a&author=me",
        "<EnqueueTimeout>PT20S</EnqueueTimeout><MaxMessageSize>9000</MaxMessageSize>",
    )
    drop = f"<PoisonMessageDrop>{ADDRESS.replace('77', 'amqp:/queues/q')}</PoisonMessageDrop>"
    proposal = ENTRY.format(QUEUE_POLICY.format(text + drop)).replace("https", "http")
    created = await api.post(url, content=proposal, headers=SENT_ATOM)
    assert (created.status_code, created.headers["location"]) == (201, "/v1/queue?key=a")
    assert created.headers["content-type"] == SENT_ATOM["content-type"]
    read = await api.get("/v1/queue?key=a", headers={"accept": "application/atom+xml"})
    before = (await api.get("/v1/queue?key=a")).json()["elements"]
    renewed = await api.put("/v1/queue?key=a&author=me", content=read.content, headers=SENT_ATOM)
    assert (renewed.status_code, renewed.content, read.content) == (200, created.content, created.content)
    as_json = await api.put("/v1/queue?key=a&author=me", headers={**SENT_ATOM, "accept": "application/json"})
    after = as_json.json()["elements"]
    assert {name: one["value"] for name, one in after.items()} == {name: one["value"] for name, one in before.items()}
    shown = ("EnqueueTimeout", "MaxMessageSize", "PoisonMessageDrop")
    assert [after[name]["value"] for name in shown] == [20.0, 9000, "amqp:/queues/q"]


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (ENTRY.format(QUEUE_POLICY.format("<Nope>1</Nope>")), "Nope"),
        (ENTRY.format(QUEUE_POLICY.format("<MaxMessageAge>soon</MaxMessageAge>")), "MaxMessageAge"),
        (ENTRY.format(QUEUE_POLICY.format("<Overflow/><Overflow/>")), "Overflow"),
        (ENTRY.format(QUEUE_POLICY.format("<Overflow><b/></Overflow>")), "Overflow"),
        (ENTRY.format(QUEUE_POLICY.format(f"<MaxQueueLength>{ADDRESS}</MaxQueueLength>")), "MaxQueueLength"),
        (ENTRY.format(QUEUE_POLICY.format("<MaxQueueCapacity>5</MaxQueueCapacity>")), "MaxQueueCapacity"),
        (ENTRY.format(""), "entry"),
        (QUEUE_POLICY, "entry"),
        ("<!DOCTYPE a [<!ENTITY b 'c'>]>" + ENTRY.format("&b;"), "DOCTYPE"),
        ("<a>" * 1_000, "a"),
        ("<a" + " " * 9_000 + "/>", None),
        ("<a>\n<b></a>", None),
        (b"<a>\n\xff</a>", None),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_wrong_entry_is_refused_with_its_place(api, content, place):
    answer = await api.post("/v1/queues?key=a&author=me", content=content, headers=SENT_ATOM)
    (problem,) = answer.json()["problems"]
    assert (answer.status_code, problem["path"] or None) == (422, place)


def test_who_may_discover_a_queue():
    """Public needs no claim at all."""
    callers = (Claim.MANAGE, Claim.LISTEN, Claim.SEND, None)
    levels = (
        Discoverability.MANAGERS, Discoverability.MANAGERS_LISTENERS, Discoverability.MANAGERS_LISTENERS_SENDERS,
        Discoverability.PUBLIC,
    )  # fmt: skip
    for number, level in enumerate(levels, 1):
        seen = [claim for claim in callers if may_discover(level, set() if claim is None else {claim})]
        assert seen == list(callers[:number]), level


async def test_sender_sees_what_the_policy_of_each_queue_allows(api, monkeypatch):
    await create(api, "managers")
    await create(api, "public", Discoverability="Public")
    await create(api, "senders/a", Discoverability="ManagersListenersSenders")
    await create(api, "senders/b", Discoverability="ManagersListenersSenders")
    sender = Principal("client", {Grant.SEND: KeyScope("senders/a")})
    monkeypatch.setattr("osrdyne.api.endpoints.queues.principal_of", lambda request: sender)
    assert [one["key"] for one in (await api.get("/v1/queues")).json()["queues"]] == ["public", "senders/a"]
    hidden, unknown = await api.get("/v1/queue?key=managers"), await api.get("/v1/queue?key=unknown")
    assert (hidden.status_code, hidden.json()) == (404, unknown.json())
