"""Which routes a request takes, and which of them decides for each endpoint. Source: seed 000; INGRESS, "Routes".

Pure. Used by the ingress for every request and by `explain`, which looks at every route and says what came of it. The
ingress looks only at routes that an index by source and by guards of their conditions leaves over: a thousand routes
that ask for different values of a header cost little more than one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from osrdyne.ingress.conditions import Undefined, reader_of
from osrdyne.ingress.conditions.guards import Property
from osrdyne.ingress.conditions.operators import Evaluate
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


class _Bucket:
    """The routes of one source, by their places in the order of urgency."""

    def __init__(self) -> None:
        self._always: list[int] = []
        self._readers: dict[Property, Evaluate] = {}
        self._by_value: dict[Property, defaultdict[object, list[int]]] = {}

    def add(self, place: int, route: Route) -> None:
        condition = route.statement.condition
        if condition is None or not condition.guards:
            self._always.append(place)
            return
        for guard in condition.guards:
            if guard.property not in self._readers:
                self._readers[guard.property] = reader_of(guard.property)
                self._by_value[guard.property] = defaultdict(list)
            self._by_value[guard.property][guard.value].append(place)

    def places(self, arrival: Arrival) -> Iterator[int]:
        """The routes that this request could take; one may come twice."""
        yield from self._always
        for property_, read in self._readers.items():
            yield from self._by_value[property_].get(read(arrival.sample), ())


class RouteTable:
    """The routes of one manifest, ready to be asked."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        # Of several routes to one endpoint the most urgent counts, and then the first: the rest needs no look.
        self._by_rank = sorted(manifest.routes, key=lambda route: route.rank)
        self._declared = {route.name: place for place, route in enumerate(manifest.routes)}
        self._buckets: defaultdict[tuple[str, ...], _Bucket] = defaultdict(_Bucket)
        for place, route in enumerate(self._by_rank):
            self._buckets[route.statement.source].add(place, route)

    def winners(self, arrival: Arrival) -> list[Route]:
        """The route that counts for each endpoint, endpoints in declared order of these routes; empty: no route."""
        segments = _segments(arrival)
        found: dict[Endpoint, Route] = {}
        for place in sorted(set(self._places(arrival, segments))):
            route = self._by_rank[place]
            endpoint = resolved(route.statement.endpoint, arrival)
            if endpoint not in found and _examine(route, segments, arrival).taken:
                found[endpoint] = route
        return sorted(found.values(), key=lambda route: self._declared[route.name])

    def _places(self, arrival: Arrival, segments: tuple[str, ...]) -> Iterator[int]:
        for length in range(len(segments) + 1):
            bucket = self._buckets.get(segments[:length])
            if bucket is not None:
                yield from bucket.places(arrival)

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
