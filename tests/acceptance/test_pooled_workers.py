"""Pooled workers with a real daemon, RabbitMQ and processes: many keys share one, and faults lose nothing."""

import asyncio
import os
import signal
from typing import Any

from daemon_process import WORKER, DaemonProcess, MakeDaemon, merged, until
from durable_caller import durable_caller

from osrdyne.protocol.pooled import PROCESS_KEY

KEYS = [f"key {number}" for number in range(20)]


def pooled(make_daemon: MakeDaemon, **settings: Any) -> DaemonProcess:
    # The memory of the machine that runs the tests must not decide how many processes there are.
    places = {"spares": 0, "process_timeout": "20s", "max_memory_used": None}
    base = {
        "driver": {"options": {"command": [WORKER, "workers.examples.echo:app"]}},
        "worker": {"placement": "pooled", "pooled": places},
        "lifecycle": {"start_attempts": 3, "max_concurrent_starts": 8},
    }
    return make_daemon(**merged(base, settings))


async def test_process_killed_under_load_loses_nothing(make_daemon, caller):
    daemon = pooled(make_daemon)
    await daemon.start()
    infos = await asyncio.gather(*map(caller.info, KEYS))
    assert {info["pid"] for info in infos} == set(daemon.pids(PROCESS_KEY))
    [process] = (await daemon.get("/v1/processes"))["processes"]
    assert (process["state"], process["keys"]) == ("ready", sorted(KEYS))
    for _ in range(3):
        await asyncio.gather(*(caller.send(key, "/sleep", {"seconds": 0.5}) for key in KEYS for _ in range(2)))
        before = daemon.pids(PROCESS_KEY)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        await until(lambda before=before: not set(before) & set(daemon.pids(PROCESS_KEY)), "the process is gone")
    await caller.until_all_answered()
    assert caller.statuses() == {"ok"}
    assert (await daemon.get("/v1/poison"))["total"] == 0


STEPS: dict[str, dict[str, object]] = {"worker is assigned": {"key": "k"}, "worker is released": {"key": "k"}}
"""What a daemon logs when a process has been asked to begin or to end a worker."""


async def kill_at(daemon: DaemonProcess, event: str, fields: dict[str, object]) -> None:
    """Kill the daemon at this step, with requests coming in, and start it again."""
    async with durable_caller(daemon.amqp_uri, daemon.pool) as caller:
        await daemon.start()
        await caller.send("other")
        await caller.send("k")
        await daemon.until_event(event, **fields)
        daemon.kill()
        for key in ("k", "other", "new"):
            await caller.send(key)
        await daemon.start()
        await caller.until_all_answered()
        assert caller.statuses() == {"ok"}, event
        assert len(daemon.pids(PROCESS_KEY)) == 1, event


async def test_daemons_killed_in_an_assign_and_a_release_lose_nothing(make_daemon, pool_id):
    """Each step in a pool of its own, side by side."""
    ending = {"unbind_delay": "1s", "extra_lifetime": "100ms"}
    async with asyncio.TaskGroup() as group:
        for number, (event, fields) in enumerate(STEPS.items()):
            daemon = pooled(make_daemon, pool=f"{pool_id}_{number}", lifecycle=ending)
            group.create_task(kill_at(daemon, event, fields))
