"""Grants, roles, the keys that a grant covers, and the principal who has them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from osrdyne.expressions import compile_linear
from osrdyne.protocol.key_patterns import KeyPattern

MAX_PATTERN = 1_000
"""Characters of a pattern."""


class Grant(StrEnum):
    """One right."""

    VIEW = "view"
    OPERATE = "operate"
    ADMIN = "admin"
    BODIES = "bodies"
    SEND = "send"
    LISTEN = "listen"


class Role(StrEnum):
    """The usual combinations of grants. Each role includes those before it."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    @property
    def grants(self) -> tuple[Grant, ...]:
        order = (Grant.VIEW, Grant.OPERATE, Grant.ADMIN)
        return order[: list(Role).index(self) + 1]


@dataclass(frozen=True, slots=True)
class KeyScope:
    """The keys that a grant covers. `pattern` None: all keys."""

    pattern: str | None = None

    @property
    def is_limited(self) -> bool:
        return self.pattern is not None

    def covers(self, key: str) -> bool:
        if self.pattern is None:
            return True
        try:
            return _compiled(self.pattern).match(key) is not None
        except UnicodeEncodeError:  # a key with half of a surrogate pair matches no pattern
            return False


ALL_KEYS = KeyScope()


@lru_cache(maxsize=1_000)
def _compiled(pattern: str) -> KeyPattern:
    return KeyPattern(pattern, compile=compile_linear)


def parse_scope(text: str | None) -> KeyScope:
    """The keys that a pattern such as `tpch/{table}` covers; all keys for None. Raises ValueError."""
    if text is None:
        return ALL_KEYS
    if len(text) > MAX_PATTERN:
        raise ValueError(f"a pattern has at most {MAX_PATTERN} characters")
    try:
        _compiled(text)
    except re.error as error:
        raise ValueError(str(error)) from None
    return KeyScope(text)


class Method(StrEnum):
    """How a principal was identified."""

    OPEN = "open"
    SOCKET = "socket"
    TOKEN = "token"
    JWT = "jwt"
    PROXY = "proxy"


@dataclass(frozen=True, slots=True)
class Principal:
    """Who sends a request, and with which rights."""

    name: str
    grants: Mapping[Grant, KeyScope] = field(default_factory=dict)
    method: Method = Method.OPEN

    @property
    def role(self) -> Role | None:
        """The strongest role of which it has all grants, for all keys or for some."""
        return next((role for role in reversed(Role) if all(grant in self.grants for grant in role.grants)), None)

    def may(self, grant: Grant, key: str | None = None) -> bool:
        """Whether it has the grant for the key; without a key: for any key."""
        scope = self.grants.get(grant)
        return scope is not None and (key is None or scope.covers(key))

    def is_limited(self, grant: Grant) -> bool:
        """Whether it has the grant for some keys only, or not at all."""
        scope = self.grants.get(grant)
        return scope is None or scope.is_limited


def grants_of(role: Role | None, more: Iterable[Grant] = (), *, keys: KeyScope = ALL_KEYS) -> dict[Grant, KeyScope]:
    """The grants of a role and further grants, all for the same keys."""
    return dict.fromkeys((*(role.grants if role is not None else ()), *more), keys)


EVERYTHING = grants_of(Role.ADMIN, Grant)
OPEN = Principal("anyone", EVERYTHING, Method.OPEN)  # Of an API without authentication.
LOCAL = Principal("local", EVERYTHING, Method.SOCKET)  # The permissions of the socket's file decide who can connect.
ANONYMOUS = Principal("anonymous")
