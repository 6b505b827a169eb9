"""Requests that come back after the death of a worker: real workers, killed, on real RabbitMQ."""

import asyncio
import signal
from pathlib import Path

import pytest
from broker_api import until
from worker_process import Stage

from osrdyne.protocol.activity import ALONE_FIELD, SUSPECTS_FIELD, Event, text_fingerprint

pytestmark = [pytest.mark.rabbitmq4, pytest.mark.usefixtures("processes")]

GATED = "tests.integration.gated_app:app"


@pytest.fixture
def gate(tmp_path):
    """A request for `/hold` with this path runs until the file exists."""
    return tmp_path / "gate"


async def suspect(pool: Stage, gate: Path, *, concurrency: int = 1) -> str:
    """A request whose first worker was killed while it ran."""
    worker = await pool.start(app=GATED, runtime={"concurrency": concurrency})
    request = await pool.caller.send("/hold", bytes(gate))
    await pool.until_reported(worker, Event.REQUEST_RECEIVED)
    worker.signal(signal.SIGKILL)
    await worker.wait()
    # RabbitMQ notices the death a moment later. Until then it may deliver further requests to the dead worker, which
    # makes suspects of them.
    await until(pool.consumers, equals=0)
    await until(pool.ready_requests, equals=1)
    return request


@pytest.mark.parametrize("concurrency", [1, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.proves("workers/request-kills-worker")
async def test_suspect_runs_last_and_alone(pool, gate, concurrency):
    request = await suspect(pool, gate, concurrency=concurrency)
    # As many as may run: others that are still in the queue when these have ended would wait for the suspect.
    others_gate = gate.with_name("others_gate")
    others = [await pool.caller.send("/hold", bytes(others_gate)) for _ in range(concurrency)]
    worker = await pool.start(app=GATED, runtime={"concurrency": concurrency})
    await pool.until(worker, lambda report: report.details.get("in_flight") == 1 + concurrency)
    others_gate.touch()
    report = await pool.until(worker, lambda report: ALONE_FIELD in report.details)
    # Their answers were confirmed before this report, and may be read after it.
    assert {(await pool.caller.answer(other)).status for other in others} == {"ok"}
    assert report.details[ALONE_FIELD] == text_fingerprint("/hold", bytes(gate))
    late = await pool.caller.send()
    assert await pool.ready_requests() == 1, "the worker takes nothing meanwhile"
    gate.touch()
    assert (await pool.caller.answer(request)).status == "ok"
    assert (await pool.caller.answer(late)).status == "ok"
    await pool.until(worker, lambda report: report.event is Event.IDLE and SUSPECTS_FIELD not in report.details)


async def test_suspect_that_is_put_aside_when_its_worker_is_killed_is_not_lost(pool, gate):
    request = await suspect(pool, gate)
    other = await pool.caller.send("/hold", bytes(gate))
    second = await pool.start(app=GATED)
    await pool.until(second, lambda report: report.details.get(SUSPECTS_FIELD) == 1)
    second.signal(signal.SIGKILL)
    await second.wait()
    gate.touch()
    await pool.start(app=GATED)
    answers = await asyncio.gather(*map(pool.caller.answer, (request, other)))
    assert [answer.status for answer in answers] == ["ok", "ok"]
