"""The order of what goes into one queue."""

from __future__ import annotations

import asyncio

from osrdyne.processors.publish_order import Lanes, Place
from osrdyne.protocol.names import Key

A = Key("a")


async def go(place: Place, name: str, gone: list[str]) -> None:
    with place:
        await place.turn()
        gone.append(name)


async def test_newcomer_does_not_overtake_those_that_are_just_called() -> None:
    lanes, gone = Lanes(), list[str]()
    async with asyncio.TaskGroup() as group:
        with lanes.enter(A, None) as first:
            first.hold_back()
            for name in "23":
                group.create_task(go(lanes.enter(A, None), name, gone))
            await asyncio.sleep(0)
        await go(lanes.enter(A, None), "4", gone)
    assert (gone, len(lanes)) == (["2", "3", "4"], 0)
