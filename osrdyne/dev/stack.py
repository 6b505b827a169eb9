"""The embedded stack: a private RabbitMQ and a daemon with the subprocess driver, in one process tree.

Used by `osrdyne dev` and the demos. While a stack runs, it is announced (`dev.announcement`), so that `osrdyne call` in
another terminal needs no options. It leaves nothing behind when it ends.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from osrdyne.aio.clock import SystemClock
from osrdyne.config.models import Settings
from osrdyne.daemon.daemon import Daemon
from osrdyne.daemon.term import StopRequest
from osrdyne.dev.announcement import announced
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.dev.sample_data import default_directory, generate_tpch, sql_configuration
from osrdyne.telemetry.last_values.reader import run_reader

# Small enough for a laptop with several workers side by side.
SAMPLE_SPARK_CONF = {
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
}


def sample_settings(settings: Settings, *, scales: tuple[str, ...]) -> Settings:
    """The settings for the SQL pipeline with TPC-H sample data at the given scale factors; generates missing data."""
    directory = default_directory()
    for scale in scales:
        generate_tpch(directory, scale)
    worker = settings.worker.model_copy(
        update={
            "config": sql_configuration(directory),
            "spark_master": "local[2]",
            "spark_conf": {**SAMPLE_SPARK_CONF, **settings.worker.spark_conf},
        }
    )
    return settings.model_copy(update={"worker": worker})


# A task beside the daemon. Its argument replaces all workers.
Beside = Callable[[Callable[[], Awaitable[None]]], Coroutine[Any, Any, None]]


@asynccontextmanager
async def running_stack(settings: Settings, *, beside: Beside | None = None) -> AsyncIterator[Settings]:
    """Start a broker and a daemon, and stop them and all workers at the end; yields the effective settings. `beside`
    runs while the daemon does.

    Raises the errors of a daemon that cannot start. If the daemon fails later, the stack is stopped.
    """
    async with EmbeddedBroker(consumer_timeout=settings.effective_consumer_timeout()) as broker:
        embedded = settings.broker.model_copy(
            update={
                "uri": SecretStr(broker.amqp_uri),
                "management_uri": SecretStr(broker.management_uri),
                "scoped_credentials": True,
            }
        )
        own = settings.model_copy(update={"broker": embedded})
        async with running_daemon(own, announce=True, beside=beside) as running:
            yield running


@asynccontextmanager
async def running_daemon(
    settings: Settings, *, announce: bool = False, beside: Beside | None = None
) -> AsyncIterator[Settings]:
    """Run a daemon in this process, wait until it leads its pool, and stop it and its workers at the end; yields the
    effective settings. `announce`: so that other commands of this user find it without a configuration."""
    with tempfile.TemporaryDirectory(prefix="osrdyne-dev-") as directory:
        effective = _with_state(settings, Path(directory))
        daemon = Daemon(effective, clock=SystemClock())
        daemon.api.bind()
        tasks = list[asyncio.Task[Any]]()
        stop = StopRequest(asyncio.Event(), stop_workers=True)
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(daemon.serve(stop), name="daemon")
            try:
                announcement = announced(effective, api_port=daemon.api.port, api_socket=daemon.api.local_path)
                with announcement if announce else nullcontext():
                    await daemon.wait_leading()
                    if effective.telemetry.name is not None:
                        tasks.append(group.create_task(run_reader(effective), name="last-value reader"))
                    if beside is not None:
                        tasks.append(group.create_task(beside(daemon.replace_workers), name="beside the daemon"))
                    yield _with_port(effective, daemon.api.port)
            finally:
                for task in tasks:
                    task.cancel()
                stop.requested.set()
                await asyncio.wait({serving})


def _with_state(settings: Settings, directory: Path) -> Settings:
    """Settings with the files of the subprocess driver and of the last-value reader in a temporary directory."""
    chosen = settings.telemetry.last_values
    if chosen.store == "sqlite" and chosen.file is None:
        last_values = chosen.model_copy(update={"file": str(directory / "last-values.db")})
        telemetry = settings.telemetry.model_copy(update={"last_values": last_values})
        settings = settings.model_copy(update={"telemetry": telemetry})
    if settings.driver.name != "subprocess":
        return settings
    options = {
        "state_directory": str(directory / "state"),
        "log_directory": str(directory / "logs"),
        # `kill -9` of this process ends its RabbitMQ: nothing else would end the workers.
        "end_with_daemon": True,
        **settings.driver.options,
    }
    return settings.model_copy(update={"driver": settings.driver.model_copy(update={"options": options})})


def _with_port(settings: Settings, port: int) -> Settings:
    return settings.model_copy(update={"api": settings.api.model_copy(update={"port": port})})
