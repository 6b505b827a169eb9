"""The roles of the HTTP API, and the role that each request needs."""

from __future__ import annotations

from enum import StrEnum

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_PUBLIC_PATHS = frozenset({"/health", "/ready"})
_QUESTIONS = frozenset({"/v1/explain"})
"""Paths whose POST changes nothing."""


class Role(StrEnum):
    """What a token may do. Each role includes the ones before it."""

    READ = "read"
    OPERATE = "operate"

    def includes(self, other: Role) -> bool:
        order = list(Role)
        return order.index(self) >= order.index(other)


def required_role(method: str, path: str) -> Role | None:
    """The role that a request needs, by the path that the router sees. None: no token is needed.

    A path or method that is not known here needs the stricter role.
    """
    if method in {"GET", "HEAD"} and path in _PUBLIC_PATHS:
        return None
    if method in _SAFE_METHODS or (method == "POST" and path in _QUESTIONS):
        return Role.READ
    return Role.OPERATE
