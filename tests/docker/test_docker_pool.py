"""A daemon as its users run it, with workers in containers: many groups, kill -9, a worker killed by hand."""

import asyncio
import secrets
from pathlib import Path

import pytest

from osrdyne.client import AsyncClient
from tests.acceptance.daemon_process import DaemonProcess
from tests.chaos.proxy import Proxy
from tests.docker.conftest import docker, remove_containers

EXAMPLES = Path(__file__).parents[2] / "workers" / "examples"
GROUPS = [f"infra={number}" for number in range(20)]
CALL_TIMEOUT = 400.0

pytestmark = pytest.mark.timeout(1200)


def containers(stack: str) -> dict[str, str]:
    """Container ids by key, of those that run."""
    form = '{{.ID}}\t{{.Label "osrdyne.key"}}'
    lines = docker("ps", "--no-trunc", "--filter", f"label=osrdyne.stack={stack}", "--format", form).splitlines()
    return {key: identity for identity, key in (line.split("\t") for line in lines)}


@pytest.fixture
def stack():
    return f"test-{secrets.token_hex(4)}"


@pytest.fixture
async def engine():
    """The engine, for this daemon alone: it can be taken away."""
    async with Proxy("/var/run/docker.sock") as proxy:
        yield proxy


@pytest.fixture
async def daemon(broker, pool_id, stack, controller_image, engine, tmp_path):
    """On the host, with light workers: the image of the daemon has the worker runtime, and no Spark to wait for."""
    options = {
        "image": controller_image, "entrypoint": ["osrdyne-worker"], "command": ["echo:app"], "pull": "never",
        "network": "host", "stack": stack, "mounts": [f"{EXAMPLES}:/examples:ro"],
        "environment": {"PYTHONPATH": "/examples"}, "memory": "256MiB", "host": f"tcp://127.0.0.1:{engine.port}",
    }  # fmt: skip
    settings = {"lifecycle": {"max_concurrent_starts": 8}, "driver": {"name": "docker", "options": options}}
    at = {"amqp_uri": broker.amqp_uri, "management_uri": broker.management_uri}
    daemon = DaemonProcess(tmp_path, **at, pool=pool_id, settings=settings)
    await daemon.start()
    yield daemon
    await daemon.close()
    remove_containers(stack)
    assert "Traceback" not in daemon.log()


async def ask(client: AsyncClient, key: str) -> str:
    """The id of the worker that answered."""
    return (await client.call(key, "/echo", key.encode(), timeout=CALL_TIMEOUT)).worker_id


@pytest.mark.proves("docker/daemon-killed-containers-work")
async def test_restarted_daemon_finds_twenty_groups_and_restarts_none(daemon, stack):
    async with daemon.client() as client:
        answered = await asyncio.gather(*(ask(client, key) for key in GROUPS))
        before = containers(stack)
        await daemon.restart()
        again = await asyncio.gather(*(ask(client, key) for key in GROUPS))
    assert sorted(before) == sorted(GROUPS)
    assert (containers(stack), again) == (before, answered)


@pytest.mark.proves("docker/container-removed-hand")
async def test_worker_killed_by_hand_is_started_again_and_requests_wait_for_it(daemon, stack):
    async with daemon.client() as client:
        first = await ask(client, "infra=1")
        killed = containers(stack)["infra=1"]
        docker("rm", "-f", killed)
        second = await ask(client, "infra=1")
    assert first != second
    assert containers(stack)["infra=1"] != killed


@pytest.mark.proves("docker/docker-engine-answer")
async def test_docker_away_for_a_while_costs_no_request_and_no_worker(daemon, stack, engine):
    async with daemon.client() as client:
        first = await ask(client, "infra=1")
        before = containers(stack)
        engine.refusing = True
        engine.cut()
        new = asyncio.ensure_future(ask(client, "infra=2"))
        await daemon.until_event("driver call failed", action="start")
        assert await ask(client, "infra=1") == first
        assert (await daemon.get("/ready"))["ready"] is True
        engine.refusing = False
        await new
        assert await ask(client, "infra=1") == first
    assert containers(stack)["infra=1"] == before["infra=1"]
