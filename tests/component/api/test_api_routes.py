"""The HTTP API over a fake pool: answers, odd keys, refusals. No socket."""

import asyncio
import json
import threading
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
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
from osrdyne.ingress.circuits.state import CircuitState
from osrdyne.ingress.quotas.question import CapacityQuestion, answer
from osrdyne.metrics import Metrics
from osrdyne.pool.routing.circuits import CircuitView
from osrdyne.pool.state.queues.lag import Lag, Lags
from osrdyne.pool.state.workers.worker_reports import WorkerState
from osrdyne.pool.views import ComponentView, ReloadOutcome, ReloadView, WaitingView
from osrdyne.protocol.names import Key
from osrdyne.protocol.poison import WorkerDeath
from osrdyne.testing.fakes.inspector import FakeInspector, group_view, poison_view, worker_view

ODD_KEYS = [
    "infra=42,timetable=24", "a/b", "a/logs", "a/start", "/", "//", "%41", "A", "%", "%2F", "+", "a b", "\n\r\t",
    "\"'`$(x)", "é漢🚄", "#?&=;", "*.:", ".", "..", "../x", "", "x" * 255, "\0",
]  # fmt: skip
JSON = {"content-type": "application/json"}
ME = {"author": "me"}
PATIENCE = 120.0
"""Seconds for anything that must happen."""


@pytest.fixture(autouse=True)
def _no_log_output():
    with structlog.testing.capture_logs():
        yield


@pytest.fixture(scope="module")
def served():
    """One application for all tests: to create its routes takes longer than most of them."""
    pool = FakeInspector()
    return pool, create_app(pool, Metrics(), version="1.2.3")


@pytest.fixture
def pool(served):
    """As new in each test."""
    pool, _ = served
    vars(pool).clear()
    vars(pool).update(vars(FakeInspector()))
    return pool


def client_of(app: FastAPI, client: str = "127.0.0.1", **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, client=(client, 5000))
    return httpx.AsyncClient(transport=transport, **{"base_url": "http://api", **options})


@pytest.fixture
async def api(pool, served):
    _, app = served
    async with client_of(app) as client:
        yield client


@pytest.mark.proves("reference-defects/15-confirms-prefetch-back")
async def test_ready_lists_every_component_without_secrets_and_health_and_version_answer_always(api, pool):
    answer = await api.get("/ready")
    broker = {"name": "broker", "ok": True, "fatal": True, "detail": "connected"}
    leader = {"pool": "fake", "role": "leader", "leader": "http://leader:4242"}
    assert (answer.status_code, answer.json()) == (200, {"ready": True, **leader, "components": [broker]})
    for address in ("http://leader:4242", None):
        pool.leading, pool.leader_address = False, address
        ready, leadership = await api.get("/ready"), await api.get("/v1/leadership")
        assert (ready.status_code, ready.json()["role"], ready.json()["leader"]) == (200, "standby", address)
        assert (leadership.json()["leading"], leadership.json()["leader"]) == (False, address)
    not_needed = ComponentView("retries", False, "off", fatal=False)
    needed = ComponentView("driver", False, "no answer from amqp://u:hidden@h")
    for components, status in (([], 503), ([not_needed], 200), ([not_needed, needed], 503)):
        pool.component_views = components
        answer = await api.get("/ready")
        assert (answer.status_code, answer.json()["ready"], "hidden" in answer.text) == (status, status == 200, False)
    pool.failure = BrokerUnavailableError("gone")
    assert (await api.get("/health")).json() == {"status": "ok"}
    assert (await api.get("/version")).json() == {"version": "1.2.3"}


async def test_metrics_tell_what_there_is_now_and_do_not_wait_for_the_store_of_last_values(api, pool, monkeypatch):
    running(pool, "a", "b")
    pool.waiting_views = [WaitingView(0, 3, 12.5), WaitingView(None, 0, None)]
    pool.retrying_requests = {500: 3, 30_000: 0}
    answer = await api.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert set(answer.text.splitlines()) >= {
        'osrdyne_groups{state="active"} 2.0',
        'osrdyne_workers{state="ready"} 2.0', 'osrdyne_workers{state="busy"} 0.0',
        'osrdyne_waiting_requests{priority="0"} 3.0', 'osrdyne_waiting_requests{priority="default"} 0.0',
        'osrdyne_oldest_waiting_seconds{priority="0"} 12.5',
        'osrdyne_retrying_requests{delay="0.5"} 3.0', 'osrdyne_retrying_requests{delay="30"} 0.0',
    }  # fmt: skip
    assert 'osrdyne_oldest_waiting_seconds{priority="default"}' not in answer.text
    pool.leading = False
    monkeypatch.setattr("osrdyne.api.endpoints.metrics.LAST_VALUES_TIMEOUT", 0.0)
    monkeypatch.setattr(pool, "last_value_totals", asyncio.Event().wait)
    standby = (await api.get("/metrics")).text
    names = ("leading 0.0", "waiting_requests{", "retrying_requests{", "last_value_events{")
    assert [f"osrdyne_{name}" in standby for name in names] == [True, False, False, False]


def running(pool: FakeInspector, *keys: str) -> None:
    for number, key in enumerate(keys):
        pool.group_views[Key(key)] = group_view(Key(key), worker_view(Key(key), f"w{number}"))


async def test_status_is_by_worker_id_or_raw_key(api, pool):
    """The reference client joins encoded keys with commas, the reference server repeats the parameter."""
    key, k = "infra=42,timetable=24", Key("k")
    running(pool, key)
    metadata = {"external_id": "pid-w0", "worker_id": "w0", "worker_key": key, "metadata": {}}
    assert (await api.get("/status")).json() == {"workers": {"w0": {"worker_metadata": metadata, "status": "Ready"}}}
    running(pool, key, "b/c", "other")
    for query in ("infra%3D42%2Ctimetable%3D24,b%2Fc", "infra%3D42%2Ctimetable%3D24&keys=b/c"):
        assert set((await api.get(f"/status?keys={query}")).json()["workers"]) == {key, "b/c"}
    loading, ready = worker_view(k, "w1", WorkerState.LOADING), worker_view(k, "w2", WorkerState.BUSY)
    for workers, status in (([loading], "Loading"), ([loading, ready], "Ready")):
        pool.group_views[k] = group_view(k, *workers)
        assert (await api.get("/status?keys=k")).json()["workers"]["k"]["status"] == status


async def test_groups_are_listed_and_tell_state_reason_and_what_comes_next(api, pool):
    running(pool, "b", "a", "a/b")
    for query, keys in (("", ["a", "a/b", "b"]), ("?key=a%2Fb&key=absent", ["a/b"])):
        assert [group["key"] for group in (await api.get(f"/v1/groups{query}")).json()["groups"]] == keys
    view = group_view(Key("k"), worker_view(Key("k"), "w0"))
    waiting = (WaitingView(0, 3, 12.5), WaitingView(None, 0, None))
    pool.group_views[Key("k")] = replace(view, waiting=waiting, profile="{x}", settings={"concurrency": 4})
    group = (await api.get("/v1/groups/k")).json()
    assert (group["state"], group["generation"], group["queue"]["name"]) == ("active", "7.3", "fake-req-k")
    assert group["next_transition"] == {"state": "unbound", "at": 1610.0}
    assert (group["reason"], group["workers"][0]["worker_id"]) == ("active: a request arrived", "w0")
    assert (group["profile"], group["settings"]) == ("{x}", {"concurrency": 4})
    found = [(one["priority"], one["requests"], one["oldest_age"]) for one in group["waiting"]]
    assert found == [(0, 3, 12.5), (None, 0, None)]


@pytest.mark.parametrize("where", ["query", "path"])
async def test_every_key_works(api, pool, where):
    """The path cannot have `.` and `..`: clients resolve them."""
    for key in ODD_KEYS if where == "query" else [key for key in ODD_KEYS if key not in {".", ".."}]:
        pool.group_views.clear()
        encoded = quote(key, safe="")
        prefix, suffix = ("/v1/group", f"?key={encoded}") if where == "query" else (f"/v1/groups/{encoded}", "")
        answer = await api.post(f"{prefix}/pin{suffix}", headers=JSON)
        assert answer.json() == {"key": key, "accepted": "pin"}
        assert (await api.get(f"{prefix}{suffix}")).json()["key"] == key
        assert (await api.get(f"{prefix}/logs{suffix}")).json() == {"key": key, "workers": {}, "ended": {}}
        assert list(pool.group_views) == [key]


async def test_reload_is_answered_with_the_outcome_of_each_worker(api, pool):
    assert (await api.post("/v1/group/reload?key=k", headers=JSON)).status_code == 404
    pool.group_views[Key("k")] = group_view(Key("k"))
    pool.reloads = [ReloadView("a", ReloadOutcome.RELOADED), ReloadView("b", ReloadOutcome.FAILED, "no data")]
    for path in ("/v1/group/reload?key=k", "/v1/groups/k/reload?timeout=5"):
        answer = await api.post(path, headers=JSON)
        assert (answer.status_code, answer.json()["key"]) == (200, "k")
        found = [(one["worker_id"], one["outcome"], one["reason"]) for one in answer.json()["workers"]]
        assert found == [("a", "reloaded", None), ("b", "failed", "no data")]
    assert (await api.post("/v1/group/reload?key=k&timeout=0", headers=JSON)).status_code == 422


async def test_group_is_stopped_and_unpinned_by_post_but_not_by_one_that_a_web_page_could_send(api, pool):
    for kind in ("", "text/plain", "multipart/form-data"):
        answer = await api.post("/v1/groups/k/start", headers={"content-type": kind} if kind else {})
        assert (answer.status_code, answer.json()["code"]) == (415, "json-required")
    assert pool.group_views == {}
    for command, status in (("start", 202), ("pin", 202), ("stop", 409), ("unpin", 202), ("stop", 202)):
        answer = await api.post(f"/v1/groups/k/{command}", headers=JSON)
        assert (answer.status_code, answer.json().get("code")) == (status, "conflict" if status == 409 else None)
    assert (await api.get("/v1/groups/k")).json()["state"] == "stopping"


async def test_logs_are_the_last_lines_without_secrets(api, pool):
    pool.log_lines[Key("k")] = {"w1": ("one", "two", "to amqp://u:hidden@h")}
    answer = await api.get("/v1/groups/k/logs?lines=2")
    assert answer.json()["workers"] == {"w1": ["two", "to amqp://u:***@h"]}
    pool.ended_workers[Key("k")] = [WorkerDeath("w0", "exit code 4", "at amqp://u:hidden@h", 7.0, ("one", "two"))]
    ended = (await api.get("/v1/group/logs?key=k&lines=1&previous=true")).json()
    assert ended["workers"] == {"w0": ["two"]}
    assert ended["ended"] == {"w0": {"ended_with": "exit code 4", "reason": "at amqp://u:***@h", "at": 7.0}}


async def test_poison_shows_evidence_and_hides_credentials(api, pool):
    headers = {"authorization": "Bearer hidden", "x-rpc-path": b"/sql", "odd": [{"n": b"\xff"}]}
    headers |= {"x\udcff": "\udcfe", "nan": float("nan"), "surrogate": "\ud800"}
    view = poison_view("e1", key="\udcff", correlation_id="\udcff", headers=headers, body=b"\xff\x00a")
    pool.poison_views = [view]
    [entry] = (await api.get("/v1/poison?bodies=true")).json()["entries"]
    assert entry["headers"] == {
        "authorization": "***", "x-rpc-path": "/sql", "odd": [{"n": "/w=="}],
        "x\\udcff": "\\udcfe", "nan": "nan", "surrogate": "\\ud800",
    }  # fmt: skip
    assert entry["key"] == entry["correlation_id"] == "\\udcff"
    assert (entry["body"], entry["body_encoding"]) == ("/wBh", "base64")
    deaths = [(one["ended_with"], one["others"]) for one in entry["deaths"]]
    assert deaths == [("exit code 9", 0), ("signal SIGKILL", 1)]
    assert (entry["deliveries"], entry["unexplained"]) == (6, 4)


@pytest.mark.parametrize("path", ["/v1/poison?bodies=true", "/v1/poison/e1"])
async def test_bodies_of_poison_are_encoded_in_a_thread(api, pool, monkeypatch, path):
    threads = []

    def encode(data):
        threads.append(threading.current_thread())
        return b64encode(data)

    monkeypatch.setattr("osrdyne.api.endpoints.poison.base64", SimpleNamespace(b64encode=encode))
    pool.poison_views = [poison_view("e1", headers={}, body=b"\xff")]
    assert "/w==" in (await api.get(path)).text
    assert threads and threading.current_thread() not in threads


async def test_poison_comes_in_pages_and_is_replayed_and_dropped_by_id(api, pool):
    pool.poison_views = [poison_view(f"e{number}", last_at=1000.0 + number) for number in range(3)]
    first = (await api.get("/v1/poison?limit=2")).json()
    assert ([entry["id"] for entry in first["entries"]], first["total"]) == (["e0", "e1"], 3)
    assert first["entries"][0]["body"] is None
    second = (await api.get("/v1/poison", params={"limit": 2, "after": first["next"]})).json()
    assert ([entry["id"] for entry in second["entries"]], second["next"]) == (["e2"], None)
    replayed = (await api.post("/v1/poison/replay?id=e0&id=absent", headers=JSON)).json()
    assert replayed == {"done": ["e0"], "missing": ["absent"], "refused": {}}
    assert (await api.post("/v1/poison/drop?id=e1", headers=JSON)).json()["done"] == ["e1"]
    assert [[view.id for view in views] for views in (pool.replayed, pool.poison_views)] == [["e0"], ["e2"]]
    assert (await api.post("/v1/poison/drop", headers=JSON)).status_code == 422
    assert (await api.get("/v1/poison/e0")).json()["code"] == "not-found"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (LeadershipLostError("This daemon does not lead."), 503, "not-leading"),
        (LeadershipLostError("This daemon is on standby.", leader="http://leader:4242"), 421, "not-leading"),
        (BrokerUnavailableError("No connection to amqp://u:hidden@h."), 503, "broker-unavailable"),
        (DriverError("Docker said no."), 502, "driver-error"),
        (OsrdyneError("Something else."), 500, "error"),
        (IndexError("hidden"), 500, "internal"),
    ],
)
async def test_error_is_a_problem_with_code_and_without_secret(api, pool, monkeypatch, error, status, code):
    async def fail(*_):
        raise error

    monkeypatch.setattr(pool, "pin", fail)
    answer = await api.post("/v1/groups/k/pin", headers=JSON)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json().get("leader") == ("http://leader:4242" if status == 421 else None)
    assert "hidden" not in answer.text and "IndexError" not in answer.text


async def test_wrong_request_is_refused_with_a_code(api):
    wrong = {
        (404, "not-found"): ("/v1/groups/absent", "/v1/nothing", "/docs"),
        (400, "invalid-key"): (
            *[f"/v1/groups/{'x' * 256}", "/v1/groups/%FF", "/v1/group?key=%C3"],
            *["/v1/group", "/v1/group?key=a&key=b"],
        ),
        (422, "invalid-parameter"): ("/v1/groups/k/logs?lines=many",),
    }
    for refusal, paths in wrong.items():
        answers = [await api.get(path) for path in paths]
        assert [(answer.status_code, answer.json()["code"]) for answer in answers] == [refusal] * len(paths)
    refused = await api.delete("/health", headers=JSON)
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET")


# --- routes


MANIFEST = {"routes": {"r": {"route": "FROM /* INTO $upstream", "priority": 2}}}


async def test_change_of_routes_shows_the_priorities_that_it_adds(api):
    answer = (await api.put("/v1/routes", json=MANIFEST, params=ME)).json()
    assert (answer["added_priorities"], answer["removed_priorities"], answer["pending"]) == ([2], [], {})
    [version] = (await api.get("/v1/routes/history", params={"manifests": "false"})).json()["versions"]
    assert (version["size"], version["manifest"]) == (1, None)
    many = {"routes": {f"r{number}": 1 for number in range(1_000)}}
    refused = await api.put("/v1/routes", json=many, params=ME)
    assert (refused.status_code, len(refused.json()["problems"])) == (422, 101)


async def test_text_of_the_document_is_read_and_errors_have_their_place(api):
    places = {
        b'{"routes": {\n  "r": ]}}': (2, 8),
        b"routes:\n  r: FROM / INTO $upstream": (1, 1),
        b'{"routes":\n "\xff"}': (2, None),
        b"": (1, 1),
        b"[" * 100_000: (None, None),
        b'{"routes": [' + b"1," * 1_000_000 + b"1]}": (None, None),
    }
    for body, place in places.items():
        answer = await api.put("/v1/routes", content=body, params=ME, headers=JSON)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid-document")
        assert [(one["path"], one["line"], one["column"]) for one in answer.json()["problems"]] == [("", *place)]
    assert (await api.get("/v1/routes")).json()["current"] is None


async def test_request_of_any_key_and_with_half_of_a_surrogate_pair_is_explained_but_no_invalid_one(api):
    async def explain(text):
        answer = await api.post("/v1/explain", content=text, headers=JSON)
        return answer.status_code, answer.json()

    await api.put("/v1/routes", json=MANIFEST, params=ME)
    sample = {"path": "/sql", "headers": {"level": 3}, "body": {"a": 1}, "app_id": "x", "timeout": 5}
    for key in ODD_KEYS:
        [delivery] = (await explain(json.dumps({"key": key, **sample})))[1]["deliveries"]
        assert (delivery["key"], delivery["priority"], delivery["limited_by"]) == (key, 2, "caller")
    for half in ({"path": "/\ud800"}, {"app_id": "\ud800"}, {"headers": {"\udcff": "\udcff"}}, {"body": "\ud800"}):
        status, explanation = await explain(json.dumps({"key": "k", **half}))
        assert (status, [one["key"] for one in explanation["deliveries"]]) == (200, ["k"])
    long = '{"key": "%s"}' % ("x" * 256)
    beyond = [f'{{"key": "k", {one}}}' for one in ('"timeout": 1e308', '"timeout": 1e400', '"headers": {"a": 1e400}')]
    found = [(status, problem["code"]) for status, problem in [await explain(text) for text in (long, *beyond)]]
    assert found == [(400, "invalid-key"), *[(422, "invalid-parameter")] * 3]


# --- capacity


async def test_a_plan_needs_no_leader_and_a_wrong_question_is_refused_with_the_place(pool, api):
    pool.failure = LeadershipLostError("This daemon is on standby.")
    question = {"load": [{"rate": "720/min"}], "store": "store-s1"}
    found = (await api.post("/v1/capacity", json=question)).json()
    assert (found["fits"], found["accepted"], found["cheapest"]["price"]) == (False, 400_000, 225)
    refused = await api.post("/v1/capacity", json={"load": [{"rate": "fast"}]})
    assert (refused.status_code, "rate" in refused.json()["detail"]) == (422, True)


@pytest.mark.proves("quotas/many-capacity-plans-requested")
async def test_many_plans_leave_the_other_threads_free(api, monkeypatch):
    """Tokens are verified in the threads of the event loop."""
    running, go = threading.Event(), threading.Event()
    question = {"load": [{"rate": "1/min"}]}

    def slow(*_):
        running.set()
        go.wait(PATIENCE)
        return answer(CapacityQuestion.model_validate(question), FakeInspector().prices)

    monkeypatch.setattr("osrdyne.api.endpoints.capacity.answer", slow)
    with ThreadPoolExecutor(1) as only_thread:
        asyncio.get_running_loop().set_default_executor(only_thread)
        plans = [asyncio.create_task(api.post("/v1/capacity", json=question)) for _ in range(MAX_PLANS + 1)]
        assert await asyncio.to_thread(running.wait, PATIENCE)
        [refused], others = await asyncio.wait(plans, return_when=asyncio.FIRST_COMPLETED)
        assert (refused.result().status_code, refused.result().headers["retry-after"]) == (503, "5")
        go.set()
        assert {(await plan).status_code for plan in others} == {200}
        assert (await api.post("/v1/capacity", json=question)).status_code == 200


async def test_circuits_are_listed_shown_one_by_one_and_only_closed_by_hand(pool, api):
    first, second, third, absent = (digit * 16 for digit in "1230")
    pool.circuit_views = [
        CircuitView(first, None, None, CircuitState.OPEN, 66, 1, 2, 5.0),
        CircuitView(second, "r", Key("a/b"), CircuitState.OPEN, 100, 0, 5, 6.0),
        CircuitView(third, "r", None, CircuitState.OPEN, 100, 0, 5, 5.0, 2),
    ]
    assert (await api.get("/v1/circuits")).json()["circuits"] == [first, second, third]
    everything = (await api.get("/v1/circuits/_all")).json()["circuits"]
    found = [(one["route"], one["key"], one["fail_ratio"]) for one in everything]
    assert found == [(None, None, 66), ("r", "a/b", 100), ("r", None, 100)]
    assert (await api.get(f"/v1/circuits/{second}")).json() == everything[1]
    assert (await api.get(f"/v1/circuits/{second}/status")).json() == {"status": "open"}
    wrong = [(await api.get(f"/v1/circuits/{one}")).status_code for one in (absent, "..%2f", "x" * 300)]
    assert wrong == [404, 422, 422]

    async def put(circuit, status, by=ME):
        return await api.put(f"/v1/circuits/{circuit}/status", json={"status": status}, params=by)

    for status in ("open", "half_open", "", "CLOSED"):
        assert [(await put(one, status)).status_code for one in (first, "_all")] == [403, 403]
    assert {one.status for one in pool.circuit_views} == {CircuitState.OPEN}
    assert [(await put(absent, "closed")).status_code, (await put("_all", "closed", {})).status_code] == [404, 422]
    for circuit, closed in ((first, [first]), ("_all", [second, third])):
        assert (await put(circuit, "closed")).json()["closed"] == closed


GATELEEN = "/playground/server/queuecircuitbreaker/circuit"


@pytest.mark.parametrize("prefix", [GATELEEN, "/queuecircuitbreaker/circuit"])
async def test_circuits_have_the_shapes_of_gateleen(pool, prefix):
    first, second, third = (digit * 16 for digit in "012")
    pool.circuit_views = [
        CircuitView(first, "r", None, CircuitState.CLOSED, 15, 85, 15, 5.0),
        CircuitView(second, "r", Key("a/b"), CircuitState.OPEN, 90, 1, 9, 6.0, 2),
        CircuitView(third, None, None, CircuitState.HALF_OPEN, 90, 1, 9, 6.0),
    ]
    async with client_of(create_app(pool, Metrics(), version="1", circuits_path=f"{GATELEEN}/")) as api:

        async def put(circuit, status="closed"):
            return await api.put(f"{prefix}/{circuit}/status", json={"status": status})

        shown = {"failRatio": 90, "circuit": "r a/b"}
        for end in ("/", "", "/_all", "/_all/"):
            assert (await api.get(f"{prefix}{end}")).json() == {
                first: {"status": "closed", "infos": {"failRatio": 15, "circuit": "r"}},
                second: {"status": "open", "infos": shown},
                third: {"status": "half_open", "infos": {"failRatio": 90, "circuit": "requests of no named route"}},
            }
        assert (await api.get(f"{prefix}/{second}")).json() == {"status": "open", "info": shown}
        assert (await api.get(f"{prefix}/{second}/status/")).json() == {"status": "open"}
        closed = [await put(one) for one in (first, second, "_all")]
        assert [(one.status_code, one.json()) for one in closed] == [(200, {"status": "closed"})] * 3
        assert {(one.status, one.fail_ratio) for one in pool.circuit_views} == {(CircuitState.CLOSED, 0)}
        actions = [one.action for one in pool.records if one.is_final]
        assert actions == ["circuits.status.put"] * 2 + ["circuits._all.status.put"]
        wrong = (
            await api.get(f"{prefix}/none"),
            await put("none"),
            await put("_all", "open"),
            await api.get(f"{prefix}x"),
        )
        assert [one.status_code for one in wrong] == [404, 404, 403, 404]


async def test_effective_policy_quota_and_lag_are_shown(pool, api):
    async def shown(path):
        return (await api.get(f"/v1/{path}")).json()

    await api.put("/v1/policies", json={"policies": [{"match": "a/{x}", "MaxMessageAge": 30.0}]}, params=ME)
    found = await shown("policies/effective?key=a%2Fb")
    assert (found["key"], found["match"]) == ("a/b", "a/{x}")
    assert found["elements"]["MaxMessageAge"] == {"value": 30.0, "origin": "proposed", "acts": True}
    assert (await shown("policies/effective?key=b"))["elements"] is None
    assert (await shown("quota"))["usage"] is None
    document = {"pool": {"messages_per_day": 10}, "rules": [{"name": "r", "per": "rule", "send_rate": 1}]}
    await api.put("/v1/quota", json=document, params=ME)
    meters = (await shown("quota"))["usage"]["meters"]
    assert [(one["name"], one["used"], one["quota"]) for one in meters] == [("pool", 0, 10), ("rule r", 0, None)]
    assert 'osrdyne_quota_used_ratio{meter="pool"} 0.0' in (await api.get("/metrics")).text
    pool.group_lags = Lags(1_700.5, Lag(None, 7, 2.0, 0.5, None), [Lag(Key("a"), 7, 2.0, -0.1, 70.0)])
    lags = {"pool": "fake", "leading": True, "as_of": 1_700.5}
    lags["total"] = {"messages": 7, "seconds": 2.0, "a_minute": 30.0, "drained_in": None}
    lags["groups"] = [{"key": "a", "messages": 7, "seconds": 2.0, "a_minute": -6.0, "drained_in": 70.0}]
    assert await shown("lag") == lags
    pool.leading = False
    assert await shown("lag") == {"pool": "fake", "leading": False, "as_of": None, "total": None, "groups": []}


@pytest.mark.parametrize("client", ["http 10.0.0.7", "https 10.0.0.7", "http 127.0.0.1", "http ::1"])
@pytest.mark.proves("api/client-host-asks-over")
async def test_key_that_demands_tls_is_refused_over_plain_http_from_another_host(pool, client):
    scheme, host = client.split()
    allowed = client != "http 10.0.0.7"
    running(pool, "a", "b/c")
    pool.tls_keys = {Key("a")}
    pool.poison_views = [poison_view("e1", key=Key("a")), poison_view("e2", key=Key("b"))]
    async with client_of(create_app(pool, Metrics(), version="1"), host, base_url=f"{scheme}://api") as api:
        demanding = [
            *["/v1/group?key=a", "/v1/groups/a", "/v1/policies/effective?key=a"],
            *["/v1/poison/e1", "/v1/poison", "/v1/poison?bodies=true", "/v1/poison?key=a"],
        ]
        answers = {path: await api.get(path) for path in demanding}
        answers["explain"] = await api.post("/v1/explain", json={"key": "a"})
        for path, answer in answers.items():
            found = (answer.status_code, answer.json().get("code"))
            assert found == ((200, None) if allowed else (403, "tls-required")), path
        assert (await api.post("/v1/group/stop?key=a", headers=JSON)).status_code == (202 if allowed else 403)
        for path in ("/v1/poison/e2", "/v1/poison?key=b", "/v1/groups/b/c"):
            assert (await api.get(path)).status_code == 200, path


@pytest.mark.parametrize(
    ("name", "author"),
    [("élodie".encode(), "élodie"), ("Àgnes".encode(), "Àgnes"), ("山田".encode(), "山田"), (b"\xe9ric", None)],
    ids=["latin", "with a control character in latin-1", "other", "not UTF-8"],
)
async def test_trusted_proxy_names_users_in_utf_8_and_is_responsible_for_their_tls(pool, name, author):
    running(pool, "a")
    pool.tls_keys = {Key("a")}
    settings = ApiSettings(trusted_proxies=("10.0.0.7",), allowed_hosts=("api",))
    app = create_app(pool, Metrics(), version="1", access=Access(Authenticators(proxies=TrustedProxies(settings))))
    headers = [(b"x-forwarded-user", name), (b"x-forwarded-role", b"admin")]
    async with client_of(app, "10.0.0.7", headers=headers) as api:
        changed = await api.put("/v1/policies", json={"policies": []}, params={"author": "other"})
        assert changed.status_code == (200 if author else 401)
        if author is not None:
            assert (await api.get("/v1/policies")).json()["current"]["author"] == author
            assert (await api.get("/v1/group?key=a")).status_code == 200
