"""Which routes a request takes, and which of them decides for each endpoint. Source: seed 000; INGRESS, "Routes".

Pure. Used by the ingress for every request and by `explain`, which looks at every route and says what came of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from osrdyne.ingress.conditions import Undefined
from osrdyne.ingress.manifest import Manifest
from osrdyne.ingress.requests import Arrival
from osrdyne.ingress.routes import UPSTREAM, Endpoint, Route, matches_source


@dataclass(frozen=True, slots=True)
class Examined:
    """What one route made of a request. `condition` is None where its source did not match, or it has none."""

    route: Route
    source: bool
    condition: bool | Undefined | None = None

    @property
    def taken(self) -> bool:
        return self.source and (self.route.statement.condition is None or self.condition is True)


class RouteTable:
    """The routes of one manifest, ready to be asked."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        # Of several routes to one endpoint the most urgent counts, and then the first: the rest needs no look.
        self._by_rank = sorted(manifest.routes, key=lambda route: route.rank)
        self._declared = {route.name: place for place, route in enumerate(manifest.routes)}

    def winners(self, arrival: Arrival) -> list[Route]:
        """The route that counts for each endpoint, endpoints in declared order of these routes; empty: no route."""
        segments = _segments(arrival)
        found: dict[Endpoint, Route] = {}
        for route in self._by_rank:
            endpoint = resolved(route.statement.endpoint, arrival)
            if endpoint not in found and _examine(route, segments, arrival).taken:
                found[endpoint] = route
        return sorted(found.values(), key=lambda route: self._declared[route.name])

    def examine(self, arrival: Arrival) -> Iterator[Examined]:
        """Every route in declared order."""
        segments = _segments(arrival)
        return (_examine(route, segments, arrival) for route in self.manifest.routes)


def resolved(endpoint: Endpoint, arrival: Arrival) -> Endpoint:
    """The endpoint for this request: one that names the request's own key and path is the same as `$upstream`."""
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
