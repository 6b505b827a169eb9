"""What a condition sees of one request: headers, system properties and the body.

Made for each request by the ingress, and by `osrdyne routes eval`. The body is parsed at most once, and only when some
condition asks for it.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NoReturn

from osrdyne.ingress.conditions.values import UNDEFINED, Undefined, Value
from osrdyne.protocol.messages import JSON_TYPE
from osrdyne.protocol.statuses import decode_text

_ENCODINGS = {"utf-8": "utf-8-sig", "utf-16": "utf-16", "utf-32": "utf-32"}
"""By Python's name for them; a byte order mark is no part of a document."""


class Sample:
    """One request as conditions see it.

    `headers` in any AMQP type; `system` by the names of system properties (`contentType`), None for one that is null.
    """

    def __init__(self, headers: Mapping[str, object], system: Mapping[str, str | None], body: bytes) -> None:
        self._given = headers
        self._system = {name.lower(): value for name, value in system.items()}
        self._body = body
        self._looked_up: dict[tuple[str | int, ...], Value] = {}

    @cached_property
    def _headers(self) -> dict[str, str | Undefined | None]:
        return {name.lower(): _as_string(value) for name, value in self._given.items()}

    @property
    def header_names(self) -> Iterable[str]:
        """The headers that there are, in lower case."""
        return self._headers

    def header(self, name: str) -> str | Undefined | None:
        """A header as a string, by its name in lower case; lists and tables are undefined."""
        return self._headers.get(name, UNDEFINED)

    def system_property(self, name: str) -> str | Undefined | None:
        """A system property, by its name in lower case."""
        return self._system.get(name, UNDEFINED)

    def at(self, steps: tuple[str | int, ...]) -> Value:
        """The scalar at a path of the body. Null where a member or element is missing; undefined where there is no
        JSON document, where the path leads into a scalar, and for objects and arrays."""
        if steps not in self._looked_up:
            self._looked_up[steps] = self._look_up(steps)
        return self._looked_up[steps]

    def _look_up(self, steps: tuple[str | int, ...]) -> Value:
        found = self._document
        for step in steps:
            if isinstance(found, dict) and isinstance(step, str):
                found = found.get(step)
            elif isinstance(found, list) and isinstance(step, int):
                found = found[step] if step < len(found) else None
            elif found is not None:
                return UNDEFINED
        return UNDEFINED if isinstance(found, dict | list) else found

    @cached_property
    def _document(self) -> Any:
        text = self._decoded()
        try:
            return UNDEFINED if text is None else json.loads(text, parse_int=float, parse_constant=_no_json)
        except (ValueError, RecursionError):
            return UNDEFINED

    def _decoded(self) -> str | None:
        """The body as text; None unless it is declared to be JSON in one of the encodings of JSON."""
        content_type, encoding = self._system.get("contenttype"), self._system.get("contentencoding")
        if not (content_type and encoding) or content_type.strip().lower() != JSON_TYPE:
            return None
        try:
            return self._body.decode(_ENCODINGS[codecs.lookup(encoding.strip()).name])
        except (LookupError, ValueError):  # a name with a NUL character, or bytes that are not in this encoding
            return None


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _as_string(value: object) -> str | Undefined | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    text = decode_text(value)
    return UNDEFINED if text is None else text
