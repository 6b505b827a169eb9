"""A backend that fails, behind 20 groups: its circuit opens, probes and closes, and outlives its leader in each state.

On RabbitMQ, with real workers; the leader is killed while the circuit is closed, open and half open.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, MakeDaemon, until
from managed_callers import LONG, Answers, answers_of, apply, managed, numbered, until_passed_on

from osrdyne.config.models import BrokerSettings

GROUPS, EACH, SAMPLES = 20, 50, 200
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
KEYS = [f"g{number}" for number in range(GROUPS)]
POOLED: dict[str, Any] = {
    "driver": {
        "options": {
            "command": [str(Path(sys.executable).with_name("osrdyne-worker")), "tests.acceptance.gated_echo:app"]
        }
    },
    "worker": {
        "placement": "pooled",
        "concurrency": 4,
        "pooled": {"spares": 0, "process_timeout": "60s", "max_memory_used": None},
    },
}


@dataclass
class Backend:
    """What the requests of all groups need; `served` is every run of one, in order."""

    directory: Path

    @property
    def body(self) -> bytes:
        return json.dumps({"directory": str(self.directory)}).encode()

    def fail(self) -> None:
        (self.directory / "down").touch()

    def work(self) -> None:
        (self.directory / "down").unlink()

    def hang(self) -> None:
        (self.directory / "hangs").touch()

    def go_on(self) -> None:
        (self.directory / "hangs").unlink()

    @property
    def served(self) -> list[tuple[str, str]]:
        """Key and name."""
        return [(key, name) for key, _, name in self._runs]

    @property
    def repeated(self) -> list[tuple[str, str]]:
        """Names of requests that ran again, each with the mark of a possible duplicate: 0 or 1."""
        seen: set[str] = set()
        return [(name, mark) for _, mark, name in self._runs if name in seen or seen.add(name)]

    @property
    def _runs(self) -> list[list[str]]:
        return [line.split(" ", 2) for line in (self.directory / "served").read_text().splitlines()]


@pytest.fixture
async def answers(broker_settings: BrokerSettings, pool_id: str) -> AsyncIterator[Answers]:
    async with answers_of(broker_settings.uri.get_secret_value(), pool_id) as collected:
        yield collected


@pytest.fixture
def backend(tmp_path: Path) -> Backend:
    return Backend(tmp_path)


def configure(daemon: DaemonProcess, directory: Path, **changes: object) -> None:
    (directory / "circuits.json").write_text(json.dumps(CIRCUITS | changes))
    done = daemon.osrdyne("circuits", "config", "apply", str(directory / "circuits.json"), "--author", "test")
    assert done.returncode == 0, done.stderr


async def circuit(daemon: DaemonProcess) -> dict[str, Any]:
    circuits = (await daemon.get("/v1/circuits/_all"))["circuits"]
    return next((one for one in circuits if one["route"] == "upstream"), {"status": "closed"})


def stored_samples(daemon: DaemonProcess) -> int:
    stored = daemon.events("circuits stored")
    return stored[-1]["samples"] if stored else 0


async def until_state(daemon: DaemonProcess, state: str) -> None:
    async def reached() -> bool:
        return (await circuit(daemon))["status"] == state

    await until(reached, f"the circuit is {state}", timeout=LONG)


@pytest.mark.nightly
@pytest.mark.proves("circuits/leader-dies-probe-under", "circuits/requests-route-fail-circuit")
async def test_circuit_of_a_failing_backend_opens_probes_and_closes(
    make_daemon: MakeDaemon, answers: Answers, backend: Backend, tmp_path: Path
) -> None:
    daemon = managed(make_daemon)
    await daemon.start()
    apply(daemon, tmp_path, {"upstream": "FROM /messages/* INTO $upstream"})
    configure(daemon, tmp_path)

    async def send(prefix: str, count: int) -> list[str]:
        names = []
        for key in KEYS:
            mine = numbered(f"{prefix} {key}", count)
            await answers.send("any", mine, key=key, path="/backend", body=backend.body)
            names += mine
        return names

    first = await send("first", 1)
    await answers.until_served(first, timeout=LONG)

    async def counted() -> bool:
        return (await circuit(daemon)).get("successes") == GROUPS

    await until(counted, "the first requests are counted", timeout=LONG)
    # Killed while closed: the samples count for the next leader, too.
    await until(lambda: stored_samples(daemon) == GROUPS, "the samples are stored", timeout=LONG)
    await until_passed_on(daemon, len(first), route="upstream")
    daemon.kill()
    await daemon.start()
    await until(counted, "the first requests are counted still", timeout=LONG)
    backend.fail()
    second = await send("second", EACH)
    await until_state(daemon, "open")
    opened = await circuit(daemon)
    assert (opened["successes"] + opened["failures"], opened["paused"]) == (SAMPLES, GROUPS)
    await until(lambda: len(daemon.events("group paused")) == GROUPS, "all groups are paused")
    assert "circuit pauses it" in (await daemon.groups())[KEYS[0]]["reason"]
    order = [event["key"] for event in daemon.events("group paused")]

    # Otherwise the next leader would forward again what was not acknowledged yet, and it would run twice.
    await until_passed_on(daemon, len(second), route="upstream")
    daemon.kill()
    await daemon.start()
    again = await circuit(daemon)
    assert [again[name] for name in ("status", "paused", "since")] == ["open", GROUPS, opened["since"]]
    before = len(backend.served)
    assert GROUPS + SAMPLES // 2 < before < GROUPS * (EACH + 1)

    # The backend still fails: exactly one request passes, and the circuit opens again.
    configure(daemon, tmp_path, openToHalfOpen={"enabled": True, "interval": 100})
    await daemon.until_event("circuit changed", after="open", reason="the probe failed", timeout=LONG)
    configure(daemon, tmp_path)
    probes = len(daemon.events("circuit changed", after="half_open"))
    await until_state(daemon, "open")
    await until(lambda: len(backend.served) == before + probes, "the probes have run")

    # Killed while half open: the one probe that is under way passes, and closes the circuit for the next leader.
    backend.hang()
    backend.work()
    before = len(backend.served)
    configure(daemon, tmp_path, openToHalfOpen={"enabled": True, "interval": 100})
    await until(lambda: len(backend.served) == before + 1, "a probe runs", timeout=LONG)
    daemon.kill()
    await daemon.start()
    await until_state(daemon, "half_open")
    assert (len(backend.served), (await circuit(daemon))["paused"]) == (before + 1, GROUPS)
    backend.go_on()
    await until_state(daemon, "closed")
    await answers.until_served([*first, *second], timeout=LONG)
    # Groups whose queue is empty are asked, too, and pass the probe on.
    asked = list(dict.fromkeys(event["key"] for event in daemon.events("probe asked for")))
    assert asked == order[: len(asked)]
    await until(lambda: len(daemon.events("group resumed")) == GROUPS, "all groups are resumed", timeout=LONG)
    assert [event["key"] for event in daemon.events("group resumed")] == order
    assert {name for _, name in backend.served} == {*first, *second}
    assert backend.repeated == []
    assert answers.repeated() == 0


@pytest.mark.proves("circuits/group-open-circuit-worker")
async def test_pooled_worker_for_a_probe_begins_paused(
    make_daemon: MakeDaemon, answers: Answers, backend: Backend, tmp_path: Path
) -> None:
    daemon = managed(make_daemon, **POOLED)
    await daemon.start()
    apply(daemon, tmp_path, {"upstream": "FROM /messages/* INTO $upstream"})
    configure(daemon, tmp_path, minQueueSampleCount=4)
    backend.fail()
    failing, held = numbered("failing", 4), numbered("held", 3)
    await answers.send("any", failing, key="failing", path="/backend", body=backend.body)
    await until_state(daemon, "open")
    await answers.send("any", held, key="new", path="/backend", body=backend.body)
    await until_passed_on(daemon, len(failing) + len(held), route="upstream")
    assert (await daemon.groups())["new"]["workers"] == []

    backend.hang()
    backend.work()
    configure(daemon, tmp_path, minQueueSampleCount=4, openToHalfOpen={"enabled": True, "interval": 100})
    await daemon.until_event("probe asked for", key="new", timeout=LONG)
    await until(lambda: len(backend.served) > len(failing), "the probe runs", timeout=LONG)
    # The worker could run four requests, and takes the probe alone.
    assert backend.served[len(failing) :] == [("new", held[0])]
    assert len((await daemon.groups())["new"]["workers"]) == 1
    backend.go_on()
    await answers.until_served([*failing, *held], timeout=LONG)
    assert (answers.statuses(failing), answers.statuses(held)) == ({"error"}, {"ok"})
    assert (await circuit(daemon))["status"] == "closed"
    assert sorted(name for key, name in backend.served if key == "new") == held
