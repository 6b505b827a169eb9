"""Which routes a request takes, in which class it goes where, and until when; and the same, explained."""

import itertools
import json
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.ingress.acceptance import (
    Deadline,
    Limiter,
    RoutedRequest,
    TtlLimits,
    accept,
    deadline_of,
    longest_ttl,
    warn_of_capped_ttls,
)
from osrdyne.ingress.conditions import compile_condition
from osrdyne.ingress.explain import Explanation, explain
from osrdyne.ingress.requests import Arrival, sample_arrival
from osrdyne.ingress.routes.manifest import load_manifest
from osrdyne.ingress.routes.table import RouteTable, resolved
from osrdyne.protocol.names import PoolNames

NOW = 1_000_000.0
LIMITS = TtlLimits(default=600.0, longest=604800.0)
NOW_MS = 1_000_000_000


def table(routes: dict[str, object], ttl: int | None = None) -> RouteTable:
    store = {} if ttl is None else {"storeAndForwardConfiguration": {"timeToLiveSecs": ttl}}
    return RouteTable(load_manifest(json.dumps({"routes": routes, **store})))


def arrival(key: str = "a", path: str = "/sql", *, app: str | None = "asa", **given: Any) -> Arrival:
    return sample_arrival(key, path, app_id=app, now=NOW, **{"headers": {}, "body": None, "timeout": None, **given})


def deliveries(routes: dict[str, object], request: Arrival) -> list[RoutedRequest]:
    return accept(request, table(routes), limits=LIMITS)


def explained(routes: dict[str, object], request: Arrival) -> Explanation:
    return explain(request, table(routes), splitter=None, names=PoolNames("p"), limits=LIMITS)


def to(text: str = "FROM /messages/* INTO $upstream", **members: object) -> dict[str, object]:
    return {"route": text, **members}


@pytest.mark.parametrize(
    ("app", "output", "path", "source"),
    [
        ("asa", None, "/sql", "/messages/modules/asa/outputs/sql"),
        ("asa", "Alerts", "/sql", "/messages/modules/asa/outputs/Alerts"),
        ("asa", bytearray(b"Alerts"), "/sql", "/messages/modules/asa/outputs/Alerts"),
        ("asa", None, "", "/messages/modules/asa"),
        (None, "Alerts", "/sql", "/messages"),
    ],
)
def test_source_of_a_request(app, output, path, source):
    assert arrival(path=path, app=app, headers={"x-output": output} if output else {}).source == source


def test_source_matches_by_whole_segments():
    own = "/messages/modules/asa/outputs/sql"
    matching = ["/", "/*", "/messages", "/MESSAGES/modules/Asa/*", own]
    others = ["/messages/modules/as", f"{own}/more", "/messages/*/asa", "/twin"]
    found = [one for one in matching + others if deliveries({"r": f"FROM {one} INTO $upstream"}, arrival())]
    assert found == matching


def test_without_a_manifest_every_request_goes_upstream_at_the_default_level():
    found = accept(arrival(), None, limits=LIMITS)
    assert found == [RoutedRequest("a", "/sql", None, Deadline(NOW_MS + 600_000, Limiter.POOL), None)]


def test_condition_that_is_true_routes():
    request = arrival(headers={"Level": 3}, body=b'{"n": 2}')
    true = "level = '3' AND $key = 'a' AND $connectionModuleId = 'asa' AND $body.n > 1"
    conditions = (true, "level = 'x'", "NOT (missing = 'x')")  # the last is undefined
    found = [deliveries({"r": f"FROM /* WHERE {one} INTO $upstream"}, request) for one in conditions]
    assert list(map(bool, found)) == [True, False, False]


@pytest.mark.parametrize(
    ("routes", "winner"),
    [
        ({"low": to(priority=3, timeToLiveSecs=10), "high": to(priority=1, timeToLiveSecs=20), "none": to()}, "high"),
        ({"b": to(priority=1, timeToLiveSecs=20), "a": to(priority=1)}, "b"),
        ({"default": to(), "nine": to(priority=9, timeToLiveSecs=20)}, "nine"),
    ],
    ids=["the higher priority", "equal: the first declared", "the default class is below 9"],
)
def test_routes_to_one_endpoint_are_one_delivery_by_the_highest_with_its_ttl(routes, winner):
    [found] = deliveries(routes, arrival())
    assert (found.route, found.deadline.at_ms) == (winner, NOW_MS + 20_000)


def test_two_endpoints_are_two_deliveries_and_the_first_keeps_the_reply():
    elsewhere = to("FROM /* INTO BrokeredEndpoint('/modules/b/inputs/store')", priority=0)
    found = deliveries({"own": to(priority=5), "copy": elsewhere}, arrival())
    shown = [(one.key, one.path, one.priority, one.keeps_reply) for one in found]
    assert shown == [("a", "/sql", 5, True), ("b", "/store", 0, False)]
    upstream = to("FROM /* INTO BrokeredEndpoint('/modules/a/inputs/sql')", priority=0)
    assert [one.route for one in deliveries({"own": to(priority=5), "same": upstream}, arrival())] == ["same"]


@pytest.mark.parametrize(
    ("of_route", "of_manifest", "own", "seconds", "limiter"),
    [
        (0, None, None, 600, Limiter.POOL),
        (60, None, None, 60, Limiter.ROUTE),
        (60, 30, None, 60, Limiter.ROUTE),
        (0, 30, None, 30, Limiter.MANIFEST),
        (0, 0, None, 600, Limiter.POOL),
        (0, -1, None, 604800, Limiter.POOL_MAXIMUM),
        (3600, 30, None, 3600, Limiter.ROUTE),
        (0, 86400, None, 86400, Limiter.MANIFEST),
        (700_000, None, None, 604800, Limiter.POOL_MAXIMUM),
        (0, 700_000, None, 604800, Limiter.POOL_MAXIMUM),
        (0, None, 3600, 600, Limiter.POOL),
        (86400, None, 3600, 3600, Limiter.CALLER),
        (60, None, 5, 5, Limiter.CALLER),
        (60, None, 500, 60, Limiter.ROUTE),
    ],
)
def test_deadline_is_the_earliest_limit(of_route, of_manifest, own, seconds, limiter):
    own_ms = None if own is None else NOW_MS + own * 1000
    found = deadline_of(route_ttl=of_route, manifest_ttl=of_manifest, limits=LIMITS, own_ms=own_ms, accepted_ms=NOW_MS)
    assert found == Deadline(NOW_MS + seconds * 1000, limiter)


def test_longest_ttl_is_that_of_the_route_that_allows_most_and_one_beyond_the_pool_is_warned_about():
    manifest = table({"short": to(timeToLiveSecs=30), "long": to(timeToLiveSecs=86400)}, ttl=60).manifest
    assert (longest_ttl(manifest, LIMITS), longest_ttl(None, LIMITS)) == (86400.0, 600.0)
    manifest = table({"seed": to(timeToLiveSecs=700_000), "fine": to(timeToLiveSecs=86400)}, ttl=800_000).manifest
    warned = [str(problem) for problem in warn_of_capped_ttls(manifest, LIMITS)]
    expected = ("routes.seed.timeToLiveSecs: 700000", "storeAndForwardConfiguration.timeToLiveSecs: 800000")
    for text, place in zip(warned, expected, strict=True):
        assert text.startswith(place) and "requests.max_ttl" in text and "604800" in text


def test_explanation_shows_what_became_of_every_route():
    routes = {
        "alerts": to("FROM /messages/modules/other INTO $upstream", priority=0),
        "typed": to("FROM /* WHERE level = 'x' INTO $upstream", priority=1),
        "data": to(priority=2, retry={"codes": [503], "max_attempts": 2, "delays": [1]}, coalesce=True),
        "rest": to(),
    }
    explanation = explained(routes, arrival("k=1"))
    assert [(one.name, one.source, one.condition, one.taken, one.wins) for one in explanation.routes] == [
        ("alerts", False, None, False, False),
        ("typed", True, "undefined", False, False),
        ("data", True, None, True, True),
        ("rest", True, None, True, False),
    ]
    [delivery] = explanation.deliveries
    assert (delivery.queue, delivery.exchange, delivery.priority) == ("p-req-k+3D1_Pri2", "p-work-xchg_Pri2", 2)
    assert (delivery.deadline, delivery.limited_by, explanation.refused) == (NOW + 600, "pool", None)
    retry = delivery.retry
    assert (retry.codes, retry.max_attempts, retry.delays_ms) == (("503",), 2, (1000,))
    assert explanation.to_json()["deliveries"][0]["coalesce"] is True
    refused = explained({}, arrival())
    assert (refused.refused, refused.deliveries) == ("no-route", ())
    assert json.dumps(refused.to_json())


CONDITIONS = [
    None, "level = 'x'", "'x' = Level", "level = 'y' AND kind = 'k'", "kind = 'k' OR level = 'x'", "NOT (level = 'x')",
    "$body.n = 1", "$body.n = true", "$body.n = 1 AND level != 'x'", "(level = 'x' OR level = 'y') AND $body.n > 0",
    "level = 'x' OR $body.n > 1", "$key = 'a'", "level = undefined OR true", "(level ?? 'x') = 'x'", "true",
]  # fmt: skip
SOURCES = [
    "/", "/messages/*", "/messages/modules/asa", "/messages/modules/ASA/outputs/sql", "/messages/modules/b/*", "/a/*/b",
]  # fmt: skip
SINKS = ["$upstream", "BrokeredEndpoint('/modules/a/inputs/sql')", "BrokeredEndpoint('/modules/c/inputs/d')"]


OPERATORS = ("<", "<=", "=", ">=", ">", "!=")
ATOMS = [
    *map(" ".join, itertools.product(("as_number(level)", "$body.n"), OPERATORS, ("-1", "1", "2.5"))),
    *map(" ".join, itertools.product(("level", "Kind", "$body.n"), ("<", ">=", "="), ("'k'", "'x'", "''"))),
    *map(" ".join, itertools.product(("1", "'x'"), OPERATORS, ("$body.n",))),
    "starts_with(level, 'x')", "starts_with(level, '')", "starts_with($body.n, 'x')", "contains(level, 'x')",
    "is_defined(level)", "NOT is_null($body.n)", "$contentType = 'application/json'", "true", "undefined",
]  # fmt: skip
COMPOUND = st.recursive(
    st.sampled_from(ATOMS),
    lambda parts: (
        st.tuples(parts, st.sampled_from(["AND", "OR"]), parts).map(lambda three: "({} {} {})".format(*three))
        | parts.map(lambda one: f"NOT ({one})")
    ),
    max_leaves=5,
)
CONDITION = st.sampled_from(CONDITIONS) | COMPOUND
PRIORITY = st.none() | st.integers(0, 9)
ROUTES = st.lists(st.tuples(st.sampled_from(SOURCES), CONDITION, st.sampled_from(SINKS), PRIORITY), max_size=12)
VALUES = ["x", "xy", "y", "k", "", 1, "2.5", "-1", None]
BODIES = [None, *(b'{"n": %s}' % value for value in (b"1", b"true", b'"x"', b"2.5", b"-1e999")), b"no json"]
REQUESTS = st.builds(
    lambda headers, body: arrival(headers=headers, body=body),
    st.dictionaries(st.sampled_from(["level", "LEVEL", "kind"]), st.sampled_from(VALUES), max_size=2),
    st.sampled_from(BODIES),
)


def test_index_lets_every_request_through_that_the_condition_takes():
    for condition in ATOMS:
        found = table({"r": to(f"FROM /* WHERE {condition} INTO $upstream")})
        compiled = compile_condition(condition)
        for value, body in itertools.product(VALUES, BODIES):
            request = arrival(headers={"level": value, "KIND": value}, body=body)
            taken = compiled.evaluate(request.sample) is True
            assert bool(found.winners(request)) is taken, (condition, value, body)


@given(ROUTES, REQUESTS)
def test_index_finds_what_a_look_at_every_route_finds(routes, request):
    document = {}
    for number, (source, condition, sink, priority) in enumerate(routes):
        text = f"FROM {source} {f'WHERE {condition}' if condition else ''} INTO {sink}"
        document[f"r{number}"] = to(text, **({} if priority is None else {"priority": priority}))
    found = table(document)
    taken = defaultdict(list)
    for one in found.examine(request):
        if one.taken:
            taken[resolved(one.route.statement.endpoint, request)].append(one.route)
    winners = {min(candidates, key=lambda route: route.rank).name for candidates in taken.values()}
    assert {route.name for route in found.winners(request)} == winners


def test_body_is_parsed_only_for_routes_that_a_header_leaves_over():
    found = table({"r": to("FROM /* WHERE level = 'x' AND $body.n > 1 INTO $upstream"), "rest": to()})
    request = arrival(headers={"level": "y"}, body=b'{"n": 2}')
    request.sample.defer_parsing()
    found.winners(request)  # raises no BodyNotParsedError
