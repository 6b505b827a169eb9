"""Serves the API from inside the daemon: uvicorn without signal handlers, without a ticking loop, on our own socket.

The daemon binds first (a port that is taken ends the start-up with one sentence), then runs `ApiServer.run` in its
TaskGroup; cancelling it is the graceful stop.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from osrdyne.config.models import ApiSettings
from osrdyne.errors import ConfigurationError, PortTakenError
from osrdyne.logs import get_logger

STOP_TIMEOUT = 5
"""Seconds that requests under way have to end."""

log = get_logger("api")


class ApiServer:
    """One listening server."""

    def __init__(self, app: ASGIApp, settings: ApiSettings) -> None:
        self._settings = settings
        self._server = _QuietServer(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                date_header=False,
                server_header=False,
                ws="none",
                timeout_graceful_shutdown=STOP_TIMEOUT,
            )
        )
        self._socket: socket.socket | None = None

    def bind(self) -> None:
        """Take the port. Raises `PortTakenError` or `ConfigurationError`; calling it again does nothing."""
        if self._socket is None:
            self._socket = bind_socket(self._settings.host, self._settings.port)

    @property
    def port(self) -> int:
        """The port, also where the settings say 0. Only after `bind`."""
        assert self._socket is not None, "bind() first"
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """Where to reach the API from this host. Only after `bind`."""
        host = self._settings.host
        host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def announced_url(self) -> str:
        """Where to reach the API from other hosts, if it listens there; else from this one. Only after `bind`."""
        if self._settings.host in {"0.0.0.0", "::", ""}:
            return f"http://{socket.gethostname()}:{self.port}"
        return self.url

    async def run(self) -> None:
        """Serve until cancelled; then let requests under way end, at most `STOP_TIMEOUT` seconds."""
        self.bind()
        assert self._socket is not None
        log.info("api listening", url=self.url)
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="uvicorn")
        try:
            await asyncio.shield(serving)
        finally:
            self._server.stop()
            await serving
            self.close()

    def close(self) -> None:
        """Give the port back; for a server that was bound and never ran."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class _QuietServer(uvicorn.Server):
    """uvicorn wakes up ten times a second to look at the clock; this one waits to be stopped."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stopped.set()

    async def main_loop(self) -> None:
        await self._stopped.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the daemon's."""
        yield


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `PortTakenError` when the port is in use, `ConfigurationError` for an
    address that is not this host's or a port that needs privileges."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigurationError(f"api.host: {host!r} is not an address of this host.") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # SO_REUSEADDR lets two sockets bind; only listening finds out that the port is taken.
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise _bind_error(error, host, port) from error
    return listener


def _bind_error(error: OSError, host: str, port: int) -> PortTakenError | ConfigurationError:
    if error.errno == errno.EADDRINUSE:
        return PortTakenError(
            f"Port {port} on {host} is in use by another process: stop it, or set api.port to another (0: any free).",
            host=host,
            port=port,
        )
    if error.errno == errno.EACCES:
        return ConfigurationError(f"api.port: this user may not listen on port {port}; use one above 1023.")
    return ConfigurationError(f"api.host: cannot listen on {host!r} port {port}: {error.strerror}.")
