"""Which queues a group has, in a direct and in a managed pool."""

import pytest

from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.protocol.names import Key, PoolNames

A = Key("a")
NAMES = PoolNames("p")


def names_of(layout: QueueLayout) -> list[tuple[str, str]]:
    return [(queue.name, queue.exchange) for queue in layout.queues(A)]


def test_direct_group_has_one_queue_and_keeps_the_priority_queues_from_a_managed_pool():
    layout = QueueLayout(NAMES)
    assert names_of(layout) == [("p-req-a", "p-req-xchg")]
    assert layout.exchanges.declarations == ()
    layout.note(A, 3)
    assert [(queue.priority, queue.used) for queue in layout.queues(A)] == [(3, False), (None, True)]
    assert layout.possible(A) == ("p-req-a_Pri3", "p-req-a")


def test_managed_group_has_a_queue_for_each_class_and_what_it_cannot_route_becomes_an_orphan():
    layout = QueueLayout(NAMES, managed=True, priorities=[7, 0])
    expected = [("p-req-a_Pri0", "p-work-xchg_Pri0"), ("p-req-a_Pri7", "p-work-xchg_Pri7"), ("p-req-a", "p-work-xchg")]
    assert names_of(layout) == expected
    exchanges = {exchange.name: exchange.arguments["alternate-exchange"] for exchange in layout.exchanges.exchanges}
    assert exchanges == dict.fromkeys((exchange for _, exchange in expected), "p-orphan-xchg")


def test_group_keeps_an_unused_priority_queue_that_workers_do_not_consume_until_it_is_used_again():
    layout = QueueLayout(NAMES, managed=True, priorities=[1])
    layout.note(A, 1)
    layout.use([2])
    assert [queue.priority for queue in layout.queues(A)] == [1, 2, None]
    assert [queue.priority for queue in layout.queues(Key("b"))] == [2, None]
    layout.stop_serving(A, 1)
    assert (layout.unused(), layout.served(A)) == ([(A, 1)], ["p-req-a_Pri2", "p-req-a"])
    layout.use([1])
    assert (layout.unused(), layout.served(A)) == ([], ["p-req-a_Pri1", "p-req-a"])


@pytest.mark.parametrize("priority", [1, None])
def test_deleted_queue_is_new_again(priority):
    layout = QueueLayout(NAMES, managed=True, priorities=[1])
    layout.note(A, priority)
    assert [layout.is_new(A, one) for one in (1, None)] == [one != priority for one in (1, None)]
    layout.forget(A, priority)
    assert layout.is_new(A, priority)
