"""Find the routes whose condition may be true for a request, without evaluating every condition.

Each route has a place, counted from 0. A set of routes is an integer with bit n set for the route at place n, so that
one `&` or `|` combines the sets of thousands of routes. Pure; built once for a manifest, used by `table`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from functools import cached_property
from itertools import accumulate
from operator import or_
from typing import Generic, TypeVar

from osrdyne.ingress.conditions import Sample, reader_of
from osrdyne.ingress.conditions.guards import Clause, Relation, Subject
from osrdyne.ingress.conditions.operators import Evaluate
from osrdyne.ingress.conditions.syntax import Call, Header
from osrdyne.ingress.conditions.values import Value

Bound = TypeVar("Bound", str, float)
RouteSet = int  # Bit n is set for the route at place n.


def lowest_place(routes: RouteSet) -> int:
    """The lowest place in a set, which must not be empty."""
    # `x & -x` keeps only the lowest bit that is set in x.
    return (routes & -routes).bit_length() - 1


class RouteIndex:
    """The clauses of all routes. Layer n holds the n-th clause of each route; a route without one passes the layer."""

    def __init__(self) -> None:
        self._all: RouteSet = 0
        self._layers: list[_Layer] = []

    def add(self, place: int, clauses: tuple[Clause, ...]) -> None:
        """Add a route whose condition can be true only if each of the clauses holds."""
        for number, clause in enumerate(clauses):
            if number == len(self._layers):
                self._layers.append(_Layer())
            self._layers[number].add(place, clause)
        # Also a route without clauses: it is a candidate for every request.
        self._all |= 1 << place

    def candidates(self, sample: Sample) -> RouteSet:
        """The routes whose condition may be true for this request."""
        found = self._all
        for layer in self._layers:
            # A layer that cannot exclude a remaining route is skipped: it may be the only one that parses the body.
            if found & layer.routes:
                # Routes without a clause in this layer pass it: the index may return too many routes, never too few.
                found &= layer.matching(sample) | ~layer.routes
        return found


class _Layer:
    """One clause of each route. Reads only the headers that a request has."""

    def __init__(self) -> None:
        self.routes: RouteSet = 0
        self._of_headers: defaultdict[str, list[tuple[Evaluate, _Values]]] = defaultdict(list)
        self._others: list[tuple[Evaluate, _Values]] = []
        self._by_subject: dict[Subject, _Values] = {}

    def add(self, place: int, clause: Clause) -> None:
        self.routes |= 1 << place
        for guard in clause:
            self._values_of(guard.subject).add(place, guard.relation, guard.value)

    def _values_of(self, subject: Subject) -> _Values:
        known = self._by_subject.get(subject)
        if known is not None:
            return known
        values = self._by_subject[subject] = _Values()
        node = Call("as_number", 0, (subject.property,)) if subject.as_number else subject.property
        property_ = subject.property
        readers = self._of_headers[property_.name] if isinstance(property_, Header) else self._others
        readers.append((reader_of(node), values))
        return values

    def matching(self, sample: Sample) -> RouteSet:
        """The routes whose clause holds."""
        found = 0
        for read, values in self._others:
            found |= values.matching(read(sample))
        for name in sample.header_names if self._of_headers else ():
            for read, values in self._of_headers.get(name, ()):
                found |= values.matching(read(sample))
        return found


class _Values:
    """The values and bounds that routes require of one subject."""

    def __init__(self) -> None:
        self._equal: defaultdict[str | float, RouteSet] = defaultdict(int)
        self._prefixes: defaultdict[int, defaultdict[str, RouteSet]] = defaultdict(lambda: defaultdict(int))
        self._numbers, self._strings = _Bounds[float](), _Bounds[str]()

    def add(self, place: int, relation: Relation, value: str | float) -> None:
        places = 1 << place
        if relation is Relation.EQUALS:
            self._equal[value] |= places
        elif isinstance(value, float):
            self._numbers.add(relation, value, places)
        elif relation is Relation.STARTS_WITH:
            self._prefixes[len(value)][value] |= places
        else:
            self._strings.add(relation, value, places)

    def matching(self, value: Value) -> RouteSet:
        if isinstance(value, str):
            found = self._equal.get(value, 0) | self._strings.matching(value)
            for length, prefixes in self._prefixes.items():
                found |= prefixes.get(value[:length], 0)
            return found
        if isinstance(value, float):
            return self._equal.get(value, 0) | self._numbers.matching(value)
        return 0


class _Bounds(Generic[Bound]):
    """The lower and upper bounds that routes set for one subject, of one type."""

    def __init__(self) -> None:
        self._least: dict[Bound, RouteSet] = {}
        self._greatest: dict[Bound, RouteSet] = {}

    def add(self, relation: Relation, bound: Bound, places: RouteSet) -> None:
        bounds = self._least if relation is Relation.AT_LEAST else self._greatest
        bounds[bound] = bounds.get(bound, 0) | places

    def matching(self, value: Bound) -> RouteSet:
        found = 0
        if self._least:
            bounds, sums = self._rising
            found |= sums[bisect_right(bounds, value)]
        if self._greatest:
            bounds, sums = self._falling
            found |= sums[len(bounds) - bisect_left(bounds, value)]
        return found

    @cached_property
    def _rising(self) -> tuple[list[Bound], list[RouteSet]]:
        """The lower bounds in ascending order, and for each n the routes of the first n of them."""
        bounds = sorted(self._least)
        return bounds, list(accumulate((self._least[bound] for bound in bounds), or_, initial=0))

    @cached_property
    def _falling(self) -> tuple[list[Bound], list[RouteSet]]:
        """The upper bounds in ascending order, and for each n the routes of the last n of them."""
        bounds = sorted(self._greatest)
        return bounds, list(accumulate((self._greatest[bound] for bound in reversed(bounds)), or_, initial=0))
