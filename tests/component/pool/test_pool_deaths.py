"""Which deaths of workers a request was there for."""

from dataclasses import replace

import pytest

from osrdyne.pool.state.workers.crashes import (
    MAX_DEATHS_OF_KEY,
    MAX_ENDED_KEYS,
    MAX_ENDED_SLOTS,
    MAX_LINE,
    PREVIOUS_LINES,
    DeathRegister,
    EndedWorkers,
)
from osrdyne.protocol.activity import Event
from osrdyne.protocol.names import Key
from osrdyne.protocol.poison import WorkerDeath

A, B = Key("a"), Key("b")


def death(worker: str = "w") -> WorkerDeath:
    return WorkerDeath(worker, "exit code 9", None, 1.0, ())


def test_death_belongs_to_the_requests_that_ran():
    deaths = DeathRegister()
    deaths.note(A, death(), ("bad", "beside"))
    deaths.note(A, death(), ("bad",))
    assert [found.others for found in deaths.of_request(A, "bad")] == [1, 0]
    assert len(deaths.of_request(A, "beside")) == 1
    assert deaths.of_request(A, "elsewhere") == deaths.of_request(B, "bad") == ()


def test_key_that_dies_often_does_not_push_out_another():
    deaths = DeathRegister()
    deaths.note(B, death(), ("other",))
    for number in range(2 * MAX_DEATHS_OF_KEY):
        deaths.note(A, death(f"w{number}"), ("bad",))
    found = deaths.of_request(A, "bad")
    assert len(found) == MAX_DEATHS_OF_KEY
    assert found[-1].worker_id == f"w{2 * MAX_DEATHS_OF_KEY - 1}"
    assert len(deaths.of_request(B, "other")) == 1


@pytest.mark.parametrize("how", ["crashes", "is stopped"])
async def test_worker_that_crashes_and_no_other_one_leaves_what_it_ran(stack, clock, how):
    await stack.publish("a")
    await clock.advance(1)
    await stack.report("a", Event.BUSY, in_flight=1, requests=["f00d"])
    if how == "crashes":
        stack.driver.exit_instance(stack.driver.workers_of(A)[0].instance.instance_id, code=9)
        await clock.advance(1)
    else:
        await (await stack.take("a")).ack()
        stack.retire(A)
        await clock.advance(1000)
        assert stack.running("a") == 0
    assert [one.ended_with for one in stack.deaths_of(A, "f00d")] == ["exit code 9"] * (how == "crashes")
    assert stack.deaths_counted() == (how == "crashes")


@pytest.mark.parametrize(
    ("details", "code"),
    [({}, 9), ({"reason": "blocked by f", "requests": ["f00d"]}, 4), ({"refusal": {"code": 404}}, 1)],
    ids=["killed", "blocked", "refused"],
)
async def test_lines_of_an_ended_worker_are_there_when_its_successor_runs(stack, clock, details, code):
    await stack.publish("a")
    await clock.advance(1)
    (first,) = [worker.instance for worker in stack.driver.workers_of(A)]
    await stack.report("a", Event.READY, in_flight=0)
    if details:
        await stack.report("a", Event.FAILED, **details)
    stack.driver.exit_instance(first.instance_id, code=code, lines=("one", "two"))
    await clock.advance(5)
    [ended] = stack.ended_workers_of(A)
    assert (stack.running("a"), ended.worker_id, ended.log_lines) == (1, first.worker_id, ("one", "two"))
    assert (ended.ended_with, ended.said) == (f"exit code {code}", details.get("reason"))


def test_ended_workers_are_kept_within_limits():
    ended = EndedWorkers()
    for slot in range(2 * MAX_ENDED_SLOTS):
        ended.note(A, slot, replace(death(f"w{slot}"), log_lines=("x" * 2 * MAX_LINE,) * 2 * PREVIOUS_LINES))
    assert [one.worker_id for one in ended.of_key(A)] == [f"w{MAX_ENDED_SLOTS + n}" for n in range(MAX_ENDED_SLOTS)]
    assert {len(one.log_lines) for one in ended.of_key(A)} == {PREVIOUS_LINES}
    assert {len(line) for one in ended.of_key(A) for line in one.log_lines} == {MAX_LINE}
    for number in range(MAX_ENDED_KEYS):
        ended.note(Key(str(number)), 0, death())
    assert ended.of_key(A) == []
