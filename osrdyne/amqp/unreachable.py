"""Why RabbitMQ cannot be reached, in words. Used where errors of AMQP and of the HTTP API are translated; pure."""

from __future__ import annotations

import errno
import socket

_NAMES = {
    socket.EAI_NONAME: "no host has this name",
    socket.EAI_AGAIN: "the name of the host could not be looked up (is the network up?)",
}
_WORDS = {
    errno.ECONNREFUSED: "nothing listens there (is RabbitMQ running?)",
    errno.EHOSTUNREACH: "there is no way to this host from here",
    errno.ENETUNREACH: "there is no way to this network from here",
    errno.ETIMEDOUT: "nothing answered (does a firewall stand between?)",
    errno.ECONNRESET: "the connection was broken off",
    errno.EPIPE: "the connection was broken off",
}


def describe_unreachable(error: BaseException) -> str | None:
    """What the operating system said, in words; None when no error that is known here is behind `error`."""
    seen: list[BaseException] = []  # aiormq's errors may be causes of each other
    found: BaseException | None = error
    while found is not None and found not in seen:
        words = _NAMES if isinstance(found, socket.gaierror) else _WORDS
        if isinstance(found, OSError) and found.errno in words:
            return words[found.errno]
        seen.append(found)
        found = found.__cause__ or found.__context__
    return None
