"""Judges a run by what clients saw and what was left at the end. Pure; knows nothing of processes and sockets.

Rules are those of a managed pool; a direct one has none.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from osrdyne.protocol.statuses import Status
from tests.chaos.rules import Rules
from tests.chaos.schedule import Action, Done, Family, Fault, Target

LIFETIME = 55.0
"""Seconds that callers give some of their requests; the pool gives all of them a little more."""
MAX_CLOCK_SKEW = 5.0
"""Seconds by which the clocks of a pool may differ."""
AFTER_EFFECTS = 60.0
"""Seconds for which a fault that is over may still explain what becomes of a request."""
CONFIRM_TIME = 15.0
"""Seconds for which a fault that is over may still keep a worker from sending a request to wait."""
LEADER_TIME = 30.0
"""Seconds after the last fault that may end a term within which a daemon must lead."""
SHOWN = 10
"""So many examples of each problem are named."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that was published; `confirmed` when the broker said that it has it.

    `expected` is the body of an answer `ok`; None when there must be none, because the request kills its worker, or
    because it `fails` at the last attempt, too. `attempts`: how many it gets when nothing comes between them.
    """

    correlation_id: str
    key: str
    expected: str | None
    confirmed: bool
    at: float
    attempts: int = 1
    fails: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """A terminal answer in the reply queue; `attempts` is the number in its header."""

    correlation_id: str
    status: str
    body: str
    at: float
    attempts: int = 1


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
    leaderless: Sequence[tuple[float, float]] = ()
    """From when to when, in seconds since the epoch, no daemon led."""
    tracebacks: Sequence[str] = ()
    ended: Sequence[str] = ()
    """Controllers that ended by themselves."""


@dataclass(frozen=True, slots=True)
class Verdict:
    requests: int
    unconfirmed: int
    duplicates: int
    tried_again: int
    """Requests with an answer that reports more than one attempt."""
    further_attempts: int
    """According to these answers."""
    statuses: Mapping[str, int]
    lost: tuple[str, ...]
    """Confirmed, and neither answered nor in the inventory."""
    unanswered: tuple[str, ...]
    """In the inventory, but never answered."""
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not (self.lost or self.unanswered or self.problems)


def allowed_statuses(faults: Sequence[Fault], *, waited: float, rules: Rules | None = None) -> frozenset[Status]:
    """What may become of a request under these faults, `waited` seconds after it was published.

    RabbitMQ counts cut connections as failed deliveries too. Only a clock that is wrong can end a request early.
    An operator policy may end it, too, and any policy while those of the pool are deleted.
    What was running when two workers died, the second time alone, is refused as poison.
    Controllers are in the way of every request in a managed pool only; where they clean queues, they may take a request
    and fail. `may_fail_early` is about what is tried again.
    """
    allowed = {Status.OK}
    for fault in faults:
        if _may_end_before(fault, LIFETIME, waited=waited, rules=rules):
            allowed |= {Status.EXPIRED}
        if fault.target in _END_DELIVERIES and fault.family not in _END_NO_DELIVERIES:
            allowed |= {Status.DELIVERY_LIMIT, Status.POISON}
        if fault.target in _CONTROLLERS and rules is not None and rules.cleans:
            allowed |= {Status.DELIVERY_LIMIT}
        if fault.target is Target.WORKER:
            allowed |= {Status.START_FAILED}
    if Status.POISON in allowed and any(fault.target in _END_TERMS for fault in faults):
        allowed |= {Status.REJECTED}  # a worker refuses it for good, and the next leader knows no refused texts
    return frozenset(allowed)


def may_fail_early(faults: Iterable[Fault], *, waited: float, rules: Rules) -> bool:
    """Whether a request may be answered with the failure of an attempt that is not its last.

    The next one would come too late, or RabbitMQ did not confirm in time that the request waits for it.
    """
    return any(
        _may_end_before(fault, LIFETIME - rules.longest_delay, waited=waited, rules=rules)
        or (fault.target in _BETWEEN_WORKERS_AND_NODE and fault.family not in _END_NO_DELIVERIES)
        for fault in faults
    )


def _may_end_before(fault: Fault, lifetime: float, *, waited: float, rules: Rules | None) -> bool:
    """Whether under this fault the time of a request that has waited so long may seem to be over."""
    is_late = waited >= lifetime - MAX_CLOCK_SKEW and _delays(fault, rules)
    return is_late or abs(fault.jump) > MAX_CLOCK_SKEW or fault.action in {Action.OPERATOR, Action.DELETE}


def _delays(fault: Fault, rules: Rules | None) -> bool:
    harmless = {Target.MANAGEMENT} if rules is not None else {Target.MANAGEMENT, *_CONTROLLERS}
    return fault.target not in harmless and fault.action is not Action.DELAY


_CONTROLLERS = frozenset({Target.LEADER, Target.STANDBY})
_BETWEEN_WORKERS_AND_NODE = frozenset({Target.WORKER, Target.WORKERS, Target.NODE, Target.EVERYBODY})
_END_NO_TERMS = {Target.WORKER, Target.WORKERS, Target.CLIENTS, Target.KEY, Target.CREDIT, Target.MANAGEMENT}
_END_TERMS = frozenset(Target) - _END_NO_TERMS
_END_NO_DELIVERIES = frozenset({Family.ALARM, Family.IMPORT, Family.PERMISSION})
_END_DELIVERIES = _BETWEEN_WORKERS_AND_NODE | {Target.KEY}


def judge(
    sent: Sequence[Sent],
    answers: Sequence[Answered],
    aftermath: Aftermath,
    *,
    done: Sequence[Done],
    rules: Rules | None = None,
    pooled: bool = False,
) -> Verdict:
    """What became of the requests that were sent, with the faults that were done meanwhile.

    `pooled`: processes end for keys together, and that uses up the attempts of no request but the one that ends them.
    """
    by_request: dict[str, list[Answered]] = defaultdict(list)
    for answer in answers:
        by_request[answer.correlation_id].append(answer)
    silent = [one.correlation_id for one in sent if one.confirmed and one.correlation_id not in by_request]
    kept = frozenset(aftermath.poison)
    attempts = [max(answer.attempts for answer in several) for several in by_request.values()]
    return Verdict(
        requests=sum(one.confirmed for one in sent),
        unconfirmed=sum(not one.confirmed for one in sent),
        duplicates=sum(len(several) - 1 for several in by_request.values()),
        tried_again=sum(one > 1 for one in attempts),
        further_attempts=sum(attempts) - len(attempts),
        statuses=Counter(answer.status for answer in answers),
        lost=tuple(one for one in silent if one not in kept),
        unanswered=tuple(one for one in silent if one in kept),
        problems=(
            *_problems_of_answers(sent, answers, kept, done, rules),
            *(_harmless_at_the_limit(sent, answers) if pooled else ()),
            *_named("no leader", unexplained_absences(aftermath.leaderless, done)),
            *_problems_of_aftermath(aftermath),
        ),
    )


def _problems_of_answers(
    sent: Sequence[Sent], answers: Sequence[Answered], kept: frozenset[str], done: Sequence[Done], rules: Rules | None
) -> Iterable[str]:
    asked = {one.correlation_id: one for one in sent}
    known = [answer for answer in answers if answer.correlation_id in asked]
    strange = [answer.correlation_id for answer in answers if answer.correlation_id not in asked]
    forbidden = [
        f"{one.correlation_id} {one.status}"
        for one in known
        if not _is_explained(one, asked[one.correlation_id], done, rules)
    ]
    wrong = [
        f"{one.correlation_id} {one.body!r}"
        for one in known
        if one.status == Status.OK and not _is_right(one, asked[one.correlation_id])
    ]
    unkept = {one.correlation_id for one in known if _must_be_kept(one, asked[one.correlation_id])} - kept
    yield from _named("answers to no known request", strange)
    yield from _named("answers that no fault explains", forbidden)
    yield from _named("wrong answers", wrong)
    yield from _named("answered delivery_limit or poison, but not in the inventory", sorted(unkept))


def _harmless_at_the_limit(sent: Sequence[Sent], answers: Sequence[Answered]) -> Iterable[str]:
    harmless = {one.correlation_id for one in sent if not _is_killer(one)}
    ended = [one.correlation_id for one in answers if one.status == Status.DELIVERY_LIMIT]
    yield from _named("harmless, but at the delivery limit", [one for one in ended if one in harmless])


def _is_killer(request: Sent) -> bool:
    return request.expected is None and not request.fails


def unexplained_absences(leaderless: Iterable[tuple[float, float]], done: Sequence[Done]) -> list[str]:
    """How long no daemon led, where the last fault that may have ended a term does not explain it any more."""
    faults = sorted((one.began, one.ended) for one in done if one.fault.target in _END_TERMS)
    found = []
    for since, until in leaderless:
        meanwhile = [(began, ended) for began, ended in faults if began <= until and ended >= since]
        for began, ended in [*meanwhile, (until, until)]:
            if began - since > LEADER_TIME:
                found.append(f"for {began - since:.0f} s")
            since = max(since, ended)
    return found


def _must_be_kept(answer: Answered, request: Sent) -> bool:
    """Texts that end workers are sent again and again: workers refuse the later ones by themselves. All others are sent
    once."""
    return answer.status == Status.DELIVERY_LIMIT or (answer.status == Status.POISON and not _is_killer(request))


def _is_right(answer: Answered, request: Sent) -> bool:
    return (answer.body, answer.attempts) == (request.expected, request.attempts)


def _is_explained(answer: Answered, request: Sent, done: Sequence[Done], rules: Rules | None) -> bool:
    waited = answer.at - request.at
    if answer.status != Status.ERROR:
        faults = _faults_meanwhile(answer, request, done, after_effects=AFTER_EFFECTS)
        return answer.status in allowed_statuses(faults, waited=waited, rules=rules)
    if rules is None or answer.attempts >= request.attempts:
        return request.fails and answer.attempts == request.attempts
    faults = _faults_meanwhile(answer, request, done, after_effects=CONFIRM_TIME)
    return may_fail_early(faults, waited=waited, rules=rules)


def _faults_meanwhile(
    answer: Answered, request: Sent, done: Sequence[Done], *, after_effects: float
) -> Sequence[Fault]:
    return [one.fault for one in done if one.began <= answer.at and one.ended >= request.at - after_effects]


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
