"""When a worker gives up on its session, its ready file, and a control exchange that it cannot use."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from structlog.testing import capture_logs

from osrdyne.errors import BrokerError, BrokerNotFoundError, BrokerUnavailableError
from osrdyne_worker.runtime import control
from osrdyne_worker.runtime.control import ControlWarnings
from osrdyne_worker.runtime.ready_file import NO_READY_FILE, ReadyFile
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


def test_without_the_variable_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = ReadyFile.from_variables({"WORKER_READY_FILE": ""})
    file.write()
    file.delete()
    assert (file, list(tmp_path.iterdir())) == (NO_READY_FILE, [])


def test_file_that_cannot_be_written_is_reported(tmp_path):
    with capture_logs() as entries:
        ReadyFile(tmp_path / "missing" / "ready").write()
    assert [entry["event"] for entry in entries] == ["ready file cannot be written"]


def warnings_of(errors: list[tuple[BrokerError, bool]]) -> list[str]:
    trouble = ControlWarnings()
    with capture_logs() as logs:
        for error, first in errors:
            trouble.note(error, exchange="p-ctl-xchg", first=first)
    return [entry["event"] for entry in logs if entry["log_level"] == "warning"]


MISSING = BrokerNotFoundError("Could not bind: no exchange 'p-ctl-xchg'")
REFUSED = BrokerUnavailableError("the queue is locked")
NO_EXCHANGE = "control exchange missing"
NOT_YET = "control queue unavailable"


@pytest.mark.parametrize(
    ("errors", "warned"),
    [
        pytest.param([(MISSING, True), (MISSING, False)] * 5, [NO_EXCHANGE], id="missing-on-every-connection"),
        pytest.param([(REFUSED, True), (REFUSED, False)] * 2, [NOT_YET] * 2, id="locked-on-every-connection"),
        pytest.param([(REFUSED, True), (MISSING, False)], [NOT_YET, NO_EXCHANGE], id="both"),
        pytest.param([(MISSING, True), (REFUSED, True)], [NO_EXCHANGE, NOT_YET], id="another-trouble-later"),
    ],
)
def test_missing_control_exchange_is_one_warning_in_the_life_of_a_worker(errors, warned):
    assert warnings_of(errors) == warned


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
        return AsyncMock()

    async def listen_once(self, channel, connection, environment, routing_keys, handle, on_listening, *more):
        self.attempts += 1
        if self.attempts % 3 == 0:
            on_listening()
        raise self.error

    async def sleep(self, seconds: float) -> None:
        self.delays.append(seconds)
        self.is_closed = self.attempts == self.most

    def listening(self, available: bool | None) -> None:
        self.available.append(available)

    async def run(self, monkeypatch: pytest.MonkeyPatch, *, has_credit: bool) -> None:
        monkeypatch.setattr(control, "_listen_once", self.listen_once)
        await control.listen(
            self,
            SimpleNamespace(control_exchange="p-ctl-xchg"),
            handle=lambda message: None,
            routing_keys=(),
            on_listening=lambda: None,
            on_forged=lambda: None,
            warnings=ControlWarnings(),
            clock=self,
            credit=self if has_credit else None,
        )


@pytest.mark.parametrize(("error", "available"), [(MISSING, False), (REFUSED, None)])
async def test_no_stream_begins_while_its_credit_could_not_be_received(monkeypatch, error, available):
    """It would end after a minute without credit."""
    outages = Outages(1, error)
    await outages.run(monkeypatch, has_credit=True)
    assert outages.available[-1] is available


async def test_each_outage_has_one_warning_and_begins_with_the_shortest_delay(monkeypatch):
    outages = Outages(6, REFUSED)
    with capture_logs() as logs:
        await outages.run(monkeypatch, has_credit=False)
    assert [entry["event"] for entry in logs] == [NOT_YET] * 3
    assert [round(delay) for delay in outages.delays] == [1, 2, 1, 2, 4, 1]
