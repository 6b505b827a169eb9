"""The source `rabbitmq-stream`: its options, the offsets of each batch, and the rows of messages."""

import re
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from osrdyne.amqp.stream_frames import StreamMessage
from osrdyne.amqp.streams import StreamRange
from osrdyne.errors import ConfigurationError, StreamDataLostError
from osrdyne_sources.rabbit_stream.broker import read_uri
from osrdyne_sources.rabbit_stream.offsets import ends, next_end, resolve, split
from osrdyne_sources.rabbit_stream.options import NAMES, Position, parse_options
from osrdyne_sources.rabbit_stream.rows import ARROW_SCHEMA, SCHEMA, to_batch

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "rabbitmq-stream-source.md"
GIVEN = {"uriFile": "/run/secrets/uri", "stream": "log"}


def test_options_have_defaults_and_any_case_and_names_are_data():
    options = parse_options({"URIFILE": "/run/secrets/uri", "Stream": "log"})
    assert (options.uri_file, options.streams) == ("/run/secrets/uri", ("log",))
    assert (options.starting_offsets, options.ending_offsets) == (Position("earliest"), Position("latest"))
    assert options.fail_on_data_loss is True
    assert parse_options({**GIVEN, "stream": '["a", b*'}).streams == ('["a", b*',)
    options = parse_options({"uriFile": "u", "streams": '["a", "b"]', "endingOffsets": '{"b": 7}'})
    assert options.ending_offsets == Position("latest", {"b": 7})
    assert parse_options({**GIVEN, "startingOffsets": "7"}).starting_offsets == Position("earliest", {"log": 7})
    text = REFERENCE.read_text(encoding="utf-8").partition("## Columns")[0]
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == list(NAMES)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"uriFile": ""}, "uriFile"),
        ({"uriFile": "amqp://u:secret@host"}, "uriFile"),
        ({"uri": "amqp://u:secret@host"}, "option uri .*uriFile"),
        ({"password": "secret"}, "option password .*uriFile"),
        ({"streams": '["a"]'}, "stream .* and streams"),
        ({"stream": ""}, "255"),
        ({"stream": None, "streams": "[]"}, "1000"),
        ({"stream": None, "streams": '["a", "a"]'}, "twice"),
        ({"stream": None, "streams": "[" * 100_000}, "streams .*JSON"),
        ({"startingOffsets": '"earliest"'}, "startingOffsets .*earliest"),
        ({"startingOffsets": '{"lag": 1}'}, "startingOffsets .*'lag'"),
        ({"endingOffsets": "-1"}, "endingOffsets.*'log'"),
        ({"endingOffsets": "9223372036854775808"}, "endingOffsets.*'log'"),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger .*1"),
        ({"prefetch": "65536"}, "prefetch .*65535"),
        ({"failOnDataLoss": "no"}, "failOnDataLoss .*true or false"),
        ({"failOnDataloose": "no"}, "failondataloose.*failOnDataLoss"),
    ],
    ids=str,
)
def test_an_invalid_option_is_named(options, named):
    given = {name: value for name, value in {**GIVEN, **options}.items() if value is not None}
    with pytest.raises(ConfigurationError, match=named) as refused:
        parse_options(given)
    assert "secret@" not in str(refused.value)


def test_a_file_without_a_uri_is_refused_without_its_content(tmp_path):
    file = tmp_path / "uri"
    for content in (b"", b"a b", b"amqp://u:secret@h\namqp://u:secret@h", b"\xff"):
        file.write_bytes(content)
        with pytest.raises(ConfigurationError, match="uriFile") as refused:
            read_uri(str(file))
        assert "secret" not in str(refused.value)
    with pytest.raises(ConfigurationError, match="missing"):
        read_uri(str(tmp_path / "missing"))


OFFSETS = st.integers(0, 2**40)
STREAMS = st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.tuples(OFFSETS, OFFSETS), min_size=1)


@given(streams=STREAMS, most=st.integers(1, 2**41) | st.none())
def test_batches_move_every_reader_to_the_end(streams, most):
    start = {name: min(pair) for name, pair in streams.items()}
    available = {name: max(pair) for name, pair in streams.items()}
    total = sum(available.values()) - sum(start.values())
    stop = next_end(start, available, most, fail_on_data_loss=True)
    assert all(start[name] <= stop[name] <= available[name] for name in streams)
    assert sum(stop.values()) - sum(start.values()) == (total if most is None else min(total, most))
    assert list(stop) == sorted(stop)


def test_a_new_or_small_stream_is_read_beside_a_large_backlog_and_a_missing_one_is_refused():
    start, available = {"large": 0, "small": 0}, {"large": 1_000_000, "small": 1}
    assert next_end(start, available, 1000, fail_on_data_loss=True) == {"large": 999, "small": 1}
    assert next_end({"a": 1}, {"a": 2, "new": 4}, None, fail_on_data_loss=True) == {"a": 2, "new": 4}
    with pytest.raises(ConfigurationError, match="'old'"):
        next_end({"a": 1, "old": 4}, {"a": 2}, None, fail_on_data_loss=False)


@given(streams=STREAMS, parts=st.integers(1, 20))
def test_splits_cover_a_batch_once(streams, parts):
    start = {name: min(pair) for name, pair in streams.items()}
    stop = {name: max(pair) for name, pair in streams.items()}
    most = max(1, *(stop[name] - start[name] for name in streams)) // parts + 1
    splits = split(start, stop, most)
    assert all(0 < one.wanted.stop - one.wanted.start <= most for one in splits)
    for name in streams:
        position = start[name]
        for one in (one for one in splits if one.stream == name):
            assert one.wanted.start == position
            position = one.wanted.stop
        assert position == stop[name]


def test_edges_are_those_of_the_stream():
    bounds = {"b": StreamRange(5, 9), "a": None}
    assert resolve(Position("earliest"), bounds) == {"a": 0, "b": 5}
    assert resolve(Position("latest"), bounds) == {"a": 0, "b": 9}
    assert ends(bounds, {"a": 7, "b": 1}) == {"a": 7, "b": 9}
    assert resolve(Position("latest", {"b": 7}), bounds) == {"a": 0, "b": 7}


def test_a_stream_that_was_declared_again_fails_or_is_read_from_its_first_message():
    with pytest.raises(StreamDataLostError, match=r"log .*3.*10"):
        next_end({"log": 10}, {"log": 3}, None, fail_on_data_loss=True)
    stop = next_end({"log": 10}, {"log": 3}, 2, fail_on_data_loss=False)
    assert stop == {"log": 2}
    assert [one.wanted for one in split({"log": 10}, stop, 100)] == [StreamRange(0, 2)]


def test_a_row_has_every_property_and_headers_as_text_in_the_schema_that_spark_expects():
    when = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    nested = {"b": [True, b"x"], "a": Decimal("1.5")}
    headers = {"text": "ü", "number": 7, "bytes": b"\xff1", "null": None, "nested": nested, "when": when}
    full = StreamMessage(3, "x", "k\udcff", b"\x00", headers, "text/plain", "gzip", "c", "m", when, 4)
    first, second = to_batch("log", [full, StreamMessage(4, "", "", b"")]).to_pylist()
    assert first.pop("timestamp").timestamp() == when.timestamp()
    assert dict(first.pop("headers")) == {
        "text": "ü",
        "number": "7",
        "bytes": "\ufffd1",
        "null": None,
        "nested": '{"a": "1.5", "b": [true, "x"]}',
        "when": '"2026-01-02T03:04:05+00:00"',
    }
    assert first.items() >= {
        "stream": "log", "offset": 3, "exchange": "x", "routing_key": "k\ufffd", "message_id": "m",
        "correlation_id": "c", "content_type": "text/plain", "content_encoding": "gzip", "body": b"\x00",
    }.items()  # fmt: skip
    assert (second["message_id"], second["timestamp"], second["headers"], second["body"]) == (None, None, [], b"")
    assert to_arrow_schema(SCHEMA, timezone="UTC").equals(ARROW_SCHEMA)
