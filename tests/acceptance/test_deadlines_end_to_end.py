"""Requests that are not served in time, or must not start anything, are answered by the controller."""

from __future__ import annotations

from pathlib import Path

import pytest
from daemon_process import MakeDaemon
from durable_caller import DurableCaller


@pytest.mark.proves("requests/worker-takes-request-time")
async def test_request_that_expires_behind_a_long_one_is_answered(
    make_daemon: MakeDaemon, caller: DurableCaller, tmp_path: Path
) -> None:
    daemon, gate = make_daemon(), tmp_path / "gate"
    await daemon.start()
    await caller.info("k")
    long = await caller.send("k", "/wait", {"file": str(gate)})
    late = await caller.call("k", "/info", expiration=0.5)
    assert late.status == "expired"
    assert "before a worker took it" in str(late.detail)
    gate.touch()
    assert (await caller.answer(long)).status == "ok"


@pytest.mark.nightly
async def test_request_that_must_not_start_a_worker_is_refused_until_one_runs(
    make_daemon: MakeDaemon, caller: DurableCaller
) -> None:
    daemon = make_daemon()
    await daemon.start()
    refused = await caller.call("k", no_activate=True)
    assert refused.status == "not-running"
    assert await daemon.groups() == {}
    await caller.info("k")
    assert (await caller.call("k", no_activate=True)).status == "ok"


@pytest.mark.proves("controller/daemon-runs")
async def test_request_without_a_daemon_expires_when_one_comes(make_daemon: MakeDaemon, caller: DurableCaller) -> None:
    daemon = make_daemon()
    await daemon.start()
    daemon.kill()
    request = await caller.send("k", expiration=0.2)
    await daemon.start()
    assert (await caller.answer(request)).status == "expired"
    assert daemon.workers() == []
