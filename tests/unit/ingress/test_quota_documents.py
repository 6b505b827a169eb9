"""Documents of quotas: what they mean, and every error at once; the counters against a dictionary, and their size."""

import json
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.ingress.documents.problems import InvalidDocumentError
from osrdyne.ingress.quotas import counters
from osrdyne.ingress.quotas.counters import CounterTable, name_hash
from osrdyne.ingress.quotas.document import describe, describe_rate, load_quotas, load_quotas_json
from osrdyne.pool.state.workers.rates import GroupRates
from osrdyne.protocol.names import Key
from osrdyne.protocol.rates import EventRate
from osrdyne.testing.clock import VirtualClock

WHOLE = {
    "pool": {"preset": "iot-hub-s2", "units": 3, "share": "principal"},
    "rules": [
        {"name": "sensors", "keys": "s-.*", "per": "key", "messages_per_day": 1000, "block_bytes": 512},
        {"name": "rest", "principals": "app-[0-9]+", "per": "rule", "send_rate": 2.5, "burst": 7},
    ],
}


def test_a_document_means_its_limits_and_is_kept_as_it_was_given():
    found = load_quotas(json.dumps(WHOLE))
    assert found.pool is not None
    of_pool = describe(found.pool)
    assert [part in of_pool for part in ("18,000,000 a day", "4096 bytes", "360 a second", "360 at once")] == [True] * 4
    of_rules = [describe(rule.limits) for rule in found.rules]
    assert "1,000 a day" in of_rules[0] and "2.5 a second, 7 at once" in of_rules[1]
    assert found.document() == WHOLE
    assert load_quotas_json(json.dumps(found.document())).document() == WHOLE
    assert load_quotas("{}").document() == {}


@pytest.mark.parametrize(
    ("document", "places"),
    [
        (
            {"pool": {}, "rules": [{"name": "r", "keys": "("}, {"name": "s", "send_rate": -1}]},
            "pool rules.0.keys rules.0 rules.1.send_rate",
        ),
        ({"pool": {}}, "pool"),
        ({"pool": {"preset": "iot-hub-s9"}}, "pool.preset"),
        ({"pool": {"preset": "iot-hub-s1", "messages_per_day": 5}}, "pool.messages_per_day"),
        ({"pool": {"preset": "iot-hub-free", "units": 2}}, "pool.units"),
        ({"pool": {"messages_per_day": -1}}, "pool.messages_per_day"),
        ({"pool": {"messages_per_day": 1, "burst": 2}}, "pool.burst"),
        ({"pool": {"send_rate": 0}}, "pool.send_rate"),
        ({"pool": {"send_rate": 1, "share": "key"}}, "pool.share"),
        ({"pool": {"send_rate": 1, "share": "app"}}, "pool.share"),
        ({"pools": {}}, "pools"),
        ({"rules": {}}, "rules"),
        ({"rules": [{"messages_per_day": 1}]}, "rules.0.name"),
        ({"rules": [{"name": "r", "keys": "(", "messages_per_day": 1}]}, "rules.0.keys"),
        ({"rules": [{"name": "r", "per": "pool", "messages_per_day": 1}]}, "rules.0.per"),
        ({"rules": [{"name": "r", "send_rate": 1}] * 2}, "rules"),
        ({"rules": [{"name": "r", "send_rate": 1}] * 101}, "rules"),
        ({"rates": {}}, "rates"),
        ({"rates": [{"preset": "store-s1"}]}, "rates.0.name"),
        ({"rates": [{"name": "r"}]}, "rates.0"),
        ({"rates": [{"name": "r", "preset": "iot-hub-s1"}]}, "rates.0.preset"),
        ({"rates": [{"name": "r", "preset": "store-s1", "events_per_minute": 5}]}, "rates.0.events_per_minute"),
        ({"rates": [{"name": "r", "preset": "store-s1", "units": 11}]}, "rates.0.units"),
        ({"rates": [{"name": "r", "preset": "store-s1", "units": 3, "max_units": 2}]}, "rates.0.units"),
        ({"rates": [{"name": "r", "events_per_minute": 0}]}, "rates.0.events_per_minute"),
        ({"rates": [{"name": "r", "preset": "store-s1"}] * 2}, "rates"),
    ],
)
def test_wrong_documents_are_refused_with_every_place(document, places):
    with pytest.raises(InvalidDocumentError) as error:
        load_quotas(json.dumps(document))
    assert [problem.path for problem in error.value.problems] == places.split()


def test_rates_of_workers_share_the_units_of_their_group():
    rates = [
        {"name": "a", "keys": "a.*", "preset": "store-s1", "units": 4},
        {"name": "b", "events_per_minute": 60, "event_bytes": 512, "max_units": 1},
    ]
    found = load_quotas(json.dumps({"rates": rates}))
    assert (found.document(), found.size) == ({"rates": rates}, 2)
    groups = GroupRates(VirtualClock())
    groups.use(found.rates)
    of_a = [groups.of(Key("a1"), workers=workers) for workers in (0, 1, 2, 4)]
    assert of_a == [EventRate(rate, 1024) for rate in (2880, 2880, 2880, 1800)]
    assert [groups.of(Key("b"), workers=workers) for workers in (1, 3)] == [EventRate(60, 512), EventRate(20, 512)]
    of_rate = describe_rate(found.rates[1])
    assert "60 events a minute" in of_rate and "512 bytes" in of_rate and "60 a group" in of_rate
    groups.use(())
    assert groups.of(Key("a1")) is None


@pytest.mark.parametrize(
    ("document", "paths"),
    [
        ({"rules": [{"name": "all", "send_rate": 1}, {"name": "never", "keys": "a", "send_rate": 1}]}, ["rules.0"]),
        ({"rates": [{"name": "r", "events_per_minute": 0.5}]}, ["rates.0.events_per_minute"]),
        ({"rates": [{"name": "r", "events_per_minute": 0.5, "units": 2}]}, []),
        ({"rates": [{"name": "r", "events_per_minute": 1}]}, []),
    ],
)
def test_what_hides_others_or_refuses_every_request_is_warned_of(document, paths):
    assert [problem.path for problem in load_quotas(json.dumps(document)).warnings] == paths


NAMES = st.text(max_size=3)


@given(st.lists(st.one_of(st.tuples(NAMES, st.integers(1, 5)), st.just("new day"), st.just("stored")), max_size=60))
def test_counts_are_those_of_a_dictionary(steps):
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


def test_100_000_counters_take_less_than_10_mb():
    table = CounterTable()
    for number in range(99_990):
        table.add(f"principal-{number}", name_hash(f"principal-{number}"), 3)
    for number in range(10):
        table.add(f"large-{number}", name_hash(f"large-{number}"), 1_000 + number)
    arrays = sum(sys.getsizeof(one) for one in (table.counts, table.moments, table._hashes))
    names = sys.getsizeof(table.names) + sum(sys.getsizeof(name) + 36 for name in table.names.values())
    assert (table.size, len(table.names)) == (100_000, counters.MAX_NAMES)
    assert arrays + names < 10_000_000
    assert table.largest(2) == [("large-9", 1_009), ("large-8", 1_008)]


@pytest.mark.proves("quotas/more-100-000-keys")
def test_further_names_share_one_counter(monkeypatch):
    monkeypatch.setattr(counters, "MAX_COUNTERS", 2_000)
    table = CounterTable()
    for number in range(counters.MAX_COUNTERS + 10):
        table.add(str(number), name_hash(str(number)), 1)
    assert table.size == counters.MAX_COUNTERS + 1
    assert table.count(name_hash("never seen")) == table.count(name_hash(str(counters.MAX_COUNTERS + 3))) == 10
    assert table.count(name_hash("7")) == 1
