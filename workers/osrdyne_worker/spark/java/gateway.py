"""Whether Spark's Java process (JVM) still accepts connections of py4j. Used by the health check of `session`.

py4j accepts connections in one thread of the JVM. An OutOfMemoryError ends this thread and not the JVM. Threads of the
worker that are connected continue; each new connection gets no answer, because only the kernel still accepts it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from osrdyne.logs import get_logger

log = get_logger(__name__)

PROBE_INTERVAL = 5.0
"""Seconds between two probes, also if several keys share the JVM."""
PROBE_TIMEOUT = 3.0
"""Seconds for the answer to a probe: the check of the session has `BUSY_INTERVAL`."""
MAX_UNANSWERED = 3
"""Probes without an answer, one after the other, after which the gateway is closed: a pause of the JVM may take one."""
CLOSED = "Spark's Java process accepts no new connections: its thread for them has ended."


class GatewayWatch:
    """Probes the gateway with a new connection. Thread-safe.

    `connect` opens a connection, waits for an answer, and closes it. Raises `OSError`.
    """

    def __init__(self, connect: Callable[[], None], *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._connect = connect
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._probed_at = float("-inf")
        self._unanswered = 0
        self.is_closed = False

    def check(self) -> bool:
        """Whether the JVM accepts connections, as far as is known. Probes it if the last probe was long enough ago.

        Call this after the JVM has answered over another connection: without an answer, the JVM may only be paused.
        """
        if not self._lock.acquire(blocking=False):
            return not self.is_closed  # another thread waits for the answer
        try:
            now = self._monotonic()
            if not self.is_closed and now - self._probed_at >= PROBE_INTERVAL:
                self._probed_at = now
                self._probe()
        finally:
            self._lock.release()
        return not self.is_closed

    def _probe(self) -> None:
        try:
            self._connect()
        except ConnectionRefusedError:
            self.is_closed = True
        except (TimeoutError, ConnectionError) as error:
            self._unanswered += 1
            self.is_closed = self._unanswered >= MAX_UNANSWERED
            log.warning("JVM did not answer a new connection", probes=self._unanswered, error=str(error))
        except OSError:  # not of the JVM, such as too many open files of this process
            log.warning("JVM could not be probed", exc_info=True)
        else:
            self._unanswered = 0


def connect_to(gateway: Any) -> None:
    """Open a connection to the gateway, log in, and close it. Raises `OSError`."""
    parameters = gateway.gateway_parameters
    address = (parameters.address, parameters.port)
    with socket.create_connection(address, PROBE_TIMEOUT) as connection:
        connection.sendall(f"A\n{parameters.auth_token or ''}\n".encode())  # py4j's command to log in
        # An answer of any kind comes from a thread that serves this connection.
        if not connection.recv(1):
            raise ConnectionResetError("the connection was closed without an answer")
