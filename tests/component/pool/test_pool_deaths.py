"""Which deaths of workers a request was there for."""

from __future__ import annotations

from osrdyne.pool.state.workers.crashes import MAX_DEATHS_OF_KEY, DeathRegister
from osrdyne.protocol.activity import Event
from osrdyne.protocol.names import Key
from osrdyne.protocol.poison import WorkerDeath
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.stack import Stack

A, B = Key("a"), Key("b")


def death(worker: str = "w") -> WorkerDeath:
    return WorkerDeath(worker, "exit code 9", None, 1.0, ())


def test_death_belongs_to_the_requests_that_ran() -> None:
    deaths = DeathRegister()
    deaths.note(A, death(), ("bad", "beside"))
    deaths.note(A, death(), ("bad",))
    assert [found.others for found in deaths.of_request(A, "bad")] == [1, 0]
    assert len(deaths.of_request(A, "beside")) == 1
    assert deaths.of_request(A, "elsewhere") == deaths.of_request(B, "bad") == ()


def test_key_that_dies_often_does_not_push_out_another() -> None:
    deaths = DeathRegister()
    deaths.note(B, death(), ("other",))
    for number in range(2 * MAX_DEATHS_OF_KEY):
        deaths.note(A, death(f"w{number}"), ("bad",))
    found = deaths.of_request(A, "bad")
    assert len(found) == MAX_DEATHS_OF_KEY
    assert found[-1].worker_id == f"w{2 * MAX_DEATHS_OF_KEY - 1}"
    assert len(deaths.of_request(B, "other")) == 1


async def test_worker_that_crashes_leaves_what_it_ran(stack: Stack, clock: VirtualClock) -> None:
    await stack.publish("a")
    await clock.advance(1)
    await stack.report("a", Event.BUSY, in_flight=1, requests=["f00d"])
    stack.driver.exit_instance(stack.driver.workers_of(A)[0].instance.instance_id, code=9)
    await clock.advance(1)
    [found] = stack.deaths_of(A, "f00d")
    assert found.ended_with == "exit code 9"


async def test_worker_that_was_stopped_is_not_a_death(stack: Stack, clock: VirtualClock) -> None:
    await stack.publish("a")
    await clock.advance(1)
    await stack.report("a", Event.BUSY, in_flight=1, requests=["f00d"])
    await (await stack.take("a")).ack()
    stack.retire(A)
    await clock.advance(1000)
    assert (stack.running("a"), stack.deaths_counted()) == (0, 0)
