"""Explain what the ingress would do with a sample request, and why: the same decisions, step by step.

Used by `osrdyne explain` and `POST /v1/explain`. Pure; nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

from osrdyne.ingress.acceptance import Limiter, RoutedRequest, TtlLimits, accept
from osrdyne.ingress.checks import KEY_CHECK, IngressChecks, Refusal, Result, check_key
from osrdyne.ingress.conditions import Undefined
from osrdyne.ingress.conditions.causes import undefined_part
from osrdyne.ingress.policies.limits import PolicyOf, limit_age
from osrdyne.ingress.requests import Arrival
from osrdyne.ingress.routes.retries import describe_retry
from osrdyne.ingress.routes.table import Examined, RouteTable
from osrdyne.ingress.splitter.rules import Split, Splitter, split_arrival
from osrdyne.ingress.telemetry import Log
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.protocol.retries import RetryTerms
from osrdyne.protocol.statuses import Status

_LIMITER_TEXTS = {
    Limiter.ROUTE: "the route's time-to-live",
    Limiter.MANIFEST: "the manifest's time-to-live",
    Limiter.POOL: "the pool's requests.ttl",
    Limiter.POOL_MAXIMUM: "the pool's requests.max_ttl",
    Limiter.CALLER: "the caller's own deadline",
    Limiter.POLICY: "MaxMessageAge of the policy of its key",
}


@dataclass(frozen=True, slots=True)
class Step:
    """One decision: the name of the check, and a sentence."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class ExplainedRoute:
    """The result of one route. `condition`: true, false or `undefined`; None if it was not evaluated. `undefined`: the
    part of the condition without a value."""

    name: str
    source: bool
    condition: bool | str | None
    taken: bool
    wins: bool
    undefined: str | None = None


@dataclass(frozen=True, slots=True)
class ExplainedDelivery:
    """One delivery. `priority`: None for the default level. `deadline`: seconds since the epoch. `retry`: None if the
    first outcome is the answer. `coalesce`: identical requests share one run. `log`, `partition`: of a write to the log
    of telemetry, whose stream is `queue`."""

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
    coalesce: bool
    log: str | None = None
    partition: int | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation. `deliveries`: to groups and to the log. `refused`: the status of the answer; None if the request
    passes."""

    source: str
    steps: tuple[Step, ...]
    split: Split
    routes: tuple[ExplainedRoute, ...]
    deliveries: tuple[ExplainedDelivery, ...]
    refused: str | None

    def to_json(self) -> dict[str, object]:
        value = asdict(self)
        return {**value, "passages": value["deliveries"]}  # their former name, for one release


_KEY_ONLY = IngressChecks([KEY_CHECK])
_NO_LOG = Log()


def explain(
    arrival: Arrival,
    table: RouteTable | None,
    *,
    splitter: Splitter | None,
    names: PoolNames,
    limits: TtlLimits,
    retrying: Mapping[int, int] | None = None,
    profile_of: Callable[[Key], str | None] = lambda key: None,
    rate_of: Callable[[Key], str | None] = lambda key: None,
    checks: IngressChecks = _KEY_ONLY,
    policy_of: PolicyOf = lambda key: None,
    log: Log = _NO_LOG,
    split: Split | None = None,
    routes: Sequence[ExplainedRoute] | None = None,
) -> Explanation:
    """Explain a request with a valid key in a managed pool. `retrying`: how many requests wait for their next attempt,
    by delay in milliseconds, if known. `profile_of`: a sentence about the profile of a group; None if the pool has no
    profiles, or they are not known. `rate_of`: the same about the rate of its workers. `checks`: those of the pool.
    `policy_of`: the policy of a key. `log`: the pool's log of telemetry. `split`, `routes`: what the splitter and
    `explain_routes` have returned for the request; None: they are called here."""
    own_key = arrival.request.key
    results = checks.explain_request(arrival, now_ms=arrival.accepted_ms)
    if results and (refusal := results[-1].refusal) is not None:
        return _refused(arrival, Split(own_key), [*_describe_checks(results)], refusal)
    split = split or preview_split(arrival, splitter)
    beginning = [
        Step("source", f"The request comes from {arrival.source}."),
        *_describe_checks(results),
        *_describe_split(own_key, split, splitter),
    ]
    if not own_key:
        beginning.insert(0, Step("key", "The key is empty. That is a key like any other, with a group of its own."))
    routes = explain_routes(arrival, table, split) if routes is None else routes
    arrival = split_arrival(arrival, split)
    if (refusal := check_key(arrival, arrival.accepted_ms)) is not None:
        return _refused(arrival, split, beginning, refusal)
    deliveries = [limit_age(arrival, one, policy_of) for one in accept(arrival, table, limits=limits)]
    steps = [*beginning, *_describe_routes(table, routes)]
    if (cause := arrival.sample.unread_body) is not None:
        steps.append(Step("body", f"$body was not read: {cause}."))
    allowed = []
    for routed in deliveries:
        if routed.log is not None:
            refusal = log.refuse(routed)
            steps += [] if refusal is not None else _describe_write(routed, names, log)
        else:
            steps += _describe_delivery(routed, names)
            results = checks.explain_delivery(arrival, routed, now_ms=arrival.accepted_ms)
            steps += _describe_checks(results)
            refusal = results[-1].refusal if results else None
        if refusal is not None:
            if routed.keeps_reply:
                # A write to the log takes place although the caller is refused.
                for write in (one for one in deliveries if one.log is not None and one is not routed):
                    steps += _describe_write(write, names, log) if log.refuse(write) is None else ()
                return _refused(arrival, split, steps, refusal, tuple(routes))
            steps.append(Step("refusal", f"This copy is dropped ({refusal.status}): {refusal.detail}"))
            continue
        allowed.append(routed)
        if routed.log is None:
            steps += _describe_work(routed, profile_of(routed.key), rate_of(routed.key), retrying)
    if not deliveries:
        steps.append(Step("refusal", "No route takes the request: its caller is answered no-route."))
    return Explanation(
        source=arrival.source,
        steps=tuple(steps),
        split=split,
        routes=tuple(routes),
        deliveries=tuple(_explained_delivery(routed, names, log) for routed in allowed),
        refused=None if deliveries else Status.NO_ROUTE,
    )


def preview_split(arrival: Arrival, splitter: Splitter | None) -> Split:
    """The group that a request goes to; the turns of the splitter do not change."""
    return Split(arrival.request.key) if splitter is None else splitter.preview(arrival)


def explain_routes(arrival: Arrival, table: RouteTable | None, split: Split) -> tuple[ExplainedRoute, ...]:
    """The result of every route. Takes seconds for thousands of routes, and uses no state of the pool: call it in a
    thread."""
    if table is None:
        return ()
    # A copy, which has a sample of its own: the conditions that are evaluated here must not use up the work that
    # conditions may do for the request.
    arrival = replace(split_arrival(arrival, split))
    winners = {route.name for route in table.winners(arrival)}
    return tuple(_explained(one, winners, arrival) for one in table.examine(arrival))


def _refused(
    arrival: Arrival, split: Split, steps: list[Step], refusal: Refusal, routes: tuple[ExplainedRoute, ...] = ()
) -> Explanation:
    step = Step("refusal", f"The caller is answered {refusal.status}: {refusal.detail}")
    return Explanation(arrival.source, (*steps, step), split, routes, (), refusal.status)


def _describe_checks(results: list[Result]) -> Iterator[Step]:
    for result in results:
        if result.text is not None:
            yield Step(result.check, result.text)


def _explained(one: Examined, winners: set[str], arrival: Arrival) -> ExplainedRoute:
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
        yield Step("splitter", f"The rule {split.rule!r} does not change the key {own_key!r}: {split.unchanged}.")
    else:
        turn = ", this time" if split.takes_turns else ""
        yield Step("splitter", f"By the rule {split.rule!r} the key {own_key!r} becomes {split.key!r}{turn}.")


def _describe_routes(table: RouteTable | None, routes: Sequence[ExplainedRoute]) -> Iterator[Step]:
    if table is None:
        yield Step("route", "The pool has no route manifest: every request goes to $upstream in the default class.")
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


def _describe_delivery(routed: RoutedRequest, names: PoolNames) -> Iterator[Step]:
    reply = "" if routed.keeps_reply else ", as a one-way copy"
    yield Step("delivery", f"To the group {routed.key!r} with the path {routed.path!r}{reply}.")
    yield Step("priority", f"{_level_name(routed.priority)}: the queue {_queue(routed, names)}.")
    yield _describe_deadline(routed)


def _describe_write(routed: RoutedRequest, names: PoolNames, log: Log) -> Iterator[Step]:
    answer = ", and the caller is answered ok (code 202)" if routed.keeps_reply else ", as a one-way copy"
    partition = log.partition(routed.key)
    yield Step("log", f"To the log {routed.log!r}, partition {partition}: {names.log_stream(partition)}{answer}.")
    yield _describe_deadline(routed)


def _describe_work(
    routed: RoutedRequest, profile: str | None, rate: str | None, retrying: Mapping[int, int] | None
) -> Iterator[Step]:
    """The treatment of a delivery by the workers of its group."""
    if profile is not None:
        yield Step("profile", profile)
    if rate is not None:
        yield Step("rate", rate)
    if routed.retry is not None:
        yield Step("retry", describe_retry(routed.retry, retrying=retrying))
    if routed.coalesce:
        yield Step("coalesce", "It shares one run with identical requests in the same worker.")


def _describe_deadline(routed: RoutedRequest) -> Step:
    moment = datetime.fromtimestamp(routed.deadline.at_ms / 1000, tz=UTC).isoformat(timespec="milliseconds")
    return Step("deadline", f"{moment}, by {_LIMITER_TEXTS[routed.deadline.limiter]}.")


def _level_name(priority: int | None) -> str:
    return "The default class, below priority 9" if priority is None else f"Priority {priority}"


def _queue(routed: RoutedRequest, names: PoolNames) -> str:
    return names.request_queue(routed.key, routed.priority)


def _explained_delivery(routed: RoutedRequest, names: PoolNames, log: Log) -> ExplainedDelivery:
    partition = None if routed.log is None else log.partition(routed.key)
    return ExplainedDelivery(
        route=routed.route,
        key=routed.key,
        path=routed.path,
        queue=_queue(routed, names) if partition is None else names.log_stream(partition),
        exchange=names.work_exchange(routed.priority) if partition is None else "",
        priority=routed.priority,
        deadline=routed.deadline.at_ms / 1000,
        limited_by=routed.deadline.limiter.value,
        keeps_reply=routed.keeps_reply,
        retry=routed.retry,
        coalesce=routed.coalesce,
        log=routed.log,
        partition=partition,
    )
