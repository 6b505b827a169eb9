"""The route manifest: what loads, what it means, and every error with its place."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.ingress.documents.problems import InvalidDocumentError
from osrdyne.ingress.routes.manifest import Manifest, load_manifest
from osrdyne.ingress.routes.route import UPSTREAM, Endpoint, Route
from osrdyne.protocol.names import Key

SEED = """
"$edgeHub": { "properties.desired": { "schemaVersion": "1.1.0", "routes": {
  "secCamAlerts": { "route": "FROM /messages/modules/SecCamMod/outputs/P0_Alerts INTO $upstream",
                    "priority": 0, "timeToLiveSecs": 86400 },
  "floorCamAlerts": { "route": "FROM /messages/modules/FloorCamMod/outputs/P0_Alerts INTO $upstream",
                      "priority": 0, "timeToLiveSecs": 86400 },
  "secCamData": { "route": "FROM /messages/modules/SecCamMod/outputs/P1_Data INTO $upstream",
                  "priority": 1, "timeToLiveSecs": 1800 },
  "upstream": "FROM /messages/* INTO $upstream" },
  "storeAndForwardConfiguration": { "timeToLiveSecs": 7200 } } }
"""
"""As Azure IoT Edge routes prints it, without braces around it."""


def one(route: object, **members: object) -> Route:
    return load_manifest(json.dumps({"routes": {"r": route}, **members})).routes[0]


def problems(text: str) -> list[str]:
    with pytest.raises(InvalidDocumentError) as caught:
        load_manifest(text)
    return [str(problem) for problem in caught.value.problems]


def problems_of(route: object) -> list[str]:
    return problems(json.dumps({"routes": {"r": route}}))


def test_manifest_of_the_seed_loads_unchanged() -> None:
    manifest = load_manifest(SEED)
    found = [(route.name, route.priority, route.ttl) for route in manifest.routes]
    assert found == [
        ("secCamAlerts", 0, 86400),
        ("floorCamAlerts", 0, 86400),
        ("secCamData", 1, 1800),
        ("upstream", None, 0),
    ]
    assert (manifest.ttl, manifest.priorities, manifest.warnings) == (7200, {0, 1}, ())


@pytest.mark.parametrize("text", [SEED, f"{{{SEED}}}"], ids=["excerpt", "json"])
def test_kept_document_loads_to_the_same_manifest(text: str) -> None:
    manifest = load_manifest(text)
    again = load_manifest(json.dumps(manifest.document()))
    assert again.document() == manifest.document()
    assert [route.statement.endpoint for route in again.routes] == [UPSTREAM] * 4


def test_yaml_means_the_same() -> None:
    text = "routes:\n  alerts:\n    route: FROM /messages/* WHERE level = 'x' INTO $upstream\n    priority: 2\n"
    assert load_manifest(text).document()["routes"]["alerts"]["priority"] == 2


@pytest.mark.parametrize("text", ["", "{}", "routes: {}", '{"routes": {}}'])
def test_manifest_without_routes_is_one(text: str) -> None:
    assert load_manifest(text or "{}").routes == ()


@pytest.mark.parametrize("order", [("text", "object"), ("object", "text")])
def test_name_in_both_forms_keeps_the_object_with_a_warning(order: tuple[str, str]) -> None:
    forms = {
        "text": '"r": "FROM /a INTO $upstream"',
        "object": '"r": {"route": "FROM /b INTO $upstream", "priority": 3}',
    }
    manifest = load_manifest(f'{{"routes": {{{", ".join(forms[form] for form in order)}}}}}')
    assert [(route.statement.source, route.priority) for route in manifest.routes] == [(("b",), 3)]
    assert [warning.path for warning in manifest.warnings] == ["routes.r"]


# --- statements


@pytest.mark.parametrize(
    ("source", "segments"),
    [
        ("/messages/*", ("messages",)),
        ("/messages", ("messages",)),
        ("/", ()),
        ("/*", ()),
        ("/Messages/Modules/ASA/*", ("messages", "modules", "asa")),
        ("/messages/modules/asa/", ("messages", "modules", "asa")),
    ],
)
def test_source_is_a_prefix_of_segments_without_case(source: str, segments: tuple[str, ...]) -> None:
    assert one(f"FROM {source} INTO $upstream").statement.source == segments


@pytest.mark.parametrize(
    "text",
    [
        "FROM /messages/* INTO $upstream",
        "  select * from /messages/*   into   $UPSTREAM  ",
        "FROM /messages/* INTO BrokeredEndpoint('$upstream')",
    ],
)
def test_blanks_and_case_do_not_matter(text: str) -> None:
    statement = one(text).statement
    assert (statement.source, statement.condition, statement.endpoint) == (("messages",), None, UPSTREAM)


@pytest.mark.parametrize(
    ("argument", "endpoint"),
    [
        ("'/modules/plant=4/inputs/sql'", Endpoint(Key("plant=4"), "/sql")),
        ('"modules/a%2Fb%20%C3%A9/inputs/x%2Fy"', Endpoint(Key("a/b é"), "/x/y")),
    ],
)
def test_endpoint_is_a_group_and_a_path(argument: str, endpoint: Endpoint) -> None:
    assert one(f"FROM /* INTO brokeredendpoint( {argument} )").statement.endpoint == endpoint


def test_keyword_inside_a_condition_is_none() -> None:
    condition = one("FROM /* WHERE a = ' INTO b' /* INTO c */ AND into.b = 'x' INTO $upstream").statement.condition
    assert condition is not None
    assert condition.text == "a = ' INTO b' /* INTO c */ AND into.b = 'x'"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("  INTO $upstream", "routes.r.route, column 3: a route must begin with FROM"),
        ("FROM", "routes.r.route, column 5: expected a source after FROM, such as /messages/*"),
        ("FROM messages INTO $upstream", "routes.r.route, column 6: a source begins with /, such as /messages/*"),
        ("FROM /a WHEN x", "routes.r.route, column 9: expected WHERE or INTO after the source"),
        ("FROM /a WHERE true", "routes.r.route, column 19: missing sink: INTO $upstream"),
        ("FROM /a INTO up", "routes.r.route, column 14: expected a sink: $upstream or BrokeredEndpoint"),
        ("FROM /a INTO BrokeredEndpoint('/modules/a')", "routes.r.route, column 14: expected a sink"),
        ("FROM /a INTO BrokeredEndpoint('/modules/a/b/c/d')", "routes.r.route, column 14: expected a sink"),
        ("FROM /a INTO BrokeredEndpoint('/modules/%ff/inputs/a')", "routes.r.route, column 14: key and path"),
        ("FROM /a WHERE a == 'x' INTO $upstream", "routes.r.condition, column 3: '==' is not an operator"),
    ],
)
def test_error_of_a_statement_has_its_column(text: str, problem: str) -> None:
    assert problems_of(text)[0].startswith(problem)


def test_route_and_condition_are_both_reported() -> None:
    text = "FROM a WHERE 1 + 'b' = 2 AND nope() INTO up"
    assert [problem.split(":")[0] for problem in problems_of(text)] == [
        "routes.r.route, column 6",
        "routes.r.condition, column 3",
        "routes.r.condition, column 17",
        "routes.r.route, column 42",
    ]


# --- the document


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "an object with routes, schemaVersion, storeAndForwardConfiguration is expected"),
        ('{"route": {}}', "route: unknown member"),
        ('{"routes": []}', "routes: an object of routes by their names is expected"),
        ('{"routes": {"a b": "FROM / INTO $upstream"}}', "routes.a b: a name has one character or more"),
        ('{"routes": {"": "FROM / INTO $upstream"}}', "routes.: a name has one character or more"),
        ('{"routes": {"r": 3}}', "routes.r: the text of a route, or an object"),
        ('{"routes": {"r": {}}}', "routes.r.route: the text of the route is missing"),
        (
            '{"storeAndForwardConfiguration": {"timeToLiveSecs": "1"}}',
            "storeAndForwardConfiguration.timeToLiveSecs: a whole",
        ),
        ('{"storeAndForwardConfiguration": 1}', "storeAndForwardConfiguration: an object with timeToLiveSecs"),
        ('{"routes": {"r": "FROM / INTO $upstream", "r": "FROM / INTO $upstream"}}', "routes.r: it is given twice"),
        ('{"routes": {}, "routes": {}}', "routes: it is given twice"),
        ('{"routes": {', "line 1, column 13: this is not JSON"),
        ("routes: [", "the document:1 is not valid YAML"),
        ("[" * 100_000, "it is nested too deeply"),
    ],
)
def test_error_of_the_document_has_its_place(text: str, problem: str) -> None:
    assert problems(text)[0].startswith(problem)


@pytest.mark.parametrize(
    ("member", "value"), [("priority", -1), ("priority", 10), ("priority", True), ("priority", "1")]
)
def test_priority_is_0_to_9(member: str, value: object) -> None:
    assert problems_of({"route": "FROM / INTO $upstream", member: value}) == [
        "routes.r.priority: a whole number from 0 to 9 is expected"
    ]


@pytest.mark.parametrize(
    "text",
    [
        r'{"routes": {"a\ud800": "FROM /messages/* INTO $upstream"}}',
        r"""{"routes": {"a": "FROM /messages/* WHERE word = '\ud800' INTO $upstream"}}""",
        'routes:\n  "a\\ud800": "FROM /messages/* INTO $upstream"',
    ],
)
def test_half_of_a_surrogate_pair_is_an_error_with_its_place(text: str) -> None:
    with pytest.raises(InvalidDocumentError, match="half of a surrogate pair") as caught:
        load_manifest(text)
    assert str(caught.value).encode().startswith(b"routes.a")


def test_number_of_thousands_of_digits_is_an_error() -> None:
    text = f'{{"routes": {{"a": {{"route": "FROM /messages/* INTO $upstream", "priority": {"9" * 5000}}}}}}}'
    with pytest.raises(InvalidDocumentError, match="at most 100 digits"):
        load_manifest(text)


def test_all_errors_are_reported_at_once() -> None:
    routes = {"a": "nothing", "b": {"route": "FROM / INTO $upstream", "priority": 99, "timeToLiveSecs": -1, "x": 1}}
    assert len(problems(json.dumps({"routes": routes, "further": 1}))) == 5


@pytest.mark.parametrize(("seconds", "ttl"), [(0, 0), (60, 60), (-1, -1), (-99, -1)])
def test_negative_ttl_of_the_manifest_is_not_a_limit(seconds: int, ttl: int) -> None:
    assert load_manifest(json.dumps({"storeAndForwardConfiguration": {"timeToLiveSecs": seconds}})).ttl == ttl


@pytest.mark.parametrize("text", ["FROM /a/*/b INTO $upstream", "FROM /a WHERE INTO $upstream"])
def test_route_that_is_never_taken_is_warned_about(text: str) -> None:
    assert [warning.path for warning in load_manifest(json.dumps({"routes": {"r": text}})).warnings] == [
        "routes.r.route"
    ]


@pytest.mark.parametrize(
    ("delays", "ttl", "warned"),
    [(["1s", "30s"], 30, "before attempt 3"), (["30s"], 30, "before attempt 2"), (["1s", "28s"], 30, "")],
)
def test_delay_that_ends_after_the_time_to_live_is_warned_about(delays: list[str], ttl: int, warned: str) -> None:
    retry = {"codes": [503], "max_attempts": 9, "delays": delays}
    document = {
        "routes": {"r": {"route": "FROM /a INTO $upstream", "retry": retry}},
        "storeAndForwardConfiguration": {"timeToLiveSecs": ttl},
    }
    warnings = load_manifest(json.dumps(document)).warnings
    assert [warning.path for warning in warnings] == (["routes.r.retry.delays"] if warned else [])
    assert warned in "".join(map(str, warnings))


def test_route_that_coalesces_is_kept_as_it_was_written() -> None:
    route = {"route": "FROM /a INTO $upstream", "coalesce": True}
    manifest = load_manifest(json.dumps({"routes": {"r": route, "other": {**route, "coalesce": False}}}))
    assert [one.coalesce for one in manifest.routes] == [True, False]
    assert manifest.document()["routes"] == {"r": route, "other": "FROM /a INTO $upstream"}
    assert load_manifest(json.dumps(manifest.document())).routes == manifest.routes


@pytest.mark.parametrize("value", [1, 0, "yes", None, []])
def test_coalesce_is_true_or_false(value: object) -> None:
    with pytest.raises(InvalidDocumentError, match="true or false is expected") as refused:
        load_manifest(json.dumps({"routes": {"r": {"route": "FROM /a INTO $upstream", "coalesce": value}}}))
    assert [problem.path for problem in refused.value.problems] == ["routes.r.coalesce"]


def test_manifest_that_takes_no_request_is_warned_about() -> None:
    assert [warning.path for warning in load_manifest("{}").warnings] == ["routes"]


@given(st.text(max_size=60))
def test_any_text_is_a_manifest_or_a_list_of_errors(text: str) -> None:
    try:
        assert isinstance(load_manifest(text), Manifest)
    except InvalidDocumentError as error:
        assert error.problems


@given(st.text(max_size=60))
def test_any_text_is_a_route_or_a_list_of_errors(text: str) -> None:
    try:
        assert isinstance(one(f"FROM {text}"), Route)
    except InvalidDocumentError as error:
        assert all((problem.column or 0) <= len(text) + 6 for problem in error.problems)
