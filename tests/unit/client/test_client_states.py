"""The client without a broker: its errors when it cannot send."""

from __future__ import annotations

import asyncio
import time

import pytest

from osrdyne.client import AsyncClient, Client, ClientClosedError, ConnectionStatus
from osrdyne.client.aio import ANSWER_SLACK, _time_limit
from osrdyne.client.request import CallTimes, Sender, build_request
from osrdyne.config.models import RequestSettings
from osrdyne.errors import ConfigurationError

URI = "amqp://user:s3cret@localhost:1/"


async def test_client_that_was_never_opened_reports_it() -> None:
    client = AsyncClient(URI, "pool")
    with pytest.raises(ClientClosedError, match="never opened"):
        await client.call("k", timeout=1)
    assert (client.status, client.in_flight) == (ConnectionStatus.CLOSED, 0)


async def test_strict_time_out_of_what_was_not_sent_is_one_error_and_no_second() -> None:
    times = CallTimes(now=1e9, timeout=0.001)
    request = build_request("k", "", None, correlation_id="c", times=times, sender=Sender("me"))
    also_reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: also_reported.append(context))
    with pytest.raises(TimeoutError):
        async with _time_limit(request):
            time.sleep(0.01)  # both of its times are over at the next turn of the loop
            await asyncio.Event().wait()
    assert also_reported == []


async def test_closing_twice_does_nothing() -> None:
    client = AsyncClient(URI, "pool")
    await client.close()
    await client.close()
    with pytest.raises(ClientClosedError, match="is closed"):
        await client.cast("k", timeout=1)


def test_invalid_pool_id_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Not a pool"):
        AsyncClient(URI, "Not a pool")


async def test_invalid_uri_is_refused_without_repeating_it() -> None:
    with pytest.raises(ConfigurationError) as raised:
        async with AsyncClient("http://user:s3cret@localhost/", "pool"):
            pass
    assert "s3cret" not in str(raised.value)


def test_client_waits_until_a_pool_reports_that_a_request_expired() -> None:
    """It reports it `max_clock_skew` after the deadline, and RabbitMQ may be a second late."""
    assert RequestSettings().max_clock_skew + 1.0 + 1.0 <= ANSWER_SLACK


def test_blocking_client_can_be_closed_unopened() -> None:
    client = Client(URI, "pool")
    client.close()
    with pytest.raises(ClientClosedError):
        client.cast("k")


def test_no_secret_in_a_repr() -> None:
    client = AsyncClient(URI, "pool")
    assert "s3cret" not in f"{client!r} {vars(client)!r}"
