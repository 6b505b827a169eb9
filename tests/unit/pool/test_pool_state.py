"""The transitions of one group: pure functions of (record, event, time)."""

from __future__ import annotations

from osrdyne.pool.state.groups import transitions
from osrdyne.pool.state.groups.transitions import Delays, GroupStatus

DELAYS = Delays(unbind=100.0, stop=50.0)


def active(now: float = 0.0, *, extra_lifetime: float = 0.0) -> transitions.GroupRecord:
    return transitions.require(None, now=now, delays=DELAYS, extra_lifetime=extra_lifetime)


def test_absent_group_required_is_active_for_unbind_delay() -> None:
    record = active(10.0)
    assert (record.status, record.last_activity, record.due_at) == (GroupStatus.ACTIVE, 10.0, 110.0)


def test_extra_lifetime_is_added_to_the_delay() -> None:
    assert active(extra_lifetime=7.0).due_at == 107.0


def test_active_group_required_again_lives_longer() -> None:
    assert transitions.require(active(), now=30.0, delays=DELAYS).due_at == 130.0


def test_short_requirement_after_a_long_one_does_not_shorten() -> None:
    """defects: activity-window: the extra lifetime was dropped for groups that exist."""
    record = transitions.require(active(extra_lifetime=60.0), now=1.0, delays=DELAYS)
    assert (record.due_at, record.last_activity) == (160.0, 1.0)


def test_active_group_unbound_is_due_after_stop_delay() -> None:
    record = transitions.unbind(active(), now=100.0, delays=DELAYS)
    assert (record.status, record.due_at, record.last_activity) == (GroupStatus.UNBOUND, 150.0, 0.0)


def test_unbound_group_required_is_active_again() -> None:
    record = transitions.require(transitions.unbind(active(), now=100.0, delays=DELAYS), now=120.0, delays=DELAYS)
    assert (record.status, record.due_at) == (GroupStatus.ACTIVE, 220.0)


def test_adopted_active_group_starts_its_clock_now() -> None:
    assert transitions.adopt(GroupStatus.ACTIVE, now=5.0, delays=DELAYS).due_at == 105.0


def test_adopted_unbound_group_starts_its_clock_now() -> None:
    record = transitions.adopt(GroupStatus.UNBOUND, now=5.0, delays=DELAYS)
    assert (record.status, record.due_at) == (GroupStatus.UNBOUND, 55.0)


def test_group_is_due_at_its_time_and_not_before() -> None:
    assert not transitions.is_due(active(), now=99.9)
    assert transitions.is_due(active(), now=100.0)
