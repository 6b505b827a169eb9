"""The routing of an accepted request: its groups, priority levels and deadlines. Pure.

Decided once: a later change of the manifest does not affect a request that was accepted.
Source: docs/reference/routes/manifest.md; Azure IoT Edge routes, "Handling TTL".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from osrdyne.ingress.documents.problems import Problem
from osrdyne.ingress.requests import Arrival
from osrdyne.ingress.routes.manifest import Manifest
from osrdyne.ingress.routes.route import Route
from osrdyne.ingress.routes.table import RouteTable
from osrdyne.protocol.names import Key
from osrdyne.protocol.retries import RetryTerms


class Limiter(StrEnum):
    """The setting or sender that a deadline comes from."""

    ROUTE = "route"
    MANIFEST = "manifest"
    POOL = "pool"
    POOL_MAXIMUM = "pool-maximum"
    CALLER = "caller"
    POLICY = "policy"


@dataclass(frozen=True, slots=True)
class TtlLimits:
    """The pool's limits in seconds: `default` where neither route nor manifest has a TTL, `longest` where one has."""

    default: float
    longest: float


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a request expires, in milliseconds since the epoch, and where the deadline comes from."""

    at_ms: int
    limiter: Limiter


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """One delivery of a request: to the group of `key`, as a request for `path`, at the level `priority`.

    `route` is None in a pool without a manifest. Only the first delivery of a request keeps its reply address.
    `attempts`: how often a worker has tried it before. `split_from`: the client's key if the splitter changed it.
    `failed_deliveries`: how often it was requeued before it was published again. `put_backs`: how often it was put back
    at its delivery limit. `coalesce`: identical requests share one run. `log`: a write to the log of this name instead;
    then `key` is the client's.
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
    put_backs: int = 0
    coalesce: bool = False
    log: str | None = None


def accept(arrival: Arrival, table: RouteTable | None, *, limits: TtlLimits) -> list[RoutedRequest]:
    """The deliveries of a request whose key is valid; none if no route matches.

    `table` is None in a pool without a manifest: then a request goes to its own group, at the default level.
    """
    if table is None:
        return [_deliver_to_own_group(arrival, limits)]
    ttl = table.manifest.ttl
    return [
        _deliver_by(route, arrival, ttl, limits, keeps_reply=place == 0)
        for place, route in enumerate(table.winners(arrival))
    ]


def deadline_of(
    *, route_ttl: int, manifest_ttl: int | None, limits: TtlLimits, own_ms: int | None, accepted_ms: int
) -> Deadline:
    """The TTL of the route, else that of the manifest, up to the pool's longest; else the pool's default. The caller's
    deadline replaces it if it is earlier.

    0 in a route: the manifest's TTL. In the manifest, 0 or None: the pool's default; negative: the pool's longest.
    """
    longest = (limits.longest, Limiter.POOL_MAXIMUM)
    if route_ttl:
        # Capped: the message TTL in the policy of the queues is at most the pool's maximum.
        seconds, limiter = min((float(route_ttl), Limiter.ROUTE), longest)
    elif manifest_ttl is None or manifest_ttl == 0:
        seconds, limiter = limits.default, Limiter.POOL
    elif manifest_ttl > 0:
        seconds, limiter = min((float(manifest_ttl), Limiter.MANIFEST), longest)
    else:
        seconds, limiter = longest
    deadline = Deadline(accepted_ms + round(seconds * 1000), limiter)
    # A caller can only shorten the lifetime: the message TTL of the queues would end a longer one.
    return deadline if own_ms is None or own_ms >= deadline.at_ms else Deadline(own_ms, Limiter.CALLER)


def longest_ttl(manifest: Manifest | None, limits: TtlLimits) -> float:
    """The longest lifetime, in seconds, of a request that this manifest accepts."""
    if manifest is None:
        return limits.default
    deadlines = (
        deadline_of(route_ttl=route.ttl, manifest_ttl=manifest.ttl, limits=limits, own_ms=None, accepted_ms=0)
        for route in manifest.routes
    )
    return max((deadline.at_ms / 1000 for deadline in deadlines), default=limits.default)


def warn_of_capped_ttls(manifest: Manifest, limits: TtlLimits) -> Iterator[Problem]:
    """Warn of TTLs without effect, because the pool's longest one is shorter."""
    remedy = f"this pool's requests.max_ttl, {limits.longest:g} s, is shorter and counts: raise it, or lower this"
    for route in manifest.routes:
        if route.ttl > limits.longest:
            yield Problem(f"{route.ttl} s; {remedy}", path=f"routes.{route.name}.timeToLiveSecs")
    if manifest.ttl is not None and manifest.ttl > limits.longest:
        yield Problem(f"{manifest.ttl} s; {remedy}", path="storeAndForwardConfiguration.timeToLiveSecs")


def _deliver_to_own_group(arrival: Arrival, limits: TtlLimits) -> RoutedRequest:
    request = arrival.request
    deadline = deadline_of(
        route_ttl=0,
        manifest_ttl=None,
        limits=limits,
        own_ms=request.deadline_ms,
        accepted_ms=arrival.accepted_ms,
    )
    return RoutedRequest(Key(request.key), request.path, None, deadline, None, split_from=arrival.split_from)


def _deliver_by(
    route: Route, arrival: Arrival, manifest_ttl: int | None, limits: TtlLimits, *, keeps_reply: bool
) -> RoutedRequest:
    request, endpoint = arrival.request, route.statement.endpoint
    if endpoint.log is not None:
        # The pool's default is for requests that wait for a worker; a message in the log ends by the log's retention.
        limits = TtlLimits(limits.longest, limits.longest)
    deadline = deadline_of(
        route_ttl=route.ttl,
        manifest_ttl=manifest_ttl,
        limits=limits,
        own_ms=request.deadline_ms,
        accepted_ms=arrival.accepted_ms,
    )
    key = Key(request.key) if endpoint.key is None else endpoint.key
    if endpoint.log is not None:
        # A device stays in one partition, whatever groups the splitter makes of its key.
        key = Key(request.key if arrival.split_from is None else arrival.split_from)
        if deadline.limiter is Limiter.POOL:
            deadline = Deadline(deadline.at_ms, Limiter.POOL_MAXIMUM)
    path = request.path if endpoint.path is None else endpoint.path
    return RoutedRequest(
        key,
        path,
        route.priority,
        deadline,
        route.name,
        keeps_reply,
        route.retry,
        split_from=arrival.split_from,
        coalesce=route.coalesce,
        log=endpoint.log,
    )
