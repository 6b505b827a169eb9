"""The one place that decides whether a request of the HTTP API may pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from osrdyne.auth.roles import Role, required_role
from osrdyne.auth.tokens import Token, find_token, looks_like_token


@dataclass(frozen=True, slots=True)
class Principal:
    """Who sends a request. `role` None: nothing is known of the sender, and only public answers are given."""

    name: str
    role: Role | None

    def may(self, role: Role) -> bool:
        return self.role is not None and self.role.includes(role)


OPEN = Principal("anyone", Role.OPERATE)
"""Of an API without tokens."""
LOCAL = Principal("local", Role.OPERATE)
"""Of the Unix socket: the file's permissions decide who can connect."""
ANONYMOUS = Principal("anonymous", None)


class Refusal(Enum):
    """Why a request is refused."""

    NO_TOKEN = "the request has no token"
    MALFORMED = "the Authorization header is not one bearer token"
    UNKNOWN = "the token is not known: it was revoked, or belongs to another pool"
    EXPIRED = "the token has expired"
    FORBIDDEN = "the token's role does not allow this"


@dataclass(frozen=True, slots=True)
class Decision:
    """`refusal` None: the request passes, as `principal`. `required` is the role that it needs."""

    principal: Principal
    required: Role | None
    refusal: Refusal | None = None


def decide(
    method: str, path: str, *, authorization: Sequence[str], tokens: Sequence[Token] | None, now: datetime
) -> Decision:
    """Whether a request may pass. `authorization`: its headers of this name; `tokens` None: the API is open."""
    required = required_role(method, path)
    if tokens is None:
        return Decision(OPEN, required)
    found, refusal = _identify(authorization, tokens, now)
    principal = ANONYMOUS if found is None else Principal(found.name, found.role)
    if required is None or (refusal is None and principal.may(required)):
        return Decision(principal, required)
    return Decision(principal, required, refusal or Refusal.FORBIDDEN)


def _identify(
    authorization: Sequence[str], tokens: Sequence[Token], now: datetime
) -> tuple[Token | None, Refusal | None]:
    if not authorization:
        return None, Refusal.NO_TOKEN
    scheme, _, text = authorization[0].partition(" ")
    if len(authorization) > 1 or scheme.lower() != "bearer" or not looks_like_token(text):
        return None, Refusal.MALFORMED
    found = find_token(tokens, text)
    if found is None:
        return None, Refusal.UNKNOWN
    return (None, Refusal.EXPIRED) if found.has_expired(now) else (found, None)
