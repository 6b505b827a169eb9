"""Verify JWTs: signature, issuer, audience and expiry. The configuration defines the algorithm, not the token.

Keys come from a file (PEM or secret), or from a JWKS in a file or at a URL. A JWKS is read again when a token names an
unknown key, at most once a minute, and every ten minutes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from joserfc import jwt
from joserfc.errors import ExpiredTokenError, InvalidKeyIdError, JoseError, UnsupportedAlgorithmError
from joserfc.jwk import ECKey, Key, OctKey, OKPKey, RSAKey
from joserfc.jws import JWSRegistry

from osrdyne.aio.clock import Clock
from osrdyne.auth.claims import principal_of_claims
from osrdyne.auth.decision import KEYS_RETRY_AFTER, AccessRefusal
from osrdyne.auth.grants import Principal
from osrdyne.config.models import JwtSettings
from osrdyne.errors import ConfigurationError
from osrdyne.logs import Logger, get_logger

MAX_TOKEN = 8_192
"""Characters of a token."""
MAX_KEYS_BYTES = 2**20
LEEWAY = 60
"""Seconds by which clocks may differ."""
REFRESH_INTERVAL = KEYS_RETRY_AFTER
"""Seconds between two reads of a JWKS."""
MAX_KEY_AGE = 600.0
"""Seconds after which a JWKS is read again, so that a withdrawn key is no longer accepted."""
FETCH_TIMEOUT = 5.0
"""Seconds for the whole answer: senders of tokens with an unknown key wait for it."""
CACHED = 1_000
"""Verified tokens that are cached by their digest, with their claims."""

_ALGORITHMS = {"HS256": ("HS256",), "RS256": ("RS256",), "ES256": ("ES256",), "EdDSA": ("EdDSA", "Ed25519")}
_KEY_TYPES: dict[str, type[Key]] = {"HS256": OctKey, "RS256": RSAKey, "ES256": ECKey, "EdDSA": OKPKey}
_CURVES = {"ES256": "P-256", "EdDSA": "Ed25519"}


class _Registry(JWSRegistry):  # type: ignore[misc]
    """Without warnings about algorithms, because the operator has chosen one."""

    def get_alg(self, name: str) -> Any:
        if self.allowed is None or name not in self.allowed:
            raise UnsupportedAlgorithmError(f"the algorithm {name!r} is not that of the configuration")
        return self.algorithms[name]


class JwtVerifier:
    """Verifies the tokens of one issuer. Used by the API and the ingress."""

    def __init__(self, settings: JwtSettings, *, clock: Clock) -> None:
        """Read the keys of a file. Raises `ConfigurationError` if they cannot be used."""
        assert settings.algorithm is not None, "only with an algorithm"
        self._settings = settings
        self._clock = clock
        self._algorithm: str = settings.algorithm
        self._registry = _Registry(algorithms=list(_ALGORITHMS[self._algorithm]), strict_check_header=False)
        self._claims = {
            "iss": {"essential": True, "value": settings.issuer},
            "aud": {"essential": True, "value": settings.audience},
            "exp": {"essential": True},
        }
        self._keys: list[Key] = [] if settings.jwks_url is not None else self._read_file()
        self._read_at = -math.inf if settings.jwks_url is not None else clock.monotonic()
        self._keys_failed = False
        self._refresh: asyncio.Lock = asyncio.Lock()
        self._cache: OrderedDict[bytes, Mapping[str, Any]] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._log: Logger = get_logger("api", issuer=settings.issuer)

    def verify_cached(self, token: str) -> Principal | AccessRefusal | None:
        """The result of `verify` if the token is cached and the keys need not be read; otherwise None."""
        if len(token) > MAX_TOKEN or not token.isascii():
            return AccessRefusal.MALFORMED
        if self._are_keys_old():
            return None
        claims = self._cached(hashlib.sha256(token.encode()).digest())
        return None if claims is None else self._principal(claims)

    async def verify(self, token: str) -> Principal | AccessRefusal:
        """The principal of a token, or why it is refused."""
        if len(token) > MAX_TOKEN or not token.isascii():
            return AccessRefusal.MALFORMED
        if self._are_keys_old():
            await self._read_again()
        digest = hashlib.sha256(token.encode()).digest()
        claims = self._cached(digest)
        if claims is None:
            # A signature costs up to some tenths of a millisecond, and any client may send one.
            keys = self._keys
            found = await asyncio.to_thread(self._decode, token)
            if found is AccessRefusal.UNKNOWN_KEY and await self._read_again():
                keys = self._keys
                found = await asyncio.to_thread(self._decode, token)
            if found is AccessRefusal.UNKNOWN_KEY and self._keys_failed:
                return AccessRefusal.KEYS_UNAVAILABLE
            if isinstance(found, AccessRefusal):
                return found
            claims = found
            if self._keys is keys:  # otherwise the key may have been withdrawn meanwhile
                self._remember(digest, claims)
        return self._principal(claims)

    def _decode(self, token: str) -> Mapping[str, Any] | AccessRefusal:
        """The claims of a token with a valid signature."""
        try:
            claims: Mapping[str, Any] = jwt.decode(token, self._choose, registry=self._registry).claims
            return claims
        except InvalidKeyIdError:
            return AccessRefusal.UNKNOWN_KEY
        except (JoseError, ValueError, RecursionError, TypeError):
            return AccessRefusal.SIGNATURE

    def _choose(self, signed: Any) -> Key:
        """The key that the header of a token names, or the only key without an id if no key has this id."""
        if "crit" in (header := signed.headers()):
            raise ValueError("critical header parameters are not supported")  # RFC 7515, section 4.1.11
        wanted = header.get("kid")
        found = [key for key in self._keys if wanted is None or key.get("kid") == wanted]
        if not found:
            found = [key for key in self._keys if key.get("kid") is None]
        if len(found) != 1:
            raise InvalidKeyIdError("no key of this id")
        return found[0]

    def _principal(self, claims: Mapping[str, Any]) -> Principal | AccessRefusal:
        registry = jwt.JWTClaimsRegistry(now=int(self._clock.time()), leeway=LEEWAY, **self._claims)  # type: ignore[arg-type,unused-ignore]
        try:
            registry.validate(dict(claims))
        except ExpiredTokenError:
            return AccessRefusal.EXPIRED
        except (JoseError, ValueError, OverflowError, TypeError):
            return AccessRefusal.CLAIMS
        settings = self._settings
        return principal_of_claims(claims, role_claim=settings.role_claim, roles=settings.roles) or AccessRefusal.CLAIMS

    # --- keys

    def _are_keys_old(self) -> bool:
        return self._settings.key_file is None and self._clock.monotonic() - self._read_at > MAX_KEY_AGE

    async def _read_again(self) -> bool:
        """Read the keys again, at most once a minute. True if this or a concurrent call has read them."""
        if self._settings.key_file is not None:
            return False
        before = self._read_at
        async with self._refresh:
            if self._read_at != before:
                return True
            if self._clock.monotonic() - self._read_at < REFRESH_INTERVAL:
                return False
            self._read_at = self._clock.monotonic()
            try:
                keys = await (asyncio.to_thread(self._read_file) if self._settings.jwks_url is None else self._fetch())
            except ConfigurationError as error:
                self._keys_failed = True
                self._log.error("keys of JWTs unavailable, the known ones stay", error=str(error))
                return False
            except BaseException:
                # Cancelled, as at the end of a term: the next token must not wait a minute for the keys.
                self._read_at = before
                raise
            self._keys, self._keys_failed = keys, False
        with self._cache_lock:
            self._cache.clear()  # tokens of a withdrawn key must not be accepted any longer
        return True

    async def _fetch(self) -> list[Key]:
        url = self._settings.jwks_url
        assert url is not None
        content = b""
        try:
            async with (
                asyncio.timeout(FETCH_TIMEOUT),
                httpx.AsyncClient(timeout=FETCH_TIMEOUT, headers={"accept-encoding": "identity"}) as client,
                client.stream("GET", url) as answer,
            ):
                if answer.status_code != httpx.codes.OK:
                    raise ConfigurationError(f"api.jwt.jwks_url: answered {answer.status_code}.")
                async for part in answer.aiter_raw():  # as sent: a small compressed answer can be very large
                    content += part
                    if len(content) > MAX_KEYS_BYTES:
                        raise ConfigurationError(f"api.jwt.jwks_url: more than {MAX_KEYS_BYTES} bytes.")
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise ConfigurationError(f"api.jwt.jwks_url: {type(error).__name__}.") from error
        return await asyncio.to_thread(self._key_set, content, "api.jwt.jwks_url")

    def _read_file(self) -> list[Key]:
        path = self._settings.key_file or self._settings.jwks_file
        assert path is not None
        place = f"api.jwt: {path}"
        try:
            with Path(path).open("rb") as file:
                content = file.read(MAX_KEYS_BYTES)
        except OSError as error:
            raise ConfigurationError(f"{place}: cannot be read: {error.strerror}.") from error
        if self._settings.key_file is None:
            return self._key_set(content, place)
        try:
            key = _KEY_TYPES[self._algorithm].import_key(content.strip())
        except (JoseError, ValueError, TypeError, Warning) as error:
            raise ConfigurationError(f"{place}: not a key for {self._algorithm}. {self._wanted()}") from error
        if not self._fits(key):
            raise ConfigurationError(f"{place}: not a key for {self._algorithm}. {self._wanted()}")
        return [key]

    def _key_set(self, content: bytes, place: str) -> list[Key]:
        try:
            entries = json.loads(content)["keys"]
            mine = [one for one in entries if one.get("kty") == _KEY_TYPES[self._algorithm].key_type]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigurationError(f'{place}: a JWKS, {{"keys": […]}}, is expected.') from error
        usable = []
        for entry in mine:
            # Others that cannot be used, such as those of an unknown curve, are ignored (RFC 7517, section 5).
            with suppress(JoseError, ValueError, KeyError, TypeError, AttributeError, Warning):
                key = _KEY_TYPES[self._algorithm].import_key(entry)
                if self._fits(key):
                    usable.append(key)
        if not usable:
            raise ConfigurationError(f"{place}: has no key for {self._algorithm}. {self._wanted()}")
        return usable

    def _fits(self, key: Key) -> bool:
        if key.get("use") not in {None, "sig"} or key.get("alg") not in {None, *_ALGORITHMS[self._algorithm]}:
            return False
        match key:
            case OctKey():
                return len(key.get_op_key("verify")) >= 32
            case RSAKey():
                return int(key.public_key.key_size) >= 2048
            case _:
                return bool(key.curve_name == _CURVES[self._algorithm])  # type: ignore[attr-defined,unused-ignore]

    def _wanted(self) -> str:
        wanted = {
            "HS256": "Use a secret of at least 32 bytes.",
            "RS256": "Use an RSA public key of at least 2048 bits, PEM.",
            "ES256": "Use a public key of the curve P-256, PEM.",
            "EdDSA": "Use an Ed25519 public key, PEM.",
        }
        return wanted[self._algorithm]

    # --- verified tokens

    def _cached(self, digest: bytes) -> Mapping[str, Any] | None:
        with self._cache_lock:
            found = self._cache.get(digest)
            if found is not None:
                self._cache.move_to_end(digest)
            return found

    def _remember(self, digest: bytes, claims: Mapping[str, Any]) -> None:
        with self._cache_lock:
            self._cache[digest] = claims
            if len(self._cache) > CACHED:
                self._cache.popitem(last=False)
