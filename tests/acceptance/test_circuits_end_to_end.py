"""A backend that fails, behind several groups: its circuit opens, probes and closes, and outlives its leader.

On RabbitMQ, with real workers; the leader is killed while the circuit is open and half open.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, until
from managed_callers import LONG, apply, managed, numbered, until_passed_on

SAMPLES = 4
HOUR = 3_600_000
CIRCUITS: dict[str, Any] = {
    "circuitCheckEnabled": True,
    "statisticsUpdateEnabled": True,
    "errorThresholdPercentage": 50,
    "minQueueSampleCount": SAMPLES,
    "openToHalfOpen": {"enabled": True, "interval": HOUR},
    "unlockSampleQueues": {"enabled": True, "interval": 600_000},
    "unlockQueues": {"enabled": True, "interval": 200},
}
KEYS = [f"g{number}" for number in range(SAMPLES)]


def configure(daemon: DaemonProcess, directory: Path, **changes: object) -> None:
    (directory / "circuits.json").write_text(json.dumps(CIRCUITS | changes))
    done = daemon.osrdyne("circuits", "config", "apply", str(directory / "circuits.json"), "--author", "test")
    assert done.returncode == 0, done.stderr


async def circuit(daemon: DaemonProcess) -> dict[str, Any]:
    circuits = (await daemon.get("/v1/circuits/_all"))["circuits"]
    return next((one for one in circuits if one["route"] == "upstream"), {"status": "closed"})


async def until_state(daemon: DaemonProcess, state: str) -> None:
    async def reached() -> bool:
        return (await circuit(daemon))["status"] == state

    await until(reached, f"the circuit is {state}", timeout=LONG)


@pytest.mark.nightly
@pytest.mark.proves("circuits/leader-dies-probe-under", "circuits/requests-route-fail-circuit")
async def test_circuit_of_a_failing_backend_opens_probes_and_closes(make_daemon, answers, tmp_path):
    down, hangs = tmp_path / "down", tmp_path / "hangs"
    backend = json.dumps({"directory": str(tmp_path)}).encode()
    daemon = managed(make_daemon)
    await daemon.start()
    apply(daemon, tmp_path, {"upstream": "FROM /messages/* INTO $upstream"})
    configure(daemon, tmp_path)

    def served():
        """The names of the requests that ran."""
        return (tmp_path / "served").read_text().splitlines()

    async def send(prefix, count):
        names = {key: numbered(f"{prefix} {key}", count) for key in KEYS}
        for key, mine in names.items():
            await answers.send("any", mine, key=key, path="/backend", body=backend)
        return [name for mine in names.values() for name in mine]

    down.touch()
    failing = await send("failing", 1)
    await until_state(daemon, "open")
    opened = await circuit(daemon)
    assert (opened["failures"], opened["paused"]) == (SAMPLES, len(KEYS))
    await until(lambda: len(daemon.events("group paused")) == len(KEYS), "all groups are paused")
    order = [event["key"] for event in daemon.events("group paused")]
    held = await send("held", 3)
    # Otherwise the next leader would forward again what was not acknowledged yet, and it would run twice.
    await until_passed_on(daemon, len(failing) + len(held), route="upstream")
    await daemon.restart()
    again = await circuit(daemon)
    assert [again[name] for name in ("status", "paused", "since")] == ["open", len(KEYS), opened["since"]]
    assert len(served()) == len(failing)

    hangs.touch()
    down.unlink()
    configure(daemon, tmp_path, openToHalfOpen={"enabled": True, "interval": 100})
    await until(lambda: len(served()) == len(failing) + 1, "a probe runs", timeout=LONG)
    await daemon.restart()
    await until_state(daemon, "half_open")
    assert (len(served()), (await circuit(daemon))["paused"]) == (len(failing) + 1, len(KEYS))
    hangs.unlink()
    await until_state(daemon, "closed")
    await answers.until_served([*failing, *held], timeout=LONG)
    await until(lambda: len(daemon.events("group resumed")) == len(KEYS), "all groups are resumed", timeout=LONG)
    assert [event["key"] for event in daemon.events("group resumed")] == order
    assert (answers.statuses(failing), answers.statuses(held)) == ({"error"}, {"ok"})
    assert len(set(served())) == len(served())
    assert answers.repeated() == 0
