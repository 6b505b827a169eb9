"""Which event of a series is its last value, whatever the order, repetitions and clocks, and where it is kept."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.amqp.stream_frames import StreamMessage
from osrdyne.errors import LastValueStoreError
from osrdyne.telemetry.last_values.sqlite import SqliteStore
from osrdyne.telemetry.last_values.values import Changes, Counts, LastValue, fold, pieces

ENQUEUED = 1_795_341_600_000


def message(body: object, *, offset: int = 0, key: object = "k", enqueued: int = ENQUEUED) -> StreamMessage:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return StreamMessage(offset, "", "P-log-1", text, {"x-osrdyne-key": key, "x-osrdyne-enqueued": enqueued})


def folded(*messages: StreamMessage, partition: int = 1, max_future: float = 300) -> Changes:
    return fold(messages, partition=partition, next_offset=99, max_future=max_future, lost=2)


def event(value: object, *, series: str = "a", **more: object) -> dict[str, object]:
    return {"series": series, "value": value, **more}


def test_last_value_has_what_the_event_has_and_invalid_ones_are_counted():
    sent = event(21.5, ts="2026-11-22T10:00:00.5Z", quality=192, kind="alarm", unit="°C", limits=[1, 2])
    changes = folded(message(sent, offset=7))
    attributes = '{"unit":"°C","limits":"[1,2]"}'
    ts, enqueued = 1_795_341_600_500_000, ENQUEUED * 1000
    value = LastValue("k", "a", ts, None, "alarm", 21.5, None, "192", attributes, enqueued, 1, 7, 0, None)
    assert (changes.values, changes.next_offset, changes.counts) == ([value], 99, Counts(events=1, lost=2))
    changes = folded(message(b"\xff"), message([3, event(1), {"value": 1}]), message(event(2), enqueued=-1))
    assert ([one.value for one in changes.values], changes.counts.invalid) == ([1], 4)
    for key, expected in (("süd\x00", "süd\x00"), (b"s\xfc", "s\ufffd"), (None, "P-log-1"), ("\udcff", "\ufffd")):
        assert folded(message(event(1), key=key)).values[0].key == expected, "a text that databases take"


@pytest.mark.parametrize(
    ("first", "second", "newest"),
    [((5, 0), (6, 0), 2), ((6, 0), (5, 1), 1), ((5, 0), (5, 1), 2), ((5, 1), (5, 1), 1)],
    ids=["later time", "late event", "equal time, later in the log", "the same event again"],
)
def test_event_is_newer_by_time_and_then_by_place(first, second, newest):
    sent = [message([event(n, ts=ENQUEUED + ts)], offset=at) for n, (ts, at) in enumerate((first, second), 1)]
    changes = folded(*sent)
    [value] = changes.values
    assert (value.value, changes.counts.late) == (newest, 2 - newest)
    [last] = folded(message([event(1), event(2), event(3)])).values
    assert (last.value, last.log_index) == (3, 2), "events of one message with equal times count in their order"


@pytest.mark.proves("last-values/clock-device-wrong-messages")
def test_event_from_the_far_future_gets_the_time_of_the_ingress_and_hides_nothing():
    changes = folded(
        message(event(1, ts=ENQUEUED + 300_001), offset=1),
        message(event(2, ts=ENQUEUED + 1), offset=2),
        message(event(3, series="b", ts=ENQUEUED + 300_000), offset=3),
    )
    later, allowed = changes.values
    assert (later.value, later.sent_ts) == (2, None)
    assert (allowed.ts, allowed.sent_ts, changes.counts.future) == ((ENQUEUED + 300_000) * 1000, None, 1)
    [skewed] = folded(message(event(1, ts=ENQUEUED + 300_001))).values
    assert (skewed.ts, skewed.sent_ts) == (ENQUEUED * 1000, (ENQUEUED + 300_001) * 1000)


def test_messages_are_divided_by_their_bytes():
    def divided(*sizes):
        return [[len(one.body) for one in piece] for piece in pieces([message(b"x" * n) for n in sizes], most_bytes=8)]

    assert [divided(), divided(9), divided(3, 3, 3), divided(9, 1, 9)] == [[], [[9]], [[3, 3], [3]], [[9], [1], [9]]]


EVENTS = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.integers(0, 4), st.booleans()), min_size=1, max_size=12
)


def stored(batches: Sequence[Sequence[StreamMessage]]) -> list[LastValue]:
    """The values after these transactions."""
    with tempfile.TemporaryDirectory() as directory:
        store = SqliteStore(Path(directory) / "v.db", pool="p", create=True)
        for batch in batches:
            store.write([folded(*batch)])
        found = [one for key in "ab" for one in store.find(key, series=None, after=None, limit=99)]
        store.close()
    return found


@given(EVENTS, st.data())
@pytest.mark.proves("last-values/clock-device-wrong-messages")
def test_any_order_and_repetition_has_the_same_last_values(events, data):
    messages = [
        # Some times are in the far future; those are compared by the time of the ingress.
        message(event(n, series=series, ts=ENQUEUED + ts + ahead * 10**6), offset=n, key=key, enqueued=ENQUEUED + n % 5)
        for n, (key, series, ts, ahead) in enumerate(events)
    ]
    repeated = data.draw(st.permutations(messages + data.draw(st.lists(st.sampled_from(messages), max_size=4))))
    at = data.draw(st.integers(0, len(repeated)))
    assert stored([repeated[:at], repeated[at:]]) == stored([messages])


@pytest.mark.proves("last-values/database-last-values-locked")
def test_full_disk_and_other_errors_name_the_remedy(tmp_path):
    store = SqliteStore(tmp_path / "v.db", pool="p", create=True)
    store.positions()
    [pages] = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    large = LastValue("k", "s", 0, None, "telemetry", None, "x" * 100_000, None, None, 0, 0, 0, 0, None)
    with pytest.raises(LastValueStoreError, match=r"v\.db: the disk is full"):
        store.write([Changes(0, 1, [large])])
    assert store.positions() == {}
    store.close()
    for file in tmp_path.iterdir():
        file.write_bytes(b"no database at all" * 999)
    with pytest.raises(LastValueStoreError, match=r"v\.db"):
        store.positions()
    with pytest.raises(LastValueStoreError, match=r"Set telemetry\.last_values\.file"):
        SqliteStore(tmp_path / "v.db" / "below", pool="p", create=True).positions()
