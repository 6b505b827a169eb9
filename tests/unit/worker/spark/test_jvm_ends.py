"""Why a JVM ended, from its exit code and its last lines."""

from __future__ import annotations

import os
import time

import pytest

from osrdyne_worker.app.errors import describe
from osrdyne_worker.spark.java.jvm import RECENT, JvmOutput, cause_of_end, last_error

NOISE = [
    "WARNING: Using incubator modules: jdk.incubator.vector",
    "Using Spark's default log4j profile: org/apache/spark/log4j2-defaults.properties",
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
        (None, [*NOISE, LOST], "SparkContext: Lost"),
    ],
)
@pytest.mark.proves("spark/jvm-worker-ends-memory")
def test_end_of_a_jvm_is_explained_by_its_exit_code_and_last_lines(
    code: int | None, lines: list[str], marker: str
) -> None:
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
def test_fault_of_a_start_is_found_among_the_lines(lines: list[str], expected: str) -> None:
    found = last_error([*NOISE, *lines, "\tat java.base/java.lang.Thread.run(Thread.java:840)"]) or ""
    assert expected in found
    assert "Exception in thread" not in found


def test_output_is_passed_on_and_only_its_recent_lines_explain_an_end() -> None:
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


def test_exception_whose_text_only_a_dead_jvm_has_is_described_by_its_class() -> None:
    class Py4JJavaError(Exception):
        def __str__(self) -> str:
            raise ConnectionRefusedError

    assert describe(Py4JJavaError()) == "Py4JJavaError"
