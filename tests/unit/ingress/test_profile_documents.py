"""The document of profiles: read from YAML and JSON, refused as a whole with every error and its place."""

import json

import pytest

from osrdyne.config.profiles import MAX_PROFILES
from osrdyne.ingress.documents.problems import InvalidDocumentError
from osrdyne.ingress.profiles import load_profiles, load_profiles_json

YAML = """
profiles:
  - match: tpch/sf={scale}
    memory: 2GiB
    spark_conf: {spark.ui.enabled: false}
    unbind_delay: 10m
  - match: "{rest}"
    concurrency: 4
"""


def problems_of(text: str) -> list[str]:
    with pytest.raises(InvalidDocumentError) as failure:
        load_profiles_json(text)
    return [str(problem) for problem in failure.value.problems]


def test_document_is_stored_as_json_that_loads_to_the_same_profiles():
    manifest = load_profiles(YAML)
    assert [profile.match for profile in manifest.profiles] == ["tpch/sf={scale}", "{rest}"]
    assert manifest.document()["profiles"][0] == {
        "match": "tpch/sf={scale}", "memory": 2 * 2**30, "spark_conf": {"spark.ui.enabled": "false"},
        "unbind_delay": 600.0,
    }  # fmt: skip
    assert load_profiles_json(json.dumps(manifest.document())) == manifest
    assert load_profiles("{}").profiles == ()


def test_every_error_is_reported_with_its_place():
    text = """{"profiles": [{"match": "a{b", "colour": 1}, 3, {"memory": 1},
        {"match": "a", "match": "b", "spark_conf": {"x": "1", "x": "2"}}]}"""
    assert [problem.partition(": ")[0] for problem in problems_of(text)] == [
        "profiles.0.colour", "profiles.0.match", "profiles.1", "profiles.2.match", "profiles.2.memory",
        "profiles.3.match", "profiles.3.spark_conf.x",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spark.hadoop.fs.s3a.secret.key", "hidden"),
        ("spark.hadoop.fs.s3a.access.key", "hidden"),
        ("spark.hadoop.fs.azure.account.key.a", "hidden"),
        ("spark.driver.extraJavaOptions", "-Da=b -DkeyPassword=hidden"),
        ("spark.x", "jdbc:postgresql://h/d?user=u&password=hidden"),
        ("spark.x", "https://u:hidden@h/maven"),
        ("spark_master", "sc://h:15002/;token=hidden"),
        ("spark_master", "k8s://https://u:hidden@h"),
    ],
)
def test_secret_is_not_stored_and_not_repeated(name, value):
    profile: dict[str, object] = {name: value} if name == "spark_master" else {"spark_conf": {name: value}}
    [problem, *_] = problems_of(json.dumps({"profiles": [{"match": "a", **profile}]}))
    place = name if name == "spark_master" else f"spark_conf.{name}"
    assert problem.startswith(f"profiles.0.{place}: ")
    assert "secret" in problem and "hidden" not in problem


def test_setting_that_only_sounds_like_a_secret_is_accepted_and_other_documents_are_refused():
    conf = {"spark.hadoop.fs.s3a.aws.credentials.provider": "org.example.TokenProvider", "spark.x": "s3a://bucket/a@b"}
    [profile] = load_profiles_json(json.dumps({"profiles": [{"match": "a", "spark_conf": conf}]})).profiles
    assert profile.spark_conf == conf
    many = {"profiles": [{"match": str(number)} for number in range(MAX_PROFILES + 1)]}
    assert [len(problems_of(json.dumps(one))) for one in ([], {"profiles": {}}, many)] == [1, 1, 1]
