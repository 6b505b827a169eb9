"""What the last-value reader and the API may expect of each database of last values."""

from collections.abc import Callable

import pytest

from osrdyne.errors import LastValueStoreError
from osrdyne.telemetry.last_values.store import LastValueStore
from osrdyne.telemetry.last_values.values import Changes, Counts, LastValue

OpenStore = Callable[..., LastValueStore]


@pytest.fixture(params=["sqlite", "postgresql"])
def open_store(request):
    """Opens connections to one empty store: `open_store(pool="p", create=True)`."""
    opened: list[LastValueStore] = []

    def opens(*, pool="p", create=True):
        if request.param == "sqlite":
            from osrdyne.telemetry.last_values.sqlite import SqliteStore

            opened.append(SqliteStore(request.getfixturevalue("tmp_path") / "d" / "v.db", pool=pool, create=create))
        else:
            from osrdyne.telemetry.last_values.postgresql import PostgresqlStore

            opened.append(PostgresqlStore(request.getfixturevalue("database"), pool=pool, create=create))
        return opened[-1]

    yield opens
    for store in opened:
        store.close()


def value(number: float, *, ts: int = 0, key: str = "k", series: str = "a", offset: int = 0) -> LastValue:
    return LastValue(key, series, ts, None, "telemetry", number, None, None, None, ts, 0, offset, 0, None)


def changes(*values: LastValue, partition: int = 0, next_offset: int = 1, **counts: int) -> Changes:
    return Changes(partition, next_offset, list(values), Counts(**counts))


def found(store: LastValueStore, key: str = "k") -> list[float | None]:
    return [one.value for one in store.find(key, series=None, after=None, limit=100)]


def test_values_and_positions_are_there_for_the_next_connection(open_store):
    with pytest.raises(LastValueStoreError, match="start `osrdyne last-value`"):
        open_store(create=False).totals()
    store = open_store()
    assert (store.positions(), store.totals()) == ({}, Counts())
    first = LastValue("kü", "a", -(2**40), 2**53, "alarm", 0.1, "x\n'\"", "192", '{"ä":null}', 9, 3, 2**60, 7, "m")
    written = store.write([changes(first, partition=3, next_offset=2**61, future=1), changes(partition=0, lost=5)])
    assert written == Counts(written=1, future=1, lost=5)
    store.close()
    other = open_store(create=False)
    assert other.positions() == {3: 2**61, 0: 1}
    assert other.find("kü", series="a", after=None, limit=1) == [first]
    assert other.totals() == written


def test_only_newer_values_are_written_and_others_counted_as_late(open_store):
    store = open_store()
    store.write([changes(value(1, ts=5, offset=5))])
    counts = store.write(
        [changes(value(2, ts=5, offset=5), value(3, series="b")), changes(value(4, ts=4, offset=9), partition=1)]
    )
    assert (counts.written, counts.late) == (1, 2)
    assert found(store) == [1, 3]
    assert store.write([changes(value(5, ts=5, offset=6))]).written == 1
    assert found(store) == [5, 3]
    assert store.totals() == Counts(written=3, late=2)


def test_keys_that_begin_with_a_text_are_found(open_store):
    odd = ["", "a\x00", "a\x01", "a\x7f", "é 漢", "a\U0010ffff", "\U0010ffff", "a\ud7ff", "a\ue000"]
    sites = ["a", "ab", "a%", "a_", "A", *odd]
    keys = sorted({*sites, *(f"{site}/{device}" for site in sites for device in (1, 2))})
    store = open_store()
    store.write([changes(*(value(0, key=key, series=series) for key in keys for series in "ab"))])
    open_store(pool="other").write([changes(value(1, key="a/1"))])
    for text in keys:
        for prefix in (text, f"{text}/"):
            values = store.find_keys(prefix, is_prefix=True, limit=1000)
            expected = [(key, series) for key in keys if key.startswith(prefix) for series in "ab"]
            assert sorted((one.key, one.series) for one in values) == expected, repr(prefix)
        assert [one.key for one in store.find_keys(text, is_prefix=False, limit=1000)] == [text, text]
    assert len(store.find_keys("", is_prefix=True, limit=3)) == 3


def test_pools_do_not_see_each_other_and_a_position_may_go_back(open_store):
    first, second = open_store(pool="p"), open_store(pool="q")
    first.write([changes(value(1, ts=9), next_offset=7)])
    assert (second.positions(), found(second)) == ({}, [])
    second.write([changes(value(2), next_offset=500)])
    second.write([changes(next_offset=3)])  # a stream that was declared again begins with 0
    assert second.positions() == {0: 3}
    assert (found(first), found(second), first.positions()) == ([1], [2], {0: 7})


TEXTS = ["\x00", "\x01", "\x01\x02", "\x00\x01", " ", "%s?", "'; DROP TABLE x; --", "A", "a", "Z", "é", "😀"]


def test_every_text_is_data_and_pages_are_complete(open_store):
    store = open_store()
    store.write([changes(*(value(number, key="\x00?", series=text) for number, text in enumerate(TEXTS)))])
    pages, after = [], None
    while page := store.find("\x00?", series=None, after=after, limit=5):
        pages += page
        after = page[-1].series
    assert sorted(one.series for one in pages) == sorted(TEXTS)
    assert [one.value for one in store.find("\x00?", series="%s?", after=None, limit=1)] == [5]


def test_readers_see_whole_transactions_while_another_is_open(open_store):
    writer, reader = open_store(), open_store()
    writer.write([changes(value(1))])
    with writer._transaction(writes=True) as cursor:
        cursor.execute("UPDATE osrdyne_last_values SET value = 2")
        assert found(reader) == [1]
    assert found(reader) == [2]


def test_error_changes_nothing_and_the_next_call_works(open_store):
    store = open_store()
    store.write([changes(value(1), next_offset=5)])
    too_large = value(2, ts=2**70, series="b")
    with pytest.raises((LastValueStoreError, OverflowError)):
        store.write([changes(value(3, ts=9), next_offset=6), changes(too_large, partition=1)])
    assert (store.positions(), found(store)) == ({0: 5}, [1])
    assert store.write([changes(value(3, ts=9))]).written == 1
