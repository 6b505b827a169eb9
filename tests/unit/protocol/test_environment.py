"""The environment of a worker, through a real process environment; users and TLS options in its AMQP URI."""

import subprocess
from urllib.parse import unquote, urlsplit

import pytest
from pydantic import SecretStr, ValidationError
from worker_environments import worker_environment

from osrdyne.config.models import BrokerSettings, TlsSettings
from osrdyne.errors import ConfigurationError
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.uri import TlsFiles, tls_of, with_tls, with_user
from osrdyne.testing.keys import ODD_KEYS

EVERYTHING = "/ % # * . : é 漢 🚄 \t\n 'quotes' \"double\" $HOME `id` \\ ="


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in worker_environment().to_variables().items() if key != name}


def test_odd_keys_survive_a_real_process_environment():
    for key in [*ODD_KEYS.values(), EVERYTHING]:
        environment = worker_environment(key=key, max_message_bytes=1234)
        printed = subprocess.run(
            ["/usr/bin/env", "-0"], env=environment.to_variables(), capture_output=True, check=True, timeout=120
        ).stdout
        variables = dict(item.split("=", 1) for item in printed.decode().rstrip("\0").split("\0"))
        assert WorkerEnvironment.from_variables(variables) == environment


def test_only_a_paused_worker_has_a_variable_for_it_and_no_secret_is_shown():
    variables = worker_environment().to_variables()
    assert "WORKER_PAUSED" not in variables
    assert worker_environment().requests_queue == variables["WORKER_REQUESTS_QUEUE"] == "p-req-k"
    paused = worker_environment(paused=True, config={"token": "hush"})
    assert WorkerEnvironment.from_variables(paused.to_variables()) == paused
    assert "s3cret" not in repr(paused) and "hush" not in repr(paused)


def test_variables_of_the_reference_protocol_are_enough():
    worker = WorkerEnvironment.from_variables(
        {"WORKER_ID": "w", "WORKER_KEY": "k", "WORKER_POOL": "p", "WORKER_AMQP_URI": "amqp://h",
         "WORKER_REQUESTS_QUEUE": "p-req-k"}
    )  # fmt: skip
    assert worker.requests_queues == ("p-req-k",)
    assert (worker.activity_exchange, worker.control_exchange) == ("p-activity-xchg", "p-ctl-xchg")
    assert (worker.retry_exchange, worker.max_message_bytes) == (None, 16 * 2**20)
    least = WorkerEnvironment.from_variables({"WORKER_ID": "w", "WORKER_KEY": "a/b", "WORKER_AMQP_URI": "amqp://h"})
    assert (least.pool, least.requests_queues) == ("core", ("core-req-a/b",))
    assert least.activity_exchange == "core-activity-xchg"


@pytest.mark.parametrize("name", ["WORKER_ID", "WORKER_AMQP_URI", "WORKER_KEY"])
def test_missing_variable_is_named_with_the_remedy(name):
    with pytest.raises(ConfigurationError, match=f"{name}.*osrdyne groups env"):
        WorkerEnvironment.from_variables(without(name))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("WORKER_REQUESTS_QUEUES", ["[]", "[1]", "p-req-k"]),
        ("WORKER_PLACEMENT", ["shared"]),
        ("WORKER_MAX_MSG_SIZE", ["many", "0", "²", "9" * 5000]),
        ("WORKER_CONFIG", ["{", "[]", "[" * 100_000]),
        ("WORKER_KEY", ["x" * 256, "\udcff"]),
        ("WORKER_KEY_ESCAPED", ["%41"]),
    ],
)
def test_wrong_variable_is_named(name, values):
    for value in values:
        with pytest.raises(ConfigurationError, match=name.removesuffix("_ESCAPED")):
            WorkerEnvironment.from_variables({**worker_environment().to_variables(), name: value})


def test_uri_comes_from_a_file_and_one_that_cannot_be_read_is_named(tmp_path):
    file = tmp_path / "uri"
    variables = {**without("WORKER_AMQP_URI"), "WORKER_AMQP_URI_FILE": str(file)}
    for content in (None, b"\xff\xfe"):
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigurationError, match=f"WORKER_AMQP_URI_FILE: .*{file}"):
            WorkerEnvironment.from_variables(variables)
    file.write_text("amqp://from:file@host/\n")
    assert WorkerEnvironment.from_variables(variables).amqp_uri == "amqp://from:file@host/"


def test_replica_takes_the_hosts_name_as_its_id(monkeypatch):
    monkeypatch.setattr("os.uname", lambda: type("Uname", (), {"nodename": "pod-7"}))
    for value, worker_id in (("true", "pod-7"), ("", "w1"), ("0", "w1"), ("false", "w1"), ("False", "w1")):
        variables = {**worker_environment().to_variables(), "WORKER_ID_USE_HOSTNAME": value}
        assert WorkerEnvironment.from_variables(variables).worker_id == worker_id, value


FILES = TlsFiles("/etc/a b/ca+1.pem", "/c=d&e.pem", "/é#?%2F@.key", verify=False)


@pytest.mark.parametrize(
    ("uri", "files", "written"),
    [
        ("amqps://u:p%2F@h:5671/v%2Fw?a=5", "/ca.pem", "amqps://u:p%2F@h:5671/v%2Fw?a=5&cacertfile=/ca.pem"),
        ("amqps://h/?cafile=/old.pem", "/ca.pem", "amqps://h/?cacertfile=/ca.pem"),
        ("amqps://h/", None, "amqps://h/"),
        ("amqp://h/", "/ca.pem", "amqp://h/"),
    ],
    ids=["other parameters stay", "given authority counts", "no files", "no TLS"],
)
def test_files_are_parameters_of_the_uri(uri, files, written):
    assert with_tls(uri, TlsFiles(ca_file=files)) == written
    assert tls_of(with_tls("amqps://u:p@h:5671/v?heartbeat=5", FILES)) == FILES


def test_verify_that_means_nothing_is_refused():
    with pytest.raises(ValueError, match="verify_peer or verify_none"):
        tls_of("amqps://h/?verify=maybe")
    with pytest.raises(ValidationError, match="verify_peer or verify_none"):
        BrokerSettings(uri=SecretStr("amqps://h/?verify=no"))


def test_other_user_takes_the_place_of_the_first():
    parts = urlsplit(with_user("amqps://u:p@[::1]:5671/v?verify=verify_none", "osrdyne-a-+2F", "x/:@"))
    assert (unquote(parts.username or ""), unquote(parts.password or "")) == ("osrdyne-a-+2F", "x/:@")
    assert (parts.hostname, parts.port, parts.path, parts.query) == ("::1", 5671, "/v", "verify=verify_none")


def test_workers_get_the_files_of_the_controller_unless_they_have_a_uri_of_their_own():
    files = TlsFiles(ca_file="/ca.pem")
    settings = BrokerSettings(uri=SecretStr("amqps://h/"), tls=TlsSettings(ca_file="/ca.pem"))
    assert tls_of(settings.effective_worker_uri()) == settings.effective_tls() == files
    own = settings.model_copy(update={"worker_uri": SecretStr("amqps://inside/")})
    assert own.effective_worker_uri() == "amqps://inside/"
    for name in ("cacertfile", "cafile"):
        assert BrokerSettings(uri=SecretStr(f"amqps://h/?{name}=/ca.pem")).effective_tls() == files
