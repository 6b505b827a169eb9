"""Identify the senders of requests by API tokens, JWTs and trusted proxies. Does not import FastAPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from ipaddress import ip_network
from typing import TYPE_CHECKING

from osrdyne.aio.clock import Clock, SystemClock
from osrdyne.api.access.token_file import TokenFile, tokens_of
from osrdyne.auth.decision import AccessRefusal, identify_named, identify_proxied, identify_token, is_trusted
from osrdyne.auth.grants import Principal
from osrdyne.auth.tokens import Token, is_token
from osrdyne.config.models import ApiSettings

if TYPE_CHECKING:
    from osrdyne.api.access.jwt import JwtVerifier


class TrustedProxies:
    """Proxies that identify users in headers. The headers are ignored in requests from any other address."""

    def __init__(self, settings: ApiSettings) -> None:
        self._networks = [ip_network(network) for network in settings.trusted_proxies]
        self._user_header = settings.proxy_user_header
        self._role_header = settings.proxy_role_header

    def trusts(self, peer: str | None) -> bool:
        """Whether this address of a socket is a trusted proxy."""
        return is_trusted(peer, self._networks)

    def identify(self, peer: str | None, headers: Callable[[str], Sequence[str]]) -> Principal | AccessRefusal:
        """The user of a request from `peer`, the address of the socket. `headers`: all values of a name."""
        if not self.trusts(peer):
            return AccessRefusal.NO_TOKEN
        return identify_proxied(_decoded(headers(self._user_header)), _decoded(headers(self._role_header)))


def _decoded(values: Sequence[str]) -> list[str]:
    """Decode header values as UTF-8, which proxies send; the framework reads them as Latin-1. Invalid bytes become
    surrogates, which are not valid in a user name."""
    return [value.encode("latin-1").decode("utf-8", "surrogateescape") for value in values]


@dataclass(frozen=True, slots=True)
class Authenticators:
    """The authenticators of one API. Without any, the API is open to everyone who can reach it."""

    tokens: TokenFile | None = None
    jwt: JwtVerifier | None = None
    proxies: TrustedProxies | None = None
    clock: Clock = field(default_factory=SystemClock)

    @property
    def is_open(self) -> bool:
        return self.tokens is None and self.jwt is None and self.proxies is None

    @property
    def verifies_tokens(self) -> bool:
        """Whether bearer tokens can be verified."""
        return self.tokens is not None or self.jwt is not None

    def identify_cached(self, token: str) -> Principal | AccessRefusal | None:
        """The owner of a bearer token, or why it is refused; None if the token is not cached, or keys or tokens must be
        read first: then call `identify`."""
        if self.jwt is not None and not is_token(token):
            return self.jwt.verify_cached(token)
        if self.tokens is None:
            return AccessRefusal.NO_KEYS if self.jwt is None else AccessRefusal.MALFORMED
        tokens = self.tokens.current_if_unchanged()
        return None if tokens is None else self._identify_token(token, tokens)

    async def identify(self, token: str) -> Principal | AccessRefusal:
        """The owner of a bearer token, or why it is refused. Verifies signatures in a thread, and may read keys or
        tokens again."""
        found = self.identify_cached(token)
        if found is not None:
            return found
        if self.jwt is not None and not is_token(token):
            return await self.jwt.verify(token)
        assert self.tokens is not None, "`identify_cached` has refused the token"
        return self._identify_token(token, await self.tokens.current())

    async def named(self, name: str) -> Principal | AccessRefusal:
        """The principal of the API token with this name."""
        if self.tokens is None:
            return AccessRefusal.NO_KEYS
        return identify_named(name, await self.tokens.current(), datetime.fromtimestamp(self.clock.time(), UTC))

    def _identify_token(self, token: str, tokens: Sequence[Token]) -> Principal | AccessRefusal:
        return identify_token(token, tokens, datetime.fromtimestamp(self.clock.time(), UTC))


def authenticators_of(settings: ApiSettings, *, clock: Clock) -> tuple[Authenticators, list[str]]:
    """The authenticators of the settings, and warnings for the log.

    Raises `ConfigurationError` if the API would be open to the network, or a file of tokens or keys cannot be used.
    """
    tokens, warnings = tokens_of(settings)
    verifier = None
    if settings.jwt.algorithm is not None:
        from osrdyne.api.access.jwt import JwtVerifier  # only here: joserfc takes a part of a second

        verifier = JwtVerifier(settings.jwt, clock=clock)
    proxies = TrustedProxies(settings) if settings.trusted_proxies else None
    return Authenticators(tokens, verifier, proxies, clock), warnings
