"""Derive the specification of workers from the settings; used by the term and by `osrdyne groups env`."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace

from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.management.credentials import ScopedCredentials, SharedCredentials
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.config.models import Settings
from osrdyne.drivers.base import Driver, WorkerSpec, new_worker_id
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import WorkerCredentials
from osrdyne.pool.state.crashes import PoisonTexts
from osrdyne.pool.workers.actions import SpecFactory
from osrdyne.pool.workers.autoscaler import ScalingRules
from osrdyne.protocol.control import Generation
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.names import Key, PoolNames, WorkerId


def scaling_rules(settings: Settings, driver: Driver) -> ScalingRules:
    """How many workers groups have. On a platform that scales workers itself, an instance stands for the whole
    group."""
    if not driver.manages_workers or not driver.instance_is_worker:
        number = 1 if driver.manages_workers else 0
        return ScalingRules(minimum=number, maximum=number)
    scaling = settings.worker.scaling
    return ScalingRules(
        minimum=scaling.min,
        maximum=scaling.max,
        target_lag=scaling.target_lag,
        cooldown=scaling.cooldown,
        concurrency=settings.worker.concurrency,
    )


def spec_factory(
    settings: Settings, layout: QueueLayout, credentials: WorkerCredentials, poison: PoisonTexts
) -> SpecFactory:
    """Return a factory for worker specifications, each with credentials of its own."""

    async def make_spec(key: Key, slot: int, generation: Generation) -> WorkerSpec:
        environment = replace(worker_environment(settings, key, layout), poison=poison.of_key(key))
        uri = await credentials.uri_for(key, environment.worker_id)
        return WorkerSpec(environment=replace(environment, amqp_uri=uri), generation=generation, slot=slot)

    return make_spec


def worker_environment(settings: Settings, key: Key, layout: QueueLayout) -> WorkerEnvironment:
    """The environment of a new worker of `key`, with a worker id of its own."""
    names = PoolNames(settings.pool.id)
    return WorkerEnvironment(
        worker_id=new_worker_id(),
        key=key,
        pool=names.pool,
        amqp_uri=settings.broker.effective_worker_uri(),
        requests_queues=tuple(layout.served(key)),
        activity_exchange=names.activity_exchange,
        control_exchange=names.control_exchange,
        retry_exchange=names.retry_exchange if layout.managed else None,
        max_message_bytes=settings.requests.max_message_bytes,
        config=settings.worker_config(),
    )


def choose_credentials(
    context: TermContext,
    *,
    layout: QueueLayout,
    management: ManagementClient,
    driver: Driver,
    alive: Callable[[], Set[WorkerId]],
) -> SharedCredentials | ScopedCredentials:
    """The credentials with which workers connect. `alive` returns the ids of the workers that exist."""
    broker, lifecycle = context.settings.broker, context.settings.lifecycle
    if not (broker.scoped_credentials and driver.manages_workers):
        return SharedCredentials(broker.effective_worker_uri())
    return ScopedCredentials(
        names=context.names,
        layout=layout,
        management=management,
        uri=broker.effective_worker_uri(),
        alive=alive,
        start_timeout=lifecycle.start_timeout,
        interval=lifecycle.resync_interval,
        clock=context.clock,
        workers_of_start=driver.workers_of_start,
    )
