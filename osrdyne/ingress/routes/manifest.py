"""The route manifest: the document of Azure IoT Edge routes, checked as a whole, and its routes.

`load_manifest` reads the text of a user, and `Manifest.document` gives the form that is stored, which loads to the same
manifest. One error refuses the whole document, and every error is reported.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from osrdyne.ingress.documents.problems import InvalidDocumentError, Problem
from osrdyne.ingress.documents.reader import DocumentReader, Members, read_document, read_json
from osrdyne.ingress.routes.retries import MAX_DIFFERENT_DELAYS, different_delays, read_retry, shown_retry
from osrdyne.ingress.routes.retries import MEMBERS as RETRY_MEMBERS
from osrdyne.ingress.routes.route import Route, parse_statement
from osrdyne.protocol.names import Key
from osrdyne.protocol.retries import RetryTerms

MAX_TTL = 2**32 - 1  # Seconds, by the schema of Azure IoT Edge.

MAX_ROUTES = 20_000  # Twice the number for which a test proves that a change takes seconds.

_NAME = re.compile(r"[^.$# ]+")
_WRAPPERS = ("content", "modulesContent", "$edgeHub", "properties.desired")
_MAX_NAMED = 20  # Sections that a warning or an error names.
_STORE = "storeAndForwardConfiguration"
_TTL = "timeToLiveSecs"
_MEMBERS = ("route", "priority", _TTL, "retry", "coalesce")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Routes in declared order. `ttl`: of routes without one, in seconds; None: not set; -1: no limit.

    `warnings`: for the author; a stored manifest has none.
    """

    routes: tuple[Route, ...] = ()
    ttl: int | None = None
    warnings: tuple[Problem, ...] = ()

    @property
    def size(self) -> int:
        return len(self.routes)

    @property
    def priorities(self) -> frozenset[int]:
        """The priorities that some route uses."""
        return frozenset(route.priority for route in self.routes if route.priority is not None)

    @property
    def retry_delays(self) -> frozenset[int]:
        """The retry delays of all routes, in milliseconds."""
        return different_delays(route.retry for route in self.routes)

    def without_retries(self, names: Collection[str]) -> Manifest:
        """The same manifest without the retries of these routes."""
        return replace(
            self, routes=tuple(replace(one, retry=None) if one.name in names else one for one in self.routes)
        )

    @property
    def named_keys(self) -> frozenset[Key]:
        """The keys of the groups that routes name."""
        endpoints = (route.statement.endpoint.key for route in self.routes)
        return frozenset(key for key in endpoints if key is not None)

    def routes_to_other_logs(self, name: str | None) -> list[Route]:
        """The routes that write to a log of another name."""
        return [one for one in self.routes if one.statement.endpoint.log not in (None, name)]

    def document(self) -> dict[str, Any]:
        """The manifest as JSON values, in the form of Azure IoT Edge, without the wrappers."""
        document: dict[str, Any] = {"routes": {route.name: _shown(route) for route in self.routes}}
        return document if self.ttl is None else {**document, _STORE: {_TTL: self.ttl}}


def load_manifest(text: str) -> Manifest:
    """Raises `InvalidDocumentError` with every error of the text."""
    return _Reader().read(read_document(text))


def load_manifest_json(text: str) -> Manifest:
    """As `load_manifest`, but of JSON only. Raises `InvalidDocumentError`."""
    return _Reader().read(read_json(text))


class _Reader(DocumentReader):
    """Reads one route manifest."""

    def read(self, value: Any) -> Manifest:
        value, wrapped = self._unwrapped(value)
        known = {"schemaVersion", "routes", _STORE}
        members = self._sections(value, "", known, required="routes", wrapped=wrapped)
        routes = list(self._routes(members.get("routes", Members(()))))
        found = members.get(_STORE, Members(()))
        store = self._sections(found, _STORE, {_TTL}, required=_TTL, wrapped=wrapped)
        ttl = self._global_ttl(store[_TTL]) if _TTL in store else None
        if len(different_delays(route.retry for route in routes)) > MAX_DIFFERENT_DELAYS:
            self.refuse("routes", f"at most {MAX_DIFFERENT_DELAYS} different delays of retries: each is a queue")
        self.raise_problems()
        if not routes:
            self.warn("routes", "there are no routes, so every request is answered no-route")
        for route in routes:
            self._warn_of_late_attempt(route, route.ttl or ttl or 0)
        return Manifest(tuple(routes), ttl, tuple(self.warnings))

    def _unwrapped(self, value: Any) -> tuple[Any, bool]:
        """The document without the wrappers of a deployment manifest of Azure IoT Edge, and whether it had some.

        Sections beside them are for other programs."""
        found: list[str] = []
        for wrapper in _WRAPPERS:
            names = [name for name, _ in value.pairs] if isinstance(value, Members) else []
            if wrapper not in names or "routes" in names:
                continue
            value = self._sections(value, ".".join(found), {wrapper}, required=wrapper)[wrapper]
            found.append(wrapper)
        return value, bool(found)

    def _sections(
        self, value: Any, path: str, known: set[str], *, required: str, wrapped: bool = True
    ) -> dict[str, Any]:
        """As `members`; in a document with wrappers, other members are not used, with a warning. Without the `required`
        one it could be misspelt among them."""
        if wrapped and isinstance(value, Members):
            names = [name for name, _ in value.pairs]
            others = [name for name in names if name not in known]
            place = f"{path}.{required}".lstrip(".")
            if others and required not in names:
                self.refuse(place, f"it is missing; there are {_listed(others)}")
            elif others:
                self.warn(place, f"not used beside it: {_listed(others)}")
            value = Members(tuple(pair for pair in value.pairs if pair[0] in known))
        return self.members(value, path, known)

    def _routes(self, value: Any) -> Iterator[Route]:
        if not isinstance(value, Members):
            self.refuse("routes", "an object of routes by their names is expected")
            return
        if len(value.pairs) > MAX_ROUTES:
            self.refuse("routes", f"there are {len(value.pairs)} routes; a manifest has at most {MAX_ROUTES}")
            return
        for name, item in self._each_once(value).items():
            path = f"routes.{name}"
            if not _NAME.fullmatch(name):
                self.refuse(path, "a name has one character or more, and none of . $ # and blank")
            if isinstance(item, Members):
                members = self.members(item, path, set(_MEMBERS))
            elif isinstance(item, str):
                members = {"route": item}
            else:
                self.refuse(path, f"the text of a route, or an object with {', '.join(_MEMBERS)}")
                continue
            yield from self._route(name, path, members)

    def _each_once(self, routes: Members) -> dict[str, Any]:
        """Routes by name. Of a route in both forms the object is used (Azure IoT Edge routes)."""
        found: dict[str, Any] = {}
        for name, item in routes.pairs:
            if name in found and isinstance(item, Members) == isinstance(found[name], Members):
                self.refuse(f"routes.{name}", "it is given twice")
            elif name in found:
                self.warn(f"routes.{name}", "it is given as text and as object: the object is used")
                item = item if isinstance(item, Members) else found[name]
            found[name] = item
        return found

    def _route(self, name: str, path: str, members: dict[str, Any]) -> Iterator[Route]:
        priority = self.whole(members.get("priority"), f"{path}.priority", largest=9)
        ttl = self.whole(members.get(_TTL), f"{path}.{_TTL}", largest=MAX_TTL)
        retry = self._retry(members["retry"], f"{path}.retry") if "retry" in members else None
        coalesce = members.get("coalesce", False)
        if not isinstance(coalesce, bool):
            self.refuse(f"{path}.coalesce", "true or false is expected")
        text = members.get("route")
        if not isinstance(text, str):
            self.refuse(f"{path}.route", "the text of the route is missing")
            return
        try:
            statement = parse_statement(text, path)
        except InvalidDocumentError as error:
            self.problems += error.problems
            return
        if "*" in statement.source:
            self.warn(f"{path}.route", "a * within a source matches nothing")
        if statement.condition is not None and not statement.condition.text:
            self.warn(f"{path}.route", "an empty condition is never true")
        yield Route(name, text, statement, priority, ttl or 0, retry, coalesce is True)

    def _retry(self, value: Any, path: str) -> RetryTerms | None:
        members = self.members(value, path, set(RETRY_MEMBERS))
        return read_retry(members, path, self.refuse) if isinstance(value, Members) else None

    def _warn_of_late_attempt(self, route: Route, ttl: int) -> None:
        """Warn of a delay that ends after the time-to-live: its attempt never takes place."""
        if route.retry is None or ttl <= 0:
            return
        waits = accumulate(route.retry.delays_ms[: route.retry.max_attempts - 1])
        late = next((attempt for attempt, waited in enumerate(waits, start=2) if waited >= ttl * 1000), None)
        if late is not None:
            self.warn(f"routes.{route.name}.retry.delays", f"{_TTL}, {ttl} s, is over before attempt {late}")

    def _global_ttl(self, value: Any) -> int | None:
        if isinstance(value, int) and not isinstance(value, bool) and value <= MAX_TTL:
            return max(value, -1)
        self.refuse(f"{_STORE}.{_TTL}", f"a whole number up to {MAX_TTL} is expected; a negative one is no limit")
        return None


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _shown(route: Route) -> str | dict[str, Any]:
    members: dict[str, Any] = {"route": route.text}
    if route.priority is not None:
        members["priority"] = route.priority
    if route.ttl:
        members[_TTL] = route.ttl
    if route.retry is not None:
        members["retry"] = shown_retry(route.retry)
    if route.coalesce:
        members["coalesce"] = True
    return members if len(members) > 1 else route.text
