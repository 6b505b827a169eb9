"""What a caller reads about failures of Spark: a missing jar, a refusal of S3, the end of the JVM."""

import os
import time

import pytest

from osrdyne_worker.app.errors import describe
from osrdyne_worker.spark.failures.missing_jars import Versions, delta_problem, remedy
from osrdyne_worker.spark.failures.store_errors import store_failure
from osrdyne_worker.spark.java.jvm import RECENT, JvmOutput, cause_of_end, last_error

NEW = Versions("4.3.0", "2.13", "3.5.0")
DELTA_42 = "io.delta:delta-spark_4.2_2.13:4.4.0"
SPARK_42 = Versions("4.2.0", "2.13")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[DATA_SOURCE_NOT_FOUND] Failed to find the data source: delta. Make sure", "Spark 4.3.0"),
        ("Failed to find data source: avro. Avro is built-in", "jars.packages to org.apache.spark:spark-avro_2.13"),
        ("ClassNotFoundException: Class org.apache.hadoop.fs.s3a.S3AFileSystem not found", "hadoop-aws:3.5.0"),
        ('UnsupportedFileSystemException: No FileSystem for scheme "s3"', "s3a://"),
        ("ClassNotFoundException: Class org.apache.hadoop.fs.gs.GoogleHadoopFileSystem not", "gcs-connector"),
        ("with the plugin class 'org.apache.iceberg.spark.SparkCatalog': cannot find", "iceberg-spark-runtime-4.3"),
        ("java.sql.SQLException: No suitable driver", "JDBC driver"),
        ("[PATH_NOT_FOUND] Path does not exist", None),
    ],
)
@pytest.mark.proves("spark/data-source-file-system")
def test_message_about_a_missing_jar_names_the_setting_and_the_version(text, named):
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
        ({}, SPARK_42, None),
    ],
)
@pytest.mark.proves("spark/dataset-format-delta-installed")
def test_incompatible_delta_and_spark_have_a_remedy(conf, versions, named):
    found = delta_problem(conf, versions)
    assert found is None if named is None else named in (found or "")


HEAD = "getFileStatus on s3a://reports/data: software.amazon.awssdk.services.s3.model"


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        (f"{HEAD}.S3Exception: null (Service: S3, Status Code: 403, Request ID: x):null", "fs.s3a.secret.key"),
        (f"{HEAD}.NoSuchBucketException: no (Service: S3, Status Code: 404, Request ID: x)", "bucket reports"),
        ("s3a://reports/data: NoAuthWithAWSException: No AWS Credentials provided", "worker.spark_conf.spark"),
        ("s3a://reports/data: Unable to execute HTTP request: Connection refused", "fs.s3a.endpoint"),
    ],
    ids=["refused", "no bucket", "no credentials", "no server"],
)
def test_failure_of_a_store_names_the_bucket_and_the_setting(text, setting):
    failure = store_failure(text)
    assert failure is not None
    assert setting in failure.message
    assert "bucket reports" in failure.message
    assert failure.is_missing == ("NoSuchBucket" in text)
    slow = f"{HEAD}.S3Exception: slow down (Service: S3, Status Code: 503, Request ID: x)"
    for other in ("[PATH_NOT_FOUND] Path does not exist: s3a://reports/data", "Connection refused", slow):
        assert store_failure(other) is None


NOISE = [
    "WARNING: Using incubator modules: jdk.incubator.vector",
    "26/11/22 11:56:36 WARN NativeCodeLoader: Unable to load native-hadoop library",
]


LOST = "26/11/22 11:56:39 ERROR SparkContext: Lost the master."


@pytest.mark.parametrize(
    ("code", "lines", "marker"),
    [
        (3, ["Terminating due to java.lang.OutOfMemoryError: Java heap space"], "OutOfMemoryError: Java heap space"),
        (None, ['Exception in thread "x" java.lang.OutOfMemoryError: GC overhead limit exceeded'], "out of memory"),
        (1, ["# There is insufficient memory for the Java Runtime Environment to continue."], "out of memory"),
        (52, [], "spark.driver.memory"),
        (-9, NOISE, "SIGKILL"),
        (-6, NOISE, "signal 6"),
        (1, [*NOISE, LOST], "SparkContext: Lost"),
    ],
)
@pytest.mark.proves("spark/jvm-worker-ends-memory")
def test_exit_code_and_last_lines_explain_the_end_of_a_jvm(code, lines, marker):
    assert marker in (cause_of_end(code, lines) or "")
    assert cause_of_end(None, NOISE) is None, "it runs"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["Error occurred during initialization of VM", "Too small maximum heap"], "Too small maximum heap"),
        (["Invalid maximum heap size: -Xmxlots", "Error: Could not create the Java Virtual Machine."], "-Xmxlots"),
        (['Exception in thread "main" java.lang.RuntimeException: [unresolved dependency: a#b;1]'], "[unresolved"),
        (["see amqp://user:hunter2@host/ for more"], "amqp://user:***@host/"),
    ],
)
def test_fault_of_a_start_is_found_among_the_lines(lines, expected):
    found = last_error([*NOISE, *lines, "\tat java.base/java.lang.Thread.run(Thread.java:840)"]) or ""
    assert expected in found
    assert "Exception in thread" not in found


def test_output_is_passed_on_and_only_its_recent_lines_explain_an_end():
    shown, sink = os.pipe()
    now = 0.0
    output = JvmOutput(sink=sink, monotonic=lambda: now)
    os.write(output.end, b"old\n")
    while b"old\n" not in os.read(shown, 100):
        time.sleep(0.01)
    now = RECENT + 1
    os.write(output.end, b"new\xff")
    output.started()
    assert output.recent() == ["new�"]
    assert os.read(shown, 100) == b"new\xff"
    os.close(shown)
    os.close(sink)


def test_exception_whose_text_only_a_dead_jvm_has_is_described_by_its_class():
    class Py4JJavaError(Exception):
        def __str__(self) -> str:
            raise ConnectionRefusedError

    assert describe(Py4JJavaError()) == "Py4JJavaError"
