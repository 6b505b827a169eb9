"""The address of the leader as a standby reports it, and when a client may follow it."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

NOT_LEADING = "not-leading"


def leader_to_ask(asked: str, problem: Mapping[str, object]) -> str | None:
    """The address of the leader in a standby's answer, for who has asked at the address `asked`.

    None when it says nothing, or when the leader listens on loopback and the standby was asked on another address: it
    is on another host, or not meant to be reached.
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
