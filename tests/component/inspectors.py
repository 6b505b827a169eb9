"""The inspector of a leader in memory, without what stands beside the term: pins, and the address of the leader."""

from typing import Any, TypeVar

from osrdyne.daemon.inspector import DaemonInspector, DaemonState
from osrdyne.testing.fakes.stack import POOL, Stack

Inspector = TypeVar("Inspector", bound=DaemonInspector)


def inspector_of(stack: Stack, kind: type[Inspector]) -> Inspector:
    unused: Any = None
    return kind(
        pool=POOL,
        state=DaemonState(term=stack.term),
        driver=stack.driver,
        management=stack.management,
        pins=unused,
        leader=unused,
        prices={},
        clock=stack.clock,
    )
