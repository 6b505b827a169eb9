"""kill -9 of the daemon in the middle of a change: what the audit shows afterwards, on a real RabbitMQ."""

import signal
import sys
from pathlib import Path

import httpx
import pytest
from daemon_process import DaemonProcess

LAUNCHER = Path(__file__).with_name("killed_change.py")


async def change(daemon: DaemonProcess, number: int) -> None:
    async with daemon.http() as http:
        document = {"profiles": [{"match": f"k{number}", "concurrency": 2}]}
        (await http.put("/v1/profiles", params={"author": f"a{number}"}, json=document)).raise_for_status()


async def active(daemon: DaemonProcess) -> str | None:
    """The pattern of the active document."""
    current = (await daemon.get("/v1/profiles"))["current"]
    return None if current is None else current["manifest"]["profiles"][0]["match"]


@pytest.mark.proves("api/daemon-killed-middle-change")
async def test_daemon_killed_in_a_change_leaves_a_record_of_how_far_it_came(make_daemon):
    daemon = make_daemon(launcher=[sys.executable, str(LAUNCHER)], audit={"required": True})
    for number, moment in enumerate(("before_the_change", "after_the_change")):
        daemon.variables["KILL_AT"] = moment
        await daemon.start()
        assert await active(daemon) is None
        with pytest.raises(httpx.TransportError):
            await change(daemon, number)
        assert await daemon.wait() == -signal.SIGKILL
    daemon.variables.clear()
    await daemon.start()
    assert await active(daemon) == "k1"
    await change(daemon, 2)
    entries = (await daemon.get("/v1/audit"))["entries"]
    assert await active(daemon) == "k2"
    # Newest first. The first change and the second look the same.
    assert [(one["author"], one["outcome"], one["status"]) for one in entries] == [
        ("a2", "done", 200),
        ("a1", "unknown", None),
        ("a0", "unknown", None),
    ]
    # The next record of this kind of document says whether a change with an unknown outcome was made.
    last, made, not_made = entries
    assert not_made["digest_before"] == made["digest_before"] is None
    assert last["digest_before"] is not None
