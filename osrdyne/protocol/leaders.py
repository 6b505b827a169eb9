"""The address of the leader in the answer of a standby, and whether a client may follow it."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

NOT_LEADING = "not-leading"


def leader_to_ask(asked: str, problem: Mapping[str, object]) -> str | None:
    """The address of the leader in the answer of a standby, which the client has called at `asked`.

    None if the answer has none, or if the leader listens on loopback and `asked` is not loopback: the client could be
    on another host.
    """
    leader = problem.get("leader")
    if problem.get("code") != NOT_LEADING or not isinstance(leader, str):
        return None
    if urlsplit(leader).scheme not in {"http", "https"} or (_is_loopback(leader) and not _is_loopback(asked)):
        return None
    return leader.rstrip("/")


def _is_loopback(url: str) -> bool:
    if urlsplit(url).scheme == "unix":
        return True
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
