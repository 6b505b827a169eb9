"""Builds the parts of a pooled process from its environment and its application. Called by `main`."""

from __future__ import annotations

import resource

from osrdyne.aio.clock import SystemClock
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.pooled import PROCESS_KEY
from osrdyne_worker.app.app import App
from osrdyne_worker.pooled.host import WorkerHost
from osrdyne_worker.pooled.log_lines import LogLines
from osrdyne_worker.pooled.process import PooledProcess
from osrdyne_worker.runtime.ready_file import ReadyFile
from osrdyne_worker.runtime.reports import Reporter
from osrdyne_worker.runtime.settings import runtime_settings
from osrdyne_worker.runtime.start_times import StartTimes


def build_process(
    app: App, environment: WorkerEnvironment, *, ready_file: ReadyFile, start_times: StartTimes
) -> PooledProcess:
    """Build the process. Raises `ConfigurationError` if the environment or the application is invalid."""
    clock = SystemClock()
    host = WorkerHost(app, environment, clock)
    log_lines = LogLines()
    log_lines.install()
    _allow_open_files()
    return PooledProcess(
        environment,
        host=host,
        settings=runtime_settings(environment.config),
        reporter=Reporter(
            key=PROCESS_KEY,
            worker_id=environment.worker_id,
            exchange=environment.activity_exchange,
            clock=clock,
        ),
        ready_file=ready_file,
        log_lines=log_lines,
        start_times=start_times,
        clock=clock,
    )


def _allow_open_files() -> None:
    """Raise the limit of open files to the hard limit: each worker has two connections to RabbitMQ, and each of its
    threads has one to the JVM."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
