"""The route manifest: what loads, what it means, and every error with its place."""

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


def places(text: str) -> list[str]:
    """Where the errors are: a path and, inside a statement, a column."""
    with pytest.raises(InvalidDocumentError) as caught:
        load_manifest(text)
    return [str(problem).partition(":")[0] for problem in caught.value.problems]


def places_in(route: object) -> list[str]:
    found = places(json.dumps({"routes": {"r": route}}))
    return [place.removeprefix("routes.r.") for place in found]


@pytest.mark.parametrize("text", [SEED, f"{{{SEED}}}"], ids=["excerpt", "json"])
def test_manifest_of_the_seed_loads_unchanged_also_from_what_is_kept(text):
    first = load_manifest(text)
    for manifest in (first, load_manifest(json.dumps(first.document()))):
        assert [(route.name, route.priority, route.ttl) for route in manifest.routes] == [
            ("secCamAlerts", 0, 86400),
            ("floorCamAlerts", 0, 86400),
            ("secCamData", 1, 1800),
            ("upstream", None, 0),
        ]
        assert [route.statement.endpoint for route in manifest.routes] == [UPSTREAM] * 4
        assert (manifest.ttl, manifest.priorities, manifest.warnings) == (7200, {0, 1}, ())
        assert manifest.document() == first.document()


def deployment(**desired: object) -> dict[str, object]:
    """A deployment manifest of Azure IoT Edge with other modules."""
    hub = {"properties.desired": {"schemaVersion": "1.2", **desired}, "properties.reported": {}}
    modules = {"$edgeAgent": {"properties.desired": {}}, "$edgeHub": hub, "camera": {}}
    return {"content": {"modulesContent": modules, "devicesContent": {}}}


def test_sections_for_other_programs_are_named_in_a_warning():
    store = {"timeToLiveSecs": 7200, "storeLimits": {"maxBytes": 1}}
    document = deployment(routes={"r": "FROM /* INTO $upstream"}, storeAndForwardConfiguration=store, mqttBroker={})
    found = load_manifest(json.dumps(document))
    assert ([route.name for route in found.routes], found.ttl) == (["r"], 7200)
    warned = " ".join(map(str, found.warnings))
    assert {name for name in NAMES if name in warned} == set(NAMES)
    assert load_manifest(json.dumps(found.document())).warnings == ()


NAMES = ("devicesContent", "$edgeAgent", "camera", "properties.reported", "mqttBroker", "storeLimits")


TTL = "storeAndForwardConfiguration.timeToLiveSecs"


@pytest.mark.parametrize(
    ("document", "wrong"),
    [
        (deployment(rotues={}), ["routes"]),
        (deployment(routes={}, storeAndForwardConfiguration={"ttl": 1}), [TTL]),
        (deployment(routes={"r": {"rout": ""}}), ["routes.r.rout", "routes.r.route"]),
        ({"$edgeHub": {"properties": {}}}, ["routes"]),
        ({"routes": {}, "$edgeHub": {}}, ["$edgeHub"]),
        ({"routes": {}, "mqttBroker": {}}, ["mqttBroker"]),
        ({"route": {}, "routes": []}, ["route", "routes"]),
        ({"routes": {"a b": "FROM / INTO $upstream"}}, ["routes.a b"]),
        ({"routes": {"": "FROM / INTO $upstream"}}, ["routes."]),
        ({"routes": {"r": 3}}, ["routes.r"]),
        ({"routes": {"r": {}}}, ["routes.r.route"]),
        ({"storeAndForwardConfiguration": {"timeToLiveSecs": "1"}}, [TTL]),
        ({"storeAndForwardConfiguration": 1}, ["storeAndForwardConfiguration"]),
        ('{"routes": {"r": "FROM / INTO $upstream", "r": "FROM / INTO $upstream"}}', ["routes.r"]),
        ('{"routes": {}, "routes": {}}', ["routes"]),
        ('{"routes": {', ["line 1, column 13"]),
    ],
)
def test_every_error_of_the_document_has_its_place(document, wrong):
    assert places(document if isinstance(document, str) else json.dumps(document)) == wrong


@pytest.mark.parametrize(
    "text",
    ["[]", "routes: [", "[" * 100_000, '{"routes": {"a": {"route": "FROM / INTO $upstream", "priority": ' + "9" * 5000],
    ids=["list", "YAML", "deep", "digits"],
)
def test_text_that_is_no_manifest_is_one_error(text):
    assert len(places(text)) == 1


@pytest.mark.parametrize("order", [("text", "object"), ("object", "text")])
def test_name_in_both_forms_keeps_the_object_with_a_warning(order):
    forms = {
        "text": '"r": "FROM /a INTO $upstream"',
        "object": '"r": {"route": "FROM /b INTO $upstream", "priority": 3}',
    }
    manifest = load_manifest(f'{{"routes": {{{", ".join(forms[form] for form in order)}}}}}')
    assert [(route.statement.source, route.priority) for route in manifest.routes] == [(("b",), 3)]
    assert [warning.path for warning in manifest.warnings] == ["routes.r"]


# --- statements


def test_statement_has_the_form_of_a_query_in_any_case():
    statement = one("  select * from /Messages/Modules/ASA/   into   $UPSTREAM  ").statement
    assert (statement.source, statement.endpoint) == (("messages", "modules", "asa"), UPSTREAM)
    endpoints = {
        "'$upstream'": UPSTREAM,
        "'/modules/plant=4/inputs/sql'": Endpoint(Key("plant=4"), "/sql"),
        '"modules/a%2Fb%20%C3%A9/inputs/x%2Fy"': Endpoint(Key("a/b é"), "/x/y"),
    }
    for argument, endpoint in endpoints.items():
        assert one(f"FROM /* INTO brokeredendpoint( {argument} )").statement.endpoint == endpoint
    condition = one("FROM /* WHERE a = ' INTO b' /* INTO c */ AND into.b = 'x' INTO $upstream").statement.condition
    assert condition is not None
    assert condition.text == "a = ' INTO b' /* INTO c */ AND into.b = 'x'", "a keyword inside a condition is none"


def test_every_error_of_a_statement_has_its_column():
    columns = {
        "  INTO $upstream": 3,
        "FROM": 5,
        "FROM messages INTO $upstream": 6,
        "FROM /a WHEN x": 9,
        "FROM /a WHERE true": 19,
        "FROM /a INTO up": 14,
        "FROM /a INTO BrokeredEndpoint('/modules/a')": 14,
        "FROM /a INTO BrokeredEndpoint('/modules/a/b/c/d')": 14,
        "FROM /a INTO BrokeredEndpoint('/modules/%ff/inputs/a')": 14,
    }
    assert {text: places_in(text) for text in columns} == {text: [f"route, column {columns[text]}"] for text in columns}
    assert places_in("FROM /a WHERE a == 'x' INTO $upstream") == ["condition, column 3"]
    both = [("route", 6), ("condition", 3), ("condition", 17), ("route", 42)]
    found = places_in("FROM a WHERE 1 + 'b' = 2 AND nope() INTO up")
    assert found == [f"{part}, column {column}" for part, column in both]


# --- the document


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"priority": -1}, ["priority"]),
        ({"priority": 10, "timeToLiveSecs": -1, "x": 1}, ["x", "priority", "timeToLiveSecs"]),
        ({"priority": True}, ["priority"]),
        ({"priority": "1"}, ["priority"]),
        *(({"coalesce": value}, ["coalesce"]) for value in (1, 0, "yes", None, [])),
    ],
    ids=str,
)
def test_every_wrong_member_of_a_route_is_refused(members, expected):
    assert places_in({"route": "FROM / INTO $upstream", **members}) == expected


@pytest.mark.parametrize(
    "text",
    [
        r'{"routes": {"a\ud800": "FROM /messages/* INTO $upstream"}}',
        r"""{"routes": {"a": "FROM /messages/* WHERE word = '\ud800' INTO $upstream"}}""",
        'routes:\n  "a\\ud800": "FROM /messages/* INTO $upstream"',
    ],
)
def test_half_of_a_surrogate_pair_is_an_error_with_its_place(text):
    assert places(text)[0].encode().startswith(b"routes.a")


def test_negative_ttl_of_the_manifest_is_not_a_limit():
    for seconds, ttl in ((0, 0), (60, 60), (-1, -1), (-99, -1)):
        assert load_manifest(json.dumps({"storeAndForwardConfiguration": {"timeToLiveSecs": seconds}})).ttl == ttl


def test_routes_that_take_no_request_are_warned_about():
    for routes in ({"r": "FROM /a/*/b INTO $upstream"}, {"r": "FROM /a WHERE INTO $upstream"}, {}):
        [warning] = load_manifest(json.dumps({"routes": routes})).warnings
        assert warning.path == ("routes.r.route" if routes else "routes")


def test_route_that_coalesces_is_kept_as_it_was_written():
    route = {"route": "FROM /a INTO $upstream", "coalesce": True}
    manifest = load_manifest(json.dumps({"routes": {"r": route, "other": {**route, "coalesce": False}}}))
    assert [one.coalesce for one in manifest.routes] == [True, False]
    assert manifest.document()["routes"] == {"r": route, "other": "FROM /a INTO $upstream"}
    assert load_manifest(json.dumps(manifest.document())).routes == manifest.routes


@given(st.text(max_size=60))
def test_any_text_is_a_manifest_or_a_list_of_errors(text):
    try:
        assert isinstance(load_manifest(text), Manifest)
    except InvalidDocumentError as error:
        assert error.problems


@given(st.text(max_size=60))
def test_any_text_is_a_route_or_a_list_of_errors(text):
    try:
        assert isinstance(one(f"FROM {text}"), Route)
    except InvalidDocumentError as error:
        assert all((problem.column or 0) <= len(text) + 6 for problem in error.problems)
