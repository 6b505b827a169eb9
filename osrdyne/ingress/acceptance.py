"""What becomes of a request when it is accepted: where it goes, in which class, and until when.

Pure. Fixed here and never again: a later change of the manifest does not touch a request that was accepted.
Source: INGRESS, "Routes"; seed 000, "Handling TTL".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from osrdyne.ingress.requests import Arrival
from osrdyne.ingress.routes import Route
from osrdyne.ingress.table import RouteTable
from osrdyne.protocol.names import Key
from osrdyne.protocol.retries import RetryTerms


class Limiter(StrEnum):
    """Whose limit made a deadline."""

    ROUTE = "route"
    MANIFEST = "manifest"
    POOL = "pool"
    CALLER = "caller"


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a request expires, milliseconds since the epoch, and whose limit that is."""

    at_ms: int
    limiter: Limiter


@dataclass(frozen=True, slots=True)
class Passage:
    """One delivery of a request: to the group of `key`, as a request for `path`, in the class of `priority`.

    `route` is None in a pool without a manifest. Only the first passage of a request keeps its reply address.
    `attempts`: how often a worker has tried it before. `split_from`: the caller's key, where the splitter changed it.
    `failed_deliveries`: how often its queue has taken it back before it was put there anew.
    """

    key: Key
    path: str
    priority: int | None
    deadline: Deadline
    route: str | None
    keeps_reply: bool = True
    retry: RetryTerms | None = None
    attempts: int = 0
    split_from: str | None = None
    failed_deliveries: int = 0


def accept(arrival: Arrival, table: RouteTable | None, *, pool_ttl: float) -> list[Passage]:
    """The passages of a request whose key is valid; none when no route takes it.

    `table` is None where there is no manifest: then everything goes to its own group in the default class. `pool_ttl`
    in seconds is the pool's own limit, which no route exceeds.
    """
    if table is None:
        return [_upstream(arrival, pool_ttl)]
    ttl = table.manifest.ttl
    return [
        _along(route, arrival, ttl, pool_ttl, keeps_reply=place == 0)
        for place, route in enumerate(table.winners(arrival))
    ]


def deadline_of(
    *, route_ttl: int, manifest_ttl: int | None, pool_ttl: float, own_ms: int | None, accepted_ms: int
) -> Deadline:
    """The earliest of what route or else manifest allow, the pool's limit, and the caller's own deadline.

    A TTL of the route of 0 inherits; one of the manifest is nothing when it is 0 or None, and no limit when negative.
    """
    limits = [Deadline(accepted_ms + round(pool_ttl * 1000), Limiter.POOL)]
    if route_ttl:
        limits.append(Deadline(accepted_ms + route_ttl * 1000, Limiter.ROUTE))
    elif manifest_ttl is not None and manifest_ttl > 0:
        limits.append(Deadline(accepted_ms + manifest_ttl * 1000, Limiter.MANIFEST))
    if own_ms is not None:
        limits.append(Deadline(own_ms, Limiter.CALLER))
    return min(limits, key=lambda limit: limit.at_ms)


def _upstream(arrival: Arrival, pool_ttl: float) -> Passage:
    request = arrival.request
    deadline = deadline_of(
        route_ttl=0,
        manifest_ttl=None,
        pool_ttl=pool_ttl,
        own_ms=request.deadline_ms,
        accepted_ms=arrival.accepted_ms,
    )
    return Passage(Key(request.key), request.path, None, deadline, None, split_from=arrival.split_from)


def _along(route: Route, arrival: Arrival, manifest_ttl: int | None, pool_ttl: float, *, keeps_reply: bool) -> Passage:
    request, endpoint = arrival.request, route.statement.endpoint
    deadline = deadline_of(
        route_ttl=route.ttl,
        manifest_ttl=manifest_ttl,
        pool_ttl=pool_ttl,
        own_ms=request.deadline_ms,
        accepted_ms=arrival.accepted_ms,
    )
    key = Key(request.key) if endpoint.key is None else endpoint.key
    path = request.path if endpoint.path is None else endpoint.path
    return Passage(
        key, path, route.priority, deadline, route.name, keeps_reply, route.retry, split_from=arrival.split_from
    )
