"""Messages in the usual forms of devices and gateways become events by the mapping of a table."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.config.models import LastValueSettings
from osrdyne.protocol.event_mapping import PRESETS, mapping_from_settings
from osrdyne.protocol.events import WHOLE_MESSAGE, ParsedMessage, parse_message
from osrdyne_worker.pipelines.ingest import TableConfig

ENQUEUED = 1_795_341_600_123
SENT = 1_711_846_800_000
NAMES = ["n", "v", "t", "bn", "bt", "bv", "bu", "ts", "values", "metrics", "name", "timestamp"]


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
def test_message_is_read_in_the_form_of_its_mapping(
    mapping: dict[str, str], body: object, expected: list[tuple[int, str, int, object]]
) -> None:
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
def test_other_fields_are_attributes(preset: str, body: object, attributes: dict[str, str]) -> None:
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
def test_what_does_not_fit_is_invalid_alone_and_small(
    mapping: dict[str, str], body: object, numbers: list[int]
) -> None:
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
def test_wrong_mapping_is_refused_by_table_and_last_values(model: Any, settings: dict[str, str], named: str) -> None:
    required = {"directory": "/data"} if model is TableConfig else {}
    with pytest.raises(ValueError, match=named):
        model(**required, mapping=settings)


@given(
    st.sampled_from(sorted(PRESETS)),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner),
    ),
)
def test_every_mapping_takes_any_message(preset: str, document: object) -> None:
    read(document, preset=preset)


@pytest.mark.parametrize(
    ("ts", "expected"),
    [
        ("2024-03-31t02:30:00z", datetime(2024, 3, 31, 2, 30, tzinfo=UTC)),
        ("2016-12-31T23:59:60.25+00:00", datetime(2017, 1, 1, tzinfo=UTC)),
        ("2024-02-28T24:00", datetime(2024, 2, 29, tzinfo=UTC)),
    ],
)
def test_time_of_rfc_3339_is_read(ts: str, expected: datetime) -> None:
    (event,) = read({"series": "a", "ts": ts}).events
    assert datetime.fromtimestamp(event.ts / 1e6, UTC) == expected
