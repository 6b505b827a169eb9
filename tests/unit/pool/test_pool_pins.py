"""Pins that a person set, kept in RabbitMQ."""

import asyncio

import pytest

from osrdyne.pool.state.groups.pins import PinStore
from osrdyne.protocol.names import Key
from osrdyne.testing.fakes.management import Parameters
from osrdyne.testing.keys import ODD_KEYS


def store(parameters: Parameters, *configured: str) -> PinStore:
    return PinStore(parameters, pool="p", configured=configured)


async def test_pins_set_at_the_same_time_outlive_the_daemon_until_they_are_removed():
    parameters = Parameters()
    earlier = store(parameters)
    await asyncio.gather(*(earlier.add(key) for key in ODD_KEYS.values()))
    pins = store(parameters, "b")
    assert sorted(await pins.load()) == sorted([*ODD_KEYS.values(), "b"])
    removed, *others = ODD_KEYS.values()
    await pins.remove(removed)
    await pins.remove(Key("never pinned"))
    assert sorted(await pins.load()) == sorted([*others, "b"])


@pytest.mark.parametrize("value", [None, "a", {"a": 1}, 7, ["\ud800", "x" * 256]], ids=repr)
async def test_foreign_value_is_not_a_pin(value):
    parameters = Parameters()
    parameters.values["osrdyne-p-pinned"] = value
    assert await store(parameters).load() == []
