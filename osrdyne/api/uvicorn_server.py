"""uvicorn in the daemon: without signal handlers, without a polling loop, on sockets that are already bound.

Imported when the API starts to serve: importing uvicorn and FastAPI takes a part of a second, for which a leader must
not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from osrdyne.api.access.checks import Local
from osrdyne.config.models import ApiSettings

STOP_TIMEOUT = 5  # Seconds that requests under way have to end.


def network_server(app: ASGIApp, settings: ApiSettings) -> QuietServer:
    """The server of the TCP socket."""
    return QuietServer(_configuration(app, settings, tls=True))


def local_server(app: ASGIApp, settings: ApiSettings) -> QuietServer:
    """The server of the Unix socket."""
    return QuietServer(_configuration(Local(app), settings, tls=False))


def probe_server(app: ASGIApp, settings: ApiSettings) -> QuietServer:
    """The server of the socket for probes."""
    return QuietServer(_configuration(app, settings, tls=False))


def _configuration(app: ASGIApp, settings: ApiSettings, *, tls: bool) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=connection_class(settings.header_timeout),
        log_config=None,
        access_log=False,
        lifespan="off",
        date_header=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        limit_concurrency=settings.limit_concurrency,
        timeout_graceful_shutdown=STOP_TIMEOUT,
        ssl_certfile=settings.tls.certificate_file if tls else None,
        ssl_keyfile=settings.tls.key_file if tls else None,
    )


class QuietServer(uvicorn.Server):
    """A server that waits for `stop`, while uvicorn's own polls ten times a second."""

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
        """Leave signals to the daemon."""
        yield


def connection_class(header_timeout: float) -> type[H11Protocol]:
    """The protocol class with this timeout: uvicorn passes no arguments of ours to a protocol."""
    return type("Connection", (_Connection,), {"header_timeout": header_timeout})


class _Connection(H11Protocol):
    """Limits the time for the headers, for which uvicorn waits without limit, and the number of connections."""

    header_timeout: float

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # uvicorn answers 503 to requests above the limit, but does not limit connections without a request.
        if self.limit_concurrency is not None and len(self.connections) > 2 * self.limit_concurrency:
            transport.abort()
            return
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect_headers()  # of the first request, or of the next one; or the rest of a refused body
        else:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_timeout, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
