"""The command `osrdyne-worker MODULE:ATTRIBUTE`: read the environment, import the application, run the worker.

An error is one sentence on stderr; the exit code is one of `runtime.exit.ExitCode`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn

import uvloop

from osrdyne.amqp import LOG_LEVELS as AMQP_LOG_LEVELS
from osrdyne.errors import ConfigurationError
from osrdyne.logs import configure_application_logs, configure_logging, get_logger
from osrdyne.protocol.environment import (
    PLACEMENT_VARIABLE,
    STANDARD_INPUT,
    URI_FILE_VARIABLE,
    URI_VARIABLE,
    Placement,
    WorkerEnvironment,
    config_from_variables,
)
from osrdyne_worker.app.app import Context, EarlyStart, importing
from osrdyne_worker.app.codec import check_handlers
from osrdyne_worker.bootstrap import build_parts
from osrdyne_worker.pooled.bootstrap import build_process
from osrdyne_worker.pooled.host import check_poolable
from osrdyne_worker.pooled.process import PooledProcess
from osrdyne_worker.runtime.exit import ExitCode, ExitReason, Stop
from osrdyne_worker.runtime.lifeline import end_with_daemon
from osrdyne_worker.runtime.loading import checked_config, import_app
from osrdyne_worker.runtime.ready_file import ReadyFile
from osrdyne_worker.runtime.settings import runtime_settings
from osrdyne_worker.runtime.start_times import StartTimes, process_age
from osrdyne_worker.worker import Worker

LOG_LEVEL_VARIABLE = "WORKER_LOG_LEVEL"
LOG_LEVELS = ("debug", "info", "warning", "error")


_DESCRIPTORS = "/dev/fd/"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The entry point."""
    parser = argparse.ArgumentParser(prog="osrdyne-worker", description="Run one osrdyne worker.")
    parser.add_argument("app", metavar="MODULE:ATTRIBUTE", help="the osrdyne_worker.App to run, e.g. my_module:app")
    parser.add_argument("--check", action="store_true", help="import the application, report errors and exit")
    parsed = parser.parse_args(arguments)
    app_reference: str = parsed.app
    if parsed.check:
        _check(app_reference)
    _leave_environment()
    level = os.environ.get(LOG_LEVEL_VARIABLE, "info").lower()
    configure_logging(level=level if level in LOG_LEVELS else "info")
    end_with_daemon(os.environ)
    ready_file = ReadyFile.from_variables(os.environ)
    times = StartTimes()
    if (age := process_age()) is not None:
        times.note("process", age)
    ready_file.delete()  # the file of an earlier run would be valid while the application is imported
    early = None
    try:
        environment = WorkerEnvironment.from_variables(os.environ)
        _forget_source(os.environ)  # before any code of the application runs
        configure_application_logs({**AMQP_LOG_LEVELS, **runtime_settings(environment.config).log_level})
        with times.part("python"):
            early = _allow_early_start(environment)
            app = import_app(app_reference)
            early.settle(app.sessions)
        worker: Worker | PooledProcess
        if environment.placement is Placement.POOLED:
            worker = build_process(app, environment, ready_file=ready_file, start_times=times)
        else:
            worker = Worker(build_parts(app, environment, ready_file=ready_file, start_times=times))
    except ConfigurationError as error:
        if early is not None:
            early.settle(None)
        sys.stderr.write(f"osrdyne-worker: {error.message}\n")
        sys.exit(ExitCode.INVALID_CONFIGURATION)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(worker))
    except BaseExceptionGroup as errors:
        get_logger("worker").error("worker runtime failed", exc_info=errors)
        # Callers receive the last line.
        sys.stderr.write("osrdyne-worker: the worker runtime failed unexpectedly; its log has the traceback.\n")
    _exit(ExitCode.UNRECOVERABLE)


def _allow_early_start(environment: WorkerEnvironment) -> EarlyStart:
    """Let the session factory of the application start its own process beside the imports."""
    config = environment.config.get("app")
    early = EarlyStart(
        Context(
            key=environment.key,
            pool=environment.pool,
            worker_id=environment.worker_id,
            config=config if isinstance(config, dict) else {},
            worker_config=environment.config,
        ),
        is_shared=environment.placement is Placement.POOLED,
    )
    importing.set(early)
    return early


# The AMQP URI stays in the memory of this process, which reconnects with it. It is removed from everything that a
# handler, a query, Spark's JVM or another process of the same user can read: the file, the environment of the process
# and of its children, and /proc/PID/environ.


def _leave_environment() -> None:
    """Execute this program again, in the same process, without the URI in its environment.

    Changing `os.environ` is not enough: `/proc/PID/environ` shows the environment that a program was started with, as
    long as it runs. The URI passes through a pipe, which is empty once it is read.
    """
    if URI_VARIABLE not in os.environ or os.environ.get(URI_FILE_VARIABLE) or sys.gettrace() is not None:
        return  # no URI in the environment; or a debugger is attached, which would lose the program
    source, sink = os.pipe()
    os.write(sink, os.environ.pop(URI_VARIABLE).encode("utf-8", "surrogateescape"))
    os.close(sink)
    os.set_inheritable(source, True)
    variables = {**os.environ, URI_FILE_VARIABLE: f"{_DESCRIPTORS}{source}"}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], variables)


def _forget_source(variables: MutableMapping[str, str]) -> None:
    """Remove the source of the URI: the variables, the file, or standard input."""
    variables.pop(URI_VARIABLE, None)
    file = variables.pop(URI_FILE_VARIABLE, None)
    if file == STANDARD_INPUT:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    elif file and file.startswith(_DESCRIPTORS):
        os.close(int(file.removeprefix(_DESCRIPTORS)))
    elif file:
        try:
            Path(file).unlink(missing_ok=True)
        except OSError as error:
            # A platform may have mounted it read-only. Handlers of this worker can read it then.
            get_logger("credentials").warning("AMQP URI file cannot be removed", file=file, error=error.strerror)


def _check(app_reference: str) -> NoReturn:
    """Import the application, check its handlers, check `WORKER_CONFIG` and `WORKER_PLACEMENT` with it if they are set,
    and exit. Builds no session."""
    try:
        app = import_app(app_reference)
        check_handlers(app)
        if os.environ.get(PLACEMENT_VARIABLE) == Placement.POOLED:
            check_poolable(app)
        if "WORKER_CONFIG" in os.environ:
            worker_config = config_from_variables(os.environ)
            checked_config(app, worker_config)
            # Session factories may have this method. Without it, invalid settings fail later, when a worker starts.
            check_settings = getattr(app.sessions, "check_settings", None)
            if check_settings is not None:
                check_settings(worker_config)
    except ConfigurationError as error:
        sys.stderr.write(f"osrdyne-worker: {error.message}\n")
        sys.exit(ExitCode.INVALID_CONFIGURATION)
    sys.exit(ExitCode.STOPPED)


async def _run(worker: Worker | PooledProcess) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    await worker.run(_log_and_exit)


def _log_and_exit(reason: ExitReason) -> NoReturn:
    """Log the reason as the last line: if the worker fails, the controller sends the last lines to the callers."""
    log = get_logger("worker")
    if isinstance(reason, Stop):
        log.info("stopped")
    elif reason.code is ExitCode.START_FAILED:
        log.error("worker start failed", reason=reason.reason, exit_code=int(reason.code))
    else:
        log.error("worker failed", reason=reason.reason, exit_code=int(reason.code))
    _exit(reason.code)


def _exit(code: ExitCode) -> NoReturn:
    """Exit without waiting for threads: one that hangs in a handler never ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
