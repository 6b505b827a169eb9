"""Tables as the parts of a stream: every row once, in order, in parts of a limited size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.client.streams import BatchDecoder
from osrdyne.protocol.streams import ROWS_HEADER
from osrdyne_worker import Answer, RequestError
from osrdyne_worker.app.streams import ArrowStream, open_stream

SCHEMA = pa.schema([("number", pa.int64()), ("text", pa.string())])


def batch(start: int, rows: int, width: int = 10) -> pa.RecordBatch:
    numbers = list(range(start, start + rows))
    return pa.record_batch([numbers, [str(number).zfill(width) for number in numbers]], schema=SCHEMA)


def parts_of(stream: ArrowStream) -> list[bytes]:
    return list(iter(stream.next_part, None))


def opened(value: Any, **options: Any) -> ArrowStream:
    stream, _ = open_stream(value, **{"limit": None, "max_bytes": 2**24, **options})
    assert stream is not None
    return stream


@given(sizes=st.lists(st.integers(0, 300), max_size=8), part_bytes=st.integers(600, 20_000), at_once=st.booleans())
def test_parts_are_one_arrow_stream_and_each_can_be_decoded_alone(
    sizes: list[int], part_bytes: int, at_once: bool
) -> None:
    batches = [batch(sum(sizes[:place]), rows) for place, rows in enumerate(sizes)]
    stream = ArrowStream(SCHEMA, batches, limit=None, at_once=at_once, part_bytes=part_bytes)
    parts = parts_of(stream)
    end = stream.end()
    whole = pa.ipc.open_stream(b"".join([*parts, end.body])).read_all()
    assert whole.column("number").to_pylist() == list(range(sum(sizes)))
    assert end.headers[ROWS_HEADER] == sum(sizes)
    schema_bytes = len(ArrowStream(SCHEMA, [], limit=None).end().body)
    assert all(len(part) <= part_bytes + schema_bytes for part in parts)

    decoder = BatchDecoder()
    decoded = [[one.num_rows for one in decoder.decode(part)] for part in parts]
    assert all(sum(rows) > 0 for rows in decoded), "no part is without rows"
    assert sum(map(sum, decoded)) == sum(sizes)
    last = list(decoder.decode(end.body))
    assert [one.num_rows for one in last] == ([] if sum(sizes) else [0])
    assert all(one.schema.names == SCHEMA.names for one in last)


def test_each_batch_of_a_generator_is_sent_at_once_and_batches_of_a_table_are_combined() -> None:
    batches = [batch(number, 1) for number in range(5)]
    assert len(parts_of(opened(iter(batches)))) == 5
    assert len(parts_of(opened(pa.Table.from_batches(batches)))) == 1


def test_dictionaries_reach_the_client() -> None:
    column = pa.array(["a", "b", "a", None]).dictionary_encode()
    batches = [pa.record_batch({"c": column}), pa.record_batch({"c": pa.array(["z", "b"]).dictionary_encode()})]
    stream, decoder = opened(iter(batches)), BatchDecoder()
    found = [value for part in parts_of(stream) for one in decoder.decode(part) for value in one["c"].to_pylist()]
    assert found == ["a", "b", "a", None, "z", "b"]


@pytest.mark.parametrize(
    ("limit", "rows", "truncated"), [(4, 4, "true"), (6, 6, "false"), (7, 6, "false"), (0, 0, "true")]
)
def test_limit_of_rows_is_exact_and_said(limit: int, rows: int, truncated: str) -> None:
    stream = opened(pa.Table.from_batches([batch(0, 3), batch(3, 3)]), limit=limit)
    found = pa.ipc.open_stream(b"".join([*parts_of(stream), (end := stream.end()).body])).read_all()
    assert (found.num_rows, end.headers["x-truncated"], end.headers[ROWS_HEADER]) == (rows, truncated, rows)


def test_row_that_fits_into_no_message_is_an_error() -> None:
    stream = opened(pa.table({"text": ["x" * 5000]}), max_bytes=4096)
    with pytest.raises(RequestError, match="4096") as caught:
        stream.next_part()
    assert caught.value.error_code == "answer_too_large"


def test_generator_is_closed_when_the_stream_is() -> None:
    closed = []

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            yield batch(0, 1)
            yield batch(1, 1)
        finally:
            closed.append(True)

    stream = opened(batches())
    assert stream.next_part() is not None
    assert not closed
    stream.close()
    stream.close()
    assert closed == [True]


def test_other_answers_are_no_streams() -> None:
    for value in ({"a": 1}, Answer("text"), Answer(pa.table({"a": [1]}), content_type="application/json")):
        assert open_stream(value, limit=None, max_bytes=1) == (None, value)
    stream, left = open_stream(iter([1, 2]), limit=None, max_bytes=1)
    assert stream is None
    assert list(left.body) == [1, 2]


def test_batches_of_another_schema_are_a_defect_of_the_handler() -> None:
    stream = opened(iter([batch(0, 1), pa.record_batch({"other": [1]})]))
    assert stream.next_part() is not None
    with pytest.raises(RequestError, match="schemas"):
        stream.next_part()
