"""What the conformance suite of drivers is given and how it asks: the harness of a backend, specifications, waiting.

Used by `driver_conformance`, which also offers these names, and by tests of one driver.
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
"""Seconds after which something that should have happened has not."""


class DriverHarness(ABC):
    """One backend for one test. `absence` is for how many seconds it is away in `BackendConformance`."""

    absence: float = float(os.environ.get("OSRDYNE_BACKEND_AWAY", "1"))

    @abstractmethod
    def driver(self, pool: str = POOL) -> Driver:
        """A new driver object for a pool. Called again: what a restarted controller would have."""

    @abstractmethod
    def changed_driver(self) -> Driver:
        """A driver of the same pool whose settings were changed in something that shapes workers."""

    @abstractmethod
    async def kill(self, instance: Instance) -> None:
        """Kill a worker from outside, as the system would that ran out of memory."""

    def away(self) -> AbstractAsyncContextManager[None]:
        """The backend does not answer the drivers inside of this; workers go on, and `kill` still works."""
        raise NotImplementedError("A harness for BackendConformance cuts its drivers off from their backend.")


def make_spec(
    key: Key = KEY,
    *,
    slot: int = 0,
    pool: str = POOL,
    behaviour: Behaviour = Behaviour.RUN,
    spec_hash: str | None = None,
    **config: object,
) -> WorkerSpec:
    """What the pool would ask for; `behaviour` and `config` say what the worker does."""
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
    """Ask until the answer is neither None, False nor empty."""
    try:
        async with asyncio.timeout(PATIENCE):
            while not (answer := await ask()):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.02)
            return answer
    except TimeoutError:
        raise AssertionError(f"This did not become true: {what}.") from None


async def is_ready(driver: Driver, instance: Instance) -> Mapping[str, Any]:
    """Wait until the worker has said that it is ready, and return what it said about itself."""

    async def last_words() -> tuple[str, ...] | None:
        lines = await driver.logs(instance.instance_id, lines=10_000)
        return lines if "ready" in lines else None

    lines = await eventually(last_words, what="the worker is ready")
    said: Mapping[str, Any] = json.loads(lines[0])
    return said


async def find(driver: Driver, instance_id: InstanceId) -> Instance | None:
    """The instance as it is listed now."""
    return next((item for item in await driver.list_instances() if item.instance_id == instance_id), None)


async def find_as_soon_as_it_answers(driver: Driver, instance_id: InstanceId) -> Instance | None:
    """The same of a backend that may be away: it is asked again."""
    while True:
        try:
            return await find(driver, instance_id)
        except DriverUnavailableError:
            await asyncio.sleep(0.1)


async def is_refused(driver: Driver, *, seconds: float) -> None:
    """Ask for so long; every answer must be that the backend does not answer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with pytest.raises(DriverUnavailableError):
            await driver.list_instances()
        await asyncio.sleep(0.2)


async def until_events_come(driver: Driver, come: asyncio.Event, *, first_slot: int) -> int:
    """Start workers, slot after slot, until one is seen through events: who listens may do so a little late. Returns
    the next free slot."""
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
    """Stop and forget every worker of the driver's pool."""

    async def end(instance: Instance) -> None:
        await driver.stop(instance.instance_id, grace=0)
        await driver.remove(instance.instance_id)

    await asyncio.gather(*(end(instance) for instance in await driver.list_instances()))
    await driver.close()
