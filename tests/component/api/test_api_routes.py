"""The HTTP API over a fake pool: answers, odd keys, refusals. No socket."""

from __future__ import annotations

import asyncio
import json
import threading
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from urllib.parse import quote

import httpx
import pytest
import structlog
from fastapi import FastAPI

from osrdyne.api.access.authenticators import Authenticators, TrustedProxies
from osrdyne.api.access.checks import Access
from osrdyne.api.app import create_app
from osrdyne.api.endpoints.capacity import MAX_PLANS
from osrdyne.config.models import ApiSettings
from osrdyne.errors import BrokerUnavailableError, DriverError, LeadershipLostError, OsrdyneError
from osrdyne.ingress.circuits.configuration import CircuitConfiguration
from osrdyne.ingress.circuits.state import CircuitState
from osrdyne.ingress.quotas.question import CapacityQuestion, answer
from osrdyne.metrics import Metrics
from osrdyne.pool.routing.circuits import CircuitView
from osrdyne.pool.state.queues.lag import Lag
from osrdyne.pool.state.workers.worker_reports import WorkerState
from osrdyne.pool.views import ComponentView, ReloadOutcome, ReloadView, WaitingView
from osrdyne.protocol.names import Key
from osrdyne.testing.fakes.inspector import FakeInspector, group_view, poison_view, worker_view

ODD_KEYS = [
    "infra=42,timetable=24", "a/b", "a/logs", "a/start", "/", "//", "%41", "A", "%", "%2F", "+", "a b", "\n\r\t",
    "\"'`$(x)", "é漢🚄", "#?&=;", "*.:", ".", "..", "../x", "", "x" * 255, "\0",
]  # fmt: skip
JSON = {"content-type": "application/json"}
PATIENCE = 120.0
"""Seconds for anything that must happen."""


@pytest.fixture(autouse=True)
def _no_log_output() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


@pytest.fixture(scope="module")
def served() -> tuple[FakeInspector, FastAPI]:
    """One application for all tests: to create its routes takes longer than most of them."""
    pool = FakeInspector()
    return pool, create_app(pool, Metrics(), version="1.2.3")


@pytest.fixture
def pool(served: tuple[FakeInspector, FastAPI]) -> FakeInspector:
    """As new in each test."""
    pool, _ = served
    vars(pool).clear()
    vars(pool).update(vars(FakeInspector()))
    return pool


@pytest.fixture
async def api(pool: FakeInspector, served: tuple[FakeInspector, FastAPI]) -> AsyncIterator[httpx.AsyncClient]:
    _, app = served
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as client:
        yield client


async def test_health_and_version_answer_always(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    pool.failure = BrokerUnavailableError("gone")
    assert (await api.get("/health")).json() == {"status": "ok"}
    assert (await api.get("/version")).json() == {"version": "1.2.3"}


async def test_ready_lists_every_component(api: httpx.AsyncClient) -> None:
    answer = await api.get("/ready")
    assert answer.status_code == 200
    assert answer.json() == {
        "ready": True,
        "pool": "fake",
        "role": "leader",
        "leader": "http://leader:4242",
        "components": [{"name": "broker", "ok": True, "fatal": True, "detail": "connected"}],
    }


async def test_daemon_is_ready_without_what_it_does_not_need(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    pool.component_views.append(ComponentView("retries", False, "off", fatal=False))
    assert (await api.get("/ready")).json()["ready"]


@pytest.mark.proves("reference-defects/15-confirms-prefetch-back")
async def test_ready_fails_with_one_component_and_hides_secrets(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    pool.component_views.append(ComponentView("driver", False, "no answer from amqp://u:hidden@h"))
    answer = await api.get("/ready")
    assert answer.status_code == 503
    assert not answer.json()["ready"]
    assert "hidden" not in answer.text


@pytest.mark.parametrize("leader", ["http://leader:4242", None])
async def test_standby_is_ready_and_says_who_leads(
    api: httpx.AsyncClient, pool: FakeInspector, leader: str | None
) -> None:
    pool.leading, pool.leader_address = False, leader
    ready, leadership = await api.get("/ready"), await api.get("/v1/leadership")
    assert (ready.status_code, ready.json()["role"], ready.json()["leader"]) == (200, "standby", leader)
    assert (leadership.json()["leading"], leadership.json()["leader"]) == (False, leader)


async def test_daemon_that_is_still_starting_is_not_ready(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    pool.component_views = []
    assert (await api.get("/ready")).status_code == 503


async def test_metrics_count_groups_and_workers_as_they_are_now(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    running(pool, "a", "b")
    text = (await api.get("/metrics")).text
    assert 'osrdyne_groups{state="active"} 2.0' in text
    assert 'osrdyne_workers{state="ready"} 2.0' in text
    assert 'osrdyne_workers{state="busy"} 0.0' in text


async def test_metrics_tell_what_waits_now(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    pool.waiting_views = [WaitingView(0, 3, 12.5), WaitingView(None, 0, None)]
    text = (await api.get("/metrics")).text
    assert 'osrdyne_waiting_requests{priority="0"} 3.0' in text
    assert 'osrdyne_waiting_requests{priority="default"} 0.0' in text
    assert [line for line in text.splitlines() if line.startswith("osrdyne_oldest")] == [
        'osrdyne_oldest_waiting_seconds{priority="0"} 12.5'
    ]


async def test_metrics_tell_what_waits_for_another_attempt(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    pool.retrying_requests = {500: 3, 30_000: 0}
    text = (await api.get("/metrics")).text
    assert 'osrdyne_retrying_requests{delay="0.5"} 3.0' in text
    assert 'osrdyne_retrying_requests{delay="30"} 0.0' in text


async def test_metrics_of_a_daemon_that_stands_by_tell_nothing_that_waits(
    api: httpx.AsyncClient, pool: FakeInspector
) -> None:
    pool.waiting_views, pool.retrying_requests = [WaitingView(0, 3, 12.5)], {500: 3}
    await api.get("/metrics")
    pool.leading = False
    text = (await api.get("/metrics")).text
    assert ("osrdyne_waiting_requests{" in text, "osrdyne_retrying_requests{" in text) == (False, False)


async def test_metrics_do_not_wait_for_the_store_of_last_values(
    api: httpx.AsyncClient, pool: FakeInspector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("osrdyne.api.endpoints.metrics.LAST_VALUES_TIMEOUT", 0.0)
    monkeypatch.setattr(pool, "last_value_totals", asyncio.Event().wait)
    text = (await api.get("/metrics")).text
    assert ("osrdyne_leading 0.0" in text, "osrdyne_last_value_events{" in text) == (True, False)


async def test_metrics_are_in_the_format_of_prometheus(api: httpx.AsyncClient) -> None:
    answer = await api.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert "osrdyne_leading 0.0" in answer.text


def running(pool: FakeInspector, *keys: str) -> None:
    for number, key in enumerate(keys):
        pool.group_views[Key(key)] = group_view(Key(key), worker_view(Key(key), f"w{number}"))


async def test_status_without_keys_is_by_worker_id(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    running(pool, "infra=42,timetable=24")
    assert (await api.get("/status")).json() == {
        "workers": {
            "w0": {
                "worker_metadata": {
                    "external_id": "pid-w0",
                    "worker_id": "w0",
                    "worker_key": "infra=42,timetable=24",
                    "metadata": {},
                },
                "status": "Ready",
            }
        }
    }


@pytest.mark.parametrize(
    "query",
    [
        "keys=infra%3D42%2Ctimetable%3D24,b%2Fc",  # the reference client: encoded, joined with commas
        "keys=infra%3D42%2Ctimetable%3D24&keys=b/c",  # the reference server: repeated
        "keys=infra=42,timetable=24&keys=b/c",  # by hand
    ],
)
async def test_status_of_keys_is_by_raw_key(api: httpx.AsyncClient, pool: FakeInspector, query: str) -> None:
    running(pool, "infra=42,timetable=24", "b/c", "other")
    workers = (await api.get(f"/status?{query}")).json()["workers"]
    assert set(workers) == {"infra=42,timetable=24", "b/c"}


async def test_status_of_one_key_does_not_mean_its_encoded_twin(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    running(pool, "A", "%41")
    assert set((await api.get("/status?keys=%2541")).json()["workers"]) == {"%41"}
    assert set((await api.get("/status?keys=%41")).json()["workers"]) == {"A"}


async def test_status_is_loading_until_one_worker_serves(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    key = Key("k")
    loading, ready = worker_view(key, "w1", WorkerState.LOADING), worker_view(key, "w2", WorkerState.BUSY)
    pool.group_views[key] = group_view(key, loading)
    assert (await api.get("/status?keys=k")).json()["workers"]["k"]["status"] == "Loading"
    pool.group_views[key] = group_view(key, loading, ready)
    assert (await api.get("/status?keys=k")).json()["workers"]["k"]["status"] == "Ready"


async def test_group_tells_state_reason_and_what_comes_next(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    running(pool, "k")
    group = (await api.get("/v1/groups/k")).json()
    assert (group["state"], group["generation"], group["queue"]["name"]) == ("active", "7.3", "fake-req-k")
    assert group["next_transition"] == {"state": "unbound", "at": 1610.0}
    assert group["reason"] == "active: a request arrived"
    assert group["workers"][0]["worker_id"] == "w0"


async def test_group_tells_what_waits_in_its_classes(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    waiting = (WaitingView(0, 3, 12.5), WaitingView(None, 0, None))
    pool.group_views[Key("k")] = replace(group_view(Key("k")), waiting=waiting)
    assert (await api.get("/v1/groups/k")).json()["waiting"] == [
        {"priority": 0, "requests": 3, "oldest_age": 12.5},
        {"priority": None, "requests": 0, "oldest_age": None},
    ]


async def test_group_has_its_profile_and_settings(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    view = group_view(Key("a"))
    pool.group_views[Key("a")] = replace(view, profile="{x}", settings={"concurrency": 4})
    found = (await api.get("/v1/group", params={"key": "a"})).json()
    assert (found["profile"], found["settings"]) == ("{x}", {"concurrency": 4})


async def test_profiles_have_versions(api: httpx.AsyncClient) -> None:
    assert (await api.get("/v1/profiles")).json() == {"pool": "fake", "version": 0, "current": None}
    document = {"profiles": [{"match": "a", "concurrency": 2}]}
    change = await api.put("/v1/profiles", json=document, params={"author": "me"})
    assert change.json() == {"pool": "fake", "version": 1, "warnings": [], "changed_groups": 0}
    assert (await api.get("/v1/profiles")).json()["current"]["manifest"] == document
    late = await api.delete("/v1/profiles", params={"author": "me"}, headers={**JSON, "if-match": '"7"'})
    assert (late.status_code, late.json()["version"]) == (412, 1)
    wrong = await api.put("/v1/profiles", json={"profiles": [{"match": "{"}]}, params={"author": "me"})
    assert wrong.json()["remedy"].startswith("`osrdyne profiles check`")


async def test_groups_are_listed_and_filtered(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    running(pool, "b", "a", "a/b")
    assert [group["key"] for group in (await api.get("/v1/groups")).json()["groups"]] == ["a", "a/b", "b"]
    answer = await api.get("/v1/groups?key=a%2Fb&key=absent")
    assert [group["key"] for group in answer.json()["groups"]] == ["a/b"]


async def test_every_key_works_in_the_query(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    for key in ODD_KEYS:
        pool.group_views.clear()
        query = f"key={quote(key, safe='')}"
        assert (await api.post(f"/v1/group/pin?{query}", headers=JSON)).json() == {"key": key, "accepted": "pin"}
        assert (await api.get(f"/v1/group?{query}")).json()["key"] == key
        assert (await api.get(f"/v1/group/logs?{query}")).json() == {"key": key, "workers": {}}
        assert list(pool.group_views) == [key]


async def test_every_other_key_works_in_the_path(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    for key in [key for key in ODD_KEYS if key not in {".", ".."}]:
        pool.group_views.clear()
        path = f"/v1/groups/{quote(key, safe='')}"
        assert (await api.post(f"{path}/start", headers=JSON)).json() == {"key": key, "accepted": "start"}
        assert (await api.get(path)).json()["key"] == key
        assert (await api.get(f"{path}/logs")).json() == {"key": key, "workers": {}}
        assert list(pool.group_views) == [key]


async def test_slashes_of_a_key_need_no_encoding(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    running(pool, "tpch/sf=0.01")
    assert (await api.get("/v1/groups/tpch/sf=0.01")).json()["key"] == "tpch/sf=0.01"


async def test_reload_is_answered_with_the_outcome_of_each_worker(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    assert (await api.post("/v1/group/reload?key=k", headers=JSON)).status_code == 404
    pool.group_views[Key("k")] = group_view(Key("k"))
    pool.reloads = [ReloadView("a", ReloadOutcome.RELOADED), ReloadView("b", ReloadOutcome.FAILED, "no data")]
    for path in ("/v1/group/reload?key=k", "/v1/groups/k/reload?timeout=5"):
        answer = await api.post(path, headers=JSON)
        assert answer.status_code == 200
        assert answer.json() == {
            "key": "k",
            "workers": [
                {"worker_id": "a", "outcome": "reloaded", "reason": None},
                {"worker_id": "b", "outcome": "failed", "reason": "no data"},
            ],
        }
    assert (await api.post("/v1/group/reload?key=k&timeout=0", headers=JSON)).status_code == 422


async def test_group_is_stopped_and_unpinned_by_post(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    await api.post("/v1/groups/k/pin", headers=JSON)
    refused = await api.post("/v1/groups/k/stop", headers=JSON)
    assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
    await api.post("/v1/groups/k/unpin", headers=JSON)
    assert (await api.post("/v1/groups/k/stop", headers=JSON)).status_code == 202
    assert (await api.get("/v1/groups/k")).json()["state"] == "stopping"


async def test_logs_are_the_last_lines_without_secrets(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    pool.log_lines[Key("k")] = {"w1": ("one", "two", "to amqp://u:hidden@h")}
    answer = await api.get("/v1/groups/k/logs?lines=2")
    assert answer.json()["workers"] == {"w1": ["two", "to amqp://u:***@h"]}


async def test_poison_shows_evidence_and_hides_credentials(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    headers: dict[str, object] = {"authorization": "Bearer hidden", "x-rpc-path": b"/sql", "odd": [{"n": b"\xff"}]}
    pool.poison_views = [poison_view("e1", headers=headers, body=b"\xff\x00a")]
    entry = (await api.get("/v1/poison?bodies=true")).json()["entries"][0]
    assert entry["headers"] == {"authorization": "***", "x-rpc-path": "/sql", "odd": [{"n": "/w=="}]}
    assert (entry["body"], entry["body_encoding"]) == ("/wBh", "base64")
    assert [(one["ended_with"], one["others"]) for one in entry["deaths"]] == [
        ("exit code 9", 0),
        ("signal SIGKILL", 1),
    ]
    assert (entry["deliveries"], entry["unexplained"]) == (6, 4)


@pytest.mark.parametrize("path", ["/v1/poison?bodies=true", "/v1/poison/e1"])
async def test_bodies_of_poison_are_encoded_in_a_thread(
    api: httpx.AsyncClient, pool: FakeInspector, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    threads: list[str] = []

    def encode(data: bytes) -> bytes:
        threads.append(threading.current_thread().name)
        return b64encode(data)

    monkeypatch.setattr("osrdyne.api.endpoints.poison.base64", SimpleNamespace(b64encode=encode))
    pool.poison_views = [poison_view("e1", headers={}, body=b"\xff")]
    assert "/w==" in (await api.get(path)).text
    assert threads
    assert threading.current_thread().name not in threads


async def test_poison_without_bodies_comes_in_pages(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    pool.poison_views = [poison_view(f"e{number}", last_at=1000.0 + number) for number in range(3)]
    first = (await api.get("/v1/poison?limit=2")).json()
    assert ([entry["id"] for entry in first["entries"]], first["total"]) == (["e0", "e1"], 3)
    assert first["entries"][0]["body"] is None
    second = (await api.get("/v1/poison", params={"limit": 2, "after": first["next"]})).json()
    assert ([entry["id"] for entry in second["entries"]], second["next"]) == (["e2"], None)


async def test_poison_of_an_odd_key_is_found(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    for key in ODD_KEYS:
        pool.poison_views = [poison_view("mine", key=key), poison_view("other", key=f"{key[:250]}+")]
        answer = (await api.get(f"/v1/poison?key={quote(key, safe='')}")).json()
        assert [(entry["id"], entry["key"]) for entry in answer["entries"]] == [("mine", key)]


async def test_poison_that_is_not_unicode_can_be_shown(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    headers: dict[str, object] = {"x\udcff": "\udcfe", "nan": float("nan"), "surrogate": "\ud800"}
    pool.poison_views = [poison_view("e1", key="\udcff", correlation_id="\udcff", headers=headers)]
    entry = (await api.get("/v1/poison/e1")).json()
    assert entry["key"] == entry["correlation_id"] == "\\udcff"
    assert entry["headers"] == {"x\\udcff": "\\udcfe", "nan": "nan", "surrogate": "\\ud800"}


async def test_poison_is_replayed_and_dropped_by_id(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    pool.poison_views = [poison_view("e1"), poison_view("e2"), poison_view("e3")]
    replayed = (await api.post("/v1/poison/replay?id=e1&id=absent", headers=JSON)).json()
    assert replayed == {"done": ["e1"], "missing": ["absent"], "refused": {}}
    assert [view.id for view in pool.replayed] == ["e1"]
    assert (await api.post("/v1/poison/drop?id=e2", headers=JSON)).json()["done"] == ["e2"]
    assert [view.id for view in pool.poison_views] == ["e3"]
    assert (await api.post("/v1/poison/drop", headers=JSON)).status_code == 422
    assert (await api.get("/v1/poison/e1")).json()["code"] == "not-found"


async def test_standby_names_the_leader(api: httpx.AsyncClient, pool: FakeInspector) -> None:
    pool.failure = LeadershipLostError("This daemon is on standby.", leader="http://leader:4242")
    answer = await api.get("/v1/poison")
    assert (answer.status_code, answer.json()["code"]) == (421, "not-leading")
    assert answer.json()["leader"] == "http://leader:4242"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (LeadershipLostError("This daemon does not lead."), 503, "not-leading"),
        (BrokerUnavailableError("No connection to amqp://u:hidden@h."), 503, "broker-unavailable"),
        (DriverError("Docker said no."), 502, "driver-error"),
        (OsrdyneError("Something else."), 500, "error"),
    ],
)
async def test_error_is_a_problem_with_code_and_without_secret(
    api: httpx.AsyncClient, pool: FakeInspector, error: OsrdyneError, status: int, code: str
) -> None:
    pool.failure = error
    answer = await api.post("/v1/groups/k/start", headers=JSON)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/problem+json"
    assert "hidden" not in answer.text


async def test_unexpected_error_tells_nothing_but_where_to_look(
    api: httpx.AsyncClient, pool: FakeInspector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "groups", lambda: [][1])
    answer = await api.get("/v1/groups")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert "IndexError" not in answer.text


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v1/groups/absent", 404, "not-found"),
        ("/v1/nothing", 404, "not-found"),
        ("/docs", 404, "not-found"),
        (f"/v1/groups/{'x' * 256}", 400, "invalid-key"),
        ("/v1/groups/%FF", 400, "invalid-key"),
        ("/v1/group?key=%C3", 400, "invalid-key"),
        ("/v1/group", 400, "invalid-key"),
        ("/v1/group?key=a&key=b", 400, "invalid-key"),
        ("/v1/groups/k/logs?lines=many", 422, "invalid-parameter"),
    ],
)
async def test_wrong_request_is_refused_with_a_code(api: httpx.AsyncClient, path: str, status: int, code: str) -> None:
    answer = await api.get(path)
    assert (answer.status_code, answer.json()["code"]) == (status, code)


async def test_wrong_method_shows_which_are_allowed(api: httpx.AsyncClient) -> None:
    answer = await api.delete("/health", headers=JSON)
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")


@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}, {"content-type": "multipart/form-data"}])
async def test_post_that_a_web_page_could_send_is_refused(
    api: httpx.AsyncClient, pool: FakeInspector, headers: dict[str, str]
) -> None:
    answer = await api.post("/v1/groups/k/start", headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (415, "json-required")
    assert pool.group_views == {}


async def test_schema_names_the_key_of_every_group_route(api: httpx.AsyncClient) -> None:
    paths = (await api.get("/openapi.json")).json()["paths"]
    groups = [path for path in paths if path.startswith("/v1/group/") or path.startswith("/v1/groups/")]
    operations = [operation for path in groups for operation in paths[path].values()]
    assert len(operations) == 13
    assert all("key" in [parameter["name"] for parameter in one["parameters"]] for one in operations)


# --- routes


MANIFEST = {"routes": {"r": {"route": "FROM /* INTO $upstream", "priority": 2}}}


async def test_pool_without_a_manifest_reports_it(api: httpx.AsyncClient) -> None:
    assert (await api.get("/v1/routes")).json() == {"pool": "fake", "version": 0, "current": None}


async def test_manifest_is_activated_with_its_author(api: httpx.AsyncClient) -> None:
    answer = await api.put("/v1/routes", json=MANIFEST, params={"author": "me"})
    assert answer.json() == {
        "pool": "fake",
        "version": 1,
        "added_priorities": [2],
        "removed_priorities": [],
        "pending": {},
        "warnings": [],
    }
    current = (await api.get("/v1/routes")).json()["current"]
    assert (current["version"], current["author"], current["manifest"]) == (1, "me", MANIFEST)


async def test_wrong_manifest_is_refused_with_every_error(api: httpx.AsyncClient) -> None:
    wrong = {"routes": {"a": "FROM x INTO $up", "b": 3}}
    answer = await api.put("/v1/routes", json=wrong, params={"author": "me"})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-document")
    assert [(one["path"], one["column"]) for one in answer.json()["problems"]] == [
        ("routes.a.route", 6),
        ("routes.a.route", 13),
        ("routes.b", None),
    ]


@pytest.mark.parametrize("text_first", [True, False])
async def test_object_counts_where_a_route_is_given_in_both_forms(api: httpx.AsyncClient, text_first: bool) -> None:
    forms = ['"r": "FROM /text INTO $upstream"', '"r": {"route": "FROM /object INTO $upstream", "priority": 3}']
    body = f'{{"routes": {{{", ".join(forms if text_first else forms[::-1])}}}}}'
    answer = await api.put("/v1/routes", content=body, params={"author": "me"}, headers=JSON)
    assert (answer.status_code, answer.json()["added_priorities"]) == (200, [3])
    assert "given as text and as object" in answer.json()["warnings"][0]


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b'{"routes": {"r": "FROM / INTO $upstream", "r": "FROM / INTO $upstream"}}', ("routes.r", None, None)),
        (b'{"routes": {},\n "routes": {}}', ("routes", None, None)),
        (b'{"routes": {\n  "r": ]}}', ("", 2, 8)),
        (b"routes:\n  r: FROM / INTO $upstream", ("", 1, 1)),
        (b'{"routes":\n "\xff"}', ("", 2, None)),
        (b"", ("", 1, 1)),
        (b"[" * 100_000, ("", None, None)),
        (b'{"routes": [' + b"1," * 1_000_000 + b"1]}", ("", None, None)),
    ],
    ids=["one form twice", "member twice", "not JSON", "YAML", "not UTF-8", "empty", "deep", "many values"],
)
async def test_text_of_the_document_is_read_and_errors_have_their_place(
    api: httpx.AsyncClient, body: bytes, place: tuple[str, int | None, int | None]
) -> None:
    answer = await api.put("/v1/routes", content=body, params={"author": "me"}, headers=JSON)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-document")
    assert [(one["path"], one["line"], one["column"]) for one in answer.json()["problems"]] == [place]
    assert (await api.get("/v1/routes")).json()["current"] is None


async def test_change_of_another_version_than_expected_is_refused(api: httpx.AsyncClient) -> None:
    async def put(version: str) -> httpx.Response:
        headers = {"if-match": version}
        return await api.put("/v1/routes", json=MANIFEST, params={"author": "me"}, headers=headers)

    assert (await put('"1"')).status_code == 412
    assert (await put('"0"')).status_code == 200
    stale = await put('"0"')
    assert (stale.status_code, stale.json()["code"], stale.json()["version"]) == (412, "version-conflict", 1)
    assert (await api.get("/v1/routes")).headers["etag"] == '"1"'
    assert (await put('"1"')).status_code == 200
    old, who = JSON | {"if-match": '"1"'}, {"author": "a", "version": "1"}
    assert (await api.delete("/v1/routes", params=who, headers=old)).status_code == 412
    assert (await api.post("/v1/routes/rollback", params=who, headers=old)).status_code == 412
    assert (await put("W/x")).status_code == 400


async def test_cleared_pool_has_no_manifest_and_can_go_back(api: httpx.AsyncClient) -> None:
    await api.put("/v1/routes", json=MANIFEST, params={"author": "me"})
    cleared = await api.delete("/v1/routes", params={"author": "you"}, headers=JSON)
    assert cleared.json()["version"] == 2
    assert (await api.get("/v1/routes")).json() == {"pool": "fake", "version": 2, "current": None}
    versions = (await api.get("/v1/routes/history")).json()["versions"]
    found = [(one["version"], one["author"], one["manifest"]) for one in versions]
    assert found == [(2, "you", None), (1, "me", MANIFEST)]
    await api.post("/v1/routes/rollback", params={"version": 1, "author": "me"}, headers=JSON)
    assert (await api.get("/v1/routes")).json()["current"]["manifest"] == MANIFEST


async def test_history_without_manifests_has_their_sizes(api: httpx.AsyncClient) -> None:
    await api.put("/v1/routes", json=MANIFEST, params={"author": "me"})
    [version] = (await api.get("/v1/routes/history", params={"manifests": "false"})).json()["versions"]
    assert (version["size"], version["manifest"]) == (1, None)


async def test_explanation_names_what_is_undefined(api: httpx.AsyncClient) -> None:
    routes = {"r": "FROM /* WHERE level = '1' AND as_number(temperature) > 3 INTO $upstream"}
    await api.put("/v1/routes", json={"routes": routes}, params={"author": "me"})
    explanation = (await api.post("/v1/explain", json={"key": "k", "headers": {"level": "1"}})).json()
    assert explanation["routes"][0]["undefined"] == "the header temperature"
    assert "its condition is undefined: the header temperature is undefined." in explanation["steps"][1]["text"]


async def test_change_without_an_author_is_refused(api: httpx.AsyncClient) -> None:
    assert (await api.put("/v1/routes", json=MANIFEST)).status_code == 422


async def test_earlier_version_comes_back_as_a_new_one(api: httpx.AsyncClient) -> None:
    await api.put("/v1/routes", json=MANIFEST, params={"author": "me"})
    await api.put("/v1/routes", json={"routes": {}}, params={"author": "me"})
    await api.post("/v1/routes/rollback", params={"version": 1, "author": "you"}, headers=JSON)
    versions = (await api.get("/v1/routes/history")).json()["versions"]
    assert [(one["version"], one["author"]) for one in versions] == [(3, "you"), (2, "me"), (1, "me")]
    assert versions[0]["manifest"] == MANIFEST


async def test_version_that_is_not_kept_is_a_conflict(api: httpx.AsyncClient) -> None:
    answer = await api.post("/v1/routes/rollback", params={"version": 9, "author": "me"}, headers=JSON)
    assert answer.status_code == 409


async def test_request_of_any_key_is_explained(api: httpx.AsyncClient) -> None:
    await api.put("/v1/routes", json=MANIFEST, params={"author": "me"})
    sample = {"path": "/sql", "headers": {"level": 3}, "body": {"a": 1}, "app_id": "x", "timeout": 5}
    for key in ODD_KEYS:
        [delivery] = (await api.post("/v1/explain", json={"key": key, **sample})).json()["deliveries"]
        assert (delivery["key"], delivery["priority"], delivery["limited_by"]) == (key, 2, "caller")


async def test_invalid_key_is_refused(api: httpx.AsyncClient) -> None:
    answer = await api.post("/v1/explain", json={"key": "x" * 256})
    assert answer.json()["code"] == "invalid-key"


async def test_time_limit_beyond_all_bounds_is_an_invalid_parameter(api: httpx.AsyncClient) -> None:
    answer = await api.post("/v1/explain", json={"key": "k", "timeout": 1e308})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-parameter")


@pytest.mark.parametrize(
    "sample", [{"path": "/\ud800"}, {"app_id": "\ud800"}, {"headers": {"\udcff": "\udcff"}}, {"body": "\ud800"}]
)
async def test_request_with_half_of_a_surrogate_pair_is_explained(
    api: httpx.AsyncClient, sample: dict[str, object]
) -> None:
    routes = {"r": "FROM /* WHERE a REGEXP 'b' INTO $upstream"}
    await api.put("/v1/routes", json={"routes": routes}, params={"author": "me"})
    answer = await api.post("/v1/explain", content=json.dumps({"key": "k", **sample}), headers=JSON)
    assert (answer.status_code, [one["key"] for one in answer.json()["deliveries"]]) == (200, ["k"])


@pytest.mark.parametrize("sample", ['"timeout": 1e400', '"headers": {"a": 1e400}'])
async def test_number_without_a_bound_is_refused(api: httpx.AsyncClient, sample: str) -> None:
    answer = await api.post("/v1/explain", content=f'{{"key": "k", {sample}}}', headers=JSON)
    assert (answer.status_code, "finite number" in answer.text) == (422, True)


async def test_of_very_many_errors_the_first_are_shown(api: httpx.AsyncClient) -> None:
    document = {"routes": {f"r{number}": 1 for number in range(1_000)}}
    answer = await api.put("/v1/routes", json=document, params={"author": "me"})
    problems = answer.json()["problems"]
    assert (answer.status_code, len(problems), problems[-1]["message"]) == (
        422,
        101,
        "900 more errors are not shown",
    )


# --- splitter


RULES = {"b.*": {"postfixFromStatic": ["x"]}, "ba": {"postfixFromStatic": ["y"]}}


async def test_rules_are_activated_in_their_order_with_warnings(api: httpx.AsyncClient) -> None:
    answer = (await api.put("/v1/splitter", json=RULES, params={"author": "me"})).json()
    assert (answer["version"], len(answer["warnings"])) == (1, 1)
    current = (await api.get("/v1/splitter")).json()["current"]
    assert (list(current["manifest"]), current["author"]) == (["b.*", "ba"], "me")


async def test_wrong_rules_are_refused_with_every_error_and_change_nothing(api: httpx.AsyncClient) -> None:
    answer = await api.put("/v1/splitter", json={"a(": {}, "b": 1}, params={"author": "me"})
    assert (answer.status_code, len(answer.json()["problems"])) == (422, 3)
    assert "`osrdyne splitter check`" in answer.json()["remedy"]
    assert (await api.get("/v1/splitter")).json()["current"] is None


async def test_earlier_rules_come_back(api: httpx.AsyncClient) -> None:
    await api.put("/v1/splitter", json=RULES, params={"author": "me"})
    await api.put("/v1/splitter", json={}, params={"author": "me"})
    await api.post("/v1/splitter/rollback", params={"version": 1, "author": "you"}, headers=JSON)
    versions = (await api.get("/v1/splitter/history")).json()["versions"]
    assert [(one["version"], len(one["manifest"])) for one in versions] == [(3, 2), (2, 0), (1, 2)]
    assert (await api.get("/v1/routes")).json()["current"] is None


async def test_explanation_has_the_step(api: httpx.AsyncClient) -> None:
    await api.put("/v1/splitter", json=RULES, params={"author": "me"})
    explanation = (await api.post("/v1/explain", json={"key": "b1"})).json()
    assert (explanation["split"]["rule"], explanation["deliveries"][0]["key"]) == ("b.*", "b1-x")


# --- capacity


async def test_a_plan_needs_no_leader(pool: FakeInspector, api: httpx.AsyncClient) -> None:
    pool.failure = LeadershipLostError("This daemon is on standby.")
    question = {"load": [{"rate": "720/min"}], "store": "store-s1"}
    found = (await api.post("/v1/capacity", json=question)).json()
    assert (found["fits"], found["accepted"], found["cheapest"]["price"]) == (False, 400_000, 225)


@pytest.mark.proves("quotas/many-capacity-plans-requested")
async def test_many_plans_leave_the_other_threads_free(api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are verified in the threads of the event loop."""
    running, go = threading.Event(), threading.Event()

    def slow(*_: object) -> dict[str, object]:
        running.set()
        go.wait(PATIENCE)
        return answer(CapacityQuestion.model_validate({"load": [{"rate": "1/min"}]}), FakeInspector().prices)

    monkeypatch.setattr("osrdyne.api.endpoints.capacity.answer", slow)
    with ThreadPoolExecutor(1) as only_thread:
        asyncio.get_running_loop().set_default_executor(only_thread)
        question = {"load": [{"rate": "1/min"}]}
        plans = [asyncio.create_task(api.post("/v1/capacity", json=question)) for _ in range(MAX_PLANS + 1)]
        assert await asyncio.to_thread(running.wait, PATIENCE)
        [refused], others = await asyncio.wait(plans, return_when=asyncio.FIRST_COMPLETED)
        assert (refused.result().status_code, refused.result().headers["retry-after"]) == (503, "5")
        go.set()
        assert {(await plan).status_code for plan in others} == {200}
        assert (await api.post("/v1/capacity", json=question)).status_code == 200


async def test_a_wrong_question_is_refused_with_the_place(api: httpx.AsyncClient) -> None:
    answer = await api.post("/v1/capacity", json={"load": [{"rate": "fast"}]})
    assert (answer.status_code, "rate" in answer.json()["detail"]) == (422, True)


async def test_circuits_are_listed_and_shown_one_by_one(pool: FakeInspector, api: httpx.AsyncClient) -> None:
    pool.circuit_views = [
        CircuitView("0123456789abcdef", None, None, CircuitState.CLOSED, 66, 1, 2, 5.0),
        CircuitView("fedcba9876543210", "r", Key("a/b"), CircuitState.CLOSED, 0, 3, 0, 6.0),
    ]
    assert (await api.get("/v1/circuits")).json()["circuits"] == ["0123456789abcdef", "fedcba9876543210"]
    everything = (await api.get("/v1/circuits/_all")).json()["circuits"]
    assert [(one["route"], one["key"], one["fail_ratio"]) for one in everything] == [(None, None, 66), ("r", "a/b", 0)]
    assert (await api.get("/v1/circuits/fedcba9876543210")).json() == everything[1]
    assert (await api.get("/v1/circuits/fedcba9876543210/status")).json() == {"status": "closed"}
    wrong = [(await api.get(f"/v1/circuits/{one}")).status_code for one in ("0" * 16, "..%2f", "x" * 300)]
    assert wrong == [404, 422, 422]


async def test_circuits_can_only_be_closed_by_hand(pool: FakeInspector, api: httpx.AsyncClient) -> None:
    pool.circuit_views = [
        CircuitView(f"{number}" * 16, "r", None, CircuitState.OPEN, 100, 0, 5, 5.0, 2) for number in (1, 2, 3)
    ]

    async def put(circuit: str, status: str) -> httpx.Response:
        return await api.put(f"/v1/circuits/{circuit}/status", json={"status": status}, params={"author": "me"})

    for status in ("open", "half_open", "", "CLOSED"):
        assert [(await put(one, status)).status_code for one in ("1" * 16, "_all")] == [403, 403]
    assert {one.status for one in pool.circuit_views} == {CircuitState.OPEN}
    assert (await put("1" * 16, "closed")).json()["closed"] == ["1" * 16]
    assert (await put("0" * 16, "closed")).status_code == 404
    assert (await put("_all", "closed")).json()["closed"] == ["2" * 16, "3" * 16]
    assert (await api.put("/v1/circuits/_all/status", json={"status": "closed"})).status_code == 422  # by whom?


async def test_configuration_of_the_circuits_has_versions(api: httpx.AsyncClient) -> None:
    document = {"statisticsUpdateEnabled": True}
    change = await api.put("/v1/circuits/config", json=document, params={"author": "me"})
    assert change.json() == {"pool": "fake", "version": 1, "warnings": []}
    assert (await api.get("/v1/circuits/config")).json()["current"]["manifest"] | document == CircuitConfiguration(
        updates_statistics=True
    ).document()
    assert len((await api.get("/v1/circuits/config/history")).json()["versions"]) == 1
    wrong = await api.put("/v1/circuits/config", json={"minQueueSampleCount": 0}, params={"author": "me"})
    assert wrong.json()["remedy"].startswith("`osrdyne circuits config check`")


async def test_policies_have_versions_and_an_effective_one_for_each_key(api: httpx.AsyncClient) -> None:
    document = {"policies": [{"match": "a/{x}", "MaxMessageAge": 30.0}]}
    change = await api.put("/v1/policies", json=document, params={"author": "me"})
    assert change.json() == {"pool": "fake", "version": 1, "warnings": []}
    assert (await api.get("/v1/policies")).json()["current"]["manifest"] == document
    found = (await api.get("/v1/policies/effective?key=a%2Fb")).json()
    assert (found["key"], found["match"]) == ("a/b", "a/{x}")
    assert found["elements"]["MaxMessageAge"] == {"value": 30.0, "origin": "proposed", "acts": True}
    assert (await api.get("/v1/policies/effective?key=b")).json()["elements"] is None
    wrong = await api.put("/v1/policies", json={"policies": [{"match": "{"}]}, params={"author": "me"})
    assert wrong.json()["remedy"].startswith("`osrdyne policies check`")


@pytest.mark.parametrize(
    ("client", "url", "status"),
    [
        ("10.0.0.7", "http://api", 403),
        ("10.0.0.7", "https://api", 200),
        ("127.0.0.1", "http://api", 200),
        ("::1", "http://api", 200),
    ],
)
@pytest.mark.proves("api/client-host-asks-over")
async def test_key_that_demands_tls_is_refused_over_plain_http_from_another_host(
    pool: FakeInspector, client: str, url: str, status: int
) -> None:
    running(pool, "a", "b/c")
    pool.tls_keys = {Key("a")}
    transport = httpx.ASGITransport(create_app(pool, Metrics(), version="1"), client=(client, 5000))
    async with httpx.AsyncClient(transport=transport, base_url=url) as api:
        for path in ("/v1/group?key=a", "/v1/groups/a", "/v1/policies/effective?key=a"):
            answer = await api.get(path)
            assert (answer.status_code, answer.json().get("code")) == (
                status,
                "tls-required" if status == 403 else None,
            )
        pool.poison_views = [poison_view("e1", key=Key("a")), poison_view("e2", key=Key("b"))]
        explained = {"json": {"key": "a"}}
        for method, path, more in (
            ("GET", "/v1/poison/e1", {}), ("GET", "/v1/poison", {}), ("GET", "/v1/poison?bodies=true", {}),
            ("GET", "/v1/poison?key=a", {}), ("POST", "/v1/explain", explained),
        ):  # fmt: skip
            answer = await api.request(method, path, **more)
            assert answer.status_code == status, path
        for path in ("/v1/poison/e2", "/v1/poison?key=b"):
            assert (await api.get(path)).status_code == 200, path
        started = await api.post("/v1/group/stop?key=a", headers=JSON)
        assert started.status_code == (403 if status == 403 else 202)
        assert (await api.get("/v1/groups/b/c")).status_code == 200


async def test_trusted_proxy_is_responsible_for_the_tls_of_its_clients(pool: FakeInspector) -> None:
    running(pool, "a")
    pool.tls_keys = {Key("a")}
    settings = ApiSettings(trusted_proxies=("10.0.0.7",), allowed_hosts=("api",))
    access = Access(Authenticators(proxies=TrustedProxies(settings)))
    transport = httpx.ASGITransport(create_app(pool, Metrics(), version="1", access=access), client=("10.0.0.7", 5000))
    headers = {"x-forwarded-user": "alice", "x-forwarded-role": "viewer"}
    async with httpx.AsyncClient(transport=transport, base_url="http://api", headers=headers) as api:
        assert (await api.get("/v1/group?key=a")).status_code == 200


@pytest.mark.parametrize(
    ("name", "author"),
    [("élodie".encode(), "élodie"), ("Àgnes".encode(), "Àgnes"), ("山田".encode(), "山田"), (b"\xe9ric", None)],
    ids=["latin", "with a control character in latin-1", "other", "not UTF-8"],
)
async def test_user_that_a_proxy_names_is_read_as_utf_8(pool: FakeInspector, name: bytes, author: str | None) -> None:
    settings = ApiSettings(trusted_proxies=("10.0.0.7",), allowed_hosts=("api",))
    access = Access(Authenticators(proxies=TrustedProxies(settings)))
    transport = httpx.ASGITransport(create_app(pool, Metrics(), version="1", access=access), client=("10.0.0.7", 5000))
    headers = [(b"x-forwarded-user", name), (b"x-forwarded-role", b"admin")]
    async with httpx.AsyncClient(transport=transport, base_url="http://api", headers=headers) as api:
        changed = await api.put("/v1/policies", json={"policies": []}, params={"author": "other"})
        assert changed.status_code == (200 if author else 401)
        if author is not None:
            assert (await api.get("/v1/policies")).json()["current"]["author"] == author


async def test_quotas_have_versions_and_their_use_is_shown_and_measured(api: httpx.AsyncClient) -> None:
    assert (await api.get("/v1/quota")).json() == {"pool": "fake", "version": 0, "current": None, "usage": None}
    document = {"pool": {"messages_per_day": 10}, "rules": [{"name": "r", "per": "rule", "send_rate": 1}]}
    change = await api.put("/v1/quota", json=document, params={"author": "me"})
    assert change.json() == {"pool": "fake", "version": 1, "warnings": []}
    found = (await api.get("/v1/quota")).json()
    assert found["current"]["manifest"] == document
    assert [(one["name"], one["used"], one["quota"]) for one in found["usage"]["meters"]] == [
        ("pool", 0, 10), ("rule r", 0, None),
    ]  # fmt: skip
    assert 'osrdyne_quota_used_ratio{meter="pool"} 0.0' in (await api.get("/metrics")).text
    wrong = await api.put("/v1/quota", json={"pool": {}}, params={"author": "me"})
    assert wrong.json()["remedy"].startswith("`osrdyne quota check`")


async def test_lag_is_that_of_the_pool_and_of_its_groups(pool: FakeInspector, api: httpx.AsyncClient) -> None:
    pool.group_lags = [Lag(None, 7, 2.0, 0.5, None), Lag(Key("a"), 7, 2.0, -0.1, 70.0)]
    found = (await api.get("/v1/lag")).json()
    assert found["total"] == {"messages": 7, "seconds": 2.0, "a_minute": 30.0, "drained_in": None}
    assert found["groups"] == [{"key": "a", "messages": 7, "seconds": 2.0, "a_minute": -6.0, "drained_in": 70.0}]
    pool.leading = False
    assert (await api.get("/v1/lag")).json() == {"pool": "fake", "leading": False, "total": None, "groups": []}
