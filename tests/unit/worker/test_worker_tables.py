"""Tables as answers of handlers, without Spark: pyarrow, pandas and record batches; whole, or in parts."""

import datetime as dt
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC
from decimal import Decimal
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from osrdyne.client.streams import BatchDecoder
from osrdyne.errors import ConfigurationError
from osrdyne.protocol.messages import ARROW_TYPE, JSON_TYPE, Request
from osrdyne.protocol.names import Key
from osrdyne.protocol.streams import ROWS_HEADER
from osrdyne_worker import Answer, App, Call, Context, RequestError
from osrdyne_worker.app.streams import ArrowStream, open_stream
from osrdyne_worker.app.tables import Rows, rows_of
from osrdyne_worker.requests.dispatch import Dispatcher
from osrdyne_worker.spark.answers.least_size import least_row_bytes

Ask = Callable[..., Any]


@pytest.fixture
def ask():
    """Runs a handler that returns the given value, or what the given function returns."""
    with ThreadPoolExecutor(2) as threads:

        async def run(value, *, accept=None, row_limit=10, is_async=False):
            def plain(call: Call) -> Any:
                return value() if callable(value) else value

            async def coroutine(call: Call) -> Any:
                return plain(call)

            app = App()
            app.handler("/p", row_limit=row_limit)(coroutine if is_async else plain)
            headers = {} if accept is None else {"accept": accept}
            call = Call(Context(Key("k")), Request("k", b"", path="/p", headers=headers))
            return await Dispatcher(app, threads=threads, side_threads=threads).run(call, group_id="g")

        yield run


def numbers(count: int, *, size: int = 2) -> Iterator[pa.RecordBatch]:
    for start in range(0, count, size):
        yield pa.record_batch({"n": list(range(start, min(start + size, count)))})


TABLE = pa.table({"n": [1, 2], "name": ["a", None]})
FORMS = {
    "pyarrow table": TABLE,
    "record batch": TABLE.to_batches()[0],
    "iterator of record batches": lambda: (batch for batch in TABLE.to_batches(max_chunksize=1)),
    "pandas frame": pd.DataFrame({"n": [1, 2], "name": ["a", None]}, index=[7, 8]),
}


@pytest.mark.parametrize("is_async", [False, True], ids=["function", "coroutine"])
@pytest.mark.parametrize("form", FORMS)
async def test_every_form_of_a_table_is_answered_alike(ask, form, is_async):
    response = await ask(FORMS[form], is_async=is_async)
    assert (response.status, response.content_type, response.headers) == ("ok", JSON_TYPE, {"x-truncated": "false"})
    assert json.loads(response.body) == {
        "columns": [{"name": "n", "type": "bigint"}, {"name": "name", "type": "string"}],
        "rows": [[1, "a"], [2, None]],
        "row_count": 2,
        "truncated": False,
    }
    response = await ask(FORMS[form], is_async=is_async, accept=f"{JSON_TYPE};q=0.5, {ARROW_TYPE}")
    assert response.content_type == ARROW_TYPE
    table = pa.ipc.open_stream(response.body).read_all()
    assert table.to_pydict() == {"n": [1, 2], "name": ["a", None]}
    assert table.schema.metadata == {b"truncated": b"false", b"row_count": b"2"}


async def test_code_headers_and_type_of_an_answer_hold_for_its_rows(ask):
    response = await ask(Answer(TABLE, content_type=ARROW_TYPE, code=203, headers={"x-model": "3"}), accept=JSON_TYPE)
    assert (response.content_type, response.code) == (ARROW_TYPE, 203)
    assert response.headers == {"x-truncated": "false", "x-model": "3"}
    with pytest.raises(ConfigurationError, match=r"row_limit.*'/p'"):
        App().handler("/p", row_limit=-1)


@given(count=st.integers(0, 12), size=st.integers(1, 5), limit=st.integers(0, 13))
def test_limit_cuts_batches_of_any_size_as_it_cuts_a_table(count, size, limit):
    table = pa.table({"n": pa.array(range(count), pa.int64())})
    whole = rows_of(table, limit=limit)
    assert isinstance(whole, Rows)
    assert (whole.table.num_rows, whole.truncated) == (min(count, limit), count > limit)
    without_columns = json.loads(rows_of(table.select([]), limit=20).to_json())
    assert (without_columns["rows"], without_columns["truncated"]) == ([[]] * count, False)
    if count:
        cut = rows_of(numbers(count, size=size), limit=limit)
        assert isinstance(cut, Rows)
        assert (cut.to_json(), cut.truncated) == (whole.to_json(), whole.truncated)


async def test_iterator_is_read_to_the_limit_and_closed(ask):
    read, closed = list[int](), list[bool]()

    def endless():
        try:
            for number in range(1_000_000):
                read.append(number)
                yield pa.record_batch({"n": [number]})
        finally:
            closed.append(True)

    response = await ask(endless, row_limit=3)
    assert (json.loads(response.body)["row_count"], response.headers["x-truncated"]) == (3, "true")
    assert (read, closed) == ([0, 1, 2, 3], [True])
    for values in ([], [1, "two", {"three": 3}]):  # no tables
        assert json.loads((await ask(lambda values=values: iter(values))).body) == values


VALUES: list[tuple[pa.Array, str, list[Any]]] = [
    (pa.array([2**64 - 1], pa.uint64()), "uint64", [2**64 - 1]),
    (pa.array([1.5, float("nan"), None], pa.float32()), "float", [1.5, "NaN", None]),
    (pa.array([1.5], pa.float16()), "halffloat", [1.5]),
    (pa.array([0], pa.timestamp("ns")), "timestamp_ntz", ["1970-01-01T00:00:00"]),
    (pa.array([Decimal("1.50")], pa.decimal128(5, 2)), "decimal(5,2)", ["1.50"]),
    (pa.array([dt.date(2024, 2, 29)]), "date", ["2024-02-29"]),
    (pa.array([1], pa.timestamp("ns")), "timestamp_ntz", ["1970-01-01T00:00:00.000000001"]),
    (pa.array([1000], pa.timestamp("ns")), "timestamp_ntz", ["1970-01-01T00:00:00.000001"]),
    (pa.array([1500], pa.timestamp("ms", "+02:00")), "timestamp", ["1970-01-01T00:00:01.500000Z"]),
    (pa.array([-1_500_000_001], pa.duration("ns")), "interval day to second", ["-PT1.500000001S"]),
    (pa.array(["a", "b", "a"]).dictionary_encode(), "string", ["a", "b", "a"]),
    (pa.array([b"\x00\xff"], pa.binary(2)), "binary", ["AP8="]),
    (pa.array([[1, 2], None], pa.list_(pa.int8(), 2)), "array<tinyint>", [[1, 2], None]),
    (pa.array([[("k", 1)]], pa.map_(pa.large_string(), pa.int64())), "map<string,bigint>", [{"k": 1}]),
    (pa.array([{"a": 1, "b": [True]}]), "struct<a:bigint,b:array<boolean>>", [{"a": 1, "b": [True]}]),
    (pa.nulls(1), "void", [None]),
]


@pytest.mark.parametrize(("column", "kind", "values"), VALUES, ids=[str(case[0].type) for case in VALUES])
def test_value_of_an_arrow_type_is_exact_in_json(column, kind, values):
    rows = rows_of(pa.table({"v": column}), limit=10)
    assert isinstance(rows, Rows)
    document = json.loads(rows.to_json())
    assert document["columns"] == [{"name": "v", "type": kind}]
    assert document["rows"] == [[value] for value in values]


@pytest.mark.parametrize(
    "value",
    [
        pd.DataFrame({"v": [1, "a"]}),
        pd.DataFrame([[1, 2]], columns=["v", "v"]),
        pa.table({"v": pa.array([(1, 2, 3)], pa.month_day_nano_interval())}),
        pa.array([1]),
        lambda: iter([pa.record_batch({"a": [1]}), pa.record_batch({"b": [1]})]),
        lambda: iter([pa.record_batch({"a": [1]}), 3]),
        Answer(TABLE, content_type="text/csv"),
    ],
    ids=["mixed column", "a name twice", "no JSON form", "no table", "two schemas", "then no batch", "another type"],
)
async def test_table_that_cannot_be_encoded_is_an_invalid_answer(ask, value):
    response = await ask(value)
    error = json.loads(response.body)["error"]
    assert (response.code, error["code"]) == (500, "invalid_answer")
    assert "\n" not in error["message"]


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


@example(sizes=[3, 3], part_bytes=600, at_once=False, limit=6)
@example(sizes=[3, 3], part_bytes=600, at_once=False, limit=4)
@example(sizes=[3, 3], part_bytes=600, at_once=False, limit=3)
@given(
    sizes=st.lists(st.integers(0, 300), max_size=8),
    part_bytes=st.integers(600, 20_000),
    at_once=st.booleans(),
    limit=st.none() | st.integers(0, 600),
)
def test_parts_are_one_stream_and_each_can_be_decoded_alone(sizes, part_bytes, at_once, limit):
    batches = [batch(sum(sizes[:place]), rows) for place, rows in enumerate(sizes)]
    stream = ArrowStream(SCHEMA, batches, limit=limit, at_once=at_once, part_bytes=part_bytes)
    parts = parts_of(stream)
    end = stream.end()
    whole = pa.ipc.open_stream(b"".join([*parts, end.body])).read_all()
    count = sum(sizes) if limit is None else min(limit, sum(sizes))
    assert whole.column("number").to_pylist() == list(range(count))
    assert (end.headers[ROWS_HEADER], stream.truncated) == (count, count < sum(sizes))
    schema_bytes = len(ArrowStream(SCHEMA, [], limit=None).end().body)
    assert all(len(part) <= part_bytes + schema_bytes for part in parts)

    decoder = BatchDecoder()
    decoded = [[one.num_rows for one in decoder.decode(part)] for part in parts]
    assert all(sum(rows) > 0 for rows in decoded), "no part is without rows"
    assert sum(map(sum, decoded)) == count
    last = list(decoder.decode(end.body))
    assert [one.num_rows for one in last] == ([] if count else [0])
    assert all(one.schema.names == SCHEMA.names for one in last)


def test_each_batch_of_a_generator_is_sent_at_once_and_batches_of_a_table_are_combined():
    batches = [batch(number, 1) for number in range(5)]
    assert len(parts_of(opened(iter(batches)))) == 5
    assert len(parts_of(opened(pa.Table.from_batches(batches)))) == 1
    columns = [pa.array(values).dictionary_encode() for values in (["a", "b", "a", None], ["z", "b"])]
    stream, decoder = opened(iter([pa.record_batch({"c": column}) for column in columns])), BatchDecoder()
    found = [value for part in parts_of(stream) for one in decoder.decode(part) for value in one["c"].to_pylist()]
    assert found == ["a", "b", "a", None, "z", "b"], "each batch has another dictionary"


def test_stream_closes_its_generator_and_refuses_what_does_not_fit():
    closed = []

    def batches():
        try:
            yield batch(0, 1)
            yield pa.record_batch({"other": [1]})
        finally:
            closed.append(True)

    for reads_on in (False, True):
        stream = opened(batches())
        assert stream.next_part() is not None
        assert not closed
        if reads_on:
            with pytest.raises(RequestError, match="schemas"):
                stream.next_part()
        for _ in range(2):
            stream.close()
        assert closed.pop()
    with pytest.raises(RequestError, match="4096") as caught:
        opened(pa.table({"text": ["x" * 5000]}), max_bytes=4096).next_part()
    assert caught.value.error_code == "answer_too_large"
    for value in ({"a": 1}, Answer("text"), Answer(pa.table({"a": [1]}), content_type="application/json")):
        assert open_stream(value, limit=None, max_bytes=1) == (None, value)
    no_stream, left = open_stream(iter([1, 2]), limit=None, max_bytes=1)
    assert (no_stream, list(left.body)) == (None, [1, 2])


COLUMNS = {
    "int": (pa.int32(), st.integers(-9, 9)),
    "bigint": (pa.int64(), st.integers(0, 9)),
    "double": (pa.float64(), st.floats(allow_nan=True)),
    "boolean": (pa.bool_(), st.booleans()),
    "string": (pa.string(), st.text(max_size=1)),
    "binary": (pa.binary(), st.binary(max_size=1)),
    "date": (pa.date32(), st.dates()),
    "timestamp": (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(UTC))),
    "timestamp_ntz": (pa.timestamp("us"), st.datetimes()),
    "decimal(5,2)": (pa.decimal128(5, 2), st.decimals(-9, 9, places=2)),
    "array<int>": (pa.list_(pa.int32()), st.lists(st.integers(0, 9), max_size=1)),
    "map<string,int>": (pa.map_(pa.string(), pa.int32()), st.just([])),
    "struct<a:int>": (pa.struct([("a", pa.int32())]), st.fixed_dictionaries({"a": st.integers(0, 9)})),
    "void": (pa.null(), st.none()),
}


@given(st.data(), st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=6), st.integers(0, 20))
def test_no_answer_is_smaller(data, types, count):
    arrays = [
        pa.array(data.draw(st.lists(st.none() | COLUMNS[kind][1], min_size=count, max_size=count)), COLUMNS[kind][0])
        for kind in types
    ]
    names = [f"c{place}" for place in range(len(types))]
    rows = Rows(pa.table(arrays, names), tuple(zip(names, types, strict=True)), truncated=False)
    assert len(rows.to_json()) >= count * least_row_bytes(types, arrow=False)
    assert len(rows.to_arrow()) >= count * least_row_bytes(types, arrow=True)
