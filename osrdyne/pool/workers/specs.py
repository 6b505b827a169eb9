"""Derive the specification of workers from the settings; used by the term and by `osrdyne groups env`."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace

from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.management.credentials import ScopedCredentials, SharedCredentials
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.config.models import Settings
from osrdyne.drivers.base import Driver, WorkerSpec, new_worker_id
from osrdyne.drivers.pooled.driver import PooledDriver, worker_hash
from osrdyne.drivers.pooled.placement import ProcessSettings
from osrdyne.pool.context import TermContext, TermState
from osrdyne.pool.ports import WorkerCredentials
from osrdyne.pool.state.groups.profiles import WorkerShape
from osrdyne.pool.workers.actions import SpecFactory
from osrdyne.pool.workers.autoscaler import ScalingRules
from osrdyne.protocol.control import Generation
from osrdyne.protocol.environment import Placement, WorkerEnvironment
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


def worker_shape(driver: Driver, pool: Settings) -> WorkerShape:
    """The hash and the processes of workers with the settings of a profile; `pool`: the settings of the pool."""
    common = pool.worker_config()

    def shape(settings: Settings) -> tuple[str, ProcessSettings | None]:
        # A profile that changes nothing of a worker leaves its hash as it is, and no worker is replaced for it.
        config = None if (own := settings.worker_config()) == common else own
        starts_processes = driver.inner if isinstance(driver, PooledDriver) else driver
        own_process = starts_processes.spec_hash() if config is None else starts_processes.spec_hash(config)
        if not isinstance(driver, PooledDriver) or settings.worker.placement == "dedicated":
            return own_process, None
        return worker_hash(own_process), ProcessSettings(own_process, settings.worker.pooled.spares, config)

    return shape


def spec_factory(state: TermState, credentials: WorkerCredentials) -> SpecFactory:
    """Return a factory for worker specifications, each with credentials of its own."""

    async def make_spec(
        key: Key, slot: int, generation: Generation, *, unconfirmed: WorkerSpec | None = None
    ) -> WorkerSpec:
        # Read once: the profiles may change during the calls below, and the hash must be that of these settings.
        group = state.profiles.of(key)
        environment = replace(
            worker_environment(group.settings, key, state.layout),
            poison=state.poison_texts.of_key(key),
            paused=state.paused.is_paused(key),
            rate=state.rates.of(key),
        )
        placement = Placement(group.settings.worker.placement)
        if (
            unconfirmed is not None
            # Not a pooled worker: a process accepts each worker id only once (lifecycle: pooled-ids-once).
            and unconfirmed.placement is placement is Placement.DEDICATED
            and credentials.keep(unconfirmed.worker_id)
        ):
            worker_id, uri = unconfirmed.worker_id, unconfirmed.environment.amqp_uri
        else:
            worker_id = environment.worker_id
            uri = await credentials.uri_for(key, worker_id)
        return WorkerSpec(
            environment=replace(environment, worker_id=worker_id, amqp_uri=uri),
            generation=generation,
            slot=slot,
            spec_hash=group.spec_hash,
            placement=placement,
        )

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
