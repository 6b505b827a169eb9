"""Loading: precedence, origins, and every mistake as one line with its place."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.config.display import MASK, masked_uri, shown_settings
from osrdyne.config.loading import LoadedSettings, load_settings
from osrdyne.drivers.docker.options import DockerOptions
from osrdyne.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(text: str = "", *assignments: str, environment: Mapping[str, str] | None = None) -> LoadedSettings:
    Path("pool.yaml").write_text(text, encoding="utf-8")
    return load_settings(file="pool.yaml", environment=environment or {}, assignments=assignments)


def mistakes(text: str = "", *assignments: str, environment: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(text, *assignments, environment=environment)
    return str(caught.value)


@pytest.mark.parametrize("name", ["checkEntireQueueOnCleanup", "CheckEntireQueueOnCleanup"])
def test_variable_of_the_edge_hub_is_a_setting_and_one_of_kubernetes_or_of_a_command_is_none(name):
    others = ("OSRDYNE_PORT", "OSRDYNE_API_PORT", "OSRDYNE_API_TOKEN", "OSRDYNE_SERVICE_HOST")
    environment = {name: "true", **dict.fromkeys(others, "tcp://10.0.0.1:80")}
    loaded = load("pool: {id: p, kind: managed}", environment=environment)
    assert loaded.settings.requests.check_entire_queue_on_cleanup
    changed = {path: origin for path, origin in loaded.origins.items() if origin.startswith("environment")}
    assert changed == {("requests", "check_entire_queue_on_cleanup"): f"environment {name}"}


def test_flag_wins_over_environment_over_file_over_default():
    text = "pool: {id: file}\napi: {port: 1}\nlog: {level: debug}\n"
    environment = {"OSRDYNE__POOL__ID": "environment", "osrdyne__api__port": "2"}
    loaded = load(text, "pool.id=flag", environment=environment)
    assert (loaded.settings.pool.id, loaded.settings.api.port, loaded.settings.log.level) == ("flag", 2, "debug")
    assert loaded.origins["pool", "id"] == "flag --set"
    assert loaded.origins["api", "port"] == "environment osrdyne__api__port"
    assert loaded.origins["log", "level"] == "file pool.yaml:3"
    assert loaded.origins["api", "host"] == "default"
    assert load_settings(environment={}, flags={"--pool": "pool.id=mine"}).origins["pool", "id"] == "flag --pool"
    Path("osrdyne.yaml").write_text("pool: {id: by_name}")
    assert load_settings(environment={}).settings.pool.id == "by_name"
    assert load_settings(environment={"OSRDYNE_CONFIG": "pool.yaml"}).settings.pool.id == "file"


def test_variable_of_a_setting_with_too_few_underscores_is_reported():
    names = ("POOL__ID", "BROKER__URI", "LIFECYCLE__UNBIND_DELAY", "WORKER__CONFIG__A")
    for variable, right in [("osrdyne_pool_id", "POOL__ID"), *((f"OSRDYNE_{name}", name) for name in names)]:
        found = mistakes(environment={variable: "secret"})
        assert f"environment {variable}" in found and f"OSRDYNE__{right}" in found and "secret" not in found


def test_mappings_are_merged_key_by_key():
    text = "worker:\n  spark_conf: {spark.ui.enabled: false}\n  config: {a: {b: 1, c: 2}}\n"
    environment = {"OSRDYNE__WORKER__CONFIG__A__B": "[3]", "OSRDYNE__WORKER__CONFIG__TEXT": "plain"}
    loaded = load(text, "worker.spark_conf.spark.executor.memory=2g", environment=environment)
    assert loaded.settings.worker.spark_conf == {"spark.ui.enabled": "false", "spark.executor.memory": "2g"}
    assert loaded.settings.worker.config == {"a": {"b": [3], "c": 2}, "text": "plain"}
    assert loaded.origins["worker", "config", "a", "c"] == "file pool.yaml:3"


def test_lists_sections_and_null_are_json_in_text_and_words_of_yaml_stay_text():
    environment = {
        "OSRDYNE__POOL__PINNED_KEYS": '["a=1,b=2", "漢 🚄"]',
        "OSRDYNE__API": '{"port": 0}',
        "OSRDYNE__REQUESTS__MAX_LENGTH": "null",
    }
    settings = load("requests: {max_length: 7}", "worker.config.a=5", environment=environment).settings
    assert (settings.pool.pinned_keys, settings.api.port) == (("a=1,b=2", "漢 🚄"), 0)
    assert (settings.requests.max_length, settings.worker.config) == (None, {"a": 5})
    for short in (load("driver: noop"), load(environment={"OSRDYNE__DRIVER": "noop"}), load("", "driver=noop")):
        assert short.settings.driver.name == "noop"
    loaded = load("pool: {pinned_keys: [no, on, 2024-01-01, 10:30]}")
    assert loaded.settings.pool.pinned_keys == ("no", "on", "2024-01-01", "10:30")


@pytest.mark.parametrize(
    ("text", "place", "marker"),
    [
        ("pool:\n  idd: x", "pool.idd (file pool.yaml:2)", "pool.id?"),
        ("unbind_delay: 5s", "unbind_delay (file pool.yaml:1)", "lifecycle.unbind_delay"),
        ("broker:\n  tls:\n    verfy: no", "broker.tls.verfy (file pool.yaml:3)", "broker.tls.verify"),
        ("pool: {id: No}", "pool.id (file pool.yaml:1)", "32"),
        ("pool: {pinned_keys: [a, 42]}", "pool.pinned_keys.1 (file pool.yaml:1)", "quotes"),
        ("pool: {pinned_keys: [" + "é" * 200 + "]}", "pool.pinned_keys (file pool.yaml:1)", "255"),
        ("pool: 5", "pool (file pool.yaml:1)", "mapping"),
        ("- a", "(file pool.yaml:1)", "mapping"),
        ("api: {circuits_path: circuits}", "api.circuits_path (file pool.yaml:1)", ""),
        ("api: {circuits_path: /v1/circuits}", "api.circuits_path (file pool.yaml:1)", "/circuits"),
        ("api: {port: lots}", "api.port (file pool.yaml:1)", "number"),
        ("api: {port: 70000}", "api.port (file pool.yaml:1)", "65535"),
        ("log: {level: loud}", "log.level (file pool.yaml:1)", "'warning'"),
        ("driver: 7", "driver (file pool.yaml:1)", ""),
        ("requests: {delivery_limit: 2}", "requests.delivery_limit (file pool.yaml:1)", "at least"),
        ("requests: {consumer_timeout: 0}", "requests.consumer_timeout (file pool.yaml:1)", ""),  # not "no limit"
        ("requests: {ttl: soon}", "requests.ttl (file pool.yaml:1)", "'soon'"),
        ("lifecycle:\n  stop_delay: 5", "lifecycle (file pool.yaml:2)", "settle_delay"),
        ("pool: {id: a}\npool: {id: b}", "pool.yaml:2", "line 1"),
        ("pool: {id: a", "pool.yaml:1", "YAML"),
        ("pool: !env X", "pool.yaml:1", "!env"),
        ("pool: {1: a}", "pool.yaml:1", "'1'"),
        ("pool: &p\n  id: *p", "pool.yaml", "itself"),
        ("a: &a {b: 1}\nc:\n  <<: *a", "pool.yaml:3", "<<"),
        ("pool: \x00", "pool.yaml", "YAML"),
        ("broker: {uri: 'amqp://u:p/w@host'}", "broker.uri (file pool.yaml:1)", "amqp://"),
        ("broker: {uri: 'amqp://u:1#w@host'}", "broker.uri (file pool.yaml:1)", "amqp://"),
        ("broker: {uri: 'http://host'}", "broker.uri (file pool.yaml:1)", "amqp://"),
        ("broker: {management_uri: 'amqp://h'}", "broker.management_uri (file pool.yaml:1)", "http://"),
        ("broker: {tls: {key_file: k}}", "broker.tls (file pool.yaml:1)", "certificate_file"),
    ],
)
def test_mistake_in_the_file_names_place_and_remedy(text, place, marker):
    found = mistakes(text)
    assert place in found
    assert marker in found


@pytest.mark.parametrize(
    ("given", "place"),
    [
        *((flag, "flag --set") for flag in ("pool.id", "pool.nothing=x", "=x")),
        ({"OSRDYNE__POOL__IDD": "x"}, "pool.idd (environment OSRDYNE__POOL__IDD)"),
        ({"OSRDYNE__": "x"}, "(environment OSRDYNE__)"),
        ({"CheckEntireQueueOnCleanup": "often"}, "(environment CheckEntireQueueOnCleanup)"),
        (
            {"OSRDYNE__REQUESTS__CHECK_ENTIRE_QUEUE_ON_CLEANUP": "true", "checkEntireQueueOnCleanup": "true"},
            "requests.check_entire_queue_on_cleanup (environment checkEntireQueueOnCleanup)",
        ),
        ({"OSRDYNE__POOL__PINNED_KEYS": "a,b"}, "pool.pinned_keys (environment OSRDYNE__POOL__PINNED_KEYS)"),
        ({"OSRDYNE__WORKER__SPARK_CONF": "x"}, "JSON"),
        ({"OSRDYNE__POOL": "x"}, "pool (environment OSRDYNE__POOL)"),
        ({"OSRDYNE__POOL": '{"idd": 1}'}, "pool.idd (environment OSRDYNE__POOL)"),
        ({"OSRDYNE__POOL__ID": "a", "osrdyne__pool__id": "b"}, "OSRDYNE__POOL__ID sets it"),
    ],
)
def test_mistake_in_a_flag_or_the_environment_names_it(given, place):
    assert place in (mistakes("", given) if isinstance(given, str) else mistakes(environment=given))


def test_secret_in_a_flag_or_given_twice_is_refused_without_showing_it_and_all_mistakes_come_at_once():
    in_a_flag = mistakes("", "broker.uri=amqp://u:hidden@h")
    assert "OSRDYNE__BROKER__URI or broker.uri_file" in in_a_flag
    twice = mistakes("broker: {uri_file: x}", environment={"OSRDYNE__BROKER__URI": "amqp://u:hidden@h"})
    assert "broker.uri (environment OSRDYNE__BROKER__URI)" in twice
    assert "hidden" not in in_a_flag + twice
    text = mistakes("pool: {idd: x}\napi: {port: x}", "log.level=loud", environment={"OSRDYNE__X": "1"})
    assert len(text.splitlines()) == 1 + 4


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_secret_file_is_read_and_its_place_remembered_or_named(encoding):
    file, text = Path("uri"), "broker:\n  uri_file: uri"
    for content in (None, b"", b"\xff"):
        if content is not None:
            file.write_bytes(content)
        assert "broker.uri_file" in mistakes(text)
    file.write_text("amqp://u:secret@host/\n", encoding=encoding)
    loaded = load(text)
    assert loaded.settings.broker.uri.get_secret_value() == "amqp://u:secret@host/"
    assert loaded.origins["broker", "uri"] == "file uri, named by file pool.yaml:2"
    with pytest.raises(ConfigurationError, match=r"nowhere\.yaml"):
        load_settings(file="nowhere.yaml", environment={})


def test_nothing_shown_holds_a_secret():
    """The type of a field decides: in a free mapping any text may be a secret, whatever its name is."""
    text = """
broker: {uri: 'amqp://u:hidden1@h/v?cert=hidden2', management_uri: 'http://u:hidden3@h'}
driver: {name: noop, options: {api_token: hidden4, url: 'http://u:hidden5@h', env: ['amqp://u:hidden6@h']}}
worker:
  spark_conf: {spark.hadoop.fs.s3a.secret.key: hidden7, spark.app: hidden7a}
  config: {s3: {password: {value: hidden8}}, list: [{plain: hidden9, key: hidden10, pin: 424242}], cache: true}
  spark_master: sc://spark:443/;token=hidden11;use_ssl=true
  profiles: [{match: a, spark_master: sc://spark:444/;token=hidden12}]
"""
    loaded = load(text)
    shown = str(shown_settings(loaded))
    assert "hidden" not in shown + repr(loaded)
    assert "424242" not in shown
    values = {one.path: one.value for one in shown_settings(loaded)}
    assert values["worker", "spark_conf", "spark.app"] == MASK
    assert values["worker", "config", "cache"] is True
    assert values["lifecycle", "max_groups"] == 100
    assert values["worker", "spark_master"] == "sc://spark:443"


def test_driver_option_is_hidden_by_its_type_and_not_by_its_name():
    options = """
driver:
  name: docker
  options:
    image: registry.example.org/tokens/key:1
    environment: {REGION: hidden1}
    labels: {secret: shown1}
    log_options: {url: hidden2}
    broker_uri: file
    mounts: ["/srv/keys:/data"]
"""
    loaded = load(options)
    values = {one.path[2:]: one.value for one in shown_settings(loaded, driver_options=DockerOptions)}
    assert values["image",] == "registry.example.org/tokens/key:1"
    assert values["mounts",] == ["/srv/keys:/data"]
    assert values["labels", "secret"] == "shown1"
    assert (values["environment", "REGION"], values["log_options", "url"]) == (MASK, MASK)
    assert values["broker_uri",] == "file"
    assert not [text for text in ("shown1", "/srv/keys") if text in str(shown_settings(loaded))]


@given(st.text(min_size=1))
def test_no_password_is_shown_whatever_it_holds(password):
    assert f"1{password}0" not in masked_uri(f"amqp://user:1{password}0@host:5672/")


@pytest.mark.parametrize(
    ("uri", "masked"),
    [
        ("amqp://u:p@h:1/v", "amqp://u:***@h:1/v"),
        ("amqp://u:p@[::1]:1/v", "amqp://u:***@[::1]:1/v"),
        ("amqps://h/%2F?password=x", "amqps://h/%2F?***"),
        *((uri, MASK) for uri in ("amqp://u:p/w@h", "amqp://u:1/w@h", "amqp://u:1?w@h", "amqp://u:1#w@h")),
        *((uri, MASK) for uri in ("no uri", "amqp://u:p@[h")),
    ],
)
def test_uri_is_shown_without_its_secrets(uri, masked):
    assert masked_uri(uri) == masked
