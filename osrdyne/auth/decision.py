"""Decide whether a request of the HTTP API may pass, and where the API may listen. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address

from osrdyne.auth.claims import grants_of_values, is_name
from osrdyne.auth.endpoints import Endpoint, KeysOf
from osrdyne.auth.grants import Grant, Method, Principal, Role
from osrdyne.auth.tokens import Token, find_token, looks_like_token
from osrdyne.errors import ConfigurationError

PROXY_ROLES = {name: name for name in (*Role, Grant.BODIES)}
"""The roles and grants that a trusted proxy may name."""

KEYS_RETRY_AFTER = 60.0
"""Seconds between two reads of the keys of JWTs, and so the longest wait after a failed one."""


class AccessRefusal(Enum):
    """Why a request is refused."""

    NO_TOKEN = "the request has no token"
    MALFORMED = "the Authorization header is not one bearer token"
    UNKNOWN = "the token is unknown: it was revoked, or belongs to another pool"
    EXPIRED = "the token has expired"
    SIGNATURE = "the JWT is malformed, or its signature or algorithm is wrong"
    UNKNOWN_KEY = "the key that signed the JWT is unknown"
    KEYS_UNAVAILABLE = "the keys that verify JWTs cannot be read at present"
    NO_KEYS = "the pool has nothing to verify tokens with: set api.tokens_file or api.jwt"
    PROXY = "the user or the roles that the proxy names are not valid"
    CLAIMS = "the issuer, the audience or another claim of the JWT is wrong"
    FORBIDDEN = "the grant is missing"
    OTHER_KEYS = "the grant is limited to other keys"
    ALL_KEYS = "the grant is limited to some keys, and this concerns all of them"


@dataclass(frozen=True, slots=True)
class Denial:
    """The refusal of an identified or unknown sender, with the grant that it needs."""

    grant: Grant
    refusal: AccessRefusal


def authorize(principal: Principal, endpoint: Endpoint, key: str | None) -> Denial | None:
    """Why the principal may not use the endpoint; None if it may. `key`: the one that the request names (`KeysOf.PATH`,
    `QUERY`)."""
    if endpoint.grant is None:
        return None
    if endpoint.keys is KeysOf.ALL and principal.may(endpoint.grant) and principal.is_limited(endpoint.grant):
        return Denial(endpoint.grant, AccessRefusal.ALL_KEYS)
    return check_grant(principal, endpoint.grant, key)


def check_grant(principal: Principal, grant: Grant, key: str | None = None) -> Denial | None:
    """Why the principal lacks the grant for the key, or without a key for every key; None if it has the grant."""
    if not principal.may(grant):
        return Denial(grant, AccessRefusal.FORBIDDEN)
    return None if principal.may(grant, key) else Denial(grant, AccessRefusal.OTHER_KEYS)


def bearer_token(authorization: Sequence[str]) -> str | AccessRefusal:
    """The token of the `Authorization` headers of a request."""
    if not authorization:
        return AccessRefusal.NO_TOKEN
    scheme, _, text = authorization[0].partition(" ")
    return text if len(authorization) == 1 and scheme.lower() == "bearer" else AccessRefusal.MALFORMED


def identify_token(presented: str, tokens: Sequence[Token], now: datetime) -> Principal | AccessRefusal:
    """The principal of an API token."""
    if not looks_like_token(presented):
        return AccessRefusal.MALFORMED
    return _identify(find_token(tokens, presented), now)


def identify_named(name: str, tokens: Sequence[Token], now: datetime) -> Principal | AccessRefusal:
    """The principal of the API token with this name."""
    return _identify(next((token for token in tokens if token.name == name), None), now)


def _identify(token: Token | None, now: datetime) -> Principal | AccessRefusal:
    if token is None:
        return AccessRefusal.UNKNOWN
    return AccessRefusal.EXPIRED if token.has_expired(now) else Principal(token.name, token.grants, Method.TOKEN)


def identify_proxied(users: Sequence[str], roles: Sequence[str]) -> Principal | AccessRefusal:
    """The principal that a trusted proxy names in its headers for user and roles."""
    if not users:
        return AccessRefusal.NO_TOKEN
    if len(users) > 1 or len(roles) > 1 or not is_name(users[0]):
        return AccessRefusal.PROXY
    given = [role.strip() for text in roles for role in text.split(",")]
    if any(role not in PROXY_ROLES for role in given if role):
        return AccessRefusal.PROXY
    return Principal(users[0], grants_of_values(given, PROXY_ROLES), Method.PROXY)


def is_trusted(peer: str | None, networks: Sequence[IPv4Network | IPv6Network]) -> bool:
    """Whether a connection comes from one of the networks."""
    try:
        address = ip_address(peer or "")
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return any(address in network for network in networks)


def is_loopback(host: str) -> bool:
    """Whether only the host itself can reach this address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(
    host: str, *, identifies: bool, allow_anonymous: bool, allowed_hosts: Sequence[str], tls: bool
) -> list[str]:
    """Warnings for the log. Raises `ConfigurationError` if the API would be open to the network.

    `identifies`: whether tokens, JWTs or a proxy identify the senders of requests.
    """
    if is_loopback(host):
        return []
    if not identifies and not allow_anonymous:
        raise ConfigurationError(
            f"api.host: other hosts can reach {host or 'every address'}, and the API has no tokens. Create one with "
            "`osrdyne token create NAME --role admin --file FILE` and set api.tokens_file, set api.jwt or "
            "api.trusted_proxies, listen on 127.0.0.1, or set api.allow_anonymous to true."
        )
    if not allowed_hosts:
        raise ConfigurationError(
            f"api.allowed_hosts: required where api.host is not loopback ({host or 'every address'}). List the names "
            "and addresses under which clients reach the API."
        )
    warnings = []
    if not identifies:
        warnings.append("api.allow_anonymous is true: every host that reaches the API can use all of it")
    elif not tls:
        warnings.append(
            "the API has no TLS (api.tls), so tokens cross the network unencrypted unless a proxy encrypts them"
        )
    return warnings
