"""kill -9 of the daemon in the middle of a change: what the audit shows afterwards, on a real RabbitMQ."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from daemon_process import PATIENCE, DaemonProcess, MakeDaemon

LAUNCHER = Path(__file__).with_name("killed_change.py")


async def change(daemon: DaemonProcess, number: int) -> None:
    async with httpx.AsyncClient(base_url=daemon.api, trust_env=False, verify=False, timeout=PATIENCE) as http:
        document = {"profiles": [{"match": f"k{number}", "concurrency": 2}]}
        (await http.put("/v1/profiles", params={"author": f"a{number}"}, json=document)).raise_for_status()


async def active(daemon: DaemonProcess) -> str | None:
    """The pattern of the active document."""
    current = (await daemon.get("/v1/profiles"))["current"]
    return None if current is None else current["manifest"]["profiles"][0]["match"]


@pytest.mark.proves("api/daemon-killed-middle-change")
async def test_daemon_killed_in_a_change_leaves_a_record_of_how_far_it_came(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(launcher=[sys.executable, str(LAUNCHER)], audit={"required": True})
    shown: list[Any] = []
    moments = ("before_the_first_record", "before_the_change", "after_the_change", "before_the_answer")
    for number, moment in enumerate(moments):
        daemon.variables["KILL_AT"] = moment
        await daemon.start()
        shown.append((await active(daemon), (await daemon.get("/v1/audit"))["entries"]))
        with pytest.raises(httpx.TransportError):
            await change(daemon, number)
        assert await daemon.wait() == -signal.SIGKILL
    daemon.variables.clear()
    await daemon.start()
    await change(daemon, len(moments))
    entries = (await daemon.get("/v1/audit"))["entries"]
    assert [one for one, _ in shown] == [None, None, None, "k2"]
    assert await active(daemon) == "k4"
    # Newest first. Nothing is left of the first change; the second and the third look the same.
    assert [(one["author"], one["outcome"], one["status"]) for one in entries] == [
        ("a4", "done", 200), ("a3", "done", 200), ("a2", "unknown", None), ("a1", "unknown", None),
    ]  # fmt: skip
    assert shown[-1][1] == entries[2:]
    # The next record of this kind of document says whether a change with an unknown outcome was made.
    not_made, made, done, last = reversed(entries)
    assert not_made["digest_before"] == made["digest_before"] is None
    assert made["digest_before"] != done["digest_before"] is not None
    assert done["digest_after"] == last["digest_before"] != done["digest_before"]
