"""Reads the engine's stream of events in a thread, and notifies the driver of changes.

The content of events is not used: the driver lists the containers. A stream that breaks is opened again with back-off,
and an opened stream counts as a change, because events may have been missed. Used by the Docker driver.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from urllib3.exceptions import ReadTimeoutError

from osrdyne.aio.clock import Backoff, Clock
from osrdyne.drivers.docker.engine import Engine
from osrdyne.logs import Logger, get_logger

# Seconds without an event after which the stream is opened again: the connection to a remote engine may be dead.
SILENCE = 300.0

_BACKOFF = Backoff(initial=0.2, maximum=10.0)
# Seconds after which a stream counts as working, and resets the back-off: some break as soon as they are opened.
_WORKING_AFTER = 10.0
_KINDS = ["create", "start", "die", "oom", "destroy", "pause", "unpause"]
_JOIN_TIMEOUT = 2.0  # Seconds for which `close` waits for the thread, which may hang in a call of the engine.


class EventReader:
    """`notify` is called in the reader's thread, after every event and every time the stream is opened."""

    def __init__(self, engine: Engine, labels: list[str], notify: Callable[[], None], *, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._filters = {"type": "container", "event": _KINDS, "label": labels}
        self._notify = notify
        self._closed = threading.Event()
        self._stream: Any = None
        self._thread = threading.Thread(target=self._run, name="docker-events", daemon=True)
        self._log: Logger = get_logger("drivers.docker")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread; blocks until it has ended, or for `_JOIN_TIMEOUT` seconds."""
        self._closed.set()
        self._close_stream()
        self._thread.join(_JOIN_TIMEOUT)
        self._engine.close()

    def _run(self) -> None:
        failures = 0
        while not self._closed.is_set():
            began, problem = self._clock.monotonic(), "the stream has ended"
            try:
                self._engine.call(self._read)
            except Exception as error:
                problem = str(error)
            finally:
                self._close_stream()
            # A stream that breaks at once must not be opened again without a pause.
            failures = 0 if self._clock.monotonic() - began >= _WORKING_AFTER else failures + 1
            if failures == 1 and not self._closed.is_set():
                self._log.warning("docker events lost", error=problem)
            self._closed.wait(_BACKOFF.delay(failures))

    def _read(self, client: Any) -> None:
        self._stream = client.events(filters=self._filters, decode=True)
        # Events may have been missed while no stream was open.
        self._notify()
        with suppress(ReadTimeoutError):  # no event for a long time: open another stream
            for _ in self._stream:
                self._notify()

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(OSError, AttributeError):  # the SDK accesses a socket that may be closed
                stream.close()
