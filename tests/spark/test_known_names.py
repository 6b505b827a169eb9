"""The names of settings and options that typing errors are compared with are those of the installed Spark."""

import pytest

from osrdyne.config.spark_names import spark_names
from osrdyne_worker.pipelines.views.reader_options import BY_FORMAT, COMMON

CLASSES = {
    "csv": "catalyst.csv.CSVOptions",
    "json": "catalyst.json.JSONOptions",
    "orc": "execution.datasources.orc.OrcOptions",
    "parquet": "execution.datasources.parquet.ParquetOptions",
}


@pytest.mark.parametrize("format", BY_FORMAT)
def test_every_option_of_a_reader_is_known(spark, format):
    companion = spark._jvm.java.lang.Class.forName(f"org.apache.spark.sql.{CLASSES[format]}$")
    options, found = companion.getField("MODULE$").get(None).getAllOptions().iterator(), set()
    while options.hasNext():
        found.add(options.next())
    assert {name for name in found if "." not in name} <= BY_FORMAT[format] | COMMON


def test_every_setting_of_spark_sql_is_known(spark):
    companion = spark._jvm.java.lang.Class.forName("org.apache.spark.sql.internal.SQLConf$")
    entries, found = companion.getField("MODULE$").get(None).getConfigEntries().iterator(), set()
    while entries.hasNext():
        found.add(entries.next().key())
    assert {name for name in found if name.startswith("spark.")} <= spark_names()
