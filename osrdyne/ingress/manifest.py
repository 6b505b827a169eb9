"""The route manifest: the document of seed 000, checked as a whole, and what it means.

`load_manifest` is for a text of a person, `Manifest.document` for keeping it: that loads again to the same manifest.
One error refuses the whole document, and every error is told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from osrdyne.ingress.documents import Members, read_document
from osrdyne.ingress.problems import InvalidDocumentError, Problem
from osrdyne.ingress.routes import Route, parse_statement

MAX_TTL = 2**32 - 1
"""Seconds, by the seed's schema."""

_NAME = re.compile(r"[^.$# ]+")
_WRAPPERS = ("$edgeHub", "properties.desired")
_STORE = "storeAndForwardConfiguration"
_TTL = "timeToLiveSecs"


@dataclass(frozen=True, slots=True)
class Manifest:
    """Routes in declared order. `ttl` is for routes without one, in seconds: None says nothing, -1 is no limit.

    `warnings` are for the person who wrote it; a manifest that was kept has none.
    """

    routes: tuple[Route, ...] = ()
    ttl: int | None = None
    warnings: tuple[Problem, ...] = ()

    @property
    def priorities(self) -> frozenset[int]:
        """The priorities that some route uses."""
        return frozenset(route.priority for route in self.routes if route.priority is not None)

    def document(self) -> dict[str, Any]:
        """The manifest as JSON values, in the seed's form, without what surrounded it."""
        document: dict[str, Any] = {"routes": {route.name: _shown(route) for route in self.routes}}
        return document if self.ttl is None else {**document, _STORE: {_TTL: self.ttl}}


def load_manifest(text: str) -> Manifest:
    """Raises `InvalidDocumentError` with every error of the text."""
    return _Reader().read(read_document(text))


class _Reader:
    """Reads one document; collects what is wrong with it."""

    def __init__(self) -> None:
        self._problems: list[Problem] = []
        self._warnings: list[Problem] = []

    def read(self, value: Any) -> Manifest:
        members = self._members(self._unwrapped(value), "", {"schemaVersion", "routes", _STORE})
        routes = list(self._routes(members.get("routes", Members(()))))
        store = self._members(members.get(_STORE, Members(())), _STORE, {_TTL})
        ttl = self._global_ttl(store[_TTL]) if _TTL in store else None
        if self._problems:
            raise InvalidDocumentError(self._problems)
        return Manifest(tuple(routes), ttl, tuple(self._warnings))

    def _refuse(self, path: str, message: str) -> None:
        self._problems.append(Problem(message, path=path))

    def _unwrapped(self, value: Any) -> Any:
        """What is inside `$edgeHub` and `properties.desired`, where they are."""
        for wrapper in _WRAPPERS:
            if isinstance(value, Members) and [name for name, _ in value.pairs] == [wrapper]:
                value = value.pairs[0][1]
        return value

    def _members(self, value: Any, path: str, known: set[str]) -> dict[str, Any]:
        """The members of an object that has only known ones, each once."""
        if not isinstance(value, Members):
            self._refuse(path, f"an object with {', '.join(sorted(known))} is expected")
            return {}
        found: dict[str, Any] = {}
        for name, item in value.pairs:
            place = f"{path}.{name}" if path else name
            if name not in known:
                self._refuse(place, f"there is no such member; known are {', '.join(sorted(known))}")
            elif name in found:
                self._refuse(place, "it is given twice")
            found[name] = item
        return {name: item for name, item in found.items() if name in known}

    def _routes(self, value: Any) -> Iterator[Route]:
        if not isinstance(value, Members):
            self._refuse("routes", "an object of routes by their names is expected")
            return
        for name, item in self._each_once(value).items():
            path = f"routes.{name}"
            if not _NAME.fullmatch(name):
                self._refuse(path, "a name has one character or more, and none of . $ # and blank")
            if isinstance(item, Members):
                members = self._members(item, path, {"route", "priority", _TTL})
            elif isinstance(item, str):
                members = {"route": item}
            else:
                self._refuse(path, "the text of a route, or an object with route, priority and timeToLiveSecs")
                continue
            yield from self._route(name, path, members)

    def _each_once(self, routes: Members) -> dict[str, Any]:
        """Routes by name. One that is given in both forms is what the object says (seed 000)."""
        found: dict[str, Any] = {}
        for name, item in routes.pairs:
            if name in found and isinstance(item, Members) == isinstance(found[name], Members):
                self._refuse(f"routes.{name}", "it is given twice")
            elif name in found:
                self._warnings.append(
                    Problem("it is given as text and as object: the object counts", path=f"routes.{name}")
                )
                item = item if isinstance(item, Members) else found[name]
            found[name] = item
        return found

    def _route(self, name: str, path: str, members: dict[str, Any]) -> Iterator[Route]:
        priority = self._whole(members.get("priority"), f"{path}.priority", 9)
        ttl = self._whole(members.get(_TTL), f"{path}.{_TTL}", MAX_TTL)
        text = members.get("route")
        if not isinstance(text, str):
            self._refuse(f"{path}.route", "the text of the route is missing")
            return
        try:
            statement = parse_statement(text, path)
        except InvalidDocumentError as error:
            self._problems += error.problems
            return
        if "*" in statement.source:
            self._warnings.append(Problem("a * within a source matches nothing", path=f"{path}.route"))
        if statement.condition is not None and not statement.condition.text:
            self._warnings.append(Problem("an empty condition is never true", path=f"{path}.route"))
        yield Route(name, text, statement, priority, ttl or 0)

    def _whole(self, value: Any, path: str, largest: int) -> int | None:
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= largest):
            return value
        self._refuse(path, f"a whole number from 0 to {largest} is expected")
        return None

    def _global_ttl(self, value: Any) -> int | None:
        if isinstance(value, int) and not isinstance(value, bool) and value <= MAX_TTL:
            return max(value, -1)
        self._refuse(f"{_STORE}.{_TTL}", f"a whole number up to {MAX_TTL} is expected; a negative one is no limit")
        return None


def _shown(route: Route) -> str | dict[str, Any]:
    members: dict[str, Any] = {"route": route.text}
    if route.priority is not None:
        members["priority"] = route.priority
    if route.ttl:
        members[_TTL] = route.ttl
    return members if len(members) > 1 else route.text
