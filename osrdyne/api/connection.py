"""One connection of the API: uvicorn's, with a limit of time for the headers and a limit of connections.

uvicorn waits without limit for the first request of a connection and for the rest of one that has begun.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


def connection_class(header_timeout: float) -> type[H11Protocol]:
    """The protocol class for uvicorn, which passes nothing of ours to it."""
    return type("Connection", (_Connection,), {"header_timeout": header_timeout})


class _Connection(H11Protocol):
    header_timeout: float

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # uvicorn answers 503 to a request above the limit, but keeps each connection that sends none.
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
