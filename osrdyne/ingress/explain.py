"""Explain what the ingress would do with a sample request, and why: the same decisions, step by step.

Used by `osrdyne explain` and `POST /v1/explain`. Pure; nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from osrdyne.errors import InvalidKeyError
from osrdyne.ingress.acceptance import Limiter, RoutedRequest, TtlLimits, accept
from osrdyne.ingress.conditions import Undefined
from osrdyne.ingress.conditions.causes import undefined_part
from osrdyne.ingress.requests import Arrival
from osrdyne.ingress.routes.retries import describe_retry
from osrdyne.ingress.routes.table import Examined, RouteTable
from osrdyne.ingress.splitter.rules import Split, Splitter, split_arrival
from osrdyne.protocol.names import PoolNames
from osrdyne.protocol.retries import RetryTerms
from osrdyne.protocol.statuses import Status

_LIMITS = {
    Limiter.ROUTE: "the route's time-to-live",
    Limiter.MANIFEST: "the manifest's time-to-live",
    Limiter.POOL: "the pool's requests.ttl",
    Limiter.POOL_MAXIMUM: "the pool's requests.max_ttl",
    Limiter.CALLER: "the caller's own deadline",
}


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was decided, for a person."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class ExplainedRoute:
    """What came of one route: `condition` is true, false or `undefined`, None where it was not looked at. `undefined`
    names the part of the condition that has no value."""

    name: str
    source: bool
    condition: bool | str | None
    taken: bool
    wins: bool
    undefined: str | None = None


@dataclass(frozen=True, slots=True)
class ExplainedPassage:
    """One delivery; `priority` None is the default class, `deadline` in seconds since the epoch, `retry` None: the
    first outcome is the answer."""

    route: str | None
    key: str
    path: str
    queue: str
    exchange: str
    priority: int | None
    deadline: float
    limited_by: str
    keeps_reply: bool
    retry: RetryTerms | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """The whole answer. `refused` is the status that the caller would get, None when the request passes."""

    source: str
    steps: tuple[Step, ...]
    split: Split
    routes: tuple[ExplainedRoute, ...]
    passages: tuple[ExplainedPassage, ...]
    refused: str | None

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def explain(
    arrival: Arrival,
    table: RouteTable | None,
    *,
    splitter: Splitter | None,
    names: PoolNames,
    limits: TtlLimits,
    retrying: Mapping[int, int] | None = None,
) -> Explanation:
    """What would happen to this request, the key of which is valid, in a managed pool. `retrying`: how many requests
    wait for their next attempt, by delay in milliseconds, where that is known."""
    own_key = arrival.request.key
    split = Split(own_key) if splitter is None else splitter.preview(arrival)
    beginning = [
        Step("source", f"The request comes from {arrival.source}."),
        *_describe_split(own_key, split, splitter),
    ]
    if not own_key:
        beginning.insert(0, Step("key", "The key is empty. That is a key like any other, with a group of its own."))
    arrival = split_arrival(arrival, split)
    try:
        arrival.check_key()
    except InvalidKeyError as error:
        beginning.append(Step("refusal", f"The caller is answered invalid: {error}"))
        return Explanation(arrival.source, tuple(beginning), split, (), (), Status.INVALID)
    passages = accept(arrival, table, limits=limits)
    winners = {passage.route for passage in passages}
    routes = [_explained(one, winners, arrival) for one in (table.examine(arrival) if table else ())]
    steps = [*beginning, *_describe_routes(table, routes)]
    for passage in passages:
        steps += _describe_passage(passage, names)
        if passage.retry is not None:
            steps.append(Step("retry", describe_retry(passage.retry, retrying=retrying)))
    if not passages:
        steps.append(Step("refusal", "No route takes the request: its caller is answered no-route."))
    return Explanation(
        source=arrival.source,
        steps=tuple(steps),
        split=split,
        routes=tuple(routes),
        passages=tuple(_shown(passage, names) for passage in passages),
        refused=None if passages else Status.NO_ROUTE,
    )


def _explained(one: Examined, winners: set[str | None], arrival: Arrival) -> ExplainedRoute:
    wins = one.taken and one.route.name in winners
    if not isinstance(one.condition, Undefined):
        return ExplainedRoute(one.route.name, one.source, one.condition, one.taken, wins)
    written = one.route.statement.condition
    part = None if written is None else undefined_part(written.text, arrival.sample)
    return ExplainedRoute(one.route.name, one.source, one.condition.value, one.taken, wins, part)


def _describe_split(own_key: str, split: Split, splitter: Splitter | None) -> Iterator[Step]:
    if splitter is None:
        return
    if split.rule is None:
        yield Step("splitter", f"No rule matches the key {own_key!r}.")
    elif split.unchanged is not None:
        yield Step("splitter", f"The rule {split.rule!r} leaves the key {own_key!r} as it is: {split.unchanged}.")
    else:
        turn = ", this time" if split.takes_turns else ""
        yield Step("splitter", f"By the rule {split.rule!r} the key {own_key!r} becomes {split.key!r}{turn}.")


def _describe_routes(table: RouteTable | None, routes: list[ExplainedRoute]) -> Iterator[Step]:
    if table is None:
        yield Step("route", "The pool has no route manifest: everything goes to $upstream in the default class.")
    for route in routes:
        yield Step("route", f"{route.name}: {_why(route)}")


def _why(route: ExplainedRoute) -> str:
    if not route.source:
        return "its source does not match."
    if not route.taken:
        cause = "" if route.undefined is None else f": {route.undefined} is undefined"
        return f"its condition is {str(route.condition).lower()}{cause}."
    if not route.wins:
        return "it matches, but another route to the same endpoint has a higher priority, or the same and comes first."
    return "it matches and decides."


def _describe_passage(passage: RoutedRequest, names: PoolNames) -> Iterator[Step]:
    reply = "" if passage.keeps_reply else ", as a one-way copy"
    yield Step("delivery", f"To the group {passage.key!r} with the path {passage.path!r}{reply}.")
    yield Step("priority", f"{_class_name(passage.priority)}: the queue {_queue(passage, names)}.")
    moment = datetime.fromtimestamp(passage.deadline.at_ms / 1000, tz=UTC).isoformat(timespec="milliseconds")
    yield Step("deadline", f"{moment}, by {_LIMITS[passage.deadline.limiter]}.")


def _class_name(priority: int | None) -> str:
    return "The default class, below priority 9" if priority is None else f"Priority {priority}"


def _queue(passage: RoutedRequest, names: PoolNames) -> str:
    return names.request_queue(passage.key, passage.priority)


def _shown(passage: RoutedRequest, names: PoolNames) -> ExplainedPassage:
    return ExplainedPassage(
        route=passage.route,
        key=passage.key,
        path=passage.path,
        queue=_queue(passage, names),
        exchange=names.work_exchange(passage.priority),
        priority=passage.priority,
        deadline=passage.deadline.at_ms / 1000,
        limited_by=passage.deadline.limiter.value,
        keeps_reply=passage.keeps_reply,
        retry=passage.retry,
    )
