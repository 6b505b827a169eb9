"""TLS to a real RabbitMQ that demands client certificates: end to end, and everything that can be wrong with it."""

import asyncio
import re
import ssl
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import uvloop
from certificates import Authority
from daemon_in_process import PATIENCE, echo_settings, running_daemon
from pydantic import SecretStr

from osrdyne import amqp
from osrdyne.amqp.tls import ssl_context
from osrdyne.broker.management.client import ManagementClient
from osrdyne.client import AsyncClient
from osrdyne.config.models import BrokerSettings, TlsSettings
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.errors import BrokerUnavailableError
from osrdyne.protocol.uri import TlsFiles, with_tls

pytestmark = pytest.mark.usefixtures("processes")

POOL = "tls"  # the broker is this module's own
RUNNERS: dict[str, Callable[[Coroutine[Any, Any, Any]], Any]] = {"asyncio": asyncio.run, "uvloop": uvloop.run}


def apart(work: Callable[[], Coroutine[Any, Any, Any]], run: Callable[[Coroutine[Any, Any, Any]], Any]) -> Any:
    """Run it in a thread and an event loop of its own."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(lambda: run(work())).result()


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority.create(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A client certificate and an authority that the broker does not know."""
    return Authority.create(tmp_path_factory.mktemp("tls") / "foreign").issue("stranger")


@pytest.fixture(scope="module")
def files(authority):
    """What a client needs."""
    return authority.issue("client")


@pytest.fixture(scope="module")
def tls_broker(authority):
    """It shows a certificate for 127.0.0.1, and demands one of the same authority."""
    broker = EmbeddedBroker(tls=authority.issue("rabbit", hosts="IP:127.0.0.1"))
    try:
        apart(broker.start, asyncio.run)
        yield broker
    finally:
        apart(broker.close, asyncio.run)


@pytest.fixture
def settings(tls_broker, files, tmp_path):
    broker = BrokerSettings(
        uri=SecretStr(tls_broker.amqps_uri),
        management_uri=SecretStr(tls_broker.https_uri),
        tls=TlsSettings(ca_file=files.ca_file, certificate_file=files.certificate_file, key_file=files.key_file),
        retry_interval=0.2,
    )
    return echo_settings(broker, POOL, tmp_path)


async def connect(uri: str) -> str:
    """The version of RabbitMQ, or the reason why it was not reached."""
    try:
        connection = await amqp.connect(amqp.ConnectionOptions(uri=uri, connect_timeout=PATIENCE))
    except BrokerUnavailableError as error:
        return error.message
    await connection.close()
    return connection.server_version


@pytest.mark.parametrize("run", RUNNERS.values(), ids=RUNNERS.keys())
def test_right_files_connect_and_without_verification_any(tls_broker, files, run):
    other_name = tls_broker.amqps_uri.replace("127.0.0.1", "localhost")
    unverified = with_tls(other_name, replace(files, ca_file=None, verify=False))
    for uri in (with_tls(tls_broker.amqps_uri, files), unverified):
        assert apart(lambda: connect(uri), run)[0].isdigit()  # noqa: B023


# Of a broker, the files of a client, and those of another authority: a URI, and what is said about it.
WRONG = {
    "other authority": (
        lambda broker, files, foreign: with_tls(broker.amqps_uri, replace(files, ca_file=foreign.ca_file)),
        r"certificate .*self-signed .*ca_file.*cacertfile",
    ),
    "no authority": (lambda b, files, _: with_tls(b.amqps_uri, replace(files, ca_file=None)), r"certificate .*ca_file"),
    "other host": (
        lambda broker, files, _: with_tls(broker.amqps_uri.replace("127.0.0.1", "localhost"), files),
        r"certificate .*Hostname mismatch",
    ),
    "no certificate": (lambda b, files, _: with_tls(b.amqps_uri, TlsFiles(files.ca_file)), r"client certificate"),
    "foreign certificate": (
        lambda broker, files, foreign: with_tls(broker.amqps_uri, replace(foreign, ca_file=files.ca_file)),
        r"unknown ca|client certificate",
    ),
    "plain to the port for TLS": (lambda b, *_: b.amqps_uri.replace("amqps:", "amqp:"), r"port for TLS"),
    "TLS to the plain port": (
        lambda broker, files, _: with_tls(broker.amqp_uri.replace("amqp:", "amqps:"), files),
        r"does not speak TLS",
    ),
}


@pytest.mark.parametrize("run", RUNNERS.values(), ids=RUNNERS.keys())
def test_wrong_files_say_what_is_wrong(tls_broker, files, foreign, run):
    for name, (uri_of, marker) in WRONG.items():
        found = apart(lambda: connect(uri_of(tls_broker, files, foreign)), run)  # noqa: B023
        assert re.search(marker, found), f"{name}: {found}"
        assert tls_broker.amqps_uri.split(":")[2].split("@")[0] not in found


async def test_expired_certificate_is_reported(authority, files):
    old = authority.issue("old", hosts="IP:127.0.0.1", not_after="20240101000000Z")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(old.certificate_file, old.key_file)
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        assert "certificate has expired" in await connect(with_tls(f"amqps://u:p@127.0.0.1:{port}/", files))


async def test_http_api_answers_over_https_and_shows_what_is_wrong(settings, foreign):
    async with ManagementClient(settings.broker) as management:
        assert (await management.whoami()).may_make_users
    right = settings.broker.tls
    for tls, marker in (
        (right.model_copy(update={"ca_file": foreign.ca_file}), "certificate was refused"),
        (TlsSettings(ca_file=right.ca_file), "client certificate"),
    ):
        async with ManagementClient(settings.broker.model_copy(update={"tls": tls})) as management:
            with pytest.raises(BrokerUnavailableError, match=rf"TLS .*{marker}"):
                await management.whoami()


async def test_daemon_worker_and_client_speak_tls(settings, files):
    """The worker gets nothing but a URI, with a user of its own, and the files are in it. A client takes a context of
    the program's own, too."""
    broker = settings.broker.model_copy(update={"scoped_credentials": True})
    async with running_daemon(settings.model_copy(update={"broker": broker})):
        async with AsyncClient(broker.effective_uri(), POOL, default_timeout=PATIENCE) as client:
            assert (await client.call("a=1", "/echo", b"over TLS")).body == b"over TLS"
        async with AsyncClient(broker.uri.get_secret_value(), POOL, tls=ssl_context(files)) as client:
            assert client.status == "connected"
        async with ManagementClient(broker) as management:
            listed = await management._request("GET", "connections")
        assert {connection.get("ssl") for connection in listed.json()} <= {True}
