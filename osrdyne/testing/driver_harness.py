"""The parts of the conformance suite of drivers: the harness of a backend, specifications, waiting for conditions.

Used by `driver_conformance`, which also exports these names, and by tests of single drivers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, TypeVar

import pytest

from osrdyne.drivers.base import Driver, Instance, InstanceId, InstanceState, WorkerSpec, new_worker_id
from osrdyne.errors import DriverUnavailableError
from osrdyne.protocol.control import Generation
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.testing.conformance_worker import Behaviour

T = TypeVar("T")

POOL = "conformance"
OTHER_POOL = "conformance_two"
KEY = Key("infra=42,timetable=24")
SECRET = "p4ssw0rd-of-the-broker"
AMQP_URI = f"amqp://worker:{SECRET}@broker.example:5672/"
GROUP_CONFIG: Mapping[str, object] = {"spark": {"master": "local[7]"}}
"""The worker configuration of a group with a profile."""
PATIENCE = 120.0
"""Seconds after which a condition counts as failed."""


class DriverHarness(ABC):
    """One backend for one test. `absence`: the seconds for which it is unavailable in `BackendConformance`."""

    absence: float = float(os.environ.get("OSRDYNE_BACKEND_AWAY", "1"))

    @abstractmethod
    def driver(self, pool: str = POOL) -> Driver:
        """Build a new driver for a pool. Further calls stand for restarts of the controller."""

    @abstractmethod
    def changed_driver(self) -> Driver:
        """Build a driver of the same pool with a change of its settings that affects workers."""

    @abstractmethod
    async def kill(self, instance: Instance) -> None:
        """Kill a worker without the driver, as the kernel does when memory runs out."""

    def away(self) -> AbstractAsyncContextManager[None]:
        """Make the backend unavailable to the drivers in this context. Workers continue, and `kill` still works."""
        raise NotImplementedError("A harness for BackendConformance must implement `away`.")


def make_spec(
    key: Key = KEY,
    *,
    slot: int = 0,
    pool: str = POOL,
    behaviour: Behaviour = Behaviour.RUN,
    spec_hash: str | None = None,
    **config: object,
) -> WorkerSpec:
    """A specification as from the pool; `behaviour` and `config` select the behaviour of the worker."""
    names = PoolNames(pool)
    environment = WorkerEnvironment(
        worker_id=new_worker_id(),
        key=key,
        pool=pool,
        amqp_uri=AMQP_URI,
        requests_queues=(names.request_queue(key),),
        activity_exchange=names.activity_exchange,
        control_exchange=names.control_exchange,
        config={"behaviour": str(behaviour), **config},
    )
    return WorkerSpec(environment=environment, generation=Generation(3, 14), slot=slot, spec_hash=spec_hash)


async def eventually(ask: Callable[[], Awaitable[T | None]], *, what: str) -> T:
    """Call `ask` until its result is neither None, False nor empty."""
    try:
        async with asyncio.timeout(PATIENCE):
            while not (answer := await ask()):  # noqa: ASYNC110 - no event announces the condition
                await asyncio.sleep(0.02)
            return answer
    except TimeoutError:
        raise AssertionError(f"This did not become true: {what}.") from None


async def is_ready(driver: Driver, instance: Instance) -> Mapping[str, Any]:
    """Wait until the worker has printed that it is ready, and return its first line, the JSON about itself."""

    async def all_lines() -> tuple[str, ...] | None:
        lines = await driver.logs(instance.instance_id, lines=10_000)
        return lines if "ready" in lines else None

    lines = await eventually(all_lines, what="the worker is ready")
    report: Mapping[str, Any] = json.loads(lines[0])
    return report


async def find(driver: Driver, instance_id: InstanceId) -> Instance | None:
    """The instance as it is listed now; None if it is not listed."""
    return next((item for item in await driver.list_instances() if item.instance_id == instance_id), None)


async def find_as_soon_as_it_answers(driver: Driver, instance_id: InstanceId) -> Instance | None:
    """The same with a backend that may be unavailable: list until it answers."""
    while True:
        try:
            return await find(driver, instance_id)
        except DriverUnavailableError:
            await asyncio.sleep(0.1)


async def is_refused(driver: Driver, *, seconds: float) -> None:
    """List for so many seconds; every call must raise `DriverUnavailableError`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with pytest.raises(DriverUnavailableError):
            await driver.list_instances()
        await asyncio.sleep(0.2)


async def until_events_come(driver: Driver, come: asyncio.Event, *, first_slot: int) -> int:
    """Start workers, slot after slot, until an event comes, because the listener may begin late. Returns the next free
    slot."""
    for slot in itertools.count(first_slot):
        await driver.start(make_spec(slot=slot))
        with suppress(TimeoutError):
            await asyncio.wait_for(come.wait(), 1.0)
            return slot + 1
    raise AssertionError("slots do not come to an end")


async def exited(driver: Driver, instance: Instance) -> Instance:
    """Wait until the instance is listed as exited."""

    async def ask() -> Instance | None:
        found = await find(driver, instance.instance_id)
        return found if found is not None and found.state is InstanceState.EXITED else None

    return await eventually(ask, what="the worker has exited")


async def clean_up(driver: Driver) -> None:
    """Stop and remove every worker of the driver's pool, and close the driver."""

    async def end(instance: Instance) -> None:
        await driver.stop(instance.instance_id, grace=0)
        await driver.remove(instance.instance_id)

    await asyncio.gather(*(end(instance) for instance in await driver.list_instances()))
    await driver.close()
