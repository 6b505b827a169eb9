"""The pool under attack: a RabbitMQ of its own, proxies in front of it, and two daemons on one host.

A managed pool has rules: routes in force, so that each request goes through the leader, and a group has several queues.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from yarl import URL

from osrdyne.broker.management.models import Permissions
from tests.acceptance.daemon_process import OSRDYNE, DaemonProcess
from tests.chaos.clocks import WrongClock
from tests.chaos.nodes import Node, managing, running_node
from tests.chaos.proxy import Proxy
from tests.chaos.rules import Rules

POOL = "chaos"
DAEMONS = ("daemon-a", "daemon-b")
LINKS = (*DAEMONS, "workers", "clients")
"""Each of them reaches RabbitMQ through a proxy of its own."""
USERS = ("daemons", "workers")
"""Users of RabbitMQ, whose permissions may be taken away."""
ALL = Permissions(".*", ".*", ".*")
WORKER = OSRDYNE.with_name("osrdyne-worker")
LOOK_TIMEOUT = 2.0
SETTINGS: Mapping[str, Any] = yaml.safe_load("""
broker: {heartbeat: 5s, leader_heartbeat: 2s, connect_timeout: 5s, rpc_timeout: 10s, management_timeout: 5s}
worker: {app: "workers.examples.echo:app", concurrency: 2, processing_timeout: 20s, stop_grace: 5s}
lifecycle:
  {settle_delay: 1s, unbind_delay: 2s, stop_delay: 1s, start_attempts: 3, start_timeout: 60s, resync_interval: 5s}
requests: {ttl: 60s, delivery_limit: 5, poison_time: 60s}
log: {level: info}
""")
POOLED: Mapping[str, Any] = yaml.safe_load("""
placement: pooled
pooled:
  {spares: 0, keys_per_process: 3, max_processes: 3, process_timeout: 10s, max_age: 45s, max_requests: 100}
profiles:
  - {match: "infra={infra},timetable={timetable}", concurrency: 1}
  - {match: "%41", placement: dedicated}
""")
"""Few places, so that processes fill, and keys wait for one; processes that are replaced under load; and one key each
whose process has other settings, and whose worker has a process of its own."""


@dataclass
class PoolUnderAttack:
    broker: Node
    proxies: Mapping[str, Proxy]
    clocks: Mapping[str, WrongClock]
    daemons: tuple[DaemonProcess, ...]
    pooled: bool
    killed: set[DaemonProcess] = field(default_factory=set)
    """Daemons that are down because we have killed them."""

    def through(self, proxy: str) -> str:
        """The AMQP URI of the broker behind this proxy."""
        return _behind(self.broker.amqp_uri, self.proxies[proxy])

    async def leaders(self) -> list[DaemonProcess]:
        """The daemons that report that they lead."""
        says = await asyncio.gather(*map(_leads, self.daemons))
        return [daemon for daemon, leads in zip(self.daemons, says, strict=True) if leads]

    def logs_with_tracebacks(self) -> list[str]:
        """Files of daemons and workers; whatever was done to them, nothing may have surprised them."""
        workers = sorted((self.daemons[0].state / "logs").glob("*"))
        logs = [*(daemon.log_file for daemon in self.daemons), *workers]
        return [str(log) for log in logs if log.exists() and "Traceback" in log.read_text(errors="replace")]

    def count_events(self, event: str) -> int:
        """How often the daemons have logged it."""
        return sum(len(daemon.events(event)) for daemon in self.daemons)

    def workers(self) -> list[tuple[str, int]]:
        """Key and process id of each living worker. Pooled workers share processes, of which there may be several:
        each counts as one of its own."""
        living = self.daemons[0].workers()
        return [(f"{worker.key} {worker.pid}" if self.pooled else worker.key, worker.pid) for worker in living]

    async def keys_twice(self) -> set[str]:
        """Keys that the leader sees in two processes of pooled workers.

        A process that is being replaced does not count: it keeps its keys until their new workers are ready, and these
        wait as long as they cannot reach RabbitMQ."""
        if not self.pooled:
            return set()
        found: set[tuple[str, str]] = set()
        for leader in await self.leaders():
            with suppress(httpx.HTTPError, json.JSONDecodeError):
                processes = (await leader.get("/v1/processes")).get("processes", [])
                staying = [process for process in processes if process["retiring"] is None]
                found.update((key, process["worker_id"]) for process in staying for key in process["keys"])
        return {key for key, count in Counter(key for key, _ in found).items() if count > 1}


async def _leads(daemon: DaemonProcess) -> bool:
    try:
        async with daemon.http(LOOK_TIMEOUT) as http:
            return bool((await http.get("/v1/leadership")).json()["leading"])
    except (httpx.HTTPError, json.JSONDecodeError):
        return False


@asynccontextmanager
async def pool_under_attack(
    directory: Path, *, image: str | None, rules: Rules | None, pooled: bool = False
) -> AsyncIterator[PoolUnderAttack]:
    """Everything is running, and one of the daemons leads. RabbitMQ is a container of `image`, or the one installed.

    A pool without rules is a direct one.
    """
    async with running_node(directory, image=image) as broker, AsyncExitStack() as stack:
        proxies = {name: await stack.enter_async_context(Proxy(broker.amqp_port)) for name in LINKS}
        proxies["management"] = await stack.enter_async_context(Proxy(broker.management_port))
        clocks = {name: WrongClock(directory / f"{name}.clock") for name in (*DAEMONS, "workers")}
        async with managing(broker) as management:
            for user in USERS:
                await management.put_user(user, password=user)
                await management.put_permissions(user, ALL)
        daemons = tuple(_make_daemon(directory, name, broker, proxies, clocks) for name in DAEMONS)
        for daemon in daemons:
            if pooled:
                daemon.write_settings(worker=POOLED)
            if rules is not None:
                daemon.write_settings(pool={"kind": "managed"}, requests=rules.settings())
        try:
            await daemons[0].start()
            if rules is not None:
                async with daemons[0].http() as http:
                    changed = await http.put("/v1/routes", params={"author": POOL}, json={"routes": rules.routes()})
                    changed.raise_for_status()
            daemons[1].launch()
            yield PoolUnderAttack(broker, proxies, clocks, daemons, pooled)
        finally:
            for daemon in daemons:
                await daemon.close()


def _make_daemon(
    directory: Path, name: str, broker: Node, proxies: Mapping[str, Proxy], clocks: Mapping[str, WrongClock]
) -> DaemonProcess:
    own = directory / name
    own.mkdir()
    state = directory / "state"
    worker = [*clocks["workers"].launcher, str(WORKER), str(SETTINGS["worker"]["app"])]
    daemon = DaemonProcess(
        own,
        amqp_uri=_behind(_as_user(broker.amqp_uri, "daemons"), proxies[name]),
        management_uri=_behind(broker.management_uri, proxies["management"]),
        pool=POOL,
        settings={**SETTINGS, "driver": {"options": {"command": worker, "state_directory": str(state)}}},
        launcher=clocks[name].launcher,
    )
    daemon.state = state / POOL
    daemon.write_settings(broker={"worker_uri": _behind(_as_user(broker.amqp_uri, "workers"), proxies["workers"])})
    return daemon


def _as_user(uri: str, user: str) -> str:
    return str(URL(uri).with_user(user).with_password(user))


def _behind(uri: str, proxy: Proxy) -> str:
    return str(URL(uri).with_port(proxy.port))
