"""The least size of an answer: never larger than the real one."""

from __future__ import annotations

from datetime import UTC

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from osrdyne_worker.app.tables import Rows
from osrdyne_worker.spark.answers.least_size import least_row_bytes

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
def test_no_answer_is_smaller(data: st.DataObject, types: list[str], count: int) -> None:
    arrays = [
        pa.array(data.draw(st.lists(st.none() | COLUMNS[kind][1], min_size=count, max_size=count)), COLUMNS[kind][0])
        for kind in types
    ]
    names = [f"c{place}" for place in range(len(types))]
    rows = Rows(pa.table(arrays, names), tuple(zip(names, types, strict=True)), truncated=False)
    assert len(rows.to_json()) >= count * least_row_bytes(types, arrow=False)
    assert len(rows.to_arrow()) >= count * least_row_bytes(types, arrow=True)
