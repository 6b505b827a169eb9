"""Options that keep the heap of a worker small, unless the configuration has options of its own."""

from __future__ import annotations

import pytest

from osrdyne.protocol.spark_master import parse_spark_master
from osrdyne_worker.spark.java.archive import DRIVER_OPTIONS
from osrdyne_worker.spark.session import session_conf

OURS = "-XX:InitialHeapSize=256m -XX:GCTimeRatio=4"


def options(
    configured: str | None = None, *, memory: str | None = None, master: str = "local[2]", of_application: str = ""
) -> str | None:
    settings = {} if configured is None else {DRIVER_OPTIONS: configured}
    settings |= {} if memory is None else {"spark.driver.memory": memory}
    return session_conf(parse_spark_master(master), settings, {}, of_application).get(DRIVER_OPTIONS)


@pytest.mark.parametrize("memory", [None, "512m", "600M", "1024mb", "2g", "1t", " 8GB "])
def test_heap_starts_small_and_grows_when_it_must(memory: str | None) -> None:
    assert options(memory=memory) == OURS
    assert options("-Da=b", memory=memory) == f"{OURS} -Da=b"
    assert options("-Da=b", memory=memory, of_application="-Da=") == f"{OURS} -Da=b -Da="


@pytest.mark.parametrize("memory", ["256m", "128m", "1000", "500000k", "nonsense"])
def test_heap_that_is_too_small_and_driver_of_a_cluster_are_left_alone(memory: str) -> None:
    assert options(memory=memory) is options(master="spark://host:7077") is None
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
