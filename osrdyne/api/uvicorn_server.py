"""uvicorn as the daemon runs it: without signal handlers, without a ticking loop, on sockets that are bound already.

Imported once the API is served: uvicorn and FastAPI take a part of a second, which no leader waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from osrdyne.api.access import Local
from osrdyne.api.connection import connection_class
from osrdyne.config.models import ApiSettings

STOP_TIMEOUT = 5
"""Seconds that requests under way have to end."""


def network_server(app: ASGIApp, settings: ApiSettings) -> QuietServer:
    """The server of the TCP socket."""
    return QuietServer(_configuration(app, settings, tls=True))


def local_server(app: ASGIApp, settings: ApiSettings) -> QuietServer:
    """The server of the Unix socket."""
    return QuietServer(_configuration(Local(app), settings, tls=False))


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
