"""The order in which messages enter one queue."""

import asyncio

from osrdyne.processors.publish_order import PublishOrder, Ticket
from osrdyne.protocol.names import Key

A = Key("a")


async def go(ticket: Ticket, name: str, gone: list[str]) -> None:
    with ticket:
        await ticket.turn()
        gone.append(name)


async def test_new_ticket_does_not_overtake_tickets_that_were_called():
    order, gone = PublishOrder(), list[str]()
    async with asyncio.TaskGroup() as group:
        with order.enter(A, None) as first:
            first.hold_back()
            for name in "23":
                group.create_task(go(order.enter(A, None), name, gone))
            await asyncio.sleep(0)
        await go(order.enter(A, None), "4", gone)
    assert (gone, len(order)) == (["2", "3", "4"], 0)


async def test_cancelled_ticket_leaves_the_others_their_order():
    order, gone = PublishOrder(), list[str]()
    async with asyncio.TaskGroup() as group:
        with order.enter(A, None) as first:
            first.hold_back()
            with order.enter(A, None) as second:
                waiting = group.create_task(second.turn())
                for name in "34":
                    group.create_task(go(order.enter(A, None), name, gone))
                await asyncio.sleep(0)
                second.cancel()
                assert not await waiting
            assert gone == []
    assert (gone, len(order)) == (["3", "4"], 0)
