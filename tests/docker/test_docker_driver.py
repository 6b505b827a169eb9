"""What the Docker driver promises beyond the conformance suite: secrets, limits, refusals, and containers of others."""

import hashlib
import json
import secrets
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from osrdyne.aio.clock import SystemClock
from osrdyne.drivers.base import DriverContext, InstanceId, InstanceState
from osrdyne.drivers.docker import DockerDriver
from osrdyne.drivers.docker.labels import Identity
from osrdyne.drivers.docker.options import DockerOptions
from osrdyne.errors import DriverUnavailableError, SlotTakenError, StartFailedError
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.conformance_worker import Behaviour
from osrdyne.testing.driver_conformance import AMQP_URI, KEY, POOL, SECRET, clean_up, exited, is_ready, make_spec
from tests.docker.conftest import ROOT, docker

WORKER = ("python", "-m", "osrdyne.testing.conformance_worker")
LIMIT, DATA = 96 << 20, 48 << 20
READ_MEMORY = f"""
import json
from osrdyne_worker.pooled.memory import memory_limit
before = memory_limit()
data = bytearray(b"x") * {DATA}
after = memory_limit()
print(json.dumps([before.used, after.used, after.total, after.scope]))
"""


@pytest.fixture
def context():
    """A stack of the test's own, so that nothing of another test is in its way."""
    stack = f"test-{secrets.token_hex(4)}.example:5672//"
    return DriverContext(pool=POOL, stack=stack, clock=SystemClock(), worker_command=())


@pytest.fixture
def driver_with(context, conformance_image):
    """Drivers with these options; what they leave is removed."""

    @asynccontextmanager
    async def make(clock=None, **options):
        settings = DockerOptions.model_validate({"image": conformance_image, "command": WORKER, **options})
        driver = DockerDriver(settings, replace(context, clock=clock or context.clock))
        try:
            yield driver
        finally:
            await clean_up(driver)

    return make


@pytest.fixture
def container(context, conformance_image):
    """Makes containers that no driver has made; they are removed at the end."""
    made = []

    def make(*arguments, verb="run", command=("sleep", "600")):
        made.append(docker(verb, *(["-d"] if verb == "run" else []), *arguments, conformance_image, *command))
        return made[-1]

    yield make
    for identity in made:
        docker("rm", "-f", identity)


def labels_of(context, **changes):
    """The marks of a worker of this pool, as options of `docker run`."""
    identity = Identity(changes.get("pool", context.pool), changes.get("stack", context.stack))
    labels = identity.labels(make_spec(), spec_hash="abc", started_at=1.0)
    return [part for name, value in labels.items() for part in ("--label", f"{name}={value}")]


def start_time(container_id):
    return docker("inspect", "--format", "{{.State.Running}} {{.State.StartedAt}}", container_id)


async def test_secret_is_in_no_inspection_but_in_a_file_for_the_worker_alone(driver_with):
    """Unless the worker only knows the variable."""
    async with driver_with() as driver:
        started = await driver.start(make_spec())
        said = await is_ready(driver, started)
        assert SECRET not in docker("inspect", started.instance_id)
        assert said["variables"]["WORKER_AMQP_URI_FILE"] == "/run/osrdyne/amqp-uri"
        shown = docker("exec", started.instance_id, "stat", "-c", "%a %U", "/run/osrdyne/amqp-uri")
        assert shown == "400 worker"
    async with driver_with(broker_uri="env") as driver:
        said = await is_ready(driver, await driver.start(make_spec()))
        assert said["uri_sha256"] == hashlib.sha256(AMQP_URI.encode()).hexdigest()
        assert {"WORKER_AMQP_URI", "WORKER_AMQP_URI_FILE"} & said["variables"].keys() == {"WORKER_AMQP_URI"}


async def test_options_shape_the_container(driver_with, tmp_path):
    (tmp_path / "data").touch()
    options = {
        "environment": {"COLOUR": "blue"}, "cpus": 0.5, "memory": "64MiB", "labels": {"team": "a"}, "user": "0",
        "extra_hosts": {"broker.example": "192.0.2.1"}, "network": "none", "mounts": [f"{tmp_path}:/mnt:ro"],
    }  # fmt: skip
    async with driver_with(**options) as driver:
        started = await driver.start(make_spec())
        said = await is_ready(driver, started)
        inspected = json.loads(docker("inspect", started.instance_id))[0]
        limits = inspected["HostConfig"]
        assert said["variables"]["COLOUR"] == "blue"
        assert (limits["NanoCpus"], limits["Memory"], limits["MemorySwap"]) == (500_000_000, 2**26, 2**26)
        assert (limits["ExtraHosts"], limits["NetworkMode"]) == (["broker.example:192.0.2.1"], "none")
        assert (inspected["Config"]["User"], inspected["Config"]["Labels"]["team"]) == ("0", "a")
        assert docker("exec", started.instance_id, "ls", "/mnt") == "data"


@pytest.mark.proves("docker/worker-takes-more-memory")
async def test_worker_that_takes_too_much_memory_is_reported_as_out_of_memory(driver_with):
    async with driver_with(memory="64MiB") as driver:
        ended = await exited(driver, await driver.start(make_spec(behaviour=Behaviour.GREEDY)))
        assert ended.exit.signal == "SIGKILL"
        assert "out of memory" in str(ended.exit)  # an engine that missed it says "killed from outside, or" before it


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"init": False, "command": ["no-such-program"]}, r"driver\.options\.command", id="command"),
        pytest.param({"network": "no-such-network"}, r"driver\.options\.network", id="network"),
        pytest.param({"mounts": ["/no/such/directory:/data"]}, r"driver\.options\.mounts", id="mount"),
        pytest.param({"user": "unknown-user"}, r"driver\.options\.user", id="user"),
        pytest.param({"log_driver": "no-such-driver"}, r"driver\.options\.log_driver", id="log-driver"),
        pytest.param({"image": "no.such.registry.invalid/x:1", "pull": "never"}, r"No such image", id="never"),
        pytest.param({"image": "no.such.registry.invalid/x:1"}, r"cannot be pulled", id="missing"),
        pytest.param({"pull": "always"}, r"cannot be pulled", id="always"),
    ],
)
@pytest.mark.proves("docker/image-network-mount-user")
async def test_start_that_the_engine_refuses_leaves_nothing_and_names_the_option(driver_with, options, message):
    async with driver_with(**options) as driver:
        with pytest.raises(StartFailedError, match=message) as raised:
            await driver.start(make_spec())
        assert SECRET not in str(raised.value)
        assert await driver.list_instances() == []


@pytest.mark.proves("docker/container-name-labels-stack")
async def test_containers_of_others_are_neither_seen_nor_touched(driver_with, container, context):
    """Those of another pool or stack, a copy of a worker, and one that a person has started, by its name too."""
    name = f"osrdyne-test-person-{secrets.token_hex(4)}"
    labels = [labels_of(context, **change) for change in ({"pool": "other"}, {"stack": "other"}, {})]
    theirs = [*(container(*each) for each in labels), container("--name", name)]
    before = [start_time(each) for each in theirs]
    async with driver_with() as driver:
        assert await driver.list_instances() == []
        for identity in map(InstanceId, [*theirs, name]):
            await driver.stop(identity, grace=0)
            await driver.remove(identity)
            assert await driver.logs(identity) == ()
    assert [start_time(each) for each in theirs] == before
    assert all(state.startswith("true ") for state in before)


@pytest.mark.proves("docker/container-name-labels-stack")
async def test_name_that_a_person_has_taken_is_a_taken_slot(driver_with, container, context):
    container("--name", Identity(context.pool, context.stack).container_name(KEY, 0))
    async with driver_with() as driver:
        with pytest.raises(SlotTakenError):
            await driver.start(make_spec())
        assert await driver.list_instances() == []


@pytest.fixture
def unfinished_start(container, context):
    """What a controller leaves that dies between creation and start."""
    name = Identity(context.pool, context.stack).container_name(KEY, 0)
    container(*labels_of(context), "--name", name, verb="create")


@pytest.mark.usefixtures("unfinished_start")
@pytest.mark.proves("docker/start-interrupted-halfway")
async def test_start_that_a_dead_controller_left_unfinished_frees_its_slot_in_the_end(driver_with):
    clock = VirtualClock()
    async with driver_with(clock, timeout=10) as driver:
        [unfinished] = await driver.list_instances()
        assert unfinished.state is InstanceState.RUNNING
        await driver.remove(unfinished.instance_id)
        await clock.advance(31)
        [unfinished] = await driver.list_instances()
        assert str(unfinished.exit) == "ended (its start was interrupted)"
        await driver.remove(unfinished.instance_id)
        assert await driver.list_instances() == []


@pytest.mark.usefixtures("unfinished_start")
async def test_stop_of_an_unfinished_start_removes_it(driver_with):
    async with driver_with() as driver:
        [unfinished] = await driver.list_instances()
        await driver.stop(unfinished.instance_id, grace=5)
        assert await driver.list_instances() == []


@pytest.mark.parametrize(
    ("options", "subject", "message"),
    [
        ({"image": "no-such-image", "pull": "never"}, "worker image", "Pull or build it"),
        ({"image": "no.such.registry.invalid/x"}, "worker image", "registry_config_file"),
        ({"network": "no-such-network"}, "worker network", "docker network create"),
        ({"registry_config_file": "/no/file"}, "registry credentials", "Correct"),
    ],
    ids=["image", "registry", "network", "credentials"],
)
@pytest.mark.proves("docker/image-network-mount-user")
async def test_doctor_names_the_fault(driver_with, options, subject, message):
    async with driver_with(**options) as driver:
        [wrong] = [finding for finding in await driver.check() if not finding.ok]
        assert wrong.subject == subject
        assert message in f"{wrong.message} {wrong.remedy}"


@pytest.mark.parametrize("host", ["unix:///no/such/socket", "tcp://127.0.0.1:1"], ids=["no-socket", "refused"])
async def test_engine_that_is_not_there_is_unavailable_and_doctor_reports_it(context, host):
    driver = DockerDriver(DockerOptions(image="x", host=host), context)
    with pytest.raises(DriverUnavailableError, match="Is the engine "):
        await driver.list_instances()
    [wrong] = await driver.check()
    assert (wrong.subject, wrong.ok) == ("docker engine", False)
    await driver.close()


@pytest.mark.proves("pooled/host-cgroup-process-short")
def test_limit_of_a_container_is_that_of_its_cgroup(conformance_image):
    """Its own cgroup, which it shares with no other container."""
    options = ("--volume", f"{ROOT}/workers:/workers:ro", "--env", "PYTHONPATH=/app:/workers")
    command = (conformance_image, "python", "-c", READ_MEMORY)
    printed = docker("run", "--rm", "--memory", str(LIMIT), *options, *command)
    before, after, total, scope = json.loads(printed)
    assert (total, scope.split()[0]) == (LIMIT, "cgroup")
    assert after - before > DATA // 2
    assert after <= LIMIT
