"""Decide whether a request of the HTTP API may pass, and where the API may listen. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from ipaddress import ip_address

from osrdyne.auth.tokens import Role, Token, find_token, looks_like_token
from osrdyne.errors import ConfigurationError

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_PUBLIC_PATHS = frozenset({"/health", "/ready"})
_QUESTIONS = frozenset({"/v1/explain"})  # Paths whose POST changes nothing.


@dataclass(frozen=True, slots=True)
class Principal:
    """Who sends a request. `role` None: nothing is known of the sender, and only public answers are given."""

    name: str
    role: Role | None

    def may(self, role: Role) -> bool:
        return self.role is not None and self.role.includes(role)


OPEN = Principal("anyone", Role.OPERATE)  # Of an API without tokens.
LOCAL = Principal("local", Role.OPERATE)  # Of the Unix socket: the file's permissions decide who can connect.
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


def required_role(method: str, path: str) -> Role | None:
    """The role that a request needs, by the path that the router sees. None: no token is needed.

    A path or method that is not known here needs the stricter role.
    """
    if method in {"GET", "HEAD"} and path in _PUBLIC_PATHS:
        return None
    if method in _SAFE_METHODS or (method == "POST" and path in _QUESTIONS):
        return Role.READ
    return Role.OPERATE


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


def is_loopback(host: str) -> bool:
    """Whether an address is reached from its own host only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(
    host: str, *, tokens_file: str | None, insecure: bool, allowed_hosts: Sequence[str], tls: bool
) -> list[str]:
    """Warnings for the log. Raises `ConfigurationError` where the API would be open to the network."""
    if is_loopback(host):
        return []
    if tokens_file is None and not insecure:
        raise ConfigurationError(
            f"api.host: other hosts can reach {host or 'every address'}, and the API has no tokens. Create one with "
            "`osrdyne token create NAME --role operate --file FILE` and set api.tokens_file, listen on 127.0.0.1, or "
            "set api.insecure to true."
        )
    if not allowed_hosts:
        raise ConfigurationError(
            f"api.allowed_hosts: required where api.host is not loopback ({host or 'every address'}). List the names "
            "and addresses under which clients reach the API."
        )
    warnings = []
    if tokens_file is None:
        warnings.append("api.insecure is true: every host that reaches the API can use all of it without a token")
    elif not tls:
        warnings.append(
            "the API has no TLS (api.tls), so tokens cross the network unencrypted unless a proxy encrypts them"
        )
    return warnings
