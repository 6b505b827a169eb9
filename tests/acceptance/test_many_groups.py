"""Many keys at once, and many groups at rest."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest
from daemon_process import DaemonProcess, MakeDaemon, until
from durable_caller import DurableCaller

pytestmark = [pytest.mark.nightly, pytest.mark.one_rabbitmq]

IDLE_SECONDS = 5.0
IDLE_LIMIT = 0.05
"""Of one core. The goal is 0.01; the limit only distinguishes an idle daemon from a polling one, on any machine."""


async def require(daemon: DaemonProcess, keys: list[str]) -> None:
    """A one-way request for each key at once, and every group is bound."""
    async with daemon.client() as client:
        await asyncio.gather(*(client.cast(key, "/echo") for key in keys))

    async def all_bound() -> bool:
        groups = await daemon.groups()
        return all(key in groups and groups[key]["queue"]["bound"] for key in keys)

    await until(all_bound, f"{len(keys)} groups are bound", interval=0.5)


async def test_burst_of_new_keys_is_bound_as_a_whole(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(driver="noop")
    await daemon.start()
    await require(daemon, [f"key {number}" for number in range(200)])


@pytest.mark.proves("reference-defects/3-one-busy-key")
async def test_key_that_loads_slowly_delays_no_other(
    make_daemon: MakeDaemon, caller: DurableCaller, tmp_path: Path
) -> None:
    daemon, gate = make_daemon(lifecycle={"max_concurrent_starts": 2}), tmp_path / "gate"
    daemon.set_faults({"slow": {"until": str(gate)}})
    await daemon.start()
    slow = await caller.send("slow")
    await daemon.until_event("worker started", key="slow")
    await asyncio.gather(*(caller.info(f"key {number}") for number in range(4)))
    gate.touch()
    assert (await caller.answer(slow)).status == "ok"


async def test_idle_daemon_with_many_groups_rests(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(driver="noop")
    await daemon.start()
    await require(daemon, [f"key {number}" for number in range(1000)])
    process = psutil.Process(daemon.pid)

    async def rests() -> bool:
        before = process.cpu_times()
        await asyncio.sleep(IDLE_SECONDS)
        after = process.cpu_times()
        share = (after.user + after.system - before.user - before.system) / IDLE_SECONDS
        print(f"a daemon with 1000 groups takes {share:.2%} of a core")
        return share < IDLE_LIMIT

    await until(rests, "the daemon rests")
