"""Where something expired may wait behind something that has not, and into which queues requests may have come back."""

import pytest

from osrdyne.pool.routing.deadlines import MAX_KNOWN, SPARE, ForwardedDeadlines
from osrdyne.pool.routing.retries import MARGIN, ReturnedRequests
from osrdyne.pool.routing.retries import MAX_KNOWN as MAX_RETURNED
from osrdyne.protocol.names import Key, QueueId

QUEUE: QueueId = (Key("k"), None)
NOW = 1_000
OLD, NEW = NOW - 10, NOW + 10


def known(*deadlines: int | None) -> ForwardedDeadlines:
    passed = ForwardedDeadlines()
    for deadline in deadlines:
        passed.note(QUEUE, deadline)
    return passed


@pytest.mark.parametrize(
    ("deadlines", "waiting", "hides"),
    [
        ((NEW, OLD), 2, True),
        ((NEW, NEW, OLD, NEW), 4, True),
        ((OLD, NEW), 2, False),  # RabbitMQ removes the head by itself
        ((OLD, OLD), 2, False),
        ((NEW, NEW), 2, False),
        ((NEW, NOW), 2, False),
        ((NEW, OLD, NEW, NEW), 2, False),  # what waits are the last ones
        ((None, OLD), 2, True),
        ((NEW, OLD), 1, False),
        ((NEW, OLD), 0, False),
        ((NEW,), 2, True),  # an earlier leader passed one on
        ((), 5, True),
    ],
)
def test_queue_is_swept_where_it_may_help(deadlines, waiting, hides):
    assert known(*deadlines).may_hide_expired(QUEUE, waiting, now_ms=NOW) is hides


def test_queue_that_was_swept_is_known_until_it_is_gone():
    passed = known()
    passed.replace(QUEUE, [NEW, NEW])
    assert not passed.may_hide_expired(QUEUE, 2, now_ms=NOW)
    assert passed.may_hide_expired((Key("other"), None), 2, now_ms=NOW)
    passed.forget(passed.queues())
    assert passed.may_hide_expired(QUEUE, 2, now_ms=NOW)


def test_what_is_remembered_is_bounded():
    passed = known(*[NEW] * (MAX_KNOWN + 1))
    assert passed.may_hide_expired(QUEUE, MAX_KNOWN + 1, now_ms=NOW)
    passed.may_hide_expired(QUEUE, 10, now_ms=NOW)
    assert not passed.may_hide_expired(QUEUE, 20 + SPARE, now_ms=NOW)
    assert passed.may_hide_expired(QUEUE, 20 + SPARE + 1, now_ms=NOW)


@pytest.mark.parametrize(
    ("deadlines", "due"),
    [
        ((NEW, OLD), True),
        ((None, OLD), True),
        ((OLD, NEW), False),
        ((NEW, NEW + 1), False),
        ((NEW + 1, NEW), False),  # later
        ((OLD,), False),
    ],
)
def test_queue_is_due_once_a_deadline_has_passed_behind_a_later_one(deadlines, due):
    assert known(*deadlines).due(now_ms=NOW) == ([QUEUE] if due else [])


def test_queue_that_is_settled_is_due_when_the_next_one_expires():
    passed = known(None, OLD, None, NEW)
    passed.settle(QUEUE, 2, now_ms=NOW)
    assert (passed.due(now_ms=NOW), passed.due(now_ms=NEW + 100)) == ([], [QUEUE])
    passed.settle(QUEUE, 1, now_ms=NOW)
    assert passed.due(now_ms=NEW + 100) == []


CLASS_OF_A, OTHER_CLASS = (Key("a"), None), (Key("a"), 3)


def test_request_comes_back_to_its_class_alone_and_anything_may_until_it_is_known_what_waits():
    returned = ReturnedRequests()
    assert returned.may_have_come(CLASS_OF_A, since=1e9)
    returned.note_from_before(50.0)
    assert [returned.may_have_come(CLASS_OF_A, since=at) for at in (49.0, 50.0 + MARGIN)] == [True, False]
    returned.note_sent(CLASS_OF_A, at=100.0, delay=30.0)
    returned.note_sent(CLASS_OF_A, at=101.0, delay=1.0)
    assert [returned.may_have_come(CLASS_OF_A, since=at) for at in (129.0, 130.0 + MARGIN)] == [True, False]
    assert not returned.may_have_come(OTHER_CLASS, since=100.0)


def test_memory_of_returned_requests_is_bounded():
    returned = ReturnedRequests()
    for number in range(3 * MAX_RETURNED):
        returned.note_sent((Key(str(number)), None), at=float(number), delay=1.0)
    assert len(returned._until) <= MAX_RETURNED
    assert returned.may_have_come((Key(str(3 * MAX_RETURNED - 1)), None), since=0.0)
