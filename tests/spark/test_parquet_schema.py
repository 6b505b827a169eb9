"""The schema from one footer equals the one that Spark infers with a job, or Spark is left to infer it."""

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from osrdyne_worker.spark.files.parquet_schema import parquet_schema

TABLE = pa.table(
    {
        "number": pa.array([1], pa.int64()),
        "small": pa.array([1], pa.int16()),
        "unsigned": pa.array([1], pa.uint32()),
        "price": pa.array([Decimal("1.50")], pa.decimal128(12, 2)),
        "day": pa.array([datetime.date(2024, 1, 1)]),
        "at": pa.array([datetime.datetime(2024, 1, 1)], pa.timestamp("us", tz="UTC")),
        "local": pa.array([datetime.datetime(2024, 1, 1)], pa.timestamp("us")),
        "text": pa.array(["é"]),
        "bytes": pa.array([b"x"]),
        "list": pa.array([[1.5]], pa.list_(pa.float64())),
        "struct": pa.array([{"a": 1, "b b": True}]),
        "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int32())),
        "with space and . dot": pa.array([None], pa.int32()),
    }
)


def one_file(session: Any, directory: Path) -> Path:
    file = directory / "a %20 é b.parquet"
    pq.write_table(TABLE, file)
    return file


def several_files(session: Any, directory: Path) -> Path:
    """The first one by name has the schema; those that Spark leaves out are no data."""
    table = directory / "table"
    table.mkdir()
    for name in ("part-1.parquet", "part-2.parquet", ".part-1.parquet.crc", "_SUCCESS"):
        pq.write_table(TABLE, table / name)
    pq.write_table(TABLE.select(["number"]), table / "part-0.parquet")
    return table


def written_by_spark(session: Any, directory: Path) -> Path:
    """The footer holds Spark's own schema, with types that Parquet does not have."""
    query = (
        "select id, cast('a' as char(3)) as c, interval '1' month as months, named_struct('x', 1) as s from range(9)"
    )
    session.sql(query).repartition(2).write.parquet(str(directory / "spark"))
    return directory / "spark"


@pytest.mark.parametrize("make", [one_file, several_files, written_by_spark])
@pytest.mark.parametrize("prefix", ["", "file://"])
def test_schema_is_that_which_spark_infers(spark, tmp_path, make, prefix):
    path = str(make(spark, tmp_path))
    found = parquet_schema(spark, f"{prefix}{path}")
    assert found is not None
    frame = spark.read.schema(found).format("parquet").load(path)
    assert frame.schema == spark.read.parquet(path).schema
    assert frame.count() == spark.read.parquet(path).count()


def partitioned(session: Any, directory: Path) -> Path:
    session.sql("select id, id % 2 as part from range(4)").write.partitionBy("part").parquet(str(directory / "p"))
    return directory / "p"


def damaged(session: Any, directory: Path) -> Path:
    (directory / "damaged.parquet").write_bytes(b"PAR1 no footer")
    return directory / "damaged.parquet"


def with_summary(session: Any, directory: Path) -> Path:
    pq.write_table(TABLE, directory / "data.parquet")
    pq.write_metadata(TABLE.schema, directory / "_metadata")
    return directory


def empty_directory(session: Any, directory: Path) -> Path:
    return directory


def missing(session: Any, directory: Path) -> Path:
    return directory / "missing"


@pytest.mark.parametrize("make", [partitioned, damaged, with_summary, empty_directory, missing])
def test_what_only_spark_can_tell_is_left_to_spark(spark, tmp_path, make):
    assert parquet_schema(spark, str(make(spark, tmp_path))) is None


def test_object_stores_and_schemas_that_are_to_be_merged_are_left_to_spark(spark, tmp_path):
    session = spark.newSession()
    assert parquet_schema(session, "s3a://bucket/table") is None
    session.conf.set("spark.sql.parquet.mergeSchema", "true")
    assert parquet_schema(session, str(one_file(session, tmp_path))) is None
