"""The lifetime of a created queue: its stored record, and when it is over."""

import json

from hypothesis import given
from hypothesis import strategies as st

from osrdyne.ingress.policies.lifetimes import Countdown, CreatedQueue, EndReason, LifetimeState, read_record
from osrdyne.protocol.names import Key

DAY = 86400.0
SECONDS = st.floats(0, 2**33)
RECORDS = st.builds(
    CreatedQueue,
    key=st.text(max_size=60).map(Key),
    proposal=st.dictionaries(st.text(max_size=10), st.integers() | st.text(max_size=10), max_size=3),
    author=st.text(max_size=20),
    created_at=SECONDS,
    renewed_at=SECONDS,
    expires_at=SECONDS,
    state=st.sampled_from(LifetimeState),
    reason=st.none() | st.sampled_from(EndReason),
)


@given(RECORDS)
def test_record_is_read_as_it_was_stored(record):
    assert read_record(json.loads(json.dumps(record.stored()))) == record


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_anything_else_is_not_a_record(value):
    assert read_record(value) is None
    record = CreatedQueue(Key("a"), {}, "me", 0.0, 0.0, 1.0)
    assert read_record({**record.stored(), "state": value}) is None


@given(
    lifetime=st.floats(30, 21 * DAY),
    jumps=st.lists(st.tuples(st.floats(0, 3 * DAY), st.floats(-2 * DAY, 2 * DAY)), max_size=6),
)
def test_clock_that_jumps_never_ends_a_queue_early(lifetime, jumps):
    """Some time passes, then the wall clock jumps, again and again."""
    countdown = Countdown.begin(1e9 + lifetime, wall=1e9, monotonic=50.0)
    passed = offset = 0.0
    for seconds, jump in jumps:
        passed += seconds
        offset += jump
        wall, monotonic = 1e9 + passed + offset, 50.0 + passed
        assert not countdown.is_over(wall=wall, monotonic=monotonic) or passed >= lifetime - 1e-3
        due = countdown.due_in(wall=wall, monotonic=monotonic)
        assert (due == 0.0) == countdown.is_over(wall=wall, monotonic=monotonic)
        # Without a further jump it is over then.
        assert countdown.is_over(wall=wall + due + 1e-3, monotonic=monotonic + due + 1e-3)


def test_ending_keeps_its_first_reason():
    record = CreatedQueue(Key("a"), {}, "me", 0.0, 0.0, 1.0).ending(EndReason.EXPIRED)
    assert record.ending(EndReason.DELETED).reason is EndReason.EXPIRED
