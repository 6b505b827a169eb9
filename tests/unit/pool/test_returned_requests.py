"""Into which queues requests may have come back, as values."""

from __future__ import annotations

from osrdyne.pool.routing.retries import MARGIN, MAX_KNOWN, ReturnedRequests
from osrdyne.protocol.names import Key

A, B = (Key("a"), None), (Key("a"), 3)


def test_anything_may_have_come_back_until_it_is_known_what_waits() -> None:
    returned = ReturnedRequests()
    assert returned.may_have_come(A, since=1e9)
    returned.note_from_before(100.0)
    assert [returned.may_have_come(A, since=at) for at in (99.0, 100.0 + MARGIN)] == [True, False]


def test_request_comes_back_to_its_class_alone() -> None:
    returned = ReturnedRequests()
    returned.note_from_before(0.0)
    returned.note_sent(A, at=100.0, delay=30.0)
    returned.note_sent(A, at=101.0, delay=1.0)
    assert [returned.may_have_come(A, since=at) for at in (129.0, 130.0 + MARGIN)] == [True, False]
    assert not returned.may_have_come(B, since=100.0)


def test_memory_of_returned_requests_is_bounded() -> None:
    returned = ReturnedRequests()
    for number in range(3 * MAX_KNOWN):
        returned.note_sent((Key(str(number)), None), at=float(number), delay=1.0)
    assert len(returned._until) <= MAX_KNOWN
    assert returned.may_have_come((Key(str(3 * MAX_KNOWN - 1)), None), since=0.0)
