"""Misspelt names in `spark_conf`."""

from osrdyne.config.models import Settings
from osrdyne.config.spark_names import meant_name, spark_names, spark_warnings


def test_misspelt_name_is_reported_with_the_one_that_was_meant():
    meant = {
        "spark.sql.shufle.partitions": "spark.sql.shuffle.partitions",
        "spark.driver.memmory": "spark.driver.memory",
        "spark.sql.caseSensitiv": "spark.sql.caseSensitive",
        "spark.sql.session.timezone": "spark.sql.session.timeZone",
    }
    assert {name: meant_name(name) for name in meant} == meant
    warnings = spark_warnings(Settings.model_validate({"worker": {"spark_conf": dict.fromkeys(meant, "1")}}))
    assert {warning.partition(": ")[0] for warning in warnings} == {f"worker.spark_conf.{name}" for name in meant}


def test_name_of_spark_or_of_an_extension_is_not_reported():
    of_extensions = {
        "spark.app.name", "spark.master", "spark.driver.host", "spark.driver.port", "spark.local.dir", "spark.ui.port",
        "spark.sql.catalog.mine.type", "spark.hadoop.fs.s3a.endpoint", "spark.kubernetes.container.image",
        "spark.executorEnv.HOME", "spark.databricks.delta.schema.autoMerge.enabled", "spark.jars.packages",
    }  # fmt: skip
    assert [name for name in of_extensions.union(spark_names()) if meant_name(name) is not None] == []


def test_names_of_profiles_and_names_that_spark_ignores_are_reported():
    profile = {"match": "a", "spark_conf": {"spark.executor.memorry": "1g", "spark.executor.memory": "1g"}}
    settings = Settings.model_validate({"worker": {"spark_conf": {"sql.ansi": "1"}, "profiles": [profile]}})
    places = [warning.partition(": ")[0] for warning in spark_warnings(settings)]
    assert places == ["worker.spark_conf.sql.ansi", "worker.profiles.0.spark_conf.spark.executor.memorry"]
