"""Tells the service manager that started this process how it is: systemd, for a unit with `Type=notify`.

Called by the daemon. Without a manager that wants to know, nothing happens; nothing here fails. Source: sd_notify(3).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum

_TIMEOUT = 1.0


class Service(StrEnum):
    """What there is to tell."""

    READY = "READY=1"
    STOPPING = "STOPPING=1"


def tell_service_manager(state: Service, environment: Mapping[str, str] = os.environ) -> None:
    """Send one datagram to the socket that `NOTIFY_SOCKET` names; `@` at its beginning is the abstract name space."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):
        address = f"\0{address[1:]}"
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(_TIMEOUT)
        manager.sendto(state.encode(), address)
