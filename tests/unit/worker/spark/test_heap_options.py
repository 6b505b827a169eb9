"""Options that keep the heap of a worker small, unless the configuration has options of its own."""

from __future__ import annotations

import pytest

from osrdyne.protocol.spark_master import parse_spark_master
from osrdyne_worker.spark.java.archive import DRIVER_OPTIONS
from osrdyne_worker.spark.session import session_conf

OURS = "-XX:InitialHeapSize=256m -XX:GCTimeRatio=4"
LOCAL = parse_spark_master("local[2]")


def options(configured: str | None = None, *, memory: str | None = None, master: str = "local[2]") -> str | None:
    settings = {} if configured is None else {DRIVER_OPTIONS: configured}
    settings |= {} if memory is None else {"spark.driver.memory": memory}
    return session_conf(parse_spark_master(master), settings, {}).get(DRIVER_OPTIONS)


@pytest.mark.parametrize("memory", [None, "512m", "600M", "1024mb", "2g", "1t", " 8GB "])
def test_heap_starts_small_and_grows_when_it_must(memory: str | None) -> None:
    assert options(memory=memory) == OURS
    assert options("-Da=b", memory=memory) == f"{OURS} -Da=b"


@pytest.mark.parametrize("memory", ["256m", "128m", "1000", "500000k", "nonsense"])
def test_java_must_start_to_say_that_the_heap_is_too_small(memory: str) -> None:
    assert options(memory=memory) is None
    assert options("-Da=b", memory=memory) == "-Da=b"


@pytest.mark.parametrize(
    "configured",
    [
        "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
        "-XX:+UseZGC",
        "-Xms1g",
        "-XX:GCTimeRatio=12",
        "-XX:InitialHeapSize=1g",
        "-XX:InitialRAMPercentage=5",
    ],
)
def test_options_of_the_configuration_are_left_alone(configured: str) -> None:
    assert options(configured) == configured


def test_driver_of_a_cluster_is_left_alone() -> None:
    assert options(master="spark://host:7077") is None


def test_options_of_the_application_come_last() -> None:
    conf = session_conf(LOCAL, {DRIVER_OPTIONS: "-Xss8m"}, {}, "-Da=")
    assert conf[DRIVER_OPTIONS] == f"{OURS} -Xss8m -Da="
