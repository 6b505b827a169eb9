"""Judges a run by what clients saw and what was left at the end. Pure; knows nothing of processes and sockets."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from osrdyne.protocol.statuses import Status
from tests.chaos.schedule import Action, Done, Family, Fault, Target

LIFETIME = 55.0
"""Seconds that callers give some of their requests; the pool gives all of them a little more."""
MAX_CLOCK_SKEW = 5.0
"""Seconds by which the clocks of a pool may differ."""
AFTER_EFFECTS = 60.0
"""Seconds for which a fault that is over may still explain what becomes of a request."""
SHOWN = 10
"""So many examples of each problem are named."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that was published; `confirmed` when the broker said that it has it.

    `expected` is the body of an answer `ok`; None when there must be none, because the request kills its worker.
    """

    correlation_id: str
    key: str
    expected: str | None
    confirmed: bool
    at: float


@dataclass(frozen=True, slots=True)
class Answered:
    """A terminal answer in the reply queue."""

    correlation_id: str
    status: str
    body: str
    at: float


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What there was after the quiet period, and what must not have been seen at any time before."""

    queues: Sequence[str] = ()
    """Request and control queues."""
    messages: Mapping[str, int] = field(default_factory=dict)
    """How many lie in each queue of the pool that should be empty."""
    workers: Sequence[str] = ()
    groups: Sequence[str] = ()
    leaders: int = 1
    poison: Sequence[str] = ()
    """Correlation ids in the inventory."""
    twins: Sequence[str] = ()
    """Moments at which a key had two living workers."""
    two_leaders: Sequence[str] = ()
    tracebacks: Sequence[str] = ()
    ended: Sequence[str] = ()
    """Controllers that ended by themselves."""


@dataclass(frozen=True, slots=True)
class Verdict:
    requests: int
    unconfirmed: int
    duplicates: int
    statuses: Mapping[str, int]
    lost: tuple[str, ...]
    """Confirmed, and neither answered nor in the inventory."""
    unanswered: tuple[str, ...]
    """In the inventory, but never answered."""
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not (self.lost or self.unanswered or self.problems)


def allowed_statuses(faults: Iterable[Fault], *, waited: float, managed: bool = False) -> frozenset[Status]:
    """What may become of a request under these faults, `waited` seconds after it was published.

    RabbitMQ counts cut connections as failed deliveries too. Only a clock that is wrong can end a request early.
    Controllers are in the way of every request in a managed pool only.
    """
    allowed = {Status.OK}
    for fault in faults:
        is_late = waited >= LIFETIME - MAX_CLOCK_SKEW and _delays(fault, managed=managed)
        if is_late or abs(fault.jump) > MAX_CLOCK_SKEW:
            allowed |= {Status.EXPIRED}
        if fault.target in _END_DELIVERIES and fault.family is not Family.ALARM:
            allowed |= {Status.DELIVERY_LIMIT}
        if fault.target is Target.WORKER:
            allowed |= {Status.START_FAILED}
    return frozenset(allowed)


def _delays(fault: Fault, *, managed: bool) -> bool:
    harmless = {Target.MANAGEMENT} if managed else {Target.LEADER, Target.STANDBY, Target.MANAGEMENT}
    return fault.target not in harmless and fault.action is not Action.DELAY


_END_DELIVERIES = frozenset({Target.WORKER, Target.WORKERS, Target.BROKER, Target.EVERYBODY, Target.KEY})


def judge(
    sent: Sequence[Sent],
    answers: Sequence[Answered],
    aftermath: Aftermath,
    *,
    done: Sequence[Done],
    managed: bool = False,
) -> Verdict:
    """What became of the requests that were sent, with the faults that were done meanwhile."""
    by_request: dict[str, list[Answered]] = defaultdict(list)
    for answer in answers:
        by_request[answer.correlation_id].append(answer)
    silent = [one.correlation_id for one in sent if one.confirmed and one.correlation_id not in by_request]
    kept = frozenset(aftermath.poison)
    return Verdict(
        requests=sum(one.confirmed for one in sent),
        unconfirmed=sum(not one.confirmed for one in sent),
        duplicates=sum(len(several) - 1 for several in by_request.values()),
        statuses=Counter(answer.status for answer in answers),
        lost=tuple(one for one in silent if one not in kept),
        unanswered=tuple(one for one in silent if one in kept),
        problems=(
            *_problems_of_answers(sent, answers, kept, done, managed=managed),
            *_problems_of_aftermath(aftermath),
        ),
    )


def _problems_of_answers(
    sent: Sequence[Sent], answers: Sequence[Answered], kept: frozenset[str], done: Sequence[Done], *, managed: bool
) -> Iterable[str]:
    asked = {one.correlation_id: one for one in sent}
    known = [answer for answer in answers if answer.correlation_id in asked]
    strange = [answer.correlation_id for answer in answers if answer.correlation_id not in asked]
    forbidden = [
        f"{one.correlation_id} {one.status}"
        for one in known
        if not _is_explained(one, asked[one.correlation_id], done, managed=managed)
    ]
    wrong = [
        f"{one.correlation_id} {one.body!r}"
        for one in known
        if one.status == Status.OK and one.body != asked[one.correlation_id].expected
    ]
    unkept = {one.correlation_id for one in known if one.status == Status.DELIVERY_LIMIT} - kept
    yield from _named("answers to nobody's request", strange)
    yield from _named("answers that no fault explains", forbidden)
    yield from _named("wrong answers", wrong)
    yield from _named("answered delivery_limit, but not in the inventory", sorted(unkept))


def _is_explained(answer: Answered, request: Sent, done: Sequence[Done], *, managed: bool) -> bool:
    faults = [one.fault for one in done if one.began <= answer.at and one.ended >= request.at - AFTER_EFFECTS]
    return answer.status in allowed_statuses(faults, waited=answer.at - request.at, managed=managed)


def _problems_of_aftermath(aftermath: Aftermath) -> Iterable[str]:
    yield from _named("queues left over", aftermath.queues)
    yield from _named("messages left over", [f"{count} in {name}" for name, count in aftermath.messages.items()])
    yield from _named("workers left over", aftermath.workers)
    yield from _named("groups left over", aftermath.groups)
    yield from _named("two workers for one key", aftermath.twins)
    yield from _named("two leaders", aftermath.two_leaders)
    yield from _named("tracebacks", aftermath.tracebacks)
    yield from _named("controllers that ended by themselves", aftermath.ended)
    if aftermath.leaders != 1:
        yield f"leaders at the end: {aftermath.leaders}"


def _named(what: str, found: Sequence[str]) -> Iterable[str]:
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        yield f"{what}: {', '.join(found[:SHOWN])}{more}"
