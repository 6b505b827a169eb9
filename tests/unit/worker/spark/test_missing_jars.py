"""What a message of Spark about a missing jar asks the user to set."""

from __future__ import annotations

import pytest

from osrdyne_worker.spark.failures.missing_jars import Versions, delta_problem, remedy

NEW = Versions("4.3.0", "2.13", "3.5.0")
DELTA_42 = "io.delta:delta-spark_4.2_2.13:4.4.0"
SPARK_42 = Versions("4.2.0", "2.13")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[DATA_SOURCE_NOT_FOUND] Failed to find the data source: delta. Make sure", "Spark 4.3.0"),
        ("Failed to find the data source: iceberg. Make", "org.apache.iceberg:iceberg-spark-runtime-4.3_2.13:VERSION"),
        (
            "Failed to find data source: avro. Avro is built-in",
            "jars.packages to org.apache.spark:spark-avro_2.13",
        ),
        ("Failed to find data source: kafka. Please", "spark-sql-kafka-0-10_2.13:4.3.0"),
        ("Failed to find the data source: com.foo.Bar. Make", "com.foo.Bar"),
        ("ClassNotFoundException: Class org.apache.hadoop.fs.s3a.S3AFileSystem not found", "hadoop-aws:3.5.0"),
        ('UnsupportedFileSystemException: No FileSystem for scheme "s3"', "s3a://"),
        ("ClassNotFoundException: Class org.apache.hadoop.fs.gs.GoogleHadoopFileSystem not", "gcs-connector"),
        ("ClassNotFoundException: Class org.apache.hadoop.fs.azurebfs.SecureAzureBlobFileSystem", "hadoop-azure:3.5.0"),
        ("with the plugin class 'org.apache.iceberg.spark.SparkCatalog': cannot find", "iceberg-spark-runtime-4.3"),
        ("java.sql.SQLException: No suitable driver", "JDBC driver"),
        ("java.lang.ClassNotFoundException: org.postgresql.Driver", "JDBC driver"),
        ("[PATH_NOT_FOUND] Path does not exist", None),
        ("java.lang.NoClassDefFoundError: scala/Option", None),
    ],
)
@pytest.mark.proves("spark/data-source-file-system")
def test_message_about_a_missing_jar_names_the_setting_and_the_version(text: str, named: str | None) -> None:
    found = remedy(text, NEW)
    assert found is None if named is None else named in (found or "")
    assert DELTA_42 in (remedy("Failed to find the data source: delta. Make", SPARK_42) or "")


@pytest.mark.parametrize(
    ("conf", "versions", "named"),
    [
        ({}, NEW, "osrdyne[delta]"),
        ({"spark.jars.packages": f"a:b:1,{DELTA_42}"}, NEW, "Spark 4.2"),
        ({"spark.jars.packages": DELTA_42}, Versions("4.1.0", "2.13"), "io.delta:delta-spark_4.1_2.13:4.4.0"),
        ({"spark.jars.packages": "io.delta:delta-spark_2.13:4.0.0"}, SPARK_42, "delta-spark_4.2_2.13"),
        ({"spark.jars.packages": DELTA_42}, SPARK_42, None),
        ({"spark.jars.packages": "io.delta:delta-spark_4.3_2.13:4.5.0"}, NEW, None),
        ({"spark.jars": "/jars/my-delta.jar"}, NEW, None),
        ({}, Versions("4.3.0", "2.13", has_delta=True), None),
        ({}, SPARK_42, None),
    ],
)
@pytest.mark.proves("spark/dataset-format-delta-installed")
def test_incompatible_delta_and_spark_are_named_with_the_remedy(
    conf: dict[str, str], versions: Versions, named: str | None
) -> None:
    found = delta_problem(conf, versions)
    assert found is None if named is None else named in (found or "")
