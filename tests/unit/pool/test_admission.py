"""Admission: places, waiting in order, refusals, and who makes room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from osrdyne.pool.state.groups.admission import Admission, Candidate, KeyCounter, Verdict, choose_to_end
from osrdyne.pool.state.groups.transitions import Delays, GroupRecord, GroupStatus, require, unbind
from osrdyne.protocol.names import Key

DELAYS = Delays(unbind=600.0, stop=600.0)


def admission(*, max_groups: int = 2, max_waiting: int = 2, max_keys: int = 100) -> Admission:
    return Admission(max_groups=max_groups, max_waiting=max_waiting, key_counter=KeyCounter(max_keys))


def keys(text: str) -> list[Key]:
    return [Key(one) for one in text]


def test_groups_up_to_the_limit_are_admitted_the_next_ones_wait_and_further_ones_are_refused() -> None:
    places = admission()
    asked = [places.request(key).value for key in keys("abcdabcde")]
    assert asked[:-1] == ["admitted", "admitted", "waiting", "waiting"] * 2
    assert places.request(Key("e")) is Verdict.NO_ROOM
    assert (sorted(places.admitted()), places.waiting()) == (keys("ab"), keys("cd"))


def test_a_free_place_goes_to_the_group_that_has_waited_longest_and_still_wants_it() -> None:
    places = admission(max_groups=1, max_waiting=3)
    for key in keys("abcd"):
        places.request(key)
    assert places.release(Key("b")) == []
    assert places.release(Key("a")) == keys("c")
    assert places.is_admitted(Key("c"))
    assert places.request(Key("e")) is Verdict.WAITING
    assert places.waiting() == keys("de")


def test_groups_that_run_already_are_admitted_beyond_the_limit_and_none_follows_too_early() -> None:
    places = admission(max_groups=1)
    for key in keys("ab"):
        places.admit(key)
    assert places.request(Key("c")) is Verdict.WAITING
    assert places.release(Key("a")) == []
    assert places.release(Key("b")) == keys("c")


def test_an_adopted_group_waits_where_a_request_would_be_refused() -> None:
    places = admission(max_groups=0, max_waiting=0)
    assert places.request(Key("a")) is Verdict.NO_ROOM
    assert places.expect(Key("a")) is Verdict.WAITING


def test_new_keys_beyond_the_counter_are_refused_and_known_ones_are_not() -> None:
    places = admission(max_groups=10, max_keys=2)
    for key in keys("ab"):
        places.request(key)
        places.release(key)
    assert places.request(Key("c")) is Verdict.TOO_MANY_KEYS
    assert places.request(Key("a")) is Verdict.ADMITTED


@pytest.mark.parametrize(("count", "nearly"), [(7, False), (8, True)])
def test_the_counter_warns_once_before_it_is_full(count: int, nearly: bool) -> None:
    counter = KeyCounter(10)
    for number in range(count):
        counter.count(Key(str(number)))
    assert counter.take_warning() is nearly
    assert counter.take_warning() is False
    assert len(counter) == count


def candidate(key: str, *, used_at: float, busy: bool = False, stays: bool = False, ending: bool = False) -> Candidate:
    record: GroupRecord = require(None, now=used_at, delays=DELAYS)
    if ending:
        record = unbind(record, now=used_at, delays=Delays(0.0, 0.0))
        assert record.status is GroupStatus.UNBOUND
    return Candidate(Key(key), record, busy, stays)


def choose(*candidates: Candidate, waiting: int = 1) -> list[Key]:
    return choose_to_end(candidates, waiting=waiting, now=100.0, idle_for=10.0)


@pytest.mark.parametrize(("waiting", "chosen"), [(1, "b"), (2, "ba"), (5, "bac")])
def test_as_many_groups_make_room_as_wait_the_least_recently_used_first(waiting: int, chosen: str) -> None:
    found = choose(candidate("a", used_at=50), candidate("b", used_at=20), candidate("c", used_at=80), waiting=waiting)
    assert found == keys(chosen)


def test_rank_comes_before_the_last_use() -> None:
    last = replace(candidate("a", used_at=20), rank=2)
    first = replace(candidate("c", used_at=60), rank=0)
    assert choose(last, replace(candidate("b", used_at=50), rank=1), first, waiting=2) == keys("cb")


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(candidate("a", used_at=20, busy=True), id="busy"),
        pytest.param(candidate("a", used_at=20, stays=True), id="pinned or held"),
        pytest.param(candidate("a", used_at=95), id="just used"),
    ],
)
def test_a_group_in_use_never_makes_room(one: Candidate) -> None:
    assert choose(one) == []


def test_groups_that_are_ending_already_count_as_room() -> None:
    assert choose(candidate("a", used_at=20, ending=True), candidate("b", used_at=30)) == []
    assert choose(candidate("a", used_at=20, ending=True), candidate("b", used_at=30), waiting=2) == keys("b")


def test_group_that_has_work_to_finish_before_its_end_makes_no_room_soon() -> None:
    assert choose(candidate("a", used_at=20, ending=True, busy=True), candidate("b", used_at=30)) == keys("b")
