"""Translation of the library's errors, contexts of TLS and failed handshakes, and the consumer's end."""

import asyncio
import ssl
from collections.abc import Coroutine
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import aiormq
import certifi
import pytest
from aiormq.exceptions import ChannelInvalidStateError, ConnectionInternalError
from pamqp import commands as spec
from pamqp.base import Frame
from pamqp.frame import marshal
from yarl import URL

from osrdyne.amqp.connection import ConnectionOptions, connect
from osrdyne.amqp.consumer import Consumer
from osrdyne.amqp.errors import describe_end, translate_error, translated
from osrdyne.amqp.message import Delivery
from osrdyne.amqp.tls import describe_tls_error, ssl_context
from osrdyne.amqp.transport import CoalescingTransport
from osrdyne.errors import (
    BrokerAccessError,
    BrokerConflictError,
    BrokerError,
    BrokerInternalError,
    BrokerNotFoundError,
    BrokerSilentError,
    BrokerUnavailableError,
    ConfigurationError,
    LeadershipLostError,
)
from osrdyne.protocol.uri import TlsFiles


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (aiormq.AuthenticationError("x"), BrokerAccessError),
        (aiormq.ProbableAuthenticationError("x"), BrokerAccessError),
        (aiormq.ChannelAccessRefused("x"), BrokerAccessError),
        (aiormq.ConnectionNotAllowed("x"), BrokerAccessError),
        (ConnectionInternalError("x"), BrokerInternalError),
        (aiormq.ChannelNotFoundEntity("x"), BrokerNotFoundError),
        (aiormq.ChannelPreconditionFailed("x"), BrokerConflictError),
        (aiormq.ChannelLockedResource("x"), BrokerConflictError),
        (aiormq.ConnectionClosed(320, "x"), BrokerUnavailableError),
        (aiormq.ChannelClosed(0, "x"), BrokerUnavailableError),
        (ChannelInvalidStateError(), BrokerUnavailableError),
        (aiormq.AMQPConnectionError(*ConnectionRefusedError(111, "x").args), BrokerUnavailableError),
        (ConnectionRefusedError("x"), BrokerUnavailableError),
        (ssl.SSLError("x"), BrokerUnavailableError),
        (TimeoutError(), BrokerSilentError),
        (StopAsyncIteration(), BrokerUnavailableError),
        (aiormq.AMQPError("x"), BrokerError),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else type(value).__name__,
)
def test_fault_of_the_library_becomes_one_of_ours(fault, kind):
    with pytest.raises(kind, match="declare queue q") as caught, translated("declare queue q"):
        raise fault
    assert type(caught.value) is kind
    assert caught.value.__cause__ is fault


@pytest.mark.parametrize("error", [LeadershipLostError("gone"), ZeroDivisionError()], ids=["ours", "defect"])
def test_other_error_passes_unchanged(error):
    with pytest.raises(type(error)) as caught, translated("anything"):
        raise error
    assert caught.value is error
    for end in (None, ConnectionResetError(), ConnectionError("gone."), aiormq.AMQPConnectionError()):
        assert describe_end(end).strip(". ") == describe_end(end) != ""


async def test_waiter_that_the_library_cancels_or_that_is_out_of_time_is_a_lost_channel():
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()
    with pytest.raises(BrokerUnavailableError, match="declare queue q"), translated("declare queue q"):
        await future
    with pytest.raises(BrokerUnavailableError), translated("connect"):
        async with asyncio.timeout(0):
            await asyncio.Event().wait()


async def test_invalid_uri_is_refused_without_showing_it():
    for uri in ("", "http://h", "amqp://", "amqp://u:s3cret#@h", "amqp://u:s3cret@h:port"):
        with pytest.raises(ConfigurationError, match="amqp://user:password@host") as caught:
            await connect(ConnectionOptions(uri))
        assert "s3cret" not in f"{caught.value} {ConnectionOptions(uri)!r}"
    assert "s3cret" not in str(translate_error(OSError("cannot reach amqp://u:s3cret@h/"), "connect"))


class Scripted(CoalescingTransport):
    """A broker that sends these frames during the log-in, whatever it is asked, and closes the socket."""

    def __init__(self, *frames: Frame) -> None:
        super().__init__()
        self._frames = frames

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader = self.new_reader()
        reader.feed_data(b"".join(marshal(frame, 0) for frame in self._frames))
        reader.feed_eof()
        return reader, Mock(spec=asyncio.StreamWriter, wait_closed=AsyncMock())


START = spec.Connection.Start(mechanisms="PLAIN", server_properties={})
TUNE = spec.Connection.Tune()


@pytest.mark.parametrize(
    ("frames", "close", "kind"),
    [
        ((START,), (403, "ACCESS_REFUSED - Login was refused"), BrokerAccessError),
        ((START, TUNE), (530, "NOT_ALLOWED - vhost nope not found"), BrokerAccessError),
        ((START, TUNE), (541, "INTERNAL_ERROR - access to vhost '/' refused: vhost is down"), BrokerInternalError),
        ((START, TUNE), (320, "CONNECTION_FORCED - broker forced connection closure"), BrokerUnavailableError),
        ((), None, BrokerUnavailableError),
    ],
    ids=["password", "no such host", "host is down", "stops", "hangs up at once"],
)
async def test_reason_for_a_close_during_the_log_in_is_reported(frames, close, kind, monkeypatch):
    closes = [] if close is None else [spec.Connection.Close(*close, 0, 0)]
    reason = "amqp://" if close is None else close[1].partition(" ")[0]
    broker = Scripted(*frames, *closes)
    monkeypatch.setattr("osrdyne.amqp.connection.CoalescingTransport", lambda: broker)
    with pytest.raises(kind, match=reason) as caught:
        await connect(ConnectionOptions("amqp://u@h"))
    assert type(caught.value) is kind


class TestConsumer:
    def delivery(self, tag: int) -> Delivery:
        return Delivery(None, tag, "", "", False, b"", None)  # type: ignore[arg-type]

    async def test_end_with_a_fault_raises_it_to_every_reader_from_then_on(self):
        consumer = Consumer("q")
        readers = [asyncio.create_task(consumer.get()) for _ in range(2)]
        await asyncio.sleep(0)
        consumer.end(BrokerUnavailableError("queue q is gone"))
        consumer.end()
        for reader in readers:
            with pytest.raises(BrokerUnavailableError, match="q is gone"):
                await reader
        with pytest.raises(BrokerUnavailableError, match="q is gone"):
            await anext(consumer)
        assert consumer.ended

    def test_room_is_what_the_present_prefetch_leaves(self):
        consumer = Consumer("q")
        consumer.begin(2)
        for tag in (1, 2):
            consumer.put(self.delivery(tag))
        rooms = [consumer.has_room]
        consumer.settle(1)
        rooms.append(consumer.has_room)
        consumer.begin(1)  # besides the delivery that it holds
        rooms.append(consumer.has_room)
        consumer.put(self.delivery(3))
        rooms.append(consumer.has_room)
        consumer.settle(3, multiple=True)
        rooms.append(consumer.has_room)
        consumer.end()
        assert ([*rooms, consumer.has_room], consumer.received) == ([False, True, True, False, True, False], 3)

    async def test_deliveries_before_the_end_are_handed_out_and_those_after_it_dropped(self):
        consumer = Consumer("q")
        reader = asyncio.create_task(consumer.get())
        await asyncio.sleep(0)
        for tag in (1, 2):
            consumer.put(self.delivery(tag))
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        consumer.end()
        consumer.put(self.delivery(3))
        assert consumer.waiting() == 2
        assert [delivery.tag async for delivery in consumer] == [1, 2]
        assert [delivery.tag async for delivery in consumer] == []


async def cancelled_while_it_waits(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "fault", [None, aiormq.ChannelClosed(0, "x"), LeadershipLostError("gone"), asyncio.CancelledError()]
)
async def test_cancellation_is_raised_also_if_the_library_swallowed_it(fault):
    """`asyncio.wait_for` before Python 3.12 returns an answer that comes together with a cancellation."""

    async def swallow():
        with translated("open a channel"):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if fault is not None:
                    raise fault from None

    await cancelled_while_it_waits(swallow())


async def test_cleaning_up_after_a_cancellation_is_not_cancelled_again():
    done: list[str] = []

    async def clean_up():
        try:
            await asyncio.Event().wait()
        finally:
            with translated("close a channel"):
                await asyncio.sleep(0)
            done.append("closed")

    await cancelled_while_it_waits(clean_up())
    assert done == ["closed"]


def test_broker_is_checked_unless_that_is_turned_off_and_the_authorities_of_a_file_are_the_only_ones(tmp_path):
    contexts = [ssl_context(TlsFiles()), ssl_context(TlsFiles(verify=False))]
    found = [(context.verify_mode, context.check_hostname) for context in contexts]
    assert found == [(ssl.CERT_REQUIRED, True), (ssl.CERT_NONE, False)]
    pem = Path(certifi.where()).read_text(encoding="utf-8")
    (tmp_path / "ca.pem").write_text(pem[pem.index("-----BEGIN") : pem.index("-----END") + 25] + "\n")
    assert ssl_context(TlsFiles(ca_file=str(tmp_path / "ca.pem"))).cert_store_stats()["x509_ca"] == 1


def test_file_that_cannot_be_used_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"broker\.tls: .*/nowhere/ca\.pem"):
        ssl_context(TlsFiles(ca_file="/nowhere/ca.pem"), place="broker.tls")
    authority, certificate, key = (tmp_path / name for name in ("ca.pem", "c.pem", "k.pem"))
    for file in (authority, certificate, key):
        file.write_text("not a certificate")
    with pytest.raises(ConfigurationError, match=r"ca\.pem"):
        ssl_context(TlsFiles(ca_file=str(authority)))
    with pytest.raises(ConfigurationError, match=r"c\.pem and .*k\.pem"):
        ssl_context(TlsFiles(certificate_file=str(certificate), key_file=str(key)))


def refusal(code: int, message: str) -> ssl.SSLError:
    error = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED]")
    error.verify_code, error.verify_message = code, message
    return error


def alert(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, f"[SSL: {reason}]")
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("fault", "marker"),
    [
        (refusal(20, "unable to get local issuer"), "ca_file"),
        (refusal(10, "certificate has expired"), "expired"),
        (refusal(62, "Hostname mismatch."), "host name"),
        (refusal(64, "IP address mismatch."), "host name"),
        (alert("WRONG_VERSION_NUMBER"), "TLS"),
        (alert("TLSV13_ALERT_CERTIFICATE_REQUIRED"), "client certificate"),
        (alert("TLSV1_ALERT_UNKNOWN_CA"), "unknown ca"),
        (alert("UNEXPECTED_EOF"), "unexpected eof"),
        (ConnectionError("other"), ""),
    ],
    ids=["authority", "expired", "host", "address", "port", "no certificate", "foreign", "else", "no TLS"],
)
def test_failed_handshake_is_described_also_behind_another_error(fault, marker):
    error = ConnectionError("lost")
    error.__cause__, fault.__cause__ = fault, error
    assert marker in (describe_tls_error(error) or "")
    assert (describe_tls_error(error) is None) is (marker == "")
