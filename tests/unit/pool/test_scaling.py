"""How many workers a group needs: a pure function, tried on simulated groups."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.pool.workers.autoscaler import GroupScale, Sample, ScalingRules, begin, rescale

RULES = ScalingRules(minimum=1, maximum=8, target_lag=30.0, cooldown=300.0)
STEP = 5.0


def simulate(
    arrivals: float, service: float, *, seconds: float, rules: ScalingRules = RULES, waiting: float = 0.0,
    scale: GroupScale | None = None,
) -> GroupScale:  # fmt: skip
    """A group whose workers need `service` seconds for a request, of which `arrivals` come in a second.

    Workers are there as soon as they are wanted.
    """
    at = scale.sample.at if scale else 0.0
    completed = float(scale.sample.completed) if scale else 0.0
    end = at + seconds
    while at < end:
        workers = scale.desired if scale else rules.minimum
        done = min(workers * rules.concurrency / service * STEP, waiting + arrivals * STEP)
        waiting += arrivals * STEP - done
        completed += done
        at += STEP
        running = min(workers * rules.concurrency, round(done * service / STEP) or int(waiting > 0))
        busy = min(workers, running)
        sample = Sample(at, int(waiting), running, busy, workers, int(completed))
        scale = begin(sample, rules, alive=workers) if scale is None else rescale(scale, sample, rules)
    assert scale is not None
    return scale


@pytest.mark.parametrize(("arrivals", "workers"), [(0.0, 1), (0.8, 1), (1000.0, 8)], ids=["quiet", "for one", "flood"])
def test_load_needs_as_many_workers_within_the_limits(arrivals, workers):
    assert simulate(arrivals, 1.0, seconds=1200).desired == workers


def test_workers_go_when_fewer_were_enough_for_the_whole_cooldown_and_not_in_an_idle_moment():
    busy = simulate(2.7, 1.0, seconds=1800)
    assert simulate(0.0, 1.0, seconds=60.0, scale=busy).desired >= busy.desired
    assert simulate(0.0, 1.0, seconds=1200.0, scale=busy).desired == 1


def test_load_of_three_workers_ends_with_no_lag_beyond_the_target():
    scale = simulate(2.7, 1.0, seconds=1800)
    assert 3 <= scale.desired <= 8
    assert scale.sample.waiting / scale.desired <= RULES.target_lag
    concurrent = simulate(2.7, 1.0, seconds=1800, rules=replace(RULES, concurrency=4))
    assert concurrent.desired < scale.desired


@pytest.mark.parametrize(
    ("waiting", "service", "seconds", "least"),
    [(200.0, 1.0, 30.0, 6), (3.0, 10_000.0, 90.0, 3)],
    ids=["as the target asks for", "long ones count before the first is done"],
)
def test_backlog_needs_workers(waiting, service, seconds, least):
    assert least <= simulate(0.0, service, seconds=seconds, waiting=waiting).desired <= 8


def test_workers_that_a_leader_finds_are_desired_and_spared_while_they_are_busy():
    scale = begin(Sample(0.0, 0, 4, 4, 4, 0), RULES, alive=4)
    for at in range(0, 7200, 5):
        assert scale.desired == 4
        scale = rescale(scale, Sample(float(at), 0, 4, 4, 4, 0), RULES)


@given(st.lists(st.tuples(*(st.integers(0, 1000) for _ in range(5))), max_size=40))
def test_wanted_is_between_the_limits_whatever_is_measured(rows):
    scale = begin(Sample(0.0, 0, 0, 0, 0, 0), RULES, alive=0)
    for number, (waiting, in_flight, busy, serving, completed) in enumerate(rows):
        scale = rescale(scale, Sample(number * STEP, waiting, in_flight, busy, serving, completed), RULES)
        assert 1 <= scale.desired <= 8


@pytest.mark.parametrize(("readers", "workers"), [(1, 1), (3, 3), (8, 8), (2**31, 8), (0, 0)])
def test_limit_of_readers_bounds_the_number_of_workers(readers, workers):
    rules = RULES.limited(readers)
    assert (rules.clamp(100), rules.clamp(0)) == (workers, min(1, readers))
