"""The client without a broker: its errors when it cannot send, and its inquiries about keys that are starting."""

import asyncio
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from osrdyne.amqp import Consumer
from osrdyne.client import AsyncClient, Client, ClientClosedError, ConnectionStatus, RequestTimeoutError, progress
from osrdyne.client.aio import ANSWER_SLACK, _time_limit
from osrdyne.client.progress import StartInquiries, _Watch
from osrdyne.client.request import CallTimes, OutgoingRequest, Sender, build_request
from osrdyne.client.session import Session
from osrdyne.config.models import RequestSettings
from osrdyne.errors import BrokerUnavailableError, ConfigurationError
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.protocol.progress import FIRST_INQUIRY

URI = "amqp://user:s3cret@localhost:1/"


async def test_client_that_is_not_open_reports_it():
    client, blocking = AsyncClient(URI, "pool"), Client(URI, "pool")
    with pytest.raises(ClientClosedError, match="never opened"):
        await client.call("k", timeout=1)
    assert (client.status, client.in_flight) == (ConnectionStatus.CLOSED, 0)
    blocking.close()
    for _ in range(2):
        await client.close()
        with pytest.raises(ClientClosedError):
            await client.cast("k", timeout=1)
        with pytest.raises(ClientClosedError):
            blocking.cast("k")


async def test_strict_time_out_of_what_was_not_sent_is_one_error_and_no_second():
    times = CallTimes(now=1e9, timeout=0.001)
    request = build_request("k", "", None, correlation_id="c", times=times, sender=Sender("me"))
    also_reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: also_reported.append(context))
    with pytest.raises(TimeoutError):
        async with _time_limit(request):
            time.sleep(0.01)  # both of its times are over at the next turn of the loop
            await asyncio.Event().wait()
    assert also_reported == []


async def test_no_secret_in_a_repr_or_an_error():
    client = AsyncClient(URI, "pool")
    assert "s3cret" not in f"{client!r} {vars(client)!r}"
    with pytest.raises(ConfigurationError) as raised:
        async with AsyncClient("http://user:s3cret@localhost/", "pool"):
            pass
    assert "s3cret" not in str(raised.value)
    with pytest.raises(ConfigurationError, match="Not a pool"):
        AsyncClient(URI, "Not a pool")
    # A pool reports an expiry `max_clock_skew` after the deadline, and RabbitMQ may be a second late.
    assert RequestSettings().max_clock_skew + 1.0 + 1.0 <= ANSWER_SLACK


def connected(connection: Any, **options: Any) -> tuple[AsyncClient, Session]:
    """A client whose session has this connection."""
    client = AsyncClient(URI, "pool", **options)
    channel: Any = SimpleNamespace(is_closed=False)
    session = Session(PoolNames("pool"), connection, channel, Consumer("replies"))
    client._state.set(session)
    return client, session


@pytest.mark.parametrize("is_closed", [True, False], ids=["lost", "too-many-channels"])
async def test_call_waits_while_its_connection_opens_no_channel(is_closed):
    """It is lost, although its first channel is not closed yet, or has too many."""
    fails = AsyncMock(side_effect=BrokerUnavailableError("Could not open a channel."))
    client, _ = connected(SimpleNamespace(is_blocked=False, is_closed=is_closed, channel=fails))
    with pytest.raises(RequestTimeoutError, match="not sent"):
        await client.call("k", timeout=0.01)


async def test_call_that_an_alarm_holds_back_says_so():
    """RabbitMQ sends `connection.blocked` only after a publish, so that the request counts as sent."""
    connection = SimpleNamespace(is_blocked=False, is_closed=False)
    client, session = connected(connection, answer_slack=0)

    async def publish(request: OutgoingRequest) -> None:
        request.sent = connection.is_blocked = True
        await asyncio.Event().wait()

    session.publish = publish  # type: ignore[method-assign]
    with pytest.raises(RequestTimeoutError, match="alarm") as raised:
        await client.call("k", timeout=0.01)
    assert raised.value.sent


def test_interrupted_iteration_over_parts_ends_with_the_interrupt(monkeypatch):
    has_begun, has_ended = threading.Event(), threading.Event()

    async def parts(*_, **__):
        try:
            has_begun.set()
            await asyncio.Event().wait()
            yield b""
        finally:
            await asyncio.sleep(0.01)  # as a call that cancels its request
            has_ended.set()

    result, interrupts = Future.result, iter([KeyboardInterrupt])

    def interrupted(future: Future[Any], timeout: float | None = None) -> Any:
        for error in interrupts:
            has_begun.wait(60)
            raise error
        return result(future, timeout)

    client = Client(URI, "pool")
    monkeypatch.setattr(Future, "result", interrupted)
    monkeypatch.setattr(AsyncClient, "call_parts", parts)
    with pytest.raises(KeyboardInterrupt):
        list(client.call_parts("k"))
    assert has_ended.is_set()
    client.close()


async def test_inquiries_that_are_not_answered_are_forgotten(monkeypatch):
    """A client that always has calls waiting would otherwise remember all of them while the pool has no leader."""
    monkeypatch.setattr(progress, "_MAX_ASKED", 3)
    connection: Any = SimpleNamespace(is_blocked=False)
    inquiries, channel = StartInquiries(PoolNames("pool"), connection), AsyncMock()
    waits_since = asyncio.get_running_loop().time() - FIRST_INQUIRY
    inquiries._watches[Key("k")] = watch = _Watch({Mock(): waits_since})
    for _ in range(10):
        watch.ask_at = 0.0  # the interval is over
        await inquiries._ask_all(channel)
    assert (channel.publish.await_count, list(inquiries._asked)) == (10, ["8", "9", "10"])
