"""One route: `[SELECT *] FROM <source> [WHERE <condition>] INTO <sink>`. Source: Azure IoT Edge routes;
docs/reference/routes/manifest.md.

Parsed for `manifest`, matched by `table`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from urllib.parse import unquote_to_bytes

from osrdyne.errors import InvalidKeyError
from osrdyne.ingress.conditions import Condition, compile_condition
from osrdyne.ingress.documents.problems import InvalidDocumentError, Problem
from osrdyne.protocol.names import Key, parse_key
from osrdyne.protocol.retries import RetryTerms

DEFAULT_RANK = 10  # The rank of a route without a priority: below priority 9.
KEPT_STATEMENTS = 20_000  # Compiled statements that are kept for the next manifest.

_BEGINNING = re.compile(r"\s*(?:SELECT\s+\*\s+)?FROM(?:\s+(?P<source>\S+)\s*|\s*$)", re.IGNORECASE)
_KEYWORD = re.compile(r"(?:WHERE|INTO)(?![\w.])", re.IGNORECASE)
_INTO = re.compile(r"(?<![\w.$])INTO(?![\w.])", re.IGNORECASE)
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|/\*.*?\*/""", re.DOTALL)
_UPSTREAM = "$upstream"
_LOG_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ENDPOINT = re.compile(r"""BrokeredEndpoint\s*\(\s*(?:'([^']*)'|"([^"]*)")\s*\)""", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The destination of a route: the group of `key`, with `path` as the path of the request. None: the request's own
    key and path (`$upstream`). `log`: the log of telemetry of this name instead, under the request's own key."""

    key: Key | None = None
    path: str | None = None
    log: str | None = None

    def __str__(self) -> str:
        if self.log is not None:
            return f"the log {self.log!r}"
        return _UPSTREAM if self.key is None else f"the group {self.key!r} with the path {self.path}"


UPSTREAM = Endpoint()


@dataclass(frozen=True, slots=True)
class Statement:
    """The text of a route, parsed.

    `source`: the segments of a path in lower case; it matches every path that begins with them. `condition` None: the
    route matches every request of its source.
    """

    source: tuple[str, ...]
    condition: Condition | None
    endpoint: Endpoint


@dataclass(frozen=True, slots=True)
class Route:
    """A route of a manifest. `priority`: 0 (highest) to 9, None for the default level below 9. `ttl`: in seconds, 0 for
    that of the manifest. `coalesce`: identical requests that are in a worker at the same time share one run."""

    name: str
    text: str
    statement: Statement
    priority: int | None = None
    ttl: int = 0
    retry: RetryTerms | None = None
    coalesce: bool = False

    @property
    def rank(self) -> int:
        """For sorting: a lower rank is more urgent."""
        return DEFAULT_RANK if self.priority is None else self.priority


def parse_statement(text: str, path: str) -> Statement:
    """Raises `InvalidDocumentError` with every error: columns in the text of the route under `{path}.route`, columns in
    the condition under `{path}.condition`.

    Statements are cached by their text: of a changed manifest only the changed routes are compiled.
    """
    try:
        return _statement(text)
    except InvalidDocumentError as error:
        raise InvalidDocumentError([replace(one, path=f"{path}.{one.path}") for one in error.problems]) from None


@lru_cache(maxsize=KEPT_STATEMENTS)
def _statement(text: str) -> Statement:
    problems: list[Problem] = []
    try:
        parts = _split(text)
    except _RouteFault as fault:
        raise InvalidDocumentError([Problem(str(fault), fault.position + 1, "route")]) from None
    condition, endpoint = None, UPSTREAM
    if not parts.source.startswith("/"):
        problems.append(Problem("a source begins with /, such as /messages/*", parts.source_at + 1, "route"))
    try:
        condition = None if parts.condition is None else compile_condition(parts.condition)
    except InvalidDocumentError as error:
        problems += [Problem(one.message, one.column, "condition") for one in error.problems]
    try:
        endpoint = _endpoint(parts.sink)
    except _RouteFault as fault:
        problems.append(Problem(str(fault), parts.sink_at + 1, "route"))
    if problems:
        raise InvalidDocumentError(problems)
    return Statement(_segments(parts.source), condition, endpoint)


def matches_source(statement: Statement, segments: tuple[str, ...]) -> bool:
    """Whether the path of a request (in lower case) begins with the source. A `*` within a source matches nothing."""
    source = statement.source
    return segments[: len(source)] == source and "*" not in source


class _RouteFault(Exception):
    """An error at a position of the text, counted from 0."""

    def __init__(self, message: str, position: int = 0) -> None:
        super().__init__(message)
        self.position = position


@dataclass(frozen=True, slots=True)
class _Parts:
    """The text between the keywords, and the positions (from 0) at which source and sink begin."""

    source: str
    source_at: int
    condition: str | None
    sink: str
    sink_at: int


def _split(text: str) -> _Parts:
    beginning = _BEGINNING.match(text)
    if beginning is None:
        raise _RouteFault("a route must begin with FROM", len(text) - len(text.lstrip()))
    if beginning["source"] is None:
        raise _RouteFault("expected a source after FROM, such as /messages/*", len(text))
    keyword = _KEYWORD.match(text, beginning.end())
    if keyword is None:
        raise _RouteFault("expected WHERE or INTO after the source", beginning.end())
    condition, into_end = None, keyword.end()
    if keyword[0].upper() == "WHERE":
        into = _last_into(text, keyword.end())
        condition, into_end = text[keyword.end() : into].strip(), into + len("INTO")
    sink_at = into_end + len(text[into_end:]) - len(text[into_end:].lstrip())
    return _Parts(beginning["source"], beginning.start("source"), condition, text[sink_at:].strip(), sink_at)


def _last_into(text: str, start: int) -> int:
    """The position of the INTO before the sink: the last one outside of strings and comments."""
    # Replaced by blanks of the same length, so that positions in the masked text are those of the text.
    masked = _QUOTED.sub(lambda match: " " * len(match[0]), text[start:])
    found = [match.start() for match in _INTO.finditer(masked)]
    if not found:
        raise _RouteFault("missing sink: INTO $upstream", len(text))
    return start + found[-1]


def _segments(source: str) -> tuple[str, ...]:
    return tuple(source.lower().rstrip("*/").strip("/").split("/")) if source.strip("*/") else ()


def _endpoint(sink: str) -> Endpoint:
    call = _ENDPOINT.fullmatch(sink)
    target = sink if call is None else call[1] or call[2] or ""
    if target.lower() == _UPSTREAM:
        return UPSTREAM
    items = target.removeprefix("/").split("/")
    kind = items[0].lower()
    if call is None or len(items) != 4 or kind not in {"modules", "streams"} or items[2].lower() != "inputs":
        raise _RouteFault(
            'expected a sink: $upstream or BrokeredEndpoint("/modules/KEY/inputs/PATH"), or "/streams/NAME/inputs/log" '
            "in place of that path"
        )
    if kind == "streams":
        if _LOG_NAME.fullmatch(items[1]) is None or items[3].lower() != "log":
            raise _RouteFault("a stream's sink is /streams/NAME/inputs/log, with the NAME of telemetry.name")
        return Endpoint(log=items[1])
    try:
        key, path = (unquote_to_bytes(item).decode("utf-8") for item in (items[1], items[3]))
        return Endpoint(parse_key(key), f"/{path}")
    except (UnicodeDecodeError, InvalidKeyError):
        raise _RouteFault("key and path of a sink are percent-encoded UTF-8, the key at most 255 bytes") from None
