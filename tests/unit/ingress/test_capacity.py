"""Plans of capacity: the worked examples of the operators' document, and an oracle that takes message by message."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from osrdyne.config.models import PriceSettings, Settings
from osrdyne.ingress.quotas.capacity import Hub, Load, Phase, Store, plan
from osrdyne.ingress.quotas.kept import kept_by_pool
from osrdyne.ingress.quotas.question import CapacityQuestion, answer
from osrdyne.ingress.quotas.tiers import HUB_TIERS, STORE_TIERS, HubTier, StoreTier

S1 = Hub(HUB_TIERS["iot-hub-s1"], 1)
STORE = Store(STORE_TIERS["store-s1"], 1)


@pytest.mark.parametrize(
    ("messages", "events", "expected"),
    [
        (277, "2.5", (398_880, None, None, True)),
        (720, "1", (400_000, Fraction(400_000, 720), None, False)),
        (200, "4", (288_000, None, 80, False)),
    ],
    ids=["fits", "stops after nine and a quarter hours", "falls behind"],
)
def test_steady_load_has_the_figures_of_the_document_for_operators(messages, events, expected):
    accepted, used_up_after, growth, fits = expected
    found = plan(Load.steady(Phase(Fraction(0), Fraction(messages), Fraction(events))), S1, STORE)
    quota = found.meters[0]
    assert (found.accepted, quota.used_up_after, found.fits) == (accepted, used_up_after, fits)
    assert quota.excess == messages * 1440 - accepted
    assert growth is None or (found.queue and (found.queue.growth, found.queue.drained)) == (growth, None)


def simulate(messages: list[Fraction], events: int, hub: Hub, store: Store) -> tuple[int, Fraction | None, Fraction]:
    """Message by message: how many are accepted, when the first is refused, and when the last event is served."""
    used, day, accepted, refused, free = 0, -1, 0, None, Fraction(0)
    for at in messages:
        if at // 1440 != day:
            used, day = 0, at // 1440
        if used == hub.quota:
            refused = at if refused is None else refused
            continue
        used, accepted = used + 1, accepted + 1
        free = max(free, at) + Fraction(events, store.rate)
    return accepted, refused, free


@given(
    quota=st.integers(1, 60),
    rate=st.integers(1, 6),
    events=st.integers(1, 4),
    start=st.integers(0, 1439),
    spans=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 8)), min_size=1, max_size=4),
)
def test_plans_agree_with_every_message(quota, rate, events, start, spans):
    hub = Hub(HubTier("small", quota, 4096, 1, 1, 1), 1)
    store = Store(StoreTier("small", rate, 1, 10**6), 1)
    load = Load(
        tuple(Phase(Fraction(minutes), Fraction(messages), Fraction(events)) for minutes, messages in spans),
        Fraction(start),
    )
    arrivals, at = [], Fraction(start)
    for minutes, messages in spans:
        # In the middle of their turns, so that none arrives at midnight.
        arrivals += [at + Fraction(2 * place + 1, 2 * messages) for place in range(minutes * messages)]
        at += minutes
    accepted, refused, served = simulate(arrivals, events, hub, store)
    found = plan(load, hub, store)
    assert (found.accepted, found.meters[0].excess) == (accepted, len(arrivals) - accepted)
    assert (found.meters[0].used_up_after is None) == (refused is None)
    assert found.queue is not None
    assert found.queue.drained is not None
    if found.queue.drained > at - start:
        # What is left when the load ends is served within the time of one message.
        assert abs(found.queue.drained + start - served) <= Fraction(events, rate) + 1


def ask(**question: Any) -> dict[str, Any]:
    return answer(CapacityQuestion.model_validate(question), PriceSettings().by_tier())


def test_more_units_than_a_tier_has_lead_to_the_next_tier_and_a_new_store():
    found = ask(load=[{"rate": "200000000/day"}], hub="iot-hub-s1", hub_units=200, store="store-s1")
    assert (found["fits"], found["cheapest"]) == (False, None)
    found = ask(load=[{"rate": "90000000/day"}], hub="iot-hub-s1", hub_units=200)
    cheapest = {"hub": "iot-hub-s3", "hub_units": 1, "store": None, "store_units": None, "price": 2500.0}
    assert found["cheapest"] == cheapest
    found = ask(load=[{"rate": "7200/min"}], hub="iot-hub-s2", hub_units=2, store="store-s1", store_units=10)
    assert (found["fits"], found["cheapest"]["store"], len(found["notes"])) == (True, "store-s2", 1)


def test_large_messages_count_in_blocks_and_the_send_rate_is_used_up_at_once():
    found = ask(load=[{"rate": "1/min", "message_size": "10KiB", "event_size": "2.6KiB"}], store="store-s1")
    assert [meter["demand"] for meter in found["meters"]] == [3 * 1440, pytest.approx(1 / 60), 3]
    found = ask(load=[{"rate": "150/s", "duration": "1m"}])
    assert (found["meters"][1]["gives_out"], found["meters"][1]["excess"], found["accepted"]) == (0, 3000, 6000)


def test_a_queue_that_outlasts_the_day_is_counted_from_the_second_day():
    spike = [{"duration": "6h", "rate": "2000/min"}]
    found = ask(load=spike, start="20h", repeats=True, hub="iot-hub-s2", store="store-s1")
    assert (found["queue"]["drained"] is not None, found["queue"]["worst_events"]) == (True, 6 * 60 * 1280)


def test_wrong_questions_are_refused():
    loads = ([], [{"rate": "1/week"}], [{"rate": -1}], [{"rate": float("nan")}], [{"rate": 1}, {"rate": 2}])
    questions: list[dict[str, Any]] = [{"load": load} for load in loads]
    questions += [
        {"load": [{"rate": 1, "duration": "25h"}], "repeats": True},
        {"load": [{"rate": 1}], "hub": "iot-hub-free", "hub_units": 2},
        {"load": [{"rate": 1}], "hubs": 1},
        {"load": [{"rate": 1}], "retention_days": 1},
    ]
    for question in questions:
        with pytest.raises(ValidationError):
            CapacityQuestion.model_validate(question)


@pytest.mark.parametrize(
    ("question", "days", "needed", "units"),
    [
        ({"load": [{"rate": "1000000/day"}], "retention_days": 31}, 30, 31_000_000, 2),
        ({"load": [{"rate": "1000000/day"}], "retention_days": 30}, 30, 30_000_000, 1),
        ({"load": [{"rate": "7200/min"}], "retention_days": 30}, pytest.approx(28.94, 1e-3), 720 * 1440 * 30, None),
        ({"load": [{"rate": "0/min"}], "retention_days": 400}, None, 0, 1),
        ({"load": [{"rate": "1000000/day"}]}, 30, None, 1),
        (
            {"load": [{"rate": f"{rate}/min", "duration": "12h"} for rate in (1, 3, 2, 1)], "retention_days": 1},
            None, 5 * 720, 1,
        ),
    ],
    ids=["too long", "fits", "no more than it takes", "nothing", "not asked", "busiest day"],
)  # fmt: skip
def test_a_store_keeps_what_it_has_room_for(question, days, needed, units):
    found = ask(store="store-s1", hub="iot-hub-s3", **question)
    assert found["storage"] == {"events": 30_000_000, "days": days, "needed": needed}
    assert found["fits"] == (units == 1)
    assert units is None or (found["cheapest"]["store"], found["cheapest"]["store_units"]) == ("store-s1", units)


ROWS = {"retention_days": 90, "max_rows": 80_000}


@pytest.mark.parametrize(
    ("table", "load", "days"),
    [
        ({**ROWS, "on_storage_limit": "purge"}, {"rate": "1000/day", "events": 2}, (5, 40, False)),
        (ROWS, {"rate": "1000/day", "events": 2}, (5, 40, True)),
        ({"retention_days": 40, "max_rows": 80_000}, {"rate": "1000/day", "events": 2}, (5, 40, False)),
        ({"retention_days": 9}, {"rate": "1/day"}, (7, 9, False)),
        ({"retention_days": 9, "max_bytes": 10**9}, {"rate": "0/day"}, (7, None, False)),
        ("typo", {"rate": "1/day"}, (7, None, False)),
        ({"retention_days": 9}, {"rate": "1/day", "duration": "1h"}, (None, None, False)),
    ],
    ids=["purged", "paused", "old and full", "old", "bytes", "invalid", "once"],
)  # fmt: skip
def test_pool_keeps_a_load_until_it_is_full_or_old(table, load, days):
    log = {"name": "sensors", "max_age": "7d", "max_bytes": 5 * 1000 * 2**20, "partitions": 1}
    worker = {"config": {"tables": {"warm": table}}}
    settings = Settings.model_validate({"pool": {"kind": "managed"}, "telemetry": log, "worker": worker})
    question = CapacityQuestion.model_validate({"load": [{**load, "message_size": "1MiB"}]})
    log_kept, warm, *others = kept_by_pool(settings, question.to_load())
    assert [(kept.name, kept.days) for kept in others] == [("poison inventory", None), ("audit", None)]
    assert (log_kept.days, warm.days, warm.pauses) == days
