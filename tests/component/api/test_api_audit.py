"""Changes through the API are recorded, refused requests are counted, over a fake pool. No socket."""

import asyncio
import re
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from osrdyne.api.access.audit import LOGGED
from osrdyne.api.access.authenticators import authenticators_of
from osrdyne.api.access.checks import Access
from osrdyne.api.app import create_app
from osrdyne.auth.audit import AuditRecord, Outcome
from osrdyne.auth.endpoints import find_endpoint
from osrdyne.auth.grants import KeyScope, Role, grants_of, parse_scope
from osrdyne.auth.tokens import Token, digest_of, generate_token, render_tokens
from osrdyne.config.models import ApiSettings
from osrdyne.errors import BrokerUnavailableError, LeadershipLostError
from osrdyne.logs import configure_events
from osrdyne.metrics import Metrics
from osrdyne.pool.routing.manifest_store import ManifestKind
from osrdyne.protocol.names import Key
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.inspector import FakeInspector, poison_view

JSON = {"content-type": "application/json"}
SECRET = generate_token()
NOW = datetime(2026, 1, 1, tzinfo=UTC)


PROFILES: dict[str, object] = {"profiles": [{"match": "a/{x}", "concurrency": 2}]}
Logs = list[MutableMapping[str, Any]]


@pytest.fixture
def pool():
    return FakeInspector()


@pytest.fixture(autouse=True)
def logs():
    """Everything that is logged from the level info on."""
    before = structlog.get_config()
    configure_events("info", as_json=True)
    with structlog.testing.capture_logs() as found:
        yield found
    structlog.configure(**before)


@pytest.fixture
def metrics():
    return Metrics()


@asynccontextmanager
async def client(
    pool: FakeInspector, metrics: Metrics, *, clock: VirtualClock | None = None, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(pool, metrics, version="1", clock=clock or VirtualClock(), **options)
    transport = httpx.ASGITransport(app, client=("192.0.2.7", 1234))
    async with httpx.AsyncClient(transport=transport, base_url="http://api", headers=JSON) as found:
        yield found


@pytest.fixture
async def api(pool, metrics):
    async with client(pool, metrics) as found:
        yield found


@pytest.fixture
async def alice(pool, metrics, tmp_path):
    """A client with the token of an administrator; its file is `tokens.json`."""
    async with client(pool, metrics, access=access_by(token_file(tmp_path, token("alice")))) as found:
        found.headers["authorization"] = f"Bearer {SECRET}"
        yield found


def token_file(directory: Path, *tokens: Token) -> Path:
    file = directory / "tokens.json"
    file.write_text(render_tokens(tokens))
    return file


def change_tokens(directory: Path, *tokens: Token) -> None:
    """Replace the file, as a tool that writes it anew."""
    (directory / "tokens.json").unlink()
    token_file(directory, *tokens)


def token(name: str, secret: str = SECRET, role: Role = Role.ADMIN, **scope: KeyScope) -> Token:
    return Token(name, grants_of(role, **scope), digest_of(secret), NOW, None)


def access_by(file: Path) -> Access:
    return Access(authenticators_of(ApiSettings(tokens_file=str(file)), clock=VirtualClock())[0])


def refused_requests(metrics: Metrics, status: str) -> float | None:
    return metrics.registry.get_sample_value("osrdyne_api_refused_total", {"status": status})


def final(pool: FakeInspector) -> list[AuditRecord]:
    return [record for record in pool.records if record.is_final]


def target_of_path(path: str) -> str | None:
    """What the record of a change names, where each parameter of the path is `e1`."""
    if "{" in path:
        return "e1"
    found = {"group": "k", "queue": "k", "queues": "k", "poison": "id e1"}.get(path.split("/")[2])
    return "version 1" if path.endswith("/rollback") else found


async def test_each_change_and_nothing_else_has_a_record_before_it_and_one_with_its_outcome(api, pool):
    """Also an endpoint that is added later."""
    paths = create_app(FakeInspector(), Metrics(), version="1").openapi()["paths"]
    for method, path in [(method.upper(), path) for path, methods in paths.items() for method in methods]:
        pool.records.clear()
        pool.poison_views = [poison_view("e1", key=Key("k"))]
        filled = re.sub(r"\{.*?\}", "e1", path)
        named = {"key": "k", "id": "e1", "author": "a", "version": 1}
        answer = await api.request(method, filled, params=named, content="{}")
        if method == "GET" or path in {"/v1/explain", "/v1/capacity"}:
            assert (pool.records, "x-request-id" in answer.headers) == ([], False), path
            continue
        begun, ended = pool.records
        assert (begun.outcome, begun.status, ended.status) == (Outcome.UNKNOWN, None, answer.status_code)
        assert {begun.request_id, ended.request_id} == {answer.headers["x-request-id"]}
        assert (ended.action, ended.target) == (find_endpoint(method, filled)[0].action, target_of_path(path))
        assert (ended.principal, ended.method, ended.address) == ("anyone", "open", "192.0.2.7")


async def test_record_of_a_document_has_its_digest_before_and_after(api, pool):
    await api.put("/v1/profiles?author=a", json=PROFILES)
    await api.put("/v1/profiles?author=a", json={"profiles": []})
    await api.post("/v1/profiles/rollback?author=a&version=1")
    assert (await api.put("/v1/profiles?author=a", json={"wrong": 1})).status_code == 422
    await api.delete("/v1/profiles?author=a")
    records = final(pool)
    full, empty = records[0].digest_after, records[1].digest_after
    assert len({full, empty, None}) == 3
    digests = [(record.digest_before, record.digest_after) for record in records]
    assert digests == [(None, full), (full, empty), (empty, full), (full, full), (full, None)]
    assert (records[3].outcome, records[3].status) == (Outcome.REFUSED, 422)


@pytest.mark.parametrize(("error", "status"), [(BrokerUnavailableError("gone"), 503), (RuntimeError("a defect"), 500)])
async def test_failed_change_is_recorded(api, pool, monkeypatch, error, status):
    async def fail(*_):
        raise error

    monkeypatch.setattr(pool, "pin", fail)
    assert (await api.post("/v1/groups/a/pin")).status_code == status
    [failed] = final(pool)
    assert (failed.outcome, failed.status, failed.target, failed.action) == (Outcome.FAILED, status, "a", "groups.pin")


async def test_author_of_a_change_is_the_authenticated_principal(alice, pool):
    await alice.put("/v1/profiles?author=mallory", json=PROFILES)
    await alice.post("/v1/profiles/rollback?author=mallory&version=1")
    await alice.delete("/v1/profiles?author=mallory")
    await alice.post("/v1/queues?author=mallory&key=k", json={})
    authors = {kept.author for kept in pool.versions[ManifestKind.PROFILES]} | {pool.queue_views["k"].record.author}
    assert authors == {"alice"}
    found = {(one.principal, one.role, one.method, one.author) for one in pool.records}
    assert found == {("alice", "admin", "token", "mallory")}
    assert [one.grant for one in final(pool)] == ["admin", "admin", "admin", "operate"]


@pytest.mark.proves("api/rabbitmq-refuses-record-change")
async def test_change_whose_record_is_not_stored_is_refused_if_it_is_required_and_logged_if_not(
    api, pool, metrics, logs
):
    pool.stores_records = False
    async with client(pool, metrics, audit_required=True) as strict:
        answer = await strict.post("/v1/groups/a/pin")
        assert (answer.status_code, answer.json()["code"]) == (503, "audit-unavailable")
        assert (await strict.get("/v1/groups")).status_code == 200
        assert pool.group_views == {}
        assert (await api.post("/v1/groups/a/pin")).status_code == 202
        assert pool.group_views[Key("a")].pinned
        logged = [(one["event"], one["outcome"]) for one in logs if one["event"].startswith("change ")]
        assert logged[-2:] == [("change requested", "unknown"), ("change finished", "done")]
        pool.records.clear()
        pool.leading, pool.failure = False, LeadershipLostError("standby", leader="http://leader:4242")
        answer = await strict.post("/v1/groups/a/pin")
        assert (answer.status_code, answer.json()["leader"], pool.records) == (421, "http://leader:4242", [])


async def test_no_secret_and_no_body_is_in_a_record_or_in_the_log(alice, pool, logs):
    document = {"profiles": [{"match": "a", "spark_conf": {"spark.app.name": "hidden-in-a-body"}}]}
    assert (await alice.put("/v1/profiles?author=a&token=hidden-in-a-query", json=document)).status_code == 200
    await alice.put("/v1/profiles?author=a", content="hidden-in-a-body")
    await alice.post("/v1/groups/a/pin", headers={"authorization": "Bearer hidden-in-a-header"})
    shown = f"{logs} {[record.to_text() for record in pool.records]}"
    assert len(final(pool)) == 2
    assert [secret for secret in (SECRET, digest_of(SECRET), "hidden-in") if secret in shown] == []


@pytest.mark.proves("api/client-tries-tokens-asks")
async def test_refused_requests_are_counted_and_logged_within_a_limit(pool, metrics, logs, tmp_path):
    clock = VirtualClock()
    access = access_by(token_file(tmp_path, token("viewer", role=Role.VIEWER)))
    async with client(pool, metrics, access=access, clock=clock) as api:
        for number in range(50):
            assert (await api.post(f"/v1/groups/{number}/stop")).status_code == 401
        assert len([one for one in logs if one["event"] == "request refused"]) == LOGGED
        await clock.advance(61)
        headers = {"authorization": f"Bearer {SECRET}"}
        assert (await api.post("/v1/groups/a/stop", headers=headers)).status_code == 403
    last = [one for one in logs if one["event"] == "request refused"][-1]
    assert (last["status"], last["principal"], last["address"]) == (403, "viewer", "192.0.2.7")
    assert (last["endpoint"], last["unlogged"]) == ("POST /v1/groups/{key:path}/stop", 50 - LOGGED)
    assert [refused_requests(metrics, status) for status in ("401", "403")] == [50, 1]
    assert pool.records == []


async def test_refusal_by_the_endpoint_itself_is_counted_and_recorded(pool, metrics, tmp_path):
    limited = token("limited", role=Role.OPERATOR, keys=parse_scope("k"))
    pool.poison_views = [poison_view("e1", key=Key("other"))]
    async with client(pool, metrics, access=access_by(token_file(tmp_path, limited))) as api:
        answer = await api.post("/v1/poison/drop?id=e1", headers={"authorization": f"Bearer {SECRET}"})
    assert (answer.status_code, refused_requests(metrics, "403")) == (403, 1)
    assert [(one.outcome, one.target) for one in final(pool)] == [(Outcome.REFUSED, "id e1")]


async def test_changed_token_file_is_recorded_when_the_daemon_sees_it(alice, pool, tmp_path):
    await alice.get("/v1/groups")
    assert pool.records == []
    for name in ("bob", "carol"):
        change_tokens(tmp_path, token("alice"), token(name, generate_token()))
        for _ in range(2):
            await alice.get("/v1/groups")
    (tmp_path / "tokens.json").unlink()
    await alice.get("/v1/groups")
    token_file(tmp_path, token("alice"), token("dora", generate_token()))
    await alice.get("/v1/groups")
    targets = ["added bob", "added carol; removed bob", "removed alice, carol", "added alice, dora"]
    assert [record.target for record in pool.records] == targets
    record = pool.records[1]
    assert (record.action, record.method, record.outcome) == ("tokens.change", "file", Outcome.DONE)
    assert record.digest_before != record.digest_after


@pytest.mark.proves("api/rabbitmq-confirms-record-alarm")
@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probe_is_answered_before_a_changed_token_file_is_recorded(pool, metrics, tmp_path, monkeypatch, path):
    """RabbitMQ does not confirm the record before the answer; the ingress has noticed the change."""
    settings = ApiSettings(tokens_file=str(token_file(tmp_path, token("alice"))))
    authenticators, _ = authenticators_of(settings, clock=VirtualClock())
    await authenticators.tokens.current()
    change_tokens(tmp_path, token("carol"))
    await authenticators.tokens.current()
    answered = asyncio.Event()

    async def record_change(record):
        await answered.wait()
        pool.records.append(record)
        return True

    async def send(message):
        if message["type"] == "http.response.body":
            answered.set()

    monkeypatch.setattr(pool, "record_change", record_change)
    app = create_app(pool, metrics, version="1", access=Access(authenticators), clock=VirtualClock())
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": [(b"host", b"api")]}
    async with asyncio.timeout(120):
        await app(scope, asyncio.Event().wait, send)
    assert [record.action for record in pool.records] == ["tokens.change"]


async def test_audit_is_paged_and_filtered(api, pool):
    for key in ("a", "b", "c"):
        await api.post(f"/v1/groups/{key}/pin")
    assert (await api.post("/v1/group/pin?key=%ff")).status_code == 400
    page = (await api.get("/v1/audit?limit=3")).json()
    rest = (await api.get("/v1/audit", params={"before": page["next"]})).json()
    assert (page["total"], len(page["entries"]), len(rest["entries"]), rest["next"]) == (4, 3, 1, None)
    assert {entry["target"] for entry in page["entries"] + rest["entries"]} == {"a", "b", "c", "\\xff"}
    for query, total in (
        ("action=groups", 4), ("action=groups.pin", 4), ("action=routes", 0), ("principal=anyone", 4),
        ("principal=alice", 0), ("since=10000000000", 0), ("until=1", 0),
    ):  # fmt: skip
        assert (await api.get(f"/v1/audit?{query}")).json()["total"] == total, query
    assert (await api.get("/v1/audit?before=x")).status_code == 400
    for query in ("limit=0", "limit=1001", "since=x", "since=-1", "principal="):
        assert (await api.get(f"/v1/audit?{query}")).status_code == 422, query
