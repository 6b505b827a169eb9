"""What a message of Spark about a missing jar asks the user to set."""

from __future__ import annotations

import pytest

from osrdyne_worker.spark.failures.missing_jars import Versions, delta_problem, installed_versions, remedy

NEW = Versions("4.3.0", "2.13", "3.5.0")
PACKAGES = "Set worker.spark_conf.spark.jars.packages to "


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[DATA_SOURCE_NOT_FOUND] Failed to find the data source: delta. Make sure", "has no jar for Spark 4.3.0"),
        ("Failed to find the data source: iceberg. Make", "org.apache.iceberg:iceberg-spark-runtime-4.3_2.13:VERSION"),
        ("Failed to find data source: avro. Avro is built-in", f"{PACKAGES}org.apache.spark:spark-avro_2.13:4.3.0."),
        ("Failed to find data source: kafka. Please", "spark-sql-kafka-0-10_2.13:4.3.0"),
        ("Failed to find the data source: com.foo.Bar. Make", "of the jar with com.foo.Bar, for Spark 4.3 and Scala"),
        (
            "java.lang.ClassNotFoundException: Class org.apache.hadoop.fs.s3a.S3AFileSystem not found",
            f"{PACKAGES}org.apache.hadoop:hadoop-aws:3.5.0.",
        ),
        ('UnsupportedFileSystemException: No FileSystem for scheme "s3"', "hadoop-aws:3.5.0 (and write s3a://"),
        ("ClassNotFoundException: Class org.apache.hadoop.fs.gs.GoogleHadoopFileSystem not", "gcs-connector"),
        ("ClassNotFoundException: Class org.apache.hadoop.fs.azurebfs.SecureAzureBlobFileSystem", "hadoop-azure:3.5.0"),
        ("with the plugin class 'org.apache.iceberg.spark.SparkCatalog': cannot find", "iceberg-spark-runtime-4.3"),
        ("java.sql.SQLException: No suitable driver", "JDBC driver"),
        ("java.lang.ClassNotFoundException: org.postgresql.Driver", "JDBC driver"),
    ],
)
@pytest.mark.proves("spark/data-source-file-system")
def test_message_about_a_missing_jar_names_the_setting_and_the_version(text: str, expected: str) -> None:
    assert expected in (remedy(text, NEW) or "")


def test_delta_gets_the_jar_of_an_older_spark() -> None:
    said = remedy("Failed to find the data source: delta. Make", Versions("4.2.0", "2.13"))
    assert said == f"{PACKAGES}io.delta:delta-spark_4.2_2.13:4.4.0."


DELTA_42 = "io.delta:delta-spark_4.2_2.13:4.4.0"


@pytest.mark.parametrize(
    ("conf", "versions", "expected"),
    [
        ({}, NEW, "Delta Lake 4.4.0 has no jar for Spark 4.3.0: install osrdyne[delta] (pyspark==4.2.0, delta-spark"),
        ({"spark.jars.packages": f"a:b:1,{DELTA_42}"}, NEW, "has a jar of Delta Lake for Spark 4.2, and the workers"),
        ({"spark.jars.packages": DELTA_42}, Versions("4.1.0", "2.13"), "to io.delta:delta-spark_4.1_2.13:4.4.0."),
        ({"spark.jars.packages": "io.delta:delta-spark_2.13:4.0.0"}, Versions("4.2.0", "2.13"), "delta-spark_4.2_2.13"),
        ({"spark.jars.packages": DELTA_42}, Versions("4.2.0", "2.13"), None),
        ({"spark.jars.packages": "io.delta:delta-spark_4.3_2.13:4.5.0"}, NEW, None),
        ({"spark.jars": "/jars/my-delta.jar"}, NEW, None),
        ({}, Versions("4.3.0", "2.13", has_delta=True), None),
        ({}, Versions("4.2.0", "2.13"), None),
    ],
)
@pytest.mark.proves("spark/dataset-format-delta-installed")
def test_incompatible_delta_and_spark_are_named_with_the_remedy(
    conf: dict[str, str], versions: Versions, expected: str | None
) -> None:
    found = delta_problem(conf, versions)
    assert found is None if expected is None else expected in (found or "")


@pytest.mark.parametrize(
    "text", ["[PATH_NOT_FOUND] Path does not exist", "java.lang.NoClassDefFoundError: scala/Option", ""]
)
def test_other_messages_get_no_remedy(text: str) -> None:
    assert remedy(text, NEW) is None


def test_versions_are_those_of_the_installed_pyspark() -> None:
    from pyspark import __version__

    found = installed_versions()
    assert found.spark == __version__
    assert found.hadoop.startswith("3.")
