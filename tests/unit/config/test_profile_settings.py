"""Profiles: patterns of keys in linear time, effective settings, and what is refused before anything starts."""

import time

import pytest
from pydantic import ValidationError

from osrdyne.config.display import shown_settings
from osrdyne.config.loading import LoadedSettings, load_settings
from osrdyne.config.models import SMALL_FOOTPRINT, Settings
from osrdyne.config.profiles import MAX_PROFILES, Profile, profile_of
from osrdyne.errors import ConfigurationError

BIG = {"match": "tpch/sf={scale:[0-9]{2,}}", "memory": "8GiB", "spark_conf": {"spark.ui.enabled": False}}


def settings_of(*profiles: dict[str, object], **worker: object) -> Settings:
    return Settings.model_validate({"worker": {"profiles": profiles, **worker}})


def test_first_profile_that_matches_counts_and_other_keys_have_the_settings_of_the_pool():
    settings = settings_of(BIG, {"match": "tpch/{rest}", "concurrency": 4})
    found = [profile_of(settings.worker.profiles, key) for key in ("tpch/sf=10", "tpch/sf=1", "tpch/a/b", "x")]
    assert found == [*settings.worker.profiles, None, None]
    assert settings.with_profile(None) is settings


def test_profile_changes_what_it_gives_and_nothing_else():
    settings = settings_of(
        {**BIG, "footprint": "small", "unbind_delay": "1m", "stop_delay": "20s", "placement": "pooled", "spares": 3},
        spark_conf={"spark.ui.enabled": True, "spark.a": "b"},
        concurrency=3,
        pooled={"spares": 1},
    )
    effective = settings.with_profile(settings.worker.profiles[0])
    assert (effective.worker.concurrency, effective.worker.pooled.spares) == (3, 3)
    assert settings.worker.pooled.spares == 1
    assert (effective.lifecycle.unbind_delay, effective.lifecycle.stop_delay) == (60.0, 20.0)
    assert effective.lifecycle.max_groups == settings.lifecycle.max_groups
    conf = effective.worker.effective_spark_conf()
    assert (conf["spark.driver.memory"], conf["spark.ui.enabled"], conf["spark.a"]) == ("8192m", "false", "b")
    assert conf["spark.sql.shuffle.partitions"] == "1"


def test_document_of_a_profile_loads_to_the_same_profile():
    profile = settings_of({**BIG, "stop_delay": "1m", "cores": 2, "spark_master": "spark://h:7077"}).worker.profiles[0]
    assert Profile.model_validate(profile.document()) == profile
    settings = settings_of({"match": "a", "stop_delay": "1h"})
    assert settings.with_profile(settings.worker.profiles[0]).worker_config() == settings.worker_config()


def test_small_footprint_and_memory_yield_to_the_settings_of_the_user():
    options = "spark.driver.extraJavaOptions"
    conf = {"spark.driver.memory": "1g", options: "-XX:+UseG1GC", "a.b": "c"}
    small = {**SMALL_FOOTPRINT, **conf, options: f"{SMALL_FOOTPRINT[options]} -XX:+UseG1GC"}
    assert settings_of(footprint="small", spark_conf=conf).worker.effective_spark_conf() == small
    worker = settings_of(memory="1GiB", spark_conf={"spark.driver.memory": "2g"}).worker
    assert worker.effective_spark_conf() == {"spark.driver.memory": "2g"}
    assert settings_of(memory="1GiB", footprint="small").worker.effective_spark_conf()["spark.driver.memory"] == "1024m"


@pytest.mark.parametrize(
    ("profile", "place"),
    [
        ({"match": "a{b"}, "character 2"),
        ({"match": "{a:(?=b)}"}, "'a'.*RE2"),
        ({"match": "{a:(b)}"}, "groups"),
        ({"match": "a", "spark_master": "nowhere"}, "'nowhere'"),
        ({"match": "a", "memory": "100MiB"}, "471859200"),
        ({"match": "a", "colour": "red"}, "colour"),
        ({"match": "a", "cores": 2}, r"worker\.profiles\.0\.cores"),
        ({"match": "a", "spark_master": "sc://h:1", "memory": "1GiB"}, r"worker\.profiles\.0\.memory"),
        ({"match": "a", "stop_delay": "1s"}, r"worker\.profiles\.0\.stop_delay"),
        ({"match": "a", "spark_master": "k8s://https://h:1"}, r"spark\.kubernetes\.container\.image in spark_conf"),
        ({"match": "a", "spares": 1}, r"worker\.profiles\.0\.spares: .*placement: pooled"),
    ],
)
def test_wrong_profiles_are_refused_with_their_place(profile, place):
    with pytest.raises(ValidationError, match=place):
        settings_of(profile)


def test_second_profile_of_one_pattern_and_too_many_profiles_are_refused():
    with pytest.raises(ValidationError, match=r"worker\.profiles\.1\.match: .*'a'"):
        settings_of({"match": "a"}, {"match": "a"})
    with pytest.raises(ValidationError, match=f"{MAX_PROFILES}"):
        settings_of(*({"match": f"a{number}"} for number in range(MAX_PROFILES + 1)))


def test_keys_are_data_and_take_linear_time():
    """Python's `re` needs about 2 to the power of 40 steps for this key."""
    began = time.process_time()
    assert not Profile(match="{a:(?:x+x+)+y}").matches("x" * 40)
    assert time.process_time() - began < 60
    assert Profile(match="a.b|{x}").matches("a.b|\0\n\u00e9")
    pairs = (("a.b", "aXb"), ("{x}", ".."), ("{x}", "\ud800"))  # the last is no text
    assert not [pattern for pattern, key in pairs if Profile(match=pattern).matches(key)]


def test_spark_settings_of_profiles_are_hidden_and_refused_without_their_values(tmp_path):
    loaded = LoadedSettings(settings_of({**BIG, "spark_conf": {"spark.secret": "hidden"}}), load_settings().origins)
    [shown] = [one.value for one in shown_settings(loaded) if one.path == ("worker", "profiles")]
    assert shown == [{"match": BIG["match"], "memory": 8 * 2**30, "spark_conf": {"spark.secret": "***"}}]
    file = tmp_path / "pool.yaml"
    file.write_text("worker:\n  profiles:\n    - match: a\n      spark_conf: [hidden]\n")
    with pytest.raises(ConfigurationError, match=r"worker\.profiles\.0\.spark_conf \(file .*:\d\)") as failure:
        load_settings(file=str(file), environment={})
    assert "hidden" not in str(failure.value)


def test_spares_of_different_settings_must_fit_into_the_processes():
    profiles = ({"match": "a", "concurrency": 2, "spares": 2}, {"match": "b", "concurrency": 3, "spares": 0})
    with pytest.raises(ValidationError, match=r"worker\.profiles: .* 4 processes"):
        settings_of(*profiles, placement="pooled", pooled={"max_processes": 3})
    settings_of(*profiles, placement="pooled", pooled={"max_processes": 4})
    # These share the processes of the pool.
    same = ({"match": "a", "stop_delay": "1m"}, {"match": "b", "stop_delay": "2m"})
    settings_of(*same, placement="pooled", pooled={"max_processes": 1})
