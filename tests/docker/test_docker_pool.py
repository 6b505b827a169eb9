"""A daemon as its users run it, with workers in containers: many groups, kill -9, a worker killed by hand."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from osrdyne.client import AsyncClient
from osrdyne.config.models import BrokerSettings
from osrdyne.protocol.pooled import PROCESS_KEY
from tests.acceptance.daemon_process import DaemonProcess, until
from tests.chaos.proxy import Proxy

EXAMPLES = Path(__file__).parents[2] / "workers" / "examples"
GROUPS = [f"infra={number}" for number in range(20)]
CALL_TIMEOUT = 400.0

pytestmark = pytest.mark.timeout(1200)


def containers(stack: str) -> dict[str, str]:
    """Container ids by key, of those that run."""
    form = '{{.ID}}\t{{.Label "osrdyne.key"}}'
    command = ["docker", "ps", "--no-trunc", "--filter", f"label=osrdyne.stack={stack}", "--format", form]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=180).stdout.splitlines()
    return {key: identity for identity, key in (line.split("\t") for line in lines)}


def remove_all(stack: str) -> None:
    command = ["docker", "ps", "-aq", "--filter", f"label=osrdyne.stack={stack}"]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=180).stdout.split()
    if found:
        subprocess.run(["docker", "rm", "-f", *found], check=True, capture_output=True, timeout=120)


@pytest.fixture
def stack() -> str:
    return f"test-{secrets.token_hex(4)}"


@pytest.fixture
async def engine() -> AsyncIterator[Proxy]:
    """The engine, for this daemon alone: it can be taken away."""
    async with Proxy("/var/run/docker.sock") as proxy:
        yield proxy


@pytest.fixture
async def daemon(
    broker_settings: BrokerSettings, pool_id: str, stack: str, controller_image: str, engine: Proxy, tmp_path: Path
) -> AsyncIterator[DaemonProcess]:
    """On the host, with light workers: the image of the daemon has the worker runtime, and no Spark to wait for."""
    options = {
        "image": controller_image, "entrypoint": ["osrdyne-worker"], "command": ["echo:app"], "pull": "never",
        "network": "host", "stack": stack, "mounts": [f"{EXAMPLES}:/examples:ro"],
        "environment": {"PYTHONPATH": "/examples"}, "memory": "256MiB", "host": f"tcp://127.0.0.1:{engine.port}",
    }  # fmt: skip
    daemon = DaemonProcess(
        tmp_path,
        amqp_uri=broker_settings.uri.get_secret_value(),
        management_uri=broker_settings.effective_management_uri(),
        pool=pool_id,
        settings={"lifecycle": {"max_concurrent_starts": 8}},
    )
    daemon.settings["driver"] = {"name": "docker", "options": options}
    daemon.write_settings()
    await daemon.start()
    yield daemon
    await daemon.close()
    remove_all(stack)
    assert "Traceback" not in daemon.log()


async def ask(client: AsyncClient, key: str) -> str:
    """The id of the worker that answered."""
    return (await client.call(key, "/echo", key.encode(), timeout=CALL_TIMEOUT)).worker_id


@pytest.mark.proves("docker/daemon-killed-containers-work")
async def test_restarted_daemon_finds_twenty_groups_and_restarts_none(daemon: DaemonProcess, stack: str) -> None:
    async with daemon.client() as client:
        answered = await asyncio.gather(*(ask(client, key) for key in GROUPS))
        before = containers(stack)
        await daemon.restart()
        again = await asyncio.gather(*(ask(client, key) for key in GROUPS))
    assert sorted(before) == sorted(GROUPS)
    assert containers(stack) == before
    assert again == answered


@pytest.mark.proves("docker/container-removed-hand")
async def test_worker_killed_by_hand_is_started_again_and_requests_wait_for_it(
    daemon: DaemonProcess, stack: str
) -> None:
    async with daemon.client() as client:
        first = await ask(client, "infra=1")
        killed = containers(stack)["infra=1"]
        subprocess.run(["docker", "rm", "-f", killed], check=True, capture_output=True, timeout=180)
        second = await ask(client, "infra=1")
    assert first != second
    assert containers(stack)["infra=1"] != killed


@pytest.mark.proves("docker/docker-engine-answer")
async def test_docker_away_for_a_while_costs_no_request_and_no_worker(
    daemon: DaemonProcess, stack: str, engine: Proxy
) -> None:
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


async def test_changed_options_replace_a_worker_that_goes_on_answering_meanwhile(
    daemon: DaemonProcess, stack: str
) -> None:
    async with daemon.client() as client:
        first = await ask(client, "infra=1")
        daemon.write_settings(driver={"options": {"environment": {"CHANGED": "yes"}}})
        await daemon.restart()
        async with asyncio.timeout(CALL_TIMEOUT):
            while await ask(client, "infra=1") == first:
                await asyncio.sleep(0.2)
    await until(lambda: len(containers(stack)) == 1, "the former worker is gone")


async def test_container_of_a_group_that_was_stopped_is_gone(daemon: DaemonProcess, stack: str) -> None:
    async with daemon.client() as client:
        await ask(client, "infra=1")
    assert daemon.osrdyne("groups", "stop", "infra=1").returncode == 0
    await until(lambda: containers(stack) == {}, "the container is gone")
    await daemon.until_gone("infra=1")


async def test_keys_share_a_container_that_is_replaced_when_it_is_killed(daemon: DaemonProcess, stack: str) -> None:
    """With pooled workers. The process reports the memory limit of its container."""
    daemon.write_settings(worker={"placement": "pooled", "pooled": {"spares": 0}})
    await daemon.restart()

    async def memory_share() -> float | None:
        [process] = (await daemon.get("/v1/processes"))["processes"]
        return process["memory_share"]

    async with daemon.client() as client:
        answered = await asyncio.gather(*(ask(client, key) for key in GROUPS))
        [process] = before = containers(stack)
        assert (process, len(set(answered))) == (PROCESS_KEY, len(GROUPS))
        assert await until(memory_share, "the process has reported its memory")
        await daemon.restart()
        assert await asyncio.gather(*(ask(client, key) for key in GROUPS)) == answered
        assert containers(stack) == before
        subprocess.run(["docker", "kill", *before.values()], check=True, capture_output=True, timeout=180)
        again = await asyncio.gather(*(ask(client, key) for key in GROUPS))
    assert not set(again) & set(answered)
    assert containers(stack).keys() == {PROCESS_KEY}
    assert containers(stack) != before
