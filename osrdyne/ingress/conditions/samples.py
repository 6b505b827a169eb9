"""One request as conditions read it: headers, system properties and the body.

Created for each request by the ingress, and by `osrdyne routes eval`. The body is parsed at most once, when a condition
reads it. A sample also limits the work of conditions on one request, because they run on the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from email.message import Message
from functools import cached_property, lru_cache
from typing import Any, NoReturn

from osrdyne.ingress.conditions.values import UNDEFINED, Undefined, Value
from osrdyne.protocol.messages import JSON_TYPE
from osrdyne.protocol.statuses import decode_text

MAX_CONDITION_WORK = 4 * 2**20  # Characters that one condition may process for one request; some milliseconds.
MAX_REQUEST_WORK = 64 * 2**20  # Characters that all conditions together may process for one request.
_FREE = 1024  # Reading a value of at most this length costs nothing: counting would cost more than the work.

# The encodings of JSON, by their names without punctuation; a byte order mark is not part of a document.
_ENCODINGS = {"utf8": "utf-8-sig", "utf16": "utf-16", "utf32": "utf-32"}


class BodyNotParsedError(Exception):
    """A condition reads a body that is to be parsed in a thread first."""


class WorkLimitExceededError(Exception):
    """A condition would process more characters than it may. Stays inside this package."""


class Sample:
    """One request as conditions read it.

    `headers`: values of any AMQP type. `system`: by the names of system properties (`contentType`); None is null.
    `exceeded`: the number of conditions that reached a work limit; each of them is undefined. `unread_body`: why a
    condition could not read the body, as the end of a sentence; None if none has tried in vain.
    """

    def __init__(self, headers: Mapping[str, object], system: Mapping[str, str | None], body: bytes) -> None:
        self._given = headers
        self._system = {name.lower(): value for name, value in system.items()}
        self._body = body
        self._looked_up: dict[tuple[str | int, ...], Value] = {}
        self._request_work = MAX_REQUEST_WORK
        self._condition_work = MAX_CONDITION_WORK
        self.shared: dict[int, Value] = {}  # Values of the parts that the current condition uses more than once.
        self.exceeded = 0
        self.unread_body: str | None = None
        self._is_deferred = False

    def defer_parsing(self) -> None:
        """From now on raise `BodyNotParsedError` when a condition reads the body, until `parse` has been called."""
        self._is_deferred = True

    def parse(self) -> None:
        """Parse the body, in a thread. All conditions are to be evaluated again afterwards."""
        self._document = self._parsed(_loads_in_thread)
        self._is_deferred = False
        self._request_work, self._condition_work, self.exceeded = MAX_REQUEST_WORK, MAX_CONDITION_WORK, 0

    def begin_condition(self) -> None:
        """Reset the work and the shared parts for the next condition; the work so far counts for the request."""
        self._request_work -= MAX_CONDITION_WORK - self._condition_work
        self._condition_work = MAX_CONDITION_WORK
        self.shared.clear()

    def spend(self, characters: int) -> None:
        """Count work. Raises `WorkLimitExceededError` beyond the limit."""
        left = self._condition_work - characters
        if left < 0 or self._request_work - (MAX_CONDITION_WORK - left) < 0:
            raise WorkLimitExceededError
        self._condition_work = left

    def read(self, value: Value) -> Value:
        """Count the reading of a value, which may be compared next: long ones cost a part of their length."""
        if type(value) is str and len(value) > _FREE:
            self.spend(len(value) // 64)
        return value

    @cached_property
    def _headers(self) -> dict[str, str | Undefined | None]:
        return {name.lower(): _as_string(value) for name, value in self._given.items()}

    @property
    def header_names(self) -> Iterable[str]:
        """The names of all headers, in lower case."""
        return self._headers

    def header(self, name: str) -> str | Undefined | None:
        """A header as a string, by its name in lower case; lists and tables are undefined."""
        return self._headers.get(name, UNDEFINED)

    def system_property(self, name: str) -> str | Undefined | None:
        """A system property, by its name in lower case."""
        return self._system.get(name, UNDEFINED)

    def at(self, steps: tuple[str | int, ...]) -> Value:
        """The scalar at a path of the body. Null if a member or element is missing; undefined if the body is no JSON
        document, if the path leads into a scalar, and for objects and arrays."""
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
        if self._is_deferred and self._encoding() is not None:
            raise BodyNotParsedError
        return self._parsed(_loads)

    def _parsed(self, loads: Callable[[str], Any]) -> Any:
        """The body; undefined if it is no JSON."""
        encoding = self._encoding()
        if encoding is None:
            self.unread_body = self._why_undeclared()
            return UNDEFINED
        try:
            return loads(self._body.decode(encoding))
        except (ValueError, RecursionError):
            self.unread_body = f"the body is no JSON in {encoding.removesuffix('-sig')}"
            return UNDEFINED

    def _encoding(self) -> str | None:
        """The codec of the body; None unless it is declared to be JSON in one of the encodings of JSON.

        The property content-encoding takes precedence over the parameter charset of the content type.
        """
        media_type, charset = _media_type(self._system.get("contenttype") or "")
        return json_encoding(self._system.get("contentencoding") or charset) if media_type == JSON_TYPE else None

    def _why_undeclared(self) -> str:
        """What the properties of a request lack whose body is not declared to be JSON."""
        content_type, encoding = (self._system.get(name) or "" for name in ("contenttype", "contentencoding"))
        media_type, charset = _media_type(content_type)
        if media_type != JSON_TYPE:
            return f"the content type is {_shown(content_type)}; it must be {JSON_TYPE}"
        return f"the content encoding is {_shown(encoding or charset)}; it must be utf-8, utf-16 or utf-32"


def json_encoding(name: str) -> str | None:
    """Python's codec for one of the encodings of JSON, None for any other name.

    Not by Python's codec registry: it caches every name, and the name comes from a client.
    """
    return _ENCODINGS.get(name.strip().lower().replace("-", "").replace("_", "")) if len(name) < 32 else None


def _shown(text: str) -> str:
    return repr(text if len(text) <= 64 else f"{text[:64]}…") if text else "missing"


@lru_cache(maxsize=256)
def _media_type(text: str) -> tuple[str, str]:
    """Media type in lower case and charset of a content type such as `application/json; charset=utf-8`."""
    media_type, _, parameters = text.partition(";")
    if not parameters:
        return media_type.strip().lower(), ""
    header = Message()
    header["content-type"] = text.replace("\r", " ").replace("\n", " ")
    charset = header.get_param("charset", "")
    return media_type.strip().lower(), charset if isinstance(charset, str) else ""


def _loads(text: str) -> Any:
    return json.loads(text, parse_int=float, parse_constant=_no_json)


def _loads_in_thread(text: str) -> Any:
    """Parse as `_loads` does, and let the event loop run meanwhile: otherwise the parser would hold the GIL until it is
    done. It gives the GIL up in functions that are written in Python: at each number and object, not at strings."""
    return json.loads(text, parse_int=_number, parse_float=_number, parse_constant=_no_json, object_hook=_unchanged)


def _number(text: str) -> float:
    return float(text)


def _unchanged(document: dict[str, Any]) -> dict[str, Any]:
    return document


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
