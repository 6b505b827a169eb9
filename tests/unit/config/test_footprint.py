"""The preset of Spark settings for small keys."""

from __future__ import annotations

from osrdyne.config.models import SMALL_FOOTPRINT, WorkerSettings

OPTIONS = "spark.driver.extraJavaOptions"


def test_small_footprint_yields_to_the_settings_of_the_user() -> None:
    conf = {"spark.driver.memory": "1g", OPTIONS: "-XX:+UseG1GC", "a.b": "c"}
    effective = WorkerSettings(footprint="small", spark_conf=conf).effective_spark_conf()
    assert effective == {
        **SMALL_FOOTPRINT,
        "spark.driver.memory": "1g",
        "a.b": "c",
        OPTIONS: f"{SMALL_FOOTPRINT[OPTIONS]} -XX:+UseG1GC",
    }
