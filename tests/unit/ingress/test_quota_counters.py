"""The table of counters against a dictionary, and its size."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.ingress.quotas import counters
from osrdyne.ingress.quotas.counters import CounterTable, name_hash

NAMES = st.text(max_size=3)


@given(st.lists(st.one_of(st.tuples(NAMES, st.integers(1, 5)), st.just("new day"), st.just("stored")), max_size=60))
def test_counts_are_those_of_a_dictionary(steps: list[tuple[str, int] | str]) -> None:
    table, model = CounterTable(), Counter[str]()
    for step in steps:
        if step == "new day":
            table.reset()
            model = Counter({name: 0 for name, count in model.items() if count})
        elif step == "stored":
            copy = CounterTable()
            copy.load(*table.dump(), table.names)
            table = copy
        else:
            name, amount = step[0], int(step[1])
            table.add(name, name_hash(name), amount)
            model[name] += amount
    assert table.size == len(model)
    assert all(table.count(name_hash(name)) == count for name, count in model.items())
    assert sorted(table.largest(1_000)) == sorted(model.items())


def test_100_000_counters_take_less_than_10_mb() -> None:
    table = CounterTable()
    for number in range(100_000):
        table.add(f"principal-{number}", name_hash(f"principal-{number}"), 3)
    arrays = sum(sys.getsizeof(one) for one in (table.counts, table.moments, table._hashes))
    names = sys.getsizeof(table.names) + sum(sys.getsizeof(name) + 36 for name in table.names.values())
    assert (table.size, len(table.names)) == (100_000, counters.MAX_NAMES)
    assert arrays + names < 10_000_000


@pytest.mark.proves("quotas/more-100-000-keys")
def test_further_names_share_one_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "MAX_COUNTERS", 2_000)
    table = CounterTable()
    for number in range(counters.MAX_COUNTERS + 10):
        table.add(str(number), name_hash(str(number)), 1)
    assert table.size == counters.MAX_COUNTERS + 1
    assert table.count(name_hash("never seen")) == table.count(name_hash(str(counters.MAX_COUNTERS + 3))) == 10
    assert table.count(name_hash("7")) == 1


def test_the_names_of_the_largest_counters_are_kept() -> None:
    table = CounterTable()
    for number in range(3_000):
        table.add(f"small-{number}", name_hash(f"small-{number}"), 1)
    for number in range(10):
        table.add(f"large-{number}", name_hash(f"large-{number}"), 1_000 + number)
    assert table.largest(2) == [("large-9", 1_009), ("large-8", 1_008)]
