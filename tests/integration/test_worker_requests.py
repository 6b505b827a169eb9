"""Requests through a real worker process and real RabbitMQ: every way a request can be answered."""

import json
import secrets

import pytest
import pytest_asyncio
from broker_api import until
from worker_process import stage

from osrdyne import amqp
from osrdyne.protocol.activity import Event
from osrdyne.protocol.control import Command
from osrdyne.protocol.statuses import Status

pytestmark = pytest.mark.usefixtures("processes")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(broker):
    """A worker for all tests that need no more than its answers."""
    async with stage(broker.amqp_uri, f"w{secrets.token_hex(6)}", forked=True) as result:
        await result.start(runtime={"concurrency": 4})
        yield result


one_loop = pytest.mark.asyncio(loop_scope="module")
"""For tests of `shared`."""
SLEEPS = ("/sleep", "/sleep_thread")


@one_loop
@pytest.mark.parametrize(
    ("path", "body", "code", "details"),
    [
        ("/sleep", {"seconds": "soon"}, 400, {"code": "invalid_request"}),
        ("/nowhere", b"", 404, {"path": "/nowhere"}),
        ("/" + "é" * 60_000, b"", 404, {"path": "/" + "é" * 198 + "…"}),
        ("/fail", b"", 500, {"code": "internal_error", "message": "ZeroDivisionError: as requested"}),
        ("/refuse", b"", 403, {"code": "refused", "hint": "ask another service"}),
        ("/sleep", b"...", 415, {}),
    ],
    ids=[
        "body that does not fit",
        "unknown path",
        "longest path",
        "failing handler",
        "refusing handler",
        "compressed body",
    ],
)
@pytest.mark.proves("requests/request-body-handler-cannot", "requests/handler-fails")
async def test_error_is_answered_with_its_code_and_details(shared, path, body, code, details):
    response = await shared.caller.call(path, body, content_encoding="gzip" if code == 415 else None)
    error = json.loads(response.body)["error"]
    assert (response.status, response.code) == (Status.ERROR, code)
    assert error.items() >= details.items()
    assert ("fields" in error, "known_paths" in error, "Traceback" in str(error)) == (code == 400, code == 404, False)


@one_loop
async def test_deadline_before_and_during_the_work_is_answered_expired(shared):
    past = await shared.caller.send("/crash", headers={"x-deadline": 1_000})
    asked = [past, *[await shared.caller.send(path, {"seconds": 60}, expiration="3000") for path in SLEEPS]]
    for one in asked:
        response = await shared.caller.answer(one)
        assert (response.status, response.code) == (Status.EXPIRED, 504)


@one_loop
async def test_progress_comes_before_the_answer_in_order_to_a_caller_that_asks_for_it(shared):
    asked = await shared.caller.send("/progress", {"steps": 3}, headers={"x-progress": True})
    responses = [await shared.caller.answer(asked) for _ in range(4)]
    assert [response.progress for response in responses] == [True, True, True, False]
    assert [json.loads(response.body).get("step") for response in responses] == [1, 2, 3, None]
    for headers in ({}, {"x-progress": False}, {"x-progress": 7}):
        assert not (await shared.caller.call("/progress", {"steps": 3}, headers=headers)).progress


async def test_reports_of_a_worker_a_too_large_answer_and_cancels(pool):
    worker = await pool.start(runtime={"concurrency": 4, "stuck_grace": 0.5}, max_message_bytes=2048)
    without_reply = amqp.Message(b"x", headers={"x-rpc-path": "/echo"})
    await pool.channel.publish(without_reply, exchange=pool.names.requests_exchange, routing_key=pool.key)
    completed = await pool.until_reported(worker, Event.REQUEST_COMPLETED)
    assert (completed.headers["x-path"], completed.details["count"]) == ("/echo", 1)
    await pool.until_reported(worker, Event.IDLE)
    await pool.caller.call("/fail")
    completed = await pool.until_reported(worker, Event.REQUEST_COMPLETED, times=2)
    assert bytes(completed.headers["x-status"]) == b"error"
    # It answers the control message with its state, which may be "busy" by then.
    events = dict.fromkeys(event for event in pool.events(worker) if event != Event.BUSY)
    assert list(events) == ["started", "ready", "request-received", "request-completed", "idle"]

    response = await pool.caller.call("/large", {"bytes": 4096})
    error = json.loads(response.body)["error"]
    assert (response.worker_id, response.code, error["code"]) == (worker.environment.worker_id, 413, "answer_too_large")

    # A cancel ends a running request, and is remembered for one that comes later.
    replies = f"{pool.names.pool}-replies"
    await pool.channel.declare_queue(replies)

    async def send(path, correlation_id):
        fields = {"headers": {"x-rpc-path": path}, "correlation_id": correlation_id, "reply_to": replies}
        message = amqp.Message(b'{"seconds": 60}', **fields)
        await pool.channel.publish(message, exchange=pool.names.requests_exchange, routing_key=pool.key)

    async def is_answered_cancelled():
        delivery = await until(lambda: pool.channel.get(replies))
        await delivery.ack()
        assert bytes(delivery.headers["x-status"]) == b"cancelled"

    received = pool.events(worker).count(Event.REQUEST_RECEIVED)
    for number, path in enumerate(SLEEPS, received + 1):
        await send(path, path)
        await pool.until_reported(worker, Event.REQUEST_RECEIVED, times=number)
        await pool.send_control(Command.CANCEL, correlation_id=path, reply_to=replies)
        await is_answered_cancelled()
    await pool.send_control(Command.CANCEL, correlation_id="c", reply_to=replies)
    await pool.resume(worker)
    await send("/crash", "c")
    await is_answered_cancelled()
