"""Keys are data: whatever bytes a key has, it gets a worker of its own, which knows the key as the caller wrote it."""

from __future__ import annotations

import asyncio

import pytest
from daemon_process import MakeDaemon
from durable_caller import DurableCaller

from osrdyne.testing.keys import ODD_KEYS


@pytest.mark.proves("requests/key-meaning-application")
async def test_every_odd_key_gets_a_worker_of_its_own(make_daemon: MakeDaemon, caller: DurableCaller) -> None:
    daemon = make_daemon(lifecycle={"max_concurrent_starts": 3})
    await daemon.start()
    async with daemon.watching_for_twins():
        infos = dict(zip(ODD_KEYS, await asyncio.gather(*map(caller.info, ODD_KEYS.values())), strict=True))
    assert len({one["pid"] for one in infos.values()}) == len(ODD_KEYS)
    assert {worker.key for worker in daemon.workers()} == set(ODD_KEYS.values())
    assert set(await daemon.groups()) == set(ODD_KEYS.values())
