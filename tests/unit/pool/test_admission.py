"""Admission: places, waiting in order, refusals, and who makes room."""

from dataclasses import replace

import pytest

from osrdyne.pool.state.groups.admission import Admission, Candidate, KeyCounter, Verdict, choose_to_end
from osrdyne.pool.state.groups.transitions import Delays, GroupStatus, require, unbind
from osrdyne.protocol.names import Key

DELAYS = Delays(unbind=600.0, stop=600.0)


def admission(*, max_groups: int = 2, max_waiting: int = 2, max_keys: int = 100) -> Admission:
    return Admission(max_groups=max_groups, max_waiting=max_waiting, key_counter=KeyCounter(max_keys))


def keys(text: str) -> list[Key]:
    return [Key(one) for one in text]


def test_groups_up_to_the_limit_are_admitted_the_next_ones_wait_and_further_ones_are_refused():
    places = admission()
    asked = [places.request(key).value for key in keys("abcdabcde")]
    assert asked[:-1] == ["admitted", "admitted", "waiting", "waiting"] * 2
    assert places.request(Key("e")) is Verdict.NO_ROOM
    assert (sorted(places.admitted()), places.waiting()) == (keys("ab"), keys("cd"))


def test_a_free_place_goes_to_the_group_that_has_waited_longest_and_still_wants_it():
    places = admission(max_groups=1, max_waiting=3)
    for key in keys("abcd"):
        places.request(key)
    assert places.release(Key("b")) == []
    assert places.release(Key("a")) == keys("c")
    assert places.is_admitted(Key("c"))
    assert places.request(Key("e")) is Verdict.WAITING
    assert places.waiting() == keys("de")


def test_groups_that_run_already_are_admitted_beyond_the_limit_and_none_follows_too_early():
    places = admission(max_groups=1, max_waiting=1)
    for key in keys("ab"):
        places.admit(key)
    assert [places.request(key) for key in keys("cd")] == [Verdict.WAITING, Verdict.NO_ROOM]
    assert places.expect(Key("d")) is Verdict.WAITING  # it was adopted
    assert [places.release(key) for key in keys("ab")] == [[], keys("c")]


def test_new_keys_beyond_the_counter_are_refused_and_known_ones_are_not():
    places = admission(max_groups=10, max_keys=2)
    for key in keys("ab"):
        places.request(key)
        places.release(key)
    assert [places.request(key) for key in keys("ca")] == [Verdict.TOO_MANY_KEYS, Verdict.ADMITTED]


def test_the_counter_warns_once_before_it_is_full():
    counter, warnings = KeyCounter(10), []
    for number in range(8):
        counter.count(Key(str(number)))
        warnings.append(counter.take_warning())
    assert (warnings, counter.take_warning(), len(counter)) == ([False] * 7 + [True], False, 8)


def candidate(key: str, used_at: float, *, busy: bool = False, stays: bool = False, rank: int = 0) -> Candidate:
    return Candidate(Key(key), require(None, now=used_at, delays=DELAYS), busy, stays, rank=rank)


def ending(key: str, *, busy: bool = False) -> Candidate:
    one = candidate(key, 20, busy=busy)
    record = unbind(one.record, now=20, delays=Delays(0.0, 0.0))
    assert record.status is GroupStatus.UNBOUND
    return replace(one, record=record)


FREE = (candidate("a", 50), candidate("b", 20), candidate("c", 80))
RANKED = (candidate("a", 20, rank=2), candidate("b", 50, rank=1), candidate("c", 60, rank=0))
B = candidate("b", 30)


@pytest.mark.parametrize(
    ("candidates", "waiting", "chosen"),
    [
        pytest.param(FREE, 1, "b", id="least recently used first"),
        pytest.param(FREE, 2, "ba", id="as many as wait"),
        pytest.param(FREE, 5, "bac", id="as many as there are"),
        pytest.param(RANKED, 2, "cb", id="rank comes before the last use"),
        pytest.param([candidate("a", 20, busy=True)], 1, "", id="busy"),
        pytest.param([candidate("a", 20, stays=True)], 1, "", id="pinned or held"),
        pytest.param([candidate("a", 95)], 1, "", id="just used"),
        pytest.param([ending("a"), B], 1, "", id="one that is ending counts as room"),
        pytest.param([ending("a"), B], 2, "b", id="one is ending, two wait"),
        pytest.param([ending("a", busy=True), B], 1, "b", id="one with work to finish makes no room soon"),
    ],
)
def test_groups_that_end_for_those_that_wait(candidates, waiting, chosen):
    assert choose_to_end(candidates, waiting=waiting, now=100.0, idle_for=10.0) == keys(chosen)
