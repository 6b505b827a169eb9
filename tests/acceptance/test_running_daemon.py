"""One daemon for all tests: keys of any bytes, late requests, workers that are killed, hang or cannot start."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from daemon_process import PATIENCE, DaemonProcess, until
from durable_caller import DurableCaller

from osrdyne.client import StartFailedError, StartProgress
from osrdyne.testing.keys import ODD_KEYS

SETTINGS = {"worker": {"silence_timeout": "10s", "stop_grace": "1s"}, "lifecycle": {"max_concurrent_starts": 3}}


@pytest.fixture
def gate(tmp_path):
    """A request to `/wait` runs until this file exists."""
    return tmp_path / "gate"


async def sent_and_running(daemon: DaemonProcess, caller: DurableCaller, key: str, gate: Path) -> str:
    """A request that runs until the gate is there."""
    request = await caller.send(key, "/wait", {"file": str(gate)})
    await daemon.until_group(key, lambda group: group["workers"][0]["state"] == "busy", "it is busy")
    return request


@pytest.mark.proves("requests/key-meaning-application")
async def test_every_odd_key_gets_a_worker_of_its_own(shared_daemon, shared_caller):
    async with shared_daemon.watching_for_twins():
        infos = dict(zip(ODD_KEYS, await asyncio.gather(*map(shared_caller.info, ODD_KEYS.values())), strict=True))
    assert len({one["pid"] for one in infos.values()}) == len(ODD_KEYS)
    assert {worker.key for worker in shared_daemon.workers()} >= set(ODD_KEYS.values())
    assert set(await shared_daemon.groups()) >= set(ODD_KEYS.values())


@pytest.mark.proves("requests/worker-takes-request-time")
async def test_request_that_expires_behind_a_long_one_is_answered(shared_daemon, shared_caller, gate):
    await shared_caller.info("late")
    long = await sent_and_running(shared_daemon, shared_caller, "late", gate)
    late = await shared_caller.call("late", "/info", expiration=0.5)
    assert late.status == "expired"
    gate.touch()
    assert (await shared_caller.answer(long)).status == "ok"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
@pytest.mark.proves("workers/worker-dies-during-request", "workers/worker-hangs-disconnected")
async def test_killed_or_hanging_worker_is_replaced_and_its_request_answered(
    shared_daemon, shared_caller, gate, number
):
    key = number.name
    before = (await shared_caller.info(key))["pid"]
    request = await sent_and_running(shared_daemon, shared_caller, key, gate)
    os.kill(int(str(before)), number)
    gate.touch()
    assert (await shared_caller.answer(request)).status == "ok"
    assert shared_daemon.pids(key) == [(await shared_caller.info(key))["pid"]] != [before]
    hangs = shared_daemon.events("worker hangs", key=key, why="it did not answer")
    assert bool(hangs) == (number is signal.SIGSTOP)


@pytest.mark.proves("workers/coroutine-handler-blocks-worker")
async def test_handler_that_blocks_a_worker_is_named_to_the_caller_and_in_the_logs(shared_daemon, shared_caller):
    shared_daemon.set_faults({"blocked": {"runtime": {"blocked_timeout": 5}}})
    answer = await shared_caller.call("blocked", "/block", {"seconds": 600})
    assert (answer.status, "block of '/block'" in str(answer.detail)) == ("poison", True)
    [ended] = shared_daemon.events("worker ended", key="blocked", component="worker_actions")  # it blocks no second one
    assert "block of '/block'" in str(ended["reason"])
    assert "event loop blocked" in shared_daemon.osrdyne("groups", "logs", "blocked", "--previous").stdout
    assert await shared_caller.info("blocked")
    shared_daemon.set_faults({})


@pytest.mark.proves("workers/worker-start")
async def test_group_that_cannot_start_answers_and_recovers(shared_daemon, shared_caller):
    pid = (await shared_caller.info("other"))["pid"]
    shared_daemon.set_faults({"broken": {"exit": 3, "says": "cannot open the data of this key"}})
    async with shared_daemon.client(default_timeout=PATIENCE) as client:
        with pytest.raises(StartFailedError, match="exit code 3") as caught:
            await client.call("broken", "/info")
        assert "cannot open the data of this key" in caught.value.log_lines
        assert caught.value.retry_after is not None
        with pytest.raises(StartFailedError):  # at once, without another attempt
            await client.call("broken", "/info")
        assert len(shared_daemon.events("worker started", key="broken")) == 1
        assert (await client.call("other", "/info")).json()["pid"] == pid
        shared_daemon.set_faults({})

        async def recovered():
            return (await client.call("broken", "/info", raise_on_error=False)).ok

        await until(recovered, "a request after the back-off starts it", interval=1.0)
    assert len(shared_daemon.events("worker started", key="broken")) == 2


@pytest.mark.proves("reference-defects/3-one-busy-key")
async def test_key_that_loads_slowly_delays_no_other(shared_daemon, shared_caller, gate):
    """Its caller learns that it starts; one of a running key is answered before the client asks."""
    shared_daemon.set_faults({"slow": {"until": str(gate)}})
    seen: list[StartProgress] = []
    silent: list[StartProgress] = []
    async with shared_daemon.client(default_timeout=PATIENCE) as client:
        slow = asyncio.create_task(client.call("slow", "/info", on_starting=seen.append))
        await until(lambda: seen and seen[-1].position == 0, "its caller learns that it starts")
        await asyncio.gather(*(shared_caller.info(f"key {number}") for number in range(4)))
        gate.touch()
        assert (await slow).status == "ok"
        await client.call("slow", "/info", on_starting=silent.append)
    assert silent == []
    shared_daemon.set_faults({})
