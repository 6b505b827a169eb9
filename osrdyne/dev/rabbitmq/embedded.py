"""A private RabbitMQ node on loopback ports, for tests, the demo and `osrdyne dev`. Never used by a real deployment.

The node, its port mapper and everything they start are one process group that a small shell supervises. The shell
reads a pipe from this process: a line means "stop in order", its end means that this process is gone, however that
happened, and then the whole group is killed. So nothing stays behind, not even after `kill -9`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from osrdyne import amqp
from osrdyne.dev.rabbitmq import node_files
from osrdyne.dev.rabbitmq.node_files import LOOPBACK, NodeIdentity
from osrdyne.errors import BrokerError, BrokerUnavailableError, ConfigurationError, PortTakenError
from osrdyne.logs import get_logger
from osrdyne.protocol.uri import TlsFiles

log = get_logger("broker.embedded")

# Debian's server script proper: the wrapper that is on its PATH changes to the user `rabbitmq`.
_SERVERS = (Path("/usr/lib/rabbitmq/bin/rabbitmq-server"),)
_PORT_MAPPERS = (Path("/usr/lib/erlang/bin/epmd"),)
_REMEDY = "install RabbitMQ (Debian and Ubuntu: apt-get install rabbitmq-server), or set broker.uri to one that runs"
_SUPERVISOR = """
"$2" -port "$ERL_EPMD_PORT" -address "$ERL_EPMD_ADDRESS" & mapper=$!
"$1" & server=$!
exec 3<&0
( if read -r word <&3; then kill -TERM $server; read -r word <&3; fi; kill -KILL 0 ) & lifeline=$!
wait $server
kill $mapper $lifeline
"""
_POLL_INTERVAL = 0.1
START_TIMEOUT = 180.0  # Seconds: a small machine that is busy takes more than one minute.
_STOP_TIMEOUT = 20.0


class EmbeddedBroker:
    """One RabbitMQ node. `async with EmbeddedBroker() as broker:` starts it, and removes every trace at the end.

    `directory` keeps the node's data from one use to the next; without it a temporary one is used.
    `consumer_timeout` (seconds) is RabbitMQ's limit for an unacknowledged delivery, its own default is 30 minutes.
    With `tls` it listens for TLS as well: its certificate and key, and with `verify` it takes only clients that have a
    certificate of `ca_file`.
    """

    def __init__(
        self, directory: Path | None = None, *, consumer_timeout: float | None = None, tls: TlsFiles | None = None
    ) -> None:
        self._directory = directory.absolute() if directory else None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._consumer_timeout = consumer_timeout
        self._tls = tls
        self._identity: NodeIdentity | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"EmbeddedBroker({str(self._directory or 'temporary')!r})"

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def directory(self) -> Path:
        if self._directory is None:
            raise RuntimeError("the embedded broker has not been started")
        return self._directory

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def amqp_port(self) -> int:
        return self._known().amqp_port

    @property
    def management_port(self) -> int:
        return self._known().management_port

    @property
    def amqp_uri(self) -> str:
        """Holds the password: never log it."""
        node = self._known()
        return f"amqp://{node.user}:{node.password}@{LOOPBACK}:{node.amqp_port}/"

    @property
    def management_uri(self) -> str:
        """Holds the password: never log it."""
        node = self._known()
        return f"http://{node.user}:{node.password}@{LOOPBACK}:{node.management_port}"

    @property
    def amqps_uri(self) -> str:
        """For a node with `tls`. Holds the password: never log it."""
        node = self._known()
        return f"amqps://{node.user}:{node.password}@{LOOPBACK}:{node.amqps_port}/"

    @property
    def https_uri(self) -> str:
        """The HTTP API of a node with `tls`. Holds the password: never log it."""
        node = self._known()
        return f"https://{node.user}:{node.password}@{LOOPBACK}:{node.https_port}"

    def _known(self) -> NodeIdentity:
        if self._identity is None:
            raise RuntimeError("the embedded broker has not been started")
        return self._identity

    async def start(self, timeout: float = START_TIMEOUT) -> None:
        """Start the node and return once it serves AMQP and the HTTP API; a running one is left alone.

        Raises `ConfigurationError` when RabbitMQ is not installed, `PortTakenError` when the ports that belong to
        `directory` are in use, `BrokerError` with the last lines of the log when the node does not come up.
        """
        if self.is_running:
            return
        server, port_mapper = find_server(), find_port_mapper()
        await self.kill()  # what a node that ended by itself has left: its process entry and our end of the pipe
        self._prepare_files()
        self._launch(server, port_mapper)
        try:
            async with asyncio.timeout(timeout):
                await self._wait_until_serving()
        except TimeoutError:
            await self.kill()
            raise BrokerError(f"RabbitMQ did not start within {timeout:g} s. {self._last_words()}") from None
        except BaseException:
            await self.kill()
            raise
        log.debug("embedded broker started", directory=str(self.directory), amqp_port=self.amqp_port)

    def _prepare_files(self) -> None:
        if self._directory is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="osrdyne-rabbitmq-", ignore_cleanup_errors=True)
            self._directory = Path(self._temporary.name)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._identity = NodeIdentity.load_or_create(self._directory)
        taken = [port for port in self._identity.ports(tls=self._tls is not None) if not node_files.is_free(port)]
        if taken:
            raise PortTakenError(
                f"Port {taken[0]} of the embedded RabbitMQ in {self._directory} is in use: stop the node that runs "
                "there already, or use another directory.",
                port=taken[0],
            )
        node_files.write_files(self._directory, self._identity, consumer_timeout=self._consumer_timeout, tls=self._tls)

    def _launch(self, server: Path, port_mapper: Path) -> None:
        with (self.directory / "log" / "console.log").open("wb") as console:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _SUPERVISOR, "osrdyne-rabbitmq", str(server), str(port_mapper)],
                stdin=subprocess.PIPE,
                stdout=console,
                stderr=console,
                cwd=self.directory,
                env=node_files.environment(self.directory, self._known(), os.environ),
                start_new_session=True,
            )

    async def _wait_until_serving(self) -> None:
        options = amqp.ConnectionOptions(uri=self.amqp_uri, name="osrdyne embedded broker", connect_timeout=5.0)
        while True:
            if not self.is_running:
                raise BrokerError(f"RabbitMQ did not start. {self._last_words()}")
            try:
                for port in (self.management_port, self.amqp_port):
                    _, writer = await asyncio.open_connection(LOOPBACK, port)
                    writer.close()
                connection = await amqp.connect(options)
                await connection.close()
                return
            except (BrokerUnavailableError, OSError):
                await asyncio.sleep(_POLL_INTERVAL)

    def _last_words(self) -> str:
        try:
            text = (self.directory / "log" / "console.log").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "Its last words:\n" + "\n".join(text.strip().splitlines()[-15:])

    async def stop(self) -> None:
        """Stop the node in order, by force after a while. Ports and data are kept: `start` brings it back."""
        if self._process is not None and self.is_running and self._process.stdin is not None:
            try:
                self._process.stdin.write(b"stop\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                pass
            await _until(lambda: not self.is_running, timeout=_STOP_TIMEOUT)
        await self.kill()

    async def kill(self) -> None:
        """Kill the node without warning (`kill -9`), as a crash would; `start` brings it back with its data."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            # The group's id stays reserved until its leader, our child, is reaped below.
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            if process.stdin is not None:
                process.stdin.close()
        await asyncio.to_thread(process.wait)
        # The shell was ours to wait for; the node itself is gone once its ports are free again.
        ports = self._known().ports(tls=self._tls is not None)
        await _until(lambda: all(map(node_files.is_free, ports)), timeout=_STOP_TIMEOUT)

    async def restart(self, timeout: float = START_TIMEOUT) -> None:
        """Stop and start again: same ports, same data."""
        await self.stop()
        await self.start(timeout)

    async def close(self) -> None:
        """Stop the node for good; a temporary directory goes with it (and then nothing needs an orderly stop)."""
        if self._temporary is None:
            await self.stop()
        else:
            await self.kill()
            self._temporary.cleanup()
            self._temporary = self._directory = self._identity = None


async def _until(condition: Callable[[], bool], *, timeout: float) -> None:
    """Return once `condition()` holds, or when the time is over."""
    for _ in range(int(timeout / _POLL_INTERVAL)):
        if condition():
            return
        await asyncio.sleep(_POLL_INTERVAL)


def find_server() -> Path:
    """RabbitMQ's server script. Raises `ConfigurationError` when it is not installed."""
    return _find(_SERVERS, "rabbitmq-server", "RabbitMQ")


def find_port_mapper() -> Path:
    """Erlang's port mapper. Raises `ConfigurationError` when it is not installed."""
    return _find(_PORT_MAPPERS, "epmd", "Erlang's port mapper epmd, a part of RabbitMQ's installation,")


def _find(places: tuple[Path, ...], name: str, what: str) -> Path:
    for place in places:
        if place.exists():
            return place
    found = shutil.which(name)
    if found is None:
        raise ConfigurationError(f"{what} is not installed: {_REMEDY}.")
    return Path(found)
