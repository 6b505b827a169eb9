"""`worker.environment: reference`: the AMQP URI is in `WORKER_AMQP_URI` under every driver, and nowhere else."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from osrdyne.aio.clock import SystemClock
from osrdyne.cli.main import full_command_line
from osrdyne.config.models import BrokerSettings, DriverSettings, Settings, WorkerSettings
from osrdyne.drivers.base import DriverContext
from osrdyne.drivers.docker.driver import DockerDriver
from osrdyne.drivers.kubernetes.driver import KubernetesDriver
from osrdyne.drivers.kubernetes.manifests import Manifests
from osrdyne.drivers.kubernetes.options import KubernetesOptions
from osrdyne.drivers.registry import create_driver, driver_context, environment_warning
from osrdyne.drivers.subprocess.driver import SubprocessDriver
from osrdyne.drivers.systemd.driver import SystemdDriver
from osrdyne.errors import ConfigurationError
from osrdyne.testing.driver_harness import AMQP_URI, make_spec

MINIMAL = DriverContext(pool="p", stack="b:1//", clock=SystemClock(), worker_command=("w",), worker_app="a:b")
REFERENCE = replace(MINIMAL, uri_in_environment=True)
OPTIONS = {"subprocess": {}, "docker": {"image": "w:1"}, "systemd": {}, "kubernetes": {"image": "w:1"}}
NEEDED = {
    "WORKER_ID", "WORKER_KEY", "WORKER_POOL", "WORKER_AMQP_URI", "WORKER_REQUESTS_QUEUE", "WORKER_ACTIVITY_EXCHANGE",
}  # fmt: skip


def reference_settings(driver="subprocess", options=None, **broker):
    return Settings(
        driver=DriverSettings(name=driver, options=options or {}),
        worker=WorkerSettings(environment="reference"),
        broker=BrokerSettings(**broker),
    )


async def variables_under(name, context, monkeypatch, tmp_path):
    """What the driver gives to a worker, at the place where it hands it to its backend."""
    directory = {"subprocess": "state_directory", "systemd": "runtime_directory"}.get(name)
    options = OPTIONS[name] | ({directory: str(tmp_path)} if directory else {})
    driver = create_driver(DriverSettings(name=name, options=options), context)
    try:
        match driver:
            case DockerDriver():
                return driver._containers._variables(make_spec())
            case SystemdDriver():
                return driver._variables(make_spec())
            case KubernetesDriver():
                container = driver._manifests.deployment(make_spec())["spec"]["template"]["spec"]["containers"][0]
                return {one["name"]: one.get("value", AMQP_URI) for one in container["env"]}
            case SubprocessDriver():
                given = {}

                def popen(_command, *, env, **_more):
                    given.update(env)
                    raise FileNotFoundError(2, "no such program")

                monkeypatch.setattr("osrdyne.drivers.subprocess.launch.subprocess.Popen", popen)
                with pytest.raises(Exception, match="could not be started"):
                    await driver.start(make_spec())
                assert not [path for path in tmp_path.rglob("*") if path.is_file() and AMQP_URI in path.read_text()]
                return {key.decode(): value.decode() for key, value in given.items()}
    finally:
        await driver.close()


@pytest.mark.parametrize("name", OPTIONS)
async def test_reference_environment_has_the_uri_and_the_minimal_one_a_file(name, monkeypatch, tmp_path):
    given = await variables_under(name, REFERENCE, monkeypatch, tmp_path)
    assert given.keys() >= NEEDED
    assert given["WORKER_AMQP_URI"] == AMQP_URI
    assert "WORKER_AMQP_URI_FILE" not in given
    if name != "kubernetes":  # its value is a reference to a secret
        given = await variables_under(name, MINIMAL, monkeypatch, tmp_path)
        assert "WORKER_AMQP_URI_FILE" in given
        assert AMQP_URI not in given.values()


@pytest.mark.parametrize("name", OPTIONS)
async def test_change_of_the_environment_replaces_workers_and_the_default_does_not(name):
    drivers = [
        create_driver(DriverSettings(name=name, options=OPTIONS[name]), context) for context in (MINIMAL, REFERENCE)
    ]
    minimal, reference = [driver.spec_hash() for driver in drivers]
    assert minimal != reference
    assert MINIMAL.worker_shape == MINIMAL.worker_config
    for driver in drivers:
        await driver.close()


def test_pod_of_a_reference_worker_is_ready_without_a_file():
    def container(context):
        manifests = Manifests(KubernetesOptions(image="w:1"), context, spec_hash="h")
        return manifests.deployment(make_spec())["spec"]["template"]["spec"]["containers"][0]

    assert "readinessProbe" in container(MINIMAL)
    assert "readinessProbe" not in container(REFERENCE)


def test_docker_option_that_contradicts_is_refused_with_the_remedy():
    settings = reference_settings("docker", {"image": "w:1", "broker_uri": "file"})
    with pytest.raises(ConfigurationError, match=r"driver\.options\.broker_uri"):
        create_driver(settings.driver, driver_context(settings, clock=SystemClock()))


def test_password_of_the_daemon_in_every_environment_is_warned_of():
    assert "scoped_credentials" in (environment_warning(reference_settings(), manages_workers=True) or "")
    assert environment_warning(reference_settings(scoped_credentials=True), manages_workers=True) is None
    assert environment_warning(reference_settings(worker_uri="amqp://w:w@b/"), manages_workers=True) is None
    assert "no effect" in (environment_warning(reference_settings("noop"), manages_workers=False) or "")
    assert environment_warning(Settings(), manages_workers=True) is None
    result = CliRunner().invoke(full_command_line(), ["check-config", "--set", "worker.environment=reference"])
    assert (result.exit_code, "warning: worker.environment" in result.output) == (0, True)
