"""When a worker gives up on its session, its ready file, and a control exchange that it cannot use."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock

import pytest
from structlog.testing import capture_logs
from worker_environments import worker_environment

from osrdyne.amqp import Consumer
from osrdyne.errors import BrokerError, BrokerNotFoundError, BrokerUnavailableError
from osrdyne_worker.runtime.control import ControlWarnings, listen
from osrdyne_worker.runtime.ready_file import ReadyFile
from osrdyne_worker.runtime.session_health import SILENCE_TIMEOUT, SessionHealth

Look = tuple[float, dict[str, int]]
STRAY = {"g": 1}


@pytest.mark.parametrize(
    ("idle", "looks", "tolerated"),
    [
        (True, [(now, STRAY) for now in (0.0, 5.0, 29.0, 30.0)], [True, True, True, False]),
        (False, [(now, STRAY) for now in (0.0, 5.0, 119.0, 120.0)], [True, True, True, False]),
        (True, [(0, STRAY), (20, {}), (40, STRAY), (60, STRAY)], [True] * 4),
        (True, [(now, {f"g{now // 10}": 1}) for now in range(0, 200, 5)], [True] * 40),
        # The session did not answer in between, and its figures may be old.
        (True, [(now, STRAY) for now in (0.0, 100.0, 105.0)], [True, True, False]),
    ],
    ids=["idle", "busy", "ended in time", "one after the other", "two looks far apart"],
)
def test_stray_tasks_are_tolerated_for_a_while_only(idle: bool, looks: list[Look], tolerated: list[bool]) -> None:
    watch = SessionHealth(30.0)
    reasons = [watch.answered(strays=strays, idle=idle, now=now) for now, strays in looks]
    assert [reason is None for reason in reasons] == tolerated


def test_silence_that_lasts_is_the_end_of_a_session_and_an_answer_ends_the_silence() -> None:
    watch = SessionHealth(30.0)
    reasons = [watch.timed_out(now=now) for now in (0.0, SILENCE_TIMEOUT - 1, SILENCE_TIMEOUT)]
    assert [reason is None for reason in reasons] == [True, True, False]
    watch = SessionHealth(30.0)
    watch.timed_out(now=0.0)
    watch.answered(strays={}, idle=True, now=10.0)
    assert watch.timed_out(now=SILENCE_TIMEOUT + 1) is None


def test_ready_file_comes_and_goes(tmp_path):
    path = tmp_path / "ready"
    file = ReadyFile.from_variables({"WORKER_READY_FILE": str(path)})
    file.write()
    assert path.exists()
    for _ in range(2):
        file.delete()
        assert not path.exists()


def test_file_that_cannot_be_written_is_reported(tmp_path):
    with capture_logs() as entries:
        ReadyFile(tmp_path / "missing" / "ready").write()
    assert [entry["event"] for entry in entries] == ["ready file cannot be written"]


MISSING = BrokerNotFoundError("Could not bind: no exchange 'p-ctl-xchg'")
REFUSED = BrokerUnavailableError("the queue is locked")


class Outages:
    """The connection, the clock and the credit of a worker. Every attempt to listen fails, every third one after it has
    listened; the connection ends after `most` of them."""

    def __init__(self, most: int, error: BrokerError) -> None:
        self.is_closed = False
        self.attempts, self.most = 0, most
        self.error = error
        self.delays: list[float] = []
        self.available: list[bool | None] = []

    async def channel(self) -> AsyncMock:
        self.attempts += 1
        channel, consumer = AsyncMock(), Consumer("control")
        consumer.end(self.error)
        channel.consume.return_value = consumer
        channel.declare_queue.side_effect = self.error if self.attempts % 3 else None
        return channel

    async def sleep(self, seconds: float) -> None:
        self.delays.append(seconds)
        self.is_closed = self.attempts == self.most

    def listening(self, available: bool | None) -> None:
        self.available.append(available)

    async def run(self, *, has_credit: bool) -> list[str]:
        """The warnings."""
        credit: Any = self if has_credit else None
        given: Any = {"routing_keys": (), "on_listening": lambda: None, "on_forged": lambda: None, "clock": self}
        with capture_logs() as logs:
            await listen(self, worker_environment(), print, warnings=ControlWarnings(), credit=credit, **given)
        return [entry["event"] for entry in logs if entry["log_level"] == "warning"]


@pytest.mark.parametrize(("error", "available"), [(MISSING, False), (REFUSED, None)], ids=["missing", "refused"])
async def test_no_stream_begins_while_its_credit_could_not_be_received(error: BrokerError, available: Any) -> None:
    """It would end after a minute without credit."""
    outages = Outages(1, error)
    await outages.run(has_credit=True)
    assert outages.available[-1] is available


@pytest.mark.parametrize(("error", "warnings"), [(MISSING, 1), (REFUSED, 3)], ids=["missing", "refused"])
async def test_missing_exchange_is_one_warning_and_delays_begin_anew(error: BrokerError, warnings: int) -> None:
    outages = Outages(6, error)
    assert len(await outages.run(has_credit=False)) == warnings
    assert [round(delay) for delay in outages.delays] == [1, 2, 1, 2, 4, 1]
