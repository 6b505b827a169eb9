"""Messages in the usual forms of devices become events; each becomes one row, or one invalid row with the reason."""

import json
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osrdyne.amqp.stream_frames import StreamMessage
from osrdyne.config.models import LastValueSettings
from osrdyne.protocol.event_mapping import EVENTS as EVENTS_AS_THEY_ARE
from osrdyne.protocol.event_mapping import PRESETS, EventMapping, mapping_from_settings
from osrdyne.protocol.events import WHOLE_MESSAGE, ParsedMessage, parse_message
from osrdyne.telemetry.last_values.values import fold
from osrdyne_sources.rabbit_stream.rows import to_batch
from osrdyne_worker.pipelines.ingest import TableConfig
from osrdyne_worker.pipelines.telemetry.events import EVENTS, INVALID, KEPT_BYTES, Parsed, count_old, parse

ENQUEUED = 1_795_341_600_123
SENT = 1_711_846_800_000
FIELDS = ["n", "v", "t", "bn", "bt", "bv", "bu", "ts", "values", "metrics", "name", "timestamp"]
HEADERS = {"x-osrdyne-key": "site/ü", "x-osrdyne-enqueued": ENQUEUED}


def message(body: object, *, offset: int = 7, headers: Any = HEADERS, **properties: Any) -> StreamMessage:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return StreamMessage(offset, "", "P-log-2", text, headers, message_id="m", **properties)


def parsed(*messages: StreamMessage, mapping: EventMapping = EVENTS_AS_THEY_ARE) -> Parsed:
    return parse(to_batch("P-log-2", messages), partition=2, mapping=mapping)


def test_event_with_all_fields_is_a_row_and_old_ones_are_counted():
    attributes = {"unit": "°C", "limits": [1, 2], "none": None}
    event = {"series": "temperature", "ts": "2026-11-22T11:00:00.25+01:00", "kind": "alarm", "value": 21.5}
    (row,) = parsed(message({**event, "quality": 192, "attributes": attributes, "line": 4})).events.to_pylist()
    assert row["ts"].isoformat() == "2026-11-22T10:00:00.250000+00:00"
    assert round(row["enqueued"].timestamp() * 1000) == ENQUEUED
    assert (row["key"], row["series"], row["kind"], row["quality"]) == ("site/ü", "temperature", "alarm", "192")
    assert (row["value"], row["value_text"], row["message_id"]) == (21.5, None, "m")
    assert (row["partition"], row["offset"], row["index"]) == (2, 7, 0)
    assert dict(row["attributes"]) == {"line": "4", "unit": "°C", "limits": "[1,2]", "none": None}
    sent = [{"series": "a", "ts": ts} for ts in ("1970-01-01", "2026-11-20", "2024-01-01")]
    assert count_old(parsed(message(sent)).events) == 2


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"value": 3}, {"value": 3.0, "value_text": None}),
        ({"value": True}, {"value": 1.0, "value_text": None}),
        ({"value": "on"}, {"value": None, "value_text": "on"}),
        ({"ts": 1_500}, {"ts": datetime.fromtimestamp(1.5, UTC)}),
        ({"ts": "1970-01-01T00:00:01.5"}, {"ts": datetime.fromtimestamp(1.5, UTC)}),
        ({"ts": "2024-03-31t02:30:00z"}, {"ts": datetime(2024, 3, 31, 2, 30, tzinfo=UTC)}),
        ({"ts": "2016-12-31T23:59:60.25+00:00"}, {"ts": datetime(2017, 1, 1, tzinfo=UTC)}),
        ({"ts": "2024-02-28T24:00"}, {"ts": datetime(2024, 2, 29, tzinfo=UTC)}),
        ({"quality": 192.0}, {"quality": "192"}),
        ({}, {"ts": datetime.fromtimestamp(ENQUEUED / 1000, UTC)}),
        ({"series": "\ud800", "\udfff": "\ud800"}, {"series": "?", "attributes": [("?", "?")]}),
    ],
    ids=str,
)
def test_field_of_an_event_is_read(given, read):
    (row,) = parsed(message({"series": "a", **given})).events.to_pylist()
    assert {name: row[name] for name in read} == read
    for body in ([{"series": "a", **given}], {"events": [{"series": "a", **given}]}):
        assert parsed(message(body)).events.to_pylist() == [row]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "JSON"),
        (b"\xff", "UTF-8"),
        (b"[" * 100_000, "nested"),
        (b"1" * 5_000, "JSON"),
        ([3], "JSON object"),
        ({"value": 1}, "series"),
        ({"series": "a", "kind": "log"}, "kind"),
        ({"series": "a", "ts": "yesterday"}, "ts"),
        ({"series": "a", "ts": -1}, "1970"),
        ({"series": "a", "value": {"x": 1}}, "value"),
        ({"series": "a", "value": 10**400}, "too large"),
        ({"series": "a", "quality": 1.5}, "quality"),
        ({"series": "a", "attributes": "x"}, "attributes"),
        ({"series": "a", "note": "x" * 33_000}, "32768"),
        (message({"series": "a"}, content_encoding="gzip"), "gzip"),
        (message({"series": "a"}, headers={"x-osrdyne-key": "site/ü"}), "time"),
    ],
)
@pytest.mark.proves("telemetry-tables/message-holds-json-event")
def test_invalid_event_is_kept_with_its_reason(body, named):
    good = message({"series": "a"}, offset=8)
    found = parsed(body if isinstance(body, StreamMessage) else message(body), good)
    (row,) = found.invalid.to_pylist()
    assert named in row["reason"]
    assert (row["key"], row["partition"], row["offset"], row["message_id"]) == ("site/ü", 2, 7, "m")
    assert row["size_bytes"] >= len(row["body"])
    assert found.events.column("offset").to_pylist() == [8]


@pytest.mark.proves("telemetry-tables/message-holds-json-event")
def test_one_invalid_event_leaves_the_others_of_its_message():
    events: list[dict[str, object]] = [{"series": f"s{number}", "value": number} for number in range(10_000)]
    events[4_321]["note"] = "x" * 100_000
    found = parsed(message(events))
    assert found.events.column("index").to_pylist() == [*range(4_321), *range(4_322, 10_000)]
    (row,) = found.invalid.to_pylist()
    assert (row["index"], len(row["body"])) == (4_321, KEPT_BYTES), "the beginning of a large event is kept"
    assert row["size_bytes"] == len(json.dumps(events[4_321], separators=(",", ":")))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["series", "ts", "kind", "value", "quality", "attributes", "events"]) | st.text(max_size=3)
DOCUMENTS = st.dictionaries(NAMES, VALUES | st.sampled_from(["alarm", "2026-11-22T10:00:00Z"]), max_size=6)
BODIES = st.lists(
    st.binary(max_size=20)
    | (VALUES | DOCUMENTS | st.lists(DOCUMENTS, max_size=4)).map(lambda one: json.dumps(one).encode()),
    max_size=6,
)


def test_table_and_last_values_read_the_same_events():
    sent, mapping = message({"t": 21.5}), mapping_from_settings({"preset": "flat"})
    assert parsed(sent, mapping=mapping).events.column("series").to_pylist() == ["t"]
    (value,) = fold([sent], partition=2, next_offset=8, max_future=1, mapping=mapping).values
    assert (value.series, value.value) == ("t", 21.5)


@pytest.mark.parametrize("bad", [b"NaN", b"-Infinity", b"9" * 5_000, b'0, "note": NaN', b'0, "note": [1e999]'])
def test_number_that_is_not_json_makes_only_its_event_invalid(bad):
    body = b'\xef\xbb\xbf[{"series": "a", "value": 1}, {"series": "b", "value": ' + bad + b"}]"
    found = parsed(message(body))
    assert [found.events.column("index").to_pylist(), found.invalid.column("index").to_pylist()] == [[0], [1]]


def expected_indexes(body: bytes) -> list[int]:
    """The index of each event of a message; -1 if the message has none because it is invalid."""
    try:
        document = json.loads(body.decode("utf-8-sig"))
    except ValueError:
        return [-1]
    if isinstance(document, dict):
        document = document["events"] if isinstance(document.get("events"), list) else [document]
    return list(range(len(document))) if isinstance(document, list) else [-1]


@settings(deadline=None)
@given(BODIES, st.integers(0, 6))
def test_every_event_is_in_one_row_however_messages_are_divided(bodies, cut):
    messages = [message(body, offset=offset) for offset, body in enumerate(bodies)]
    whole = parsed(*messages)
    rows = [
        (one["offset"], one["index"])
        for batch in (whole.events, whole.invalid)
        for one in batch.select(["offset", "index"]).to_pylist()
    ]
    expected = [(offset, index) for offset, body in enumerate(bodies) for index in expected_indexes(body)]
    assert sorted(rows) == sorted(expected)
    parts = [parsed(*messages[:cut]), parsed(*messages[cut:])]
    for schema, name in ((EVENTS, "events"), (INVALID, "invalid")):
        together = pa.Table.from_batches([getattr(one, name) for one in parts], schema)
        assert together.equals(pa.Table.from_batches([getattr(whole, name)], schema))


def read(body: object, **mapping: str) -> ParsedMessage:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_message(text, encoding=None, enqueued=ENQUEUED * 1000, mapping=mapping_from_settings(mapping))


@pytest.mark.parametrize(
    ("mapping", "body", "expected"),
    [
        ({"preset": "flat"}, {"t": 21.5, "h": 60}, [(0, "t", ENQUEUED, 21.5), (1, "h", ENQUEUED, 60)]),
        ({"preset": "flat"}, [{"ts": SENT, "t": 1}, {"t": 2}], [(0, "t", SENT, 1), (1, "t", ENQUEUED, 2)]),
        ({"preset": "flat", "ts": "at", "events": "d"}, {"d": [{"at": SENT, "ts": 1}]}, [(0, "ts", SENT, 1)]),
        ({"preset": "thingsboard"}, {"ts": SENT, "values": {"a": 1, "ts": 2}}, [(0, "a", SENT, 1), (1, "ts", SENT, 2)]),
        ({"preset": "pascal-case"}, {"Series": "p", "Ts": SENT, "Value": 1}, [(0, "p", SENT, 1)]),
        (
            {"preset": "sparkplug"},
            {"timestamp": SENT, "metrics": [{"name": "t", "value": 1.5}, {"name": "u", "timestamp": SENT + 5}]},
            [(0, "t", SENT, 1.5), (1, "u", SENT + 5, None)],
        ),
        (
            {"preset": "senml"},
            [{"bn": "d:", "bt": SENT / 1000, "bv": 20, "n": "t", "v": 1.5}, {"n": "h", "t": -5, "vs": "x"}],
            [(0, "d:t", SENT, 21.5), (1, "d:h", SENT - 5_000, "x")],
        ),
        (
            {"preset": "senml"},
            [{"bn": "d"}, {"t": -2, "v": 1}, {"vb": True}],
            [(0, "d", ENQUEUED - 2_000, 1), (1, "d", ENQUEUED, 1)],
        ),
        ({"series": "name", "events": "list"}, {"list": [{"name": "a", "value": 3}]}, [(0, "a", ENQUEUED, 3)]),
        ({"ts_unit": "s"}, {"series": "a", "ts": 1_500}, [(0, "a", 1_500_000, None)]),
        *(
            ({"ts_unit": "auto"}, {"series": "a", "ts": ts}, [(0, "a", SENT, None)])
            for ts in (SENT // 1000, SENT, SENT * 1000, SENT * 10**6)
        ),
    ],
)
def test_message_is_read_in_the_form_of_its_mapping(mapping, body, expected):
    """`expected`: number, series, milliseconds and value of each event."""
    found = read(body, **mapping)
    events = [(one.number, one.series, one.ts // 1000, one.value_text or one.value) for one in found.events]
    assert (events, found.invalid) == (expected, [])


@pytest.mark.parametrize(
    ("preset", "body", "attributes"),
    [
        ("pascal-case", {"Series": "a", "Line": 4, "Attributes": {"Unit": "C"}}, {"Line": "4", "Unit": "C"}),
        ("sparkplug", {"metrics": [{"name": "a", "dataType": "Int8", "ts": "x"}]}, {"dataType": "Int8", "ts": "x"}),
        ("senml", [{"bu": "Cel", "n": "a", "v": 1}], {"u": "Cel"}),
    ],
)
def test_other_fields_are_attributes(preset, body, attributes):
    (event,) = read(body, preset=preset).events
    assert dict(event.attributes) == attributes


@pytest.mark.parametrize(
    ("mapping", "body", "numbers"),
    [
        ({"preset": "flat"}, b'{"a": 1, "b": NaN, "c": {"x": 1}, "d": 2}', [1, 2]),
        ({"preset": "flat"}, [3, {"a": 1}], [0]),
        ({"preset": "senml"}, [{"n": "a", "v": 1, "t": "now"}, {"n": "a", "v": 2}], [0]),
        ({"preset": "senml"}, b'[{"n": "a", "bt": 1e400, "v": 1}]', [0]),
        ({"preset": "senml"}, [{"bn": "x" * 600}], [WHOLE_MESSAGE]),
        ({"preset": "sparkplug"}, {"timestamp": ["x" * 20_000], "metrics": [{"name": "a"}] * 2}, [0, 1]),
        *(({}, {"series": "a", "ts": ts}, [0]) for ts in (SENT // 1000, SENT * 1000, SENT * 10**6)),
        ({"ts_unit": "ms"}, {"series": "a", "ts": SENT * 1000}, [0]),
    ],
)
@pytest.mark.proves("telemetry-tables/event-has-time-in-another-unit")
def test_what_does_not_fit_is_invalid_alone_and_small(mapping, body, numbers):
    found = read(body, **mapping)
    assert [one.number for one in found.invalid] == numbers
    assert all(len(one.body) < 10_000 for one in found.invalid)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"preset": "flatt"}, "flatt"),
        ({"preset": "flat", "series": "n"}, "series"),
        ({"preset": "senml", "ts": "t"}, "ts"),
        ({"ts_unit": "m"}, "ts_unit"),
        ({"serie": "n"}, "serie"),
    ],
)
@pytest.mark.parametrize("model", [TableConfig, LastValueSettings])
def test_wrong_mapping_is_refused_by_table_and_last_values(model, settings, named):
    required = {"directory": "/data"} if model is TableConfig else {}
    with pytest.raises(ValueError, match=named):
        model(**required, mapping=settings)


@given(
    st.sampled_from(sorted(PRESETS)),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner),
    ),
)
def test_every_mapping_takes_any_message(preset, document):
    read(document, preset=preset)
