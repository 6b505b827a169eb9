"""A private RabbitMQ node on loopback ports, for tests, the demos and `osrdyne dev`. Not for deployments.

The node, its port mapper and their children are one process group, supervised by a shell. The shell reads a pipe from
this process: a line means "stop in order"; the end of the pipe means that this process has ended, and then the shell
kills the whole group. So no process is left, even after `kill -9`.
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

# Debian's server script itself: the wrapper in its PATH changes to the user `rabbitmq`.
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
START_TIMEOUT = 180.0  # Seconds: a small, busy machine needs more than one minute.
_STOP_TIMEOUT = 20.0


class EmbeddedBroker:
    """One RabbitMQ node. `async with EmbeddedBroker() as broker:` starts it, and stops it at the end.

    `directory`: for data that outlives the node; by default a temporary one. `consumer_timeout`: RabbitMQ's limit for
    an unacknowledged delivery in seconds; its default is 30 minutes. `tls`: also listen for TLS, with this certificate
    and key; with `verify` only clients with a certificate of `ca_file` are accepted.
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
        return self._node().amqp_port

    @property
    def management_port(self) -> int:
        return self._node().management_port

    @property
    def amqp_uri(self) -> str:
        """The AMQP URI with the password, so it must not be logged."""
        node = self._node()
        return f"amqp://{node.user}:{node.password}@{LOOPBACK}:{node.amqp_port}/"

    @property
    def management_uri(self) -> str:
        """The URI of the HTTP API with the password, so it must not be logged."""
        node = self._node()
        return f"http://{node.user}:{node.password}@{LOOPBACK}:{node.management_port}"

    @property
    def amqps_uri(self) -> str:
        """The AMQP URI of a node with `tls`, with the password."""
        node = self._node()
        return f"amqps://{node.user}:{node.password}@{LOOPBACK}:{node.amqps_port}/"

    @property
    def https_uri(self) -> str:
        """The URI of the HTTP API of a node with `tls`, with the password."""
        node = self._node()
        return f"https://{node.user}:{node.password}@{LOOPBACK}:{node.https_port}"

    def _node(self) -> NodeIdentity:
        if self._identity is None:
            raise RuntimeError("the embedded broker has not been started")
        return self._identity

    async def start(self, timeout: float = START_TIMEOUT) -> None:
        """Start the node and return once it serves AMQP and the HTTP API. No-op if it runs.

        Raises `ConfigurationError` if RabbitMQ is not installed, `PortTakenError` if the ports of `directory` are in
        use, and `BrokerError` with the last lines of the console if the node does not start.
        """
        if self.is_running:
            return
        server, port_mapper = find_server(), find_port_mapper()
        await self.kill()  # clean up after a node that ended by itself: reap it and close the pipe
        self._prepare_files()
        self._launch(server, port_mapper)
        try:
            async with asyncio.timeout(timeout):
                await self._wait_until_serving()
        except TimeoutError:
            await self.kill()
            raise BrokerError(f"RabbitMQ did not start within {timeout:g} s. {self._last_lines()}") from None
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
                env=node_files.environment(self.directory, self._node(), os.environ),
                start_new_session=True,
            )

    async def _wait_until_serving(self) -> None:
        options = amqp.ConnectionOptions(uri=self.amqp_uri, name="osrdyne embedded broker", connect_timeout=5.0)
        while True:
            if not self.is_running:
                raise BrokerError(f"RabbitMQ did not start. {self._last_lines()}")
            try:
                for port in (self.management_port, self.amqp_port):
                    _, writer = await asyncio.open_connection(LOOPBACK, port)
                    writer.close()
                connection = await amqp.connect(options)
                await connection.close()
                return
            except (BrokerUnavailableError, OSError):
                await asyncio.sleep(_POLL_INTERVAL)

    def _last_lines(self) -> str:
        try:
            text = (self.directory / "log" / "console.log").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "Its last lines:\n" + "\n".join(text.strip().splitlines()[-15:])

    async def stop(self) -> None:
        """Stop the node in order, or kill it after a time-out. `start` starts it again with its ports and data."""
        if self._process is not None and self.is_running and self._process.stdin is not None:
            try:
                self._process.stdin.write(b"stop\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                pass
            await _until(lambda: not self.is_running, timeout=_STOP_TIMEOUT)
        await self.kill()

    async def kill(self) -> None:
        """Kill the node (`kill -9`), as a crash would. `start` starts it again with its ports and data."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            # The id of the group is not reused before its leader, a child of this process, is reaped below.
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            if process.stdin is not None:
                process.stdin.close()
        await asyncio.to_thread(process.wait)
        # The shell is reaped. The node, which is not a child of this process, has ended once its ports are free.
        ports = self._node().ports(tls=self._tls is not None)
        await _until(lambda: all(map(node_files.is_free, ports)), timeout=_STOP_TIMEOUT)

    async def restart(self, timeout: float = START_TIMEOUT) -> None:
        """Stop and start the node, with the same ports and data."""
        await self.stop()
        await self.start(timeout)

    async def close(self) -> None:
        """Stop the node, or kill it and delete its directory if that is temporary."""
        if self._temporary is None:
            await self.stop()
        else:
            await self.kill()
            self._temporary.cleanup()
            self._temporary = self._directory = self._identity = None


async def _until(condition: Callable[[], bool], *, timeout: float) -> None:
    """Return once `condition()` holds, or after `timeout` seconds."""
    for _ in range(int(timeout / _POLL_INTERVAL)):
        if condition():
            return
        await asyncio.sleep(_POLL_INTERVAL)


def find_server() -> Path:
    """RabbitMQ's server script. Raises `ConfigurationError` if it is not installed."""
    return _find(_SERVERS, "rabbitmq-server", "RabbitMQ")


def find_port_mapper() -> Path:
    """Erlang's port mapper. Raises `ConfigurationError` if it is not installed."""
    return _find(_PORT_MAPPERS, "epmd", "Erlang's port mapper epmd, a part of RabbitMQ's installation,")


def _find(places: tuple[Path, ...], name: str, what: str) -> Path:
    for place in places:
        if place.exists():
            return place
    found = shutil.which(name)
    if found is None:
        raise ConfigurationError(f"{what} is not installed: {_REMEDY}.")
    return Path(found)
