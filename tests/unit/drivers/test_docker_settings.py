"""The Docker driver without an engine: options, names, labels and secrets."""

import io
import re
import tarfile
from dataclasses import replace

import pytest
import requests
from docker.errors import APIError

from osrdyne.aio.clock import SystemClock
from osrdyne.config.models import DriverSettings
from osrdyne.drivers.base import DriverContext, Exit, InstanceState
from osrdyne.drivers.docker import DockerDriver
from osrdyne.drivers.docker.engine import Engine
from osrdyne.drivers.docker.labels import Identity, read_exit, read_instance
from osrdyne.drivers.docker.launch import host_settings, refuse_loopback, start_error
from osrdyne.drivers.docker.options import DockerOptions
from osrdyne.drivers.docker.secret import owner_of, secret_archive, user_id
from osrdyne.drivers.registry import create_driver
from osrdyne.errors import ConfigurationError, DriverUnavailableError, StartFailedError
from osrdyne.testing.driver_conformance import AMQP_URI, KEY, SECRET, make_spec
from osrdyne.testing.keys import ODD_KEYS

CONTEXT = DriverContext(
    pool="blue", stack="broker:5672//", clock=SystemClock(), worker_command=("here",), worker_app="my:app"
)
IDENTITY, OTHER_STACK = Identity("blue", "broker:5672//"), Identity("blue", "other:5672//")
OPTIONS = DockerOptions(image="worker:1")


def refusal(status, text):
    response = requests.Response()
    response.status_code = status
    return APIError("refused", response=response, explanation=text)


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"image": None}, ".image"),
        ({"imag": "x"}, ".imag"),
        ({"mounts": ["/data"]}, ".mounts.0"),
        ({"mounts": ["/a:b"]}, ".mounts.0"),
        ({"environment": {"WORKER_KEY": "x"}}, ".environment: WORKER_KEY"),
        ({"labels": {"osrdyne.key": "x"}}, ".labels: osrdyne.key"),
        ({"host": "docker.sock"}, ".host"),
        ({"tls_directory": "/tls"}, ": tls_directory"),
        ({"memory": "1MiB"}, ".memory"),
        ({"pull": "often"}, ".pull"),
    ],
    ids=str,
)
def test_wrong_option_is_refused_with_its_path(options, path):
    with pytest.raises(ConfigurationError, match=re.escape(f"driver.options{path}")):
        create_driver(DriverSettings(name="docker", options={"image": "x", **options}), CONTEXT)


def test_mounts_may_be_written_short_or_long_and_limited_memory_leaves_no_swap():
    mounts = ["/srv/a:/a:ro", "cache:/c", {"source": "/b", "target": "/b"}]
    options = DockerOptions.model_validate({"image": "x", "mounts": mounts, "memory": 2**30, "cpus": 1.5})
    found = [(mount.source, mount.target, mount.read_only) for mount in options.mounts]
    assert found == [("/srv/a", "/a", True), ("cache", "/c", False), ("/b", "/b", False)]
    settings = host_settings(options)
    assert [mount["Type"] for mount in settings["mounts"]] == ["bind", "volume", "bind"]
    assert (settings["mem_limit"], settings["memswap_limit"], settings["nano_cpus"]) == (2**30, 2**30, 1_500_000_000)


async def test_local_engine_binds_the_pool_to_its_host_and_missing_certificates_are_found(monkeypatch, tmp_path):
    for host, is_here in (("unix:///run/docker.sock", True), ("tcp://engine:2376", False)):
        driver = DockerDriver(OPTIONS.model_copy(update={"host": host}), CONTEXT)
        assert driver.same_host is is_here
        await driver.close()
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
    driver = DockerDriver(OPTIONS, CONTEXT)
    [finding] = await driver.check()
    assert (finding.ok, "tcp://127.0.0.1:1" in finding.message) == (False, True)
    await driver.close()


async def test_hash_follows_what_shapes_a_worker_and_nothing_else():
    async def hash_of(context=CONTEXT, **changes):
        driver = DockerDriver(OPTIONS.model_copy(update=changes), context)
        await driver.close()
        return driver.spec_hash()

    same = {await hash_of(), await hash_of(timeout=1.0), await hash_of(host="tcp://engine:2376")}
    different = {await hash_of(image="worker:2"), await hash_of(memory=2**30)}
    for changes in ({"worker_app": "your:app"}, {"worker_config": {"a": 1}}):
        different.add(await hash_of(replace(CONTEXT, **changes)))
    assert (len(same), len(same | different)) == (1, 5)


def test_container_names_are_names_and_differ():
    names = [IDENTITY.container_name(key, slot) for key in ODD_KEYS.values() for slot in (0, 1)]
    names.append(OTHER_STACK.container_name(KEY, 0))
    assert len(set(names)) == 2 * len(ODD_KEYS) + 1
    assert all(re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+", name) and len(name) < 180 for name in names)


@pytest.mark.parametrize("key", ODD_KEYS.values(), ids=ODD_KEYS)
def test_labels_are_read_back_and_name_the_only_container_that_is_ours(key):
    spec, name = make_spec(key, slot=3), IDENTITY.container_name(key, 3)
    labels = IDENTITY.labels(spec, spec_hash="abc", started_at=1234.5)
    names = (name, "/copy", "/name", IDENTITY.container_name(key, 1))
    assert [IDENTITY.owns(one, labels) for one in names] == [True, False, False, False]
    assert not (Identity("green", IDENTITY.stack).owns(name, labels) or OTHER_STACK.owns(name, labels))
    assert not (IDENTITY.owns(name, {}) or IDENTITY.owns(name, None))
    found = read_instance("id", "/name", labels, state=InstanceState.RUNNING)
    assert (found.instance_id, found.external_id, found.spec_hash, found.started_at) == ("id", "name", "abc", 1234.5)
    assert (found.key, found.slot, found.worker_id) == (key, 3, spec.worker_id)
    marks = {"osrdyne.pool": "blue", "osrdyne.stack": IDENTITY.stack}
    assert read_instance("id", "/mine", marks, state=InstanceState.RUNNING) is None


@pytest.mark.parametrize(
    ("state", "exit"),
    [
        ({"ExitCode": 3}, Exit(code=3)),
        ({"ExitCode": 143}, Exit(code=143, signal="SIGTERM")),
        ({"ExitCode": 137}, Exit(137, "SIGKILL", "killed from outside")),
        ({"ExitCode": 137, "OOMKilled": True}, Exit(137, "SIGKILL", "driver.options.memory")),
        ({"ExitCode": 127, "Error": "no runc"}, Exit(127, None, "no runc")),
    ],
    ids=["code", "signal", "killed", "out-of-memory", "error"],
)
def test_end_of_a_container_is_reported_as_it_was(state, exit):
    found = read_exit(state)
    assert (found.code, found.signal) == (exit.code, exit.signal)
    assert (exit.reason or "") in (found.reason or "")


def test_refused_start_names_the_option():
    said = {
        "image": (404, "No such image: x:1"),
        "network": (404, "network y not found"),
        "command": (400, 'exec: "z": executable file not found in $PATH'),
        "mounts": (400, "invalid mount config: bind source path does not exist"),
        "user": (400, "unable to find user u: no matching entries"),
    }
    for option, refused in said.items():
        error = start_error(refusal(*refused), log_lines=("last",))
        assert (type(error), error.log_lines) == (StartFailedError, ("last",))
        assert f"driver.options.{option}" in error.message
    vanished = start_error(refusal(404, "No such container: abc"))
    assert isinstance(vanished, DriverUnavailableError), "it is tried again"


def test_broker_on_loopback_is_refused_in_a_network_of_its_own():
    for network in (None, "backend"):
        with pytest.raises(StartFailedError, match=r"Set broker\.worker_uri") as raised:
            refuse_loopback(OPTIONS.model_copy(update={"network": network}), f"amqp://me:{SECRET}@127.0.0.1:5672/")
        assert SECRET not in str(raised.value)
    for shared in ("host", "container:broker"):
        refuse_loopback(OPTIONS.model_copy(update={"network": shared}), "amqp://localhost/")


def test_secret_is_a_file_for_its_owner_only():
    with tarfile.open(fileobj=io.BytesIO(secret_archive(AMQP_URI, owner=4711))) as archive:
        directory, file = archive.getmembers()
        assert archive.extractfile(file).read().decode() == AMQP_URI
    assert (directory.name, directory.mode, directory.uid) == ("run/osrdyne", 0o700, 4711)
    assert (file.name, file.mode, file.uid) == ("run/osrdyne/amqp-uri", 0o400, 4711)


def test_user_of_an_image_is_found_by_its_name():
    passwd = "root:x:0:0:root:/root:/bin/sh\nworker:x:4711:4711::/home/worker:/bin/sh\nbroken\n"
    assert [user_id(name, passwd) for name in ("worker", "root", "broken", "absent")] == [4711, 0, 0, 0]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("passwd")
        member.size = len(passwd)
        archive.addfile(member, io.BytesIO(passwd.encode()))
    link = ([b"an archive of the link"], {"linkTarget": "/nix/store/passwd"})
    engine = ImageOfWorker({"/etc/passwd": link, "/nix/store/passwd": ([buffer.getvalue()], {"linkTarget": ""})})
    assert owner_of(engine, "id") == 4711
    with pytest.raises(DriverUnavailableError, match="/etc/passwd"):
        owner_of(ImageOfWorker({"/etc/passwd": ([], None)}), "id")


class ImageOfWorker:
    """An engine that has an image with the user `worker`; `archives` are the files that it gives out, by their path."""

    def __init__(self, archives):
        self.archives = archives

    def call(self, function):
        return function(self)

    def inspect_container(self, _container_id):
        return {"Config": {"User": "worker"}}

    def get_archive(self, _container_id, path):
        return self.archives[path]


def test_socket_that_may_not_be_used_is_reported_as_the_system_said(monkeypatch):
    def refuse(_engine):
        raise requests.ConnectionError(RuntimeError("aborted", PermissionError(13, "Permission denied")))

    monkeypatch.setattr(Engine, "_connect", refuse)
    with pytest.raises(DriverUnavailableError, match="Permission denied"):
        Engine(OPTIONS, timeout=1.0).call(lambda client: client.version())
