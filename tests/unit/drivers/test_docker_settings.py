"""Options, names, labels and secrets of the Docker driver: the parts that need no engine."""

from __future__ import annotations

import io
import re
import tarfile
from dataclasses import replace

import pytest
from docker.errors import APIError
from requests import Response

from osrdyne.aio.clock import SystemClock
from osrdyne.config.models import DriverSettings
from osrdyne.drivers.base import DriverContext, Exit, InstanceId, InstanceState
from osrdyne.drivers.docker import DockerDriver
from osrdyne.drivers.docker.engine import Engine, root_cause
from osrdyne.drivers.docker.labels import Identity, read_exit, read_instance
from osrdyne.drivers.docker.launch import host_settings, refuse_loopback, start_error
from osrdyne.drivers.docker.options import DockerOptions, Mount
from osrdyne.drivers.docker.secret import owner_of, secret_archive, user_id
from osrdyne.drivers.registry import create_driver
from osrdyne.errors import ConfigurationError, DriverUnavailableError, StartFailedError
from osrdyne.testing.driver_conformance import AMQP_URI, KEY, SECRET, make_spec
from osrdyne.testing.keys import ODD_KEYS

CONTEXT = DriverContext(
    pool="blue", stack="broker:5672//", clock=SystemClock(), worker_command=("here",), worker_app="my:app"
)
IDENTITY = Identity("blue", "broker:5672//")
OPTIONS = DockerOptions(image="worker:1")


def refusal(status, text):
    response = Response()
    response.status_code = status
    return APIError("refused", response=response, explanation=text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({}, r"driver\.options\.image: Field required", id="no-image"),
        pytest.param({"imag": "x"}, r"driver\.options\.imag: there is no such option", id="unknown"),
        pytest.param({"mounts": ["/data"]}, r"driver\.options\.mounts\.0: '/data' is not a mount", id="mount"),
        pytest.param({"mounts": ["/a:b"]}, r"driver\.options\.mounts\.0: '/a:b' is not a mount", id="relative-target"),
        pytest.param({"environment": {"WORKER_KEY": "x"}}, r"environment: WORKER_KEY is set by osrdyne", id="ours"),
        pytest.param({"labels": {"osrdyne.key": "x"}}, r"labels: osrdyne\.key is set by osrdyne", id="label"),
        pytest.param({"host": "docker.sock"}, r"driver\.options\.host: must look like unix://", id="host"),
        pytest.param(
            {"tls_directory": "/tls"}, r"tls_directory: only allowed for a host that begins with tcp", id="tls"
        ),
        pytest.param({"memory": "1MiB"}, r"driver\.options\.memory: .*greater than or equal", id="little-memory"),
        pytest.param({"pull": "often"}, r"driver\.options\.pull: .*'always', 'missing' or 'never'", id="pull"),
    ],
)
def test_wrong_option_is_refused_with_its_path(options, message):
    image = {} if not options else {"image": "x"}
    with pytest.raises(ConfigurationError, match=message):
        create_driver(DriverSettings(name="docker", options={**image, **options}), CONTEXT)


def test_mounts_may_be_written_short_or_long():
    options = DockerOptions.model_validate(
        {"image": "x", "mounts": ["/srv/a:/a:ro", "cache:/c", {"source": "/b", "target": "/b"}]}
    )
    assert options.mounts == (
        Mount(source="/srv/a", target="/a", read_only=True),
        Mount(source="cache", target="/c"),
        Mount(source="/b", target="/b"),
    )


def test_source_without_a_slash_is_a_volume():
    options = OPTIONS.model_copy(update={"mounts": (Mount(source="cache", target="/c"),)})
    assert host_settings(options)["mounts"][0]["Type"] == "volume"


def test_limited_memory_leaves_no_swap():
    settings = host_settings(OPTIONS.model_copy(update={"memory": 2**30, "cpus": 1.5}))
    assert (settings["mem_limit"], settings["memswap_limit"], settings["nano_cpus"]) == (2**30, 2**30, 1_500_000_000)


async def test_local_engine_binds_the_pool_to_its_host():
    here = DockerDriver(OPTIONS.model_copy(update={"host": "unix:///run/docker.sock"}), CONTEXT)
    elsewhere = DockerDriver(OPTIONS.model_copy(update={"host": "tcp://engine:2376"}), CONTEXT)
    assert (here.same_host, elsewhere.same_host) == (True, False)
    await here.close()
    await elsewhere.close()


async def test_driver_is_made_without_the_certificates_that_the_environment_names(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
    driver = DockerDriver(OPTIONS, CONTEXT)
    [finding] = await driver.check()
    assert not finding.ok
    assert "The Docker engine at tcp://127.0.0.1:1 does not answer" in finding.message
    await driver.close()


async def hash_of(context=CONTEXT, **changes):
    driver = DockerDriver(OPTIONS.model_copy(update=changes), context)
    await driver.close()
    return driver.spec_hash()


async def test_hash_follows_what_shapes_a_worker_and_nothing_else():
    same = [await hash_of(), await hash_of(timeout=1.0), await hash_of(host="tcp://engine:2376")]
    different = [
        await hash_of(image="worker:2"),
        await hash_of(memory=2**30),
        await hash_of(replace(CONTEXT, worker_app="your:app")),
        await hash_of(replace(CONTEXT, worker_config={"a": 1})),
    ]
    assert len(set(same)) == 1
    assert len({same[0], *different}) == 5


def test_container_names_are_names_and_differ():
    names = [IDENTITY.container_name(key, slot) for key in ODD_KEYS.values() for slot in (0, 1)]
    names.append(Identity("blue", "other:5672//").container_name(KEY, 0))
    assert len(set(names)) == 2 * len(ODD_KEYS) + 1
    assert all(re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+", name) and len(name) < 180 for name in names)


def test_labels_are_read_back():
    for key in ODD_KEYS.values():
        spec = make_spec(key, slot=3)
        labels = IDENTITY.labels(spec, spec_hash="abc", started_at=1234.5)
        instance = read_instance("id", "/name", labels, state=InstanceState.RUNNING)
        assert instance is not None
        assert (instance.instance_id, instance.external_id) == (InstanceId("id"), "name")
        assert (instance.key, instance.slot, instance.worker_id) == (key, 3, spec.worker_id)
        assert (instance.spec_hash, instance.started_at) == ("abc", 1234.5)


def test_container_of_another_stack_pool_or_person_is_not_owned():
    labels = IDENTITY.labels(make_spec(), spec_hash="abc", started_at=1.0)
    name = f"/{IDENTITY.container_name(KEY, 0)}"
    assert IDENTITY.owns(name, labels)
    assert not Identity("green", IDENTITY.stack).owns(name, labels)
    assert not Identity("blue", "other:5672//").owns(name, labels)
    assert not IDENTITY.owns(name, {})
    assert not IDENTITY.owns(name, None)


def test_copy_of_a_container_is_not_ours():
    for key in ODD_KEYS.values():
        labels = IDENTITY.labels(make_spec(key), spec_hash="abc", started_at=1.0)
        assert IDENTITY.owns(IDENTITY.container_name(key, 0), labels)
        assert not IDENTITY.owns("/copy", labels)
        assert not IDENTITY.owns(IDENTITY.container_name(key, 1), labels)


def test_container_with_our_marks_and_nothing_else_is_not_a_worker():
    labels = {"osrdyne.pool": "blue", "osrdyne.stack": IDENTITY.stack}
    assert read_instance("id", "/mine", labels, state=InstanceState.RUNNING) is None


@pytest.mark.parametrize(
    ("state", "exit"),
    [
        pytest.param({"ExitCode": 3}, Exit(code=3), id="code"),
        pytest.param({"ExitCode": 143}, Exit(code=143, signal="SIGTERM"), id="signal"),
        pytest.param(
            {"ExitCode": 137},
            Exit(137, "SIGKILL", "killed from outside, or out of memory"),
            id="killed",
        ),
        pytest.param(
            {"ExitCode": 137, "OOMKilled": True},
            Exit(137, "SIGKILL", "out of memory: it took more than driver.options.memory allows"),
            id="out-of-memory",
        ),
        pytest.param({"ExitCode": 127, "Error": "no runc"}, Exit(127, None, "no runc"), id="error"),
    ],
)
def test_end_of_a_container_is_reported_as_it_was(state, exit):
    assert read_exit(state) == exit


@pytest.mark.parametrize(
    ("status", "said", "message"),
    [
        pytest.param(404, "No such image: x:1", r"Check|correct driver\.options\.image", id="image"),
        pytest.param(404, "network y not found", r"driver\.options\.network", id="network"),
        pytest.param(400, 'exec: "z": executable file not found in $PATH', r"driver\.options\.command", id="command"),
        pytest.param(400, "invalid mount config: bind source path does not exist", r"options\.mounts", id="mount"),
        pytest.param(400, "unable to find user u: no matching entries", r"driver\.options\.user", id="user"),
    ],
)
def test_refused_start_names_the_option(status, said, message):
    error = start_error(refusal(status, said), log_lines=("last",))
    assert isinstance(error, StartFailedError)
    assert re.search(message, error.message)
    assert error.log_lines == ("last",)


def test_container_that_vanished_while_it_was_started_is_tried_again():
    assert isinstance(start_error(refusal(404, "No such container: abc")), DriverUnavailableError)


@pytest.mark.parametrize("network", [None, "backend"])
def test_broker_on_loopback_is_refused_in_a_network_of_its_own(network):
    with pytest.raises(StartFailedError, match=r"Set broker\.worker_uri") as raised:
        refuse_loopback(OPTIONS.model_copy(update={"network": network}), f"amqp://me:{SECRET}@127.0.0.1:5672/")
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize("network", ["host", "container:broker"])
def test_broker_on_loopback_is_fine_where_loopback_is_shared(network):
    refuse_loopback(OPTIONS.model_copy(update={"network": network}), "amqp://localhost/")


def test_secret_is_a_file_for_its_owner_only():
    with tarfile.open(fileobj=io.BytesIO(secret_archive(AMQP_URI, owner=4711))) as archive:
        directory, file = archive.getmembers()
        content = archive.extractfile(file)
        assert content is not None
        assert content.read().decode() == AMQP_URI
    assert (directory.name, directory.mode, directory.uid) == ("run/osrdyne", 0o700, 4711)
    assert (file.name, file.mode, file.uid) == ("run/osrdyne/amqp-uri", 0o400, 4711)


def test_user_of_an_image_is_found_by_its_name():
    passwd = "root:x:0:0:root:/root:/bin/sh\nworker:x:4711:4711::/home/worker:/bin/sh\nbroken\n"
    assert [user_id(name, passwd) for name in ("worker", "root", "broken", "absent")] == [4711, 0, 0, 0]


def test_list_of_users_may_be_a_link():
    text = b"worker:x:4711:4711::/home/worker:/bin/sh\n"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("passwd")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))

    class Client:
        def inspect_container(self, _container_id):
            return {"Config": {"User": "worker"}}

        def get_archive(self, _container_id, path):
            if path == "/etc/passwd":
                return [b"an archive of the link"], {"linkTarget": "/nix/store/passwd"}
            return [buffer.getvalue()], {"linkTarget": ""}

    class FakeEngine:
        def call(self, function):
            return function(Client())

    assert owner_of(FakeEngine(), "id") == 4711


def test_damaged_list_of_users_is_an_error_of_the_engine():
    class Client:
        def inspect_container(self, _container_id):
            return {"Config": {"User": "worker"}}

        def get_archive(self, _container_id, _path):
            return [], None

    class FakeEngine:
        def call(self, function):
            return function(Client())

    with pytest.raises(DriverUnavailableError, match="damaged copy of /etc/passwd"):
        owner_of(FakeEngine(), "id")


def test_root_cause_is_what_the_system_said():
    try:
        try:
            raise FileNotFoundError(2, "No such file or directory")
        except OSError as inner:
            raise RuntimeError("Connection aborted.", inner) from None
    except RuntimeError as outer:
        outer.__context__ = None
        cause = root_cause(outer)
    assert isinstance(cause, FileNotFoundError)


def test_socket_that_may_not_be_used_is_reported_with_the_remedy(monkeypatch):
    def refuse(_engine):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Engine, "_connect", refuse)
    with pytest.raises(DriverUnavailableError, match=r"Permission denied\. Let the daemon's user use the socket"):
        Engine(OPTIONS, timeout=1.0).call(lambda client: client.version())
