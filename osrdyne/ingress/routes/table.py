"""Find the routes that match a request, and the one that decides for each endpoint. Source: Azure IoT Edge routes;
docs/reference/routes/manifest.md.

Pure. Used by the ingress for every request, and by `explain`, which evaluates every route. The ingress evaluates only
the candidates of an index by source and by requirements of conditions: a thousand routes for different values of a
header cost little more than one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from osrdyne.ingress.conditions import Undefined
from osrdyne.ingress.requests import Arrival
from osrdyne.ingress.routes.index import RouteIndex, RouteSet, lowest_place
from osrdyne.ingress.routes.manifest import Manifest
from osrdyne.ingress.routes.route import UPSTREAM, Endpoint, Route, matches_source


@dataclass(frozen=True, slots=True)
class Examined:
    """The result of one route for a request. `condition` is None if the source did not match or the route has none."""

    route: Route
    source: bool
    condition: bool | Undefined | None = None

    @property
    def taken(self) -> bool:
        return self.source and (self.route.statement.condition is None or self.condition is True)


class RouteTable:
    """The routes of one manifest, with their index."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        # Of several routes to one endpoint the most urgent decides, of equal ones the first; the rest is not evaluated.
        self._by_rank = sorted(manifest.routes, key=lambda route: route.rank)
        self._declared = {route.name: place for place, route in enumerate(manifest.routes)}
        self._by_source: defaultdict[tuple[str, ...], RouteIndex] = defaultdict(RouteIndex)
        self._same_endpoint: defaultdict[Endpoint, RouteSet] = defaultdict(int)
        for place, route in enumerate(self._by_rank):
            condition, endpoint = route.statement.condition, route.statement.endpoint
            self._by_source[route.statement.source].add(place, () if condition is None else condition.clauses)
            self._same_endpoint[endpoint] |= 1 << place

    def winners(self, arrival: Arrival) -> list[Route]:
        """The deciding route of each endpoint, in declared order; empty if no route matches."""
        segments = _segments(arrival)
        found: dict[Endpoint, Route] = {}
        left = self._candidates(arrival, segments)
        while left:
            route = self._by_rank[lowest_place(left)]
            # For this request: two endpoints that differ in the manifest may be the same group and path here.
            endpoint = resolved(route.statement.endpoint, arrival)
            # Conditions are evaluated one by one, the most urgent route first: most are never evaluated.
            if endpoint in found or _examine(route, segments, arrival).taken:
                found.setdefault(endpoint, route)
                left &= ~self._same_endpoint[route.statement.endpoint]
            else:
                left &= left - 1  # clears the lowest set bit: this route is done
        return sorted(found.values(), key=lambda route: self._declared[route.name])

    def _candidates(self, arrival: Arrival, segments: tuple[str, ...]) -> RouteSet:
        """The routes whose source matches and whose condition may be true."""
        found = 0
        for length in range(len(segments) + 1):
            index = self._by_source.get(segments[:length])
            if index is not None:
                found |= index.candidates(arrival.sample)
        return found

    def examine(self, arrival: Arrival) -> Iterator[Examined]:
        """Every route in declared order."""
        segments = _segments(arrival)
        return (_examine(route, segments, arrival) for route in self.manifest.routes)


def resolved(endpoint: Endpoint, arrival: Arrival) -> Endpoint:
    """The endpoint for this request: `$upstream` if it names the request's own key and path."""
    own = (arrival.request.key, arrival.request.path)
    return UPSTREAM if (endpoint.key, endpoint.path) == own else endpoint


def _segments(arrival: Arrival) -> tuple[str, ...]:
    return tuple(arrival.source.lower().strip("/").split("/"))


def _examine(route: Route, segments: tuple[str, ...], arrival: Arrival) -> Examined:
    statement = route.statement
    if not matches_source(statement, segments):
        return Examined(route, source=False)
    condition = statement.condition
    return Examined(route, source=True, condition=None if condition is None else condition.evaluate(arrival.sample))
