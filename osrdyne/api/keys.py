"""Read keys from URLs, decoded exactly once. A key is data: it may contain `/`, `%`, `,` and any other character.

Frameworks decode the path before routing and replace bytes that are not UTF-8; both would change keys. So the
application routes on the raw path (see `guard`), and keys are read here from the raw text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal
from urllib.parse import unquote_to_bytes

from fastapi import Request

from osrdyne.errors import InvalidKeyError
from osrdyne.protocol.names import Key, parse_key

KeyPlace = Literal["path", "query"]
"""The part of a URL that has the key."""


def key_schema(place: KeyPlace) -> dict[str, Any]:
    """The parameter `key` in the OpenAPI schema. FastAPI cannot derive it, because the key is read from raw text."""
    return {
        "parameters": [
            {
                "name": "key",
                "in": place,
                "required": True,
                "schema": {"type": "string"},
                "description": "The raw key, percent-encoded once.",
            }
        ]
    }


async def path_key(request: Request) -> Key:
    """The key of `/v1/groups/{key}…`. Raises `InvalidKeyError`."""
    return _decode(request.path_params["key"])


async def query_key(request: Request) -> Key:
    """The key of `?key=`, which must be given once. Raises `InvalidKeyError`."""
    values = list(_raw_values(request, "key"))
    if len(values) != 1:
        raise InvalidKeyError(f"Exactly one key= parameter is required, percent-encoded; the query has {len(values)}.")
    return _decode(values[0], form=True)


async def query_keys(request: Request) -> set[Key] | None:
    """All keys of repeated `?key=`; None if the parameter is missing."""
    values = list(_raw_values(request, "key"))
    return {_decode(value, form=True) for value in values} if values else None


async def status_keys(request: Request) -> set[Key] | None:
    """The keys of `/status?keys=`; None without the parameter.

    The reference client joins percent-encoded keys with commas, and its server reads repeated parameters; both forms
    are supported. An unencoded comma may also be part of a key, so the whole value counts as a key as well if it is
    valid: an unknown key has no effect on the answer.
    """
    values = list(_raw_values(request, "keys"))
    if not values:
        return None
    keys = {_decode(text, form=True) for value in values for text in value.split(",")}
    for value in values:
        with suppress(InvalidKeyError):  # several keys together may exceed the length of one
            keys.add(_decode(value, form=True))
    return keys


def _raw_values(request: Request, name: str) -> Iterator[str]:
    query: bytes = request.scope["query_string"]
    for pair in query.decode("latin-1").split("&"):
        parameter, _, value = pair.partition("=")
        # Decoded as in the audit: both must read the same parameters.
        if unquote_to_bytes(parameter) == name.encode():
            yield value


def _decode(text: str, *, form: bool = False) -> Key:
    raw = unquote_to_bytes((text.replace("+", " ") if form else text).encode("latin-1"))
    return parse_key(raw.decode("utf-8", errors="surrogateescape"))
