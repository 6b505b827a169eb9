"""API tokens: 256 random bits, of which only the SHA-256 digest is stored, the grants, and the document of digests."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from osrdyne.auth.grants import Grant, KeyScope, parse_scope
from osrdyne.errors import ConfigurationError

PREFIX = "osr_"
MAX_TOKENS = 1_000  # Each request is compared with every token.

_TOKEN = re.compile(r"osr_[A-Za-z0-9_-]{43}", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Token:
    """One token as it is stored. `expires` None: never. A token is valid until it expires or is removed."""

    name: str
    grants: Mapping[Grant, KeyScope]
    sha256: str = field(repr=False)
    created: datetime
    expires: datetime | None = None

    def has_expired(self, now: datetime) -> bool:
        return self.expires is not None and now >= self.expires


def generate_token() -> str:
    """A new token, to be shown once."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(token: str) -> str:
    """The stored part of a token. A plain hash is enough: a random token cannot be guessed from its digest."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def is_token(text: str) -> bool:
    """Whether a bearer token is an API token rather than a JWT, by its prefix."""
    return text.startswith(PREFIX)


def looks_like_token(text: str) -> bool:
    """Whether a text has the format of an API token."""
    return _TOKEN.fullmatch(text) is not None


def find_token(tokens: Sequence[Token], presented: str) -> Token | None:
    """The token with the digest of the presented text. The time does not depend on its position in the list."""
    digest, found = digest_of(presented), None
    for one in tokens:
        if hmac.compare_digest(one.sha256, digest):
            found = one
    return found


def check_name(name: str) -> str:
    """Return the name. Raises `ConfigurationError` if it is not valid for a token."""
    if _NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"{name!r} is not a name for a token: use up to 64 letters, digits and . _ @ -, and begin with a letter or "
            "a digit."
        )
    return name


def parse_tokens(text: str, place: str) -> tuple[Token, ...]:
    """The tokens of a document. Raises `ConfigurationError` that names `place` and the entry."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        where = f"line {error.lineno}, column {error.colno}: " if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigurationError(f"{place}: {where}invalid JSON. `osrdyne token create` writes the file.") from None
    entries = document.get("tokens") if isinstance(document, dict) else None
    if not isinstance(entries, list) or set(document) != {"tokens"}:
        raise ConfigurationError(f'{place}: {{"tokens": […]}} expected. `osrdyne token create` writes the file.')
    if len(entries) > MAX_TOKENS:
        raise ConfigurationError(f"{place}: at most {MAX_TOKENS} tokens are supported; the file has {len(entries)}.")
    tokens = tuple(_token(entry, f"{place}: tokens[{number}]") for number, entry in enumerate(entries))
    names = [token.name for token in tokens]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigurationError(f"{place}: two tokens have the name {twice!r}. Remove one of them.")
    return tokens


_FORMER_ROLES: Mapping[object, Mapping[str, None]] = {
    "read": dict.fromkeys(["view"]),
    "operate": dict.fromkeys(["view", "operate", "admin", "bodies"]),
}
"""The roles in token files of earlier versions."""


def _token(entry: Any, place: str) -> Token:
    if isinstance(entry, dict) and entry.get("role") in list(_FORMER_ROLES):
        entry = {name: value for name, value in entry.items() if name != "role"} | {
            "grants": _FORMER_ROLES[entry["role"]]
        }
    known = {"name", "grants", "sha256", "created", "expires"}
    if not isinstance(entry, dict) or not known - {"expires"} <= set(entry) <= known:
        raise ConfigurationError(f"{place}: an object with {', '.join(sorted(known))} is expected.")
    name, sha256 = entry["name"], entry["sha256"]
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ConfigurationError(f"{place}.name: expected a name.")
    grants = _grants(entry["grants"], f"{place}.grants")
    if not isinstance(sha256, str) or _DIGEST.fullmatch(sha256) is None:
        raise ConfigurationError(f"{place}.sha256: expected 64 lower-case hexadecimal digits.")
    created = _moment(entry["created"], f"{place}.created")
    expires = None if entry.get("expires") is None else _moment(entry["expires"], f"{place}.expires")
    return Token(name, grants, sha256, created, expires)


def _grants(value: Any, place: str) -> dict[Grant, KeyScope]:
    if not isinstance(value, dict) or not value:
        raise ConfigurationError(f"{place}: expected an object with some of {', '.join(Grant)}.")
    grants = {}
    for name, scope in value.items():
        if name not in list(Grant):
            raise ConfigurationError(f"{place}.{name}: unknown; the grants are {', '.join(Grant)}.")
        if scope is not None and not isinstance(scope, str):
            raise ConfigurationError(f"{place}.{name}: expected a pattern of keys, or null for all keys.")
        try:
            grants[Grant(name)] = parse_scope(scope)
        except ValueError as error:
            raise ConfigurationError(f"{place}.{name}: {error}.") from None
    return grants


def _moment(value: Any, place: str) -> datetime:
    try:
        moment = datetime.fromisoformat(value)
        # A time without a time zone would be a different moment on each host.
        if moment.tzinfo is not None:
            return moment.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ConfigurationError(f"{place}: expected a time with a time zone, such as 2026-01-31T12:00:00+00:00.")


def render_tokens(tokens: Sequence[Token]) -> str:
    """The document that `parse_tokens` reads."""
    entries = [
        {
            "name": token.name,
            "grants": {grant.value: scope.pattern for grant, scope in token.grants.items()},
            "sha256": token.sha256,
            "created": token.created.isoformat(timespec="seconds"),
            "expires": None if token.expires is None else token.expires.isoformat(timespec="seconds"),
        }
        for token in tokens
    ]
    return json.dumps({"tokens": entries}, indent=2) + "\n"
