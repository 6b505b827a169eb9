"""The life of a worker process: starting, losing the broker, pausing, dying, stopping. On real RabbitMQ."""

import json
import signal

import pytest
from broker_api import close_connections, until
from worker_process import stage

from osrdyne import amqp
from osrdyne.protocol.activity import Event, text_fingerprint
from osrdyne.protocol.control import Command
from osrdyne.protocol.names import QueueName
from osrdyne.protocol.statuses import Status

pytestmark = pytest.mark.usefixtures("processes")

GATED = "tests.integration.gated_app:app"


@pytest.mark.proves("reference-defects/17-restart-loading-workers")
async def test_worker_says_ready_only_after_loading_and_takes_nothing_while_paused(pool, tmp_path):
    """In a report and by its file, which is there while the worker takes requests."""
    file, gate = tmp_path / "ready", tmp_path / "gate"
    file.touch()  # left behind by a former run
    variables = {"WORKER_READY_FILE": str(file)}
    worker = await pool.start(app=GATED, config={"gate": str(gate)}, ready=False, variables=variables)
    await pool.until_reported(worker, Event.STARTED)
    assert (Event.READY in pool.events(worker), file.exists()) == (False, False)
    await pool.send_control(Command.PAUSE)
    await pool.until_control_answered(worker, paused=True)
    gate.touch()
    await pool.until_reported(worker, Event.READY)
    asked = await pool.caller.send("/echo")
    await until(pool.ready_requests, equals=1)
    await pool.send_control(Command.RESUME)
    await pool.caller.answer(asked)
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
    setting = ("workers.examples.echo:app", {"concurrency": "many"}, "WORKER_CONFIG.runtime.concurrency")
    for app, runtime, named in (("nowhere:app", {}, "'nowhere'"), setting):
        worker = await pool.start(app=app, runtime=runtime, ready=False)
        assert await worker.wait() == 2
        assert (len(worker.lines), named in worker.lines[0]) == (1, True)


async def test_queue_that_never_comes_ends_the_worker(broker, pool_id):
    async with stage(broker.amqp_uri, pool_id, declare=False, forked=True) as pool:
        worker = await pool.start(runtime={"queue_missing_timeout": 1})
        assert await worker.wait() == 3


@pytest.mark.proves(
    "races/worker-alive-but-disconnected", "workers/rabbitmq-cancels-worker-s", "workers/worker-loses-connection"
)
async def test_worker_outlives_its_connection_and_its_queue(pool, broker, tmp_path):
    gate = tmp_path / "gate"
    worker = await pool.start(app=GATED, runtime={"concurrency": 2})
    asked = await pool.caller.send("/hold", bytes(gate))
    await pool.until_reported(worker, Event.REQUEST_RECEIVED)
    await close_connections(broker.management_uri, name=f"osrdyne-worker {worker.environment.worker_id}")
    gate.touch()
    assert (await pool.caller.answer(asked)).status == Status.OK
    assert (await pool.caller.call("/echo", b"x")).worker_id == worker.environment.worker_id
    await pool.channel.delete_queue(pool.names.request_queue(pool.key))
    await worker.until_line("request queue missing")
    await pool.declare()
    assert (await pool.caller.call("/echo", b"x")).worker_id == worker.environment.worker_id


@pytest.mark.parametrize("drains", [False, True], ids=["SIGTERM", "drain"])
@pytest.mark.proves("reference-defects/15-confirms-prefetch-back")
async def test_stop_finishes_what_runs(pool, drains):
    worker = await pool.start(runtime={"stop_grace": 0.1} if drains else {})
    asked = await pool.caller.send("/sleep", {"seconds": 1})
    await pool.until_reported(worker, Event.REQUEST_RECEIVED)
    if drains:
        await pool.send_control(Command.DRAIN)
    else:
        worker.signal(signal.SIGTERM)
    assert (await pool.caller.answer(asked)).status == Status.OK
    assert await worker.wait() == 0
    assert drains or Event.STOPPING in pool.events(worker)


async def test_sigterm_requeues_what_would_take_longer(pool):
    worker = await pool.start(runtime={"stop_grace": 1, "concurrency": 2})
    for path in ("/sleep", "/sleep_thread"):
        await pool.caller.send(path, {"seconds": 60})
    await pool.until(worker, lambda report: report.details.get("in_flight") == 2)
    worker.signal(signal.SIGTERM)
    assert await worker.wait() == 0
    await until(pool.ready_requests, equals=2)


@pytest.mark.nightly
async def test_sigterm_while_loading_ends_at_once(pool):
    worker = await pool.start(config={"load_seconds": 600}, ready=False)
    await pool.until_reported(worker, Event.STARTED)
    worker.signal(signal.SIGTERM)
    assert await worker.wait() == 0


@pytest.mark.proves("workers/coroutine-handler-blocks-worker")
async def test_coroutine_that_blocks_the_loop_ends_the_worker_and_is_named(pool):
    worker = await pool.start(runtime={"blocked_timeout": 6})
    body = json.dumps({"seconds": 600}).encode()
    await pool.caller.send("/block", body)
    assert await worker.wait() == 4
    assert "blocked for 6 s" in worker.lines[-1] and "block (" in worker.lines[-1]
    # Over a connection of its own: that of the worker is stuck.
    report = await pool.until_reported(worker, Event.FAILED)
    assert "block of '/block'" in str(report.details["reason"])
    assert (len(report.details["requests"]), report.details["blocked"]) == (1, text_fingerprint("/block", body))


async def test_controls_pause_resume_and_move_a_worker_to_another_queue(pool):
    """Commands of an earlier generation count for nothing, and the request of a caller that is gone is not run."""
    worker = await pool.start(runtime={"skip_abandoned": True})
    await pool.send_control(Command.PAUSE, generation=7)
    await pool.until_control_answered(worker, paused=True)
    await until(pool.consumers, equals=0)
    asked = await pool.caller.send("/echo", b"x")
    gone = await pool.connection.channel(confirms=True)
    await gone.consume("amq.rabbitmq.reply-to", no_ack=True)
    message = amqp.Message(headers={"x-rpc-path": "/crash"}, reply_to="amq.rabbitmq.reply-to")
    await gone.publish(message, exchange=pool.names.requests_exchange, routing_key=pool.key)
    await gone.close()
    await pool.send_control(Command.RESUME, generation=6)
    await pool.until(worker, lambda report: report.details.get("paused") is True, times=2)
    await until(pool.ready_requests, equals=2)
    await pool.send_control(Command.RESUME, generation=8)
    assert (await pool.caller.answer(asked)).body == b"x"
    report = await pool.until(worker, lambda report: report.headers.get("x-path") == "/crash")
    assert report.headers["x-status"] == b"abandoned"
    queue = pool.names.request_queue(pool.key, 3)
    await pool.declare_request_queue(queue)
    await pool.send_control(Command.QUEUES, queues=[queue], generation=9)
    assert (await pool.caller.call("/echo", b"new", queue=queue)).body == b"new"
    await pool.caller.send("/echo")
    await until(pool.ready_requests, equals=1)


@pytest.mark.rabbitmq4
@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.proves("managed/priorities-change-requests-wait")
async def test_waiting_requests_keep_their_place_through_changes_of_the_levels(pool, concurrency):
    """Each return to the queue would put a request behind later ones, and count as a failed delivery before 4.3: here
    RabbitMQ drops a request at its second one."""
    base, urgent, *others = (pool.names.request_queue(pool.key, level) for level in (None, 4, 2, 9))
    await pool.channel.delete_queue(base)
    for queue in (base, urgent, *others):
        await pool.channel.declare_queue(queue, arguments={"x-queue-type": "quorum", "x-delivery-limit": 1})
    await pool.start(runtime={"concurrency": concurrency}, queues=(base,))
    replies = QueueName(f"{pool.names.pool}-callers")
    await pool.channel.declare_queue(replies, exclusive=True)
    for number in range(concurrency):
        fields = {"correlation_id": f"c{number}", "reply_to": replies}
        request = amqp.Message(b'{"seconds": 600}', headers={"x-rpc-path": "/sleep"}, **fields)
        await pool.channel.publish(request, exchange="", routing_key=base)
    waiting = [await pool.caller.send(queue=base) for _ in range(4)]
    for number in range(20):
        added = others[number % 2]
        await pool.send_control(Command.QUEUES, queues=[*sorted([added, urgent]), base])
        await until(lambda: pool.consumers(added), equals=1)  # noqa: B023
        if number == 5:
            waiting = [await pool.caller.send(queue=urgent) for _ in range(4)] + waiting
        await pool.send_control(Command.QUEUES, queues=[urgent, base] if number >= 5 else [base])
        await until(lambda: pool.consumers(added), equals=0)  # noqa: B023
    for number in range(concurrency):
        await pool.send_control(Command.CANCEL, correlation_id=f"c{number}", reply_to=replies)
    answers = [await pool.caller.answer(one) for one in waiting]
    assert {answer.status for answer in answers} == {Status.OK}
    if concurrency == 1:
        assert [one for one in pool.caller.order if one in waiting] == waiting
