"""How many requests wait in each class, and since when the oldest does."""

from __future__ import annotations

import pytest

from osrdyne.broker.management.listings import ListedQueue
from osrdyne.pool.state.queues.backlog import MAX_MARKS, ArrivalLog, PriorityBacklog, Waiting
from osrdyne.protocol.names import Key

A, B = Key("a"), Key("b")


def listed(key: Key, **ready: int) -> ListedQueue:
    """`default`, or `p` and a priority."""
    by_class = {None if name == "default" else int(name[1:]): count for name, count in ready.items()}
    return ListedQueue(key, bound=True, ready=sum(ready.values()), messages=None, ready_by_level=by_class)


def test_oldest_of_those_that_wait_is_that_many_arrivals_back_or_from_before_the_log() -> None:
    log = ArrivalLog()
    for at in range(0, 100, 10):
        log.note(float(at))
    assert [log.oldest_at(waiting) for waiting in (11, 10, 3, 1)] == [None, 0.0, 70.0, 90.0]


@pytest.mark.parametrize("since", [3.0, None], ids=["the age of the term", "arrivals are not noted"])
def test_what_waited_before_the_term_is_as_old_as_the_term(since: float | None) -> None:
    backlog = PriorityBacklog(since=since)
    if since is not None:
        backlog.note(A, None, 10.0)
    backlog.take_listing([listed(A, default=5)])
    assert backlog.waiting() == {None: Waiting(5, since)}


def test_reported_age_is_never_too_low_with_any_number_of_marks() -> None:
    log = ArrivalLog()
    for number in range(20 * MAX_MARKS):
        log.note(float(number))
    found = [log.oldest_at(waiting) for waiting in range(20 * MAX_MARKS, 0, -7)]
    true = [20 * MAX_MARKS - waiting for waiting in range(20 * MAX_MARKS, 0, -7)]
    assert all(one is not None and one <= at for one, at in zip(found, true, strict=True))
    assert len(log._marks) <= MAX_MARKS


def test_classes_are_summed_over_groups_and_the_oldest_of_all_counts() -> None:
    backlog = PriorityBacklog(since=0.0)
    backlog.note(A, 0, 10.0)
    backlog.note(B, 0, 5.0)
    backlog.note(B, 0, 20.0)
    backlog.take_listing([listed(A, p0=1, default=0), listed(B, p0=1, default=0)])
    assert backlog.waiting() == {0: Waiting(2, 10.0), None: Waiting(0, None)}
    of_groups = [backlog.of_group(key) for key in (A, B, Key("c"))]
    assert of_groups == [*({0: Waiting(1, at), None: Waiting(0, None)} for at in (10.0, 20.0)), {}]


def test_arrivals_that_are_over_are_forgotten() -> None:
    backlog = PriorityBacklog(since=0.0)
    for at in range(50):
        backlog.note(A, None, float(at))
    backlog.take_listing([listed(A, default=0)])
    assert len(backlog._arrivals[A, None]._marks) == 1


def test_group_that_was_not_listed_yet_is_not_forgotten() -> None:
    backlog = PriorityBacklog(since=0.0)
    backlog.note(A, None, 10.0)
    backlog.take_listing([])
    backlog.take_listing([listed(A, default=1)])
    assert backlog.waiting() == {None: Waiting(1, 10.0)}
    backlog.take_listing([])
    assert not backlog._arrivals
