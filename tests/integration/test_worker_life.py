"""The life of a worker process: starting, losing the broker, pausing, dying, stopping. On real RabbitMQ."""

from __future__ import annotations

import asyncio
import json
import signal

import pytest
from broker_api import close_connections
from worker_process import PATIENCE, Stage, stage

from osrdyne import amqp
from osrdyne.protocol.activity import Event, text_fingerprint
from osrdyne.protocol.control import Command
from osrdyne.protocol.names import QueueName
from osrdyne.protocol.statuses import Status

pytestmark = pytest.mark.usefixtures("processes")

GATED = "tests.integration.gated_app:app"


@pytest.mark.proves("reference-defects/17-restart-loading-workers")
async def test_worker_says_ready_only_after_loading(pool, tmp_path):
    """In a report and by its file, which is there while the worker takes requests."""
    file, gate = tmp_path / "ready", tmp_path / "gate"
    file.touch()  # left behind by a former run
    variables = {"WORKER_READY_FILE": str(file)}
    worker = await pool.start(app=GATED, config={"gate": str(gate)}, ready=False, variables=variables)
    await pool.until_reported(worker, Event.STARTED)
    assert (Event.READY in pool.events(worker), file.exists()) == (False, False)
    gate.touch()
    await pool.until_reported(worker, Event.READY)
    await pool.caller.call("/echo")
    assert file.exists()
    worker.signal(signal.SIGTERM)
    await worker.wait()
    assert not file.exists()


async def test_failing_start_reports_why_in_its_last_line(pool):
    worker = await pool.start(config={"load_error": "no such table"}, ready=False)
    assert await worker.wait() == 1
    assert "RuntimeError: no such table (echo.py, line " in worker.lines[-1]
    assert not any("no connection" in line or "Traceback" in line for line in worker.lines)
    report = next(report for report in pool.reports if report.event is Event.FAILED)
    assert str(report.details["reason"]).startswith("RuntimeError: no such table")


async def test_unusable_application_or_setting_is_one_sentence(pool):
    """`tests/component/worker/test_worker_check.py` has further applications."""
    wrong = [
        ("nowhere:app", {}, "'nowhere'"),
        ("json:dumps", {}, "json:dumps"),
        ("workers.examples.echo:app", {"concurrency": "many"}, "WORKER_CONFIG.runtime.concurrency"),
    ]
    for app, runtime, named in wrong:
        worker = await pool.start(app=app, runtime=runtime, ready=False)
        assert await worker.wait() == 2
        assert (len(worker.lines), named in worker.lines[0]) == (1, True)


async def test_queue_that_never_comes_ends_the_worker(broker, pool_id):
    async with stage(broker.amqp_uri, pool_id, declare=False) as pool:
        worker = await pool.start(runtime={"queue_missing_timeout": 1})
        assert await worker.wait() == 3


@pytest.mark.proves("workers/rabbitmq-cancels-worker-s")
async def test_queue_that_is_deleted_and_declared_again_is_served_again(pool):
    worker = await pool.start()
    await pool.channel.delete_queue(pool.names.request_queue(pool.key))
    await worker.until_line("request queue missing")
    await pool.declare()
    assert json.loads((await pool.caller.call("/info")).body)["pid"] == worker.pid


@pytest.mark.proves("races/worker-alive-but-disconnected", "workers/worker-loses-connection")
async def test_closed_connection_changes_nothing_but_the_connection(pool, broker, tmp_path):
    gate = tmp_path / "gate"
    worker = await pool.start(app=GATED, runtime={"concurrency": 2})
    asked = await pool.caller.send("/hold", bytes(gate))
    await pool.until_reported(worker, Event.REQUEST_RECEIVED)
    await close_connections(broker.management_uri, name=f"osrdyne-worker {worker.environment.worker_id}")
    gate.touch()
    assert (await pool.caller.answer(asked)).status == Status.OK
    assert (await pool.caller.call("/echo", b"x")).worker_id == worker.environment.worker_id
    assert worker.process.returncode is None


@pytest.mark.proves("reference-defects/15-confirms-prefetch-back")
async def test_sigterm_finishes_what_runs(pool):
    worker = await pool.start()
    asked = await pool.caller.send("/sleep", {"seconds": 1})
    await pool.until_reported(worker, Event.REQUEST_RECEIVED)
    worker.signal(signal.SIGTERM)
    assert (await pool.caller.answer(asked)).status == Status.OK
    assert await worker.wait() == 0
    assert Event.STOPPING in pool.events(worker)


async def test_sigterm_requeues_what_would_take_longer(pool):
    worker = await pool.start(runtime={"stop_grace": 1, "concurrency": 2})
    for path in ("/sleep", "/sleep_thread"):
        await pool.caller.send(path, {"seconds": 60})
    await pool.until(worker, lambda report: report.details.get("in_flight") == 2)
    worker.signal(signal.SIGTERM)
    assert await worker.wait() == 0
    assert await until_ready_requests(pool, 2)


@pytest.mark.nightly
async def test_sigterm_while_loading_ends_at_once(pool):
    worker = await pool.start(config={"load_seconds": 600}, ready=False)
    await pool.until_reported(worker, Event.STARTED)
    worker.signal(signal.SIGTERM)
    assert await worker.wait() == 0


async def test_drain_finishes_and_ends(pool):
    worker = await pool.start(runtime={"stop_grace": 0.1})
    asked = await pool.caller.send("/sleep", {"seconds": 1})
    await pool.until_reported(worker, Event.REQUEST_RECEIVED)
    await pool.send_control(Command.DRAIN)
    assert (await pool.caller.answer(asked)).status == Status.OK
    assert await worker.wait() == 0


@pytest.mark.proves("workers/coroutine-handler-blocks-worker")
async def test_coroutine_that_blocks_the_loop_ends_the_worker_and_is_named(pool):
    worker = await pool.start(runtime={"blocked_timeout": 6})
    body = json.dumps({"seconds": 600}).encode()
    await pool.caller.send("/block", body)
    assert await worker.wait() == 4
    assert "The event loop has been blocked for 6 s" in worker.lines[-1]
    assert "block (" in worker.lines[-1]
    report = await pool.until_reported(
        worker, Event.FAILED
    )  # over a connection of its own: that of the worker is stuck
    assert "block of '/block'" in str(report.details["reason"])
    assert (len(report.details["requests"]), report.details["blocked"]) == (1, text_fingerprint("/block", body))


async def test_pause_stops_taking_and_resume_of_a_later_generation_goes_on(pool):
    worker = await pool.start()
    await pool.send_control(Command.PAUSE, generation=7)
    await pool.until_control_answered(worker, paused=True)
    assert await until_consumers(pool, 0)
    asked = await pool.caller.send("/echo", b"x")
    await pool.send_control(Command.RESUME, generation=6)
    await pool.until(worker, lambda report: report.details.get("paused") is True, times=2)
    assert await until_ready_requests(pool, 1)
    await pool.send_control(Command.RESUME, generation=8)
    assert (await pool.caller.answer(asked)).body == b"x"


@pytest.mark.nightly
async def test_paused_loading_worker_takes_nothing_when_ready(pool, tmp_path):
    gate = tmp_path / "gate"
    worker = await pool.start(app=GATED, config={"gate": str(gate)}, ready=False)
    await pool.until_reported(worker, Event.STARTED)
    await pool.send_control(Command.PAUSE)
    await pool.until_control_answered(worker, paused=True)
    gate.touch()
    await pool.until_reported(worker, Event.READY)
    await pool.caller.send("/echo")
    assert await until_ready_requests(pool, 1)


async def test_new_queues_are_taken_and_old_ones_left(pool):
    await pool.start()
    queue = pool.names.request_queue(pool.key, 3)
    await pool.declare_request_queue(queue)
    await pool.send_control(Command.QUEUES, queues=[queue])
    assert (await pool.caller.call("/echo", b"new", queue=queue)).body == b"new"
    await pool.caller.send("/echo")
    assert await until_ready_requests(pool, 1)


async def test_request_of_a_caller_that_is_gone_is_not_run(pool):
    worker = await pool.start(runtime={"skip_abandoned": True})
    await pool.send_control(Command.PAUSE)
    await pool.until_control_answered(worker, paused=True)
    gone = await pool.connection.channel(confirms=True)
    await gone.consume("amq.rabbitmq.reply-to", no_ack=True)
    message = amqp.Message(headers={"x-rpc-path": "/crash"}, reply_to="amq.rabbitmq.reply-to")
    await gone.publish(message, exchange=pool.names.requests_exchange, routing_key=pool.key)
    await gone.close()
    await pool.send_control(Command.RESUME)
    report = await pool.until(worker, lambda report: report.headers.get("x-path") == "/crash")
    assert report.headers["x-status"] == b"abandoned"


async def until_ready_requests(pool: Stage, number: int, queue: QueueName | None = None) -> bool:
    async with asyncio.timeout(PATIENCE):
        while await pool.ready_requests(queue) != number:
            await asyncio.sleep(0.05)
    return True


async def until_consumers(pool: Stage, number: int) -> bool:
    async with asyncio.timeout(PATIENCE):
        while True:
            channel = await pool.connection.channel()
            info = await channel.declare_queue(pool.names.request_queue(pool.key), passive=True)
            await channel.close()
            if info.consumers == number:
                return True
            await asyncio.sleep(0.05)
