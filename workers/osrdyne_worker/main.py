"""The command `osrdyne-worker MODULE:ATTRIBUTE`: read the environment, import the application, run the worker.

An error is one sentence on stderr; the exit code is one of `runtime.exit.ExitCode`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import uvloop

from osrdyne.errors import ConfigurationError
from osrdyne.logs import configure_logging, get_logger
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne_worker.bootstrap import build_parts
from osrdyne_worker.runtime.credentials import forget_source, leave_environment
from osrdyne_worker.runtime.exit import ExitCode, ExitReason, Stop
from osrdyne_worker.runtime.loading import import_app
from osrdyne_worker.runtime.ready_file import ReadyFile
from osrdyne_worker.worker import Worker

LOG_LEVEL_VARIABLE = "WORKER_LOG_LEVEL"
LOG_LEVELS = ("debug", "info", "warning", "error")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The entry point."""
    parser = argparse.ArgumentParser(prog="osrdyne-worker", description="Run one osrdyne worker.")
    parser.add_argument("app", metavar="MODULE:ATTRIBUTE", help="the osrdyne_worker.App to run, e.g. my_module:app")
    parser.add_argument("--check", action="store_true", help="import the application, report errors and exit")
    parsed = parser.parse_args(arguments)
    app_reference: str = parsed.app
    if parsed.check:
        _check(app_reference)
    leave_environment()
    level = os.environ.get(LOG_LEVEL_VARIABLE, "info").lower()
    configure_logging(level=level if level in LOG_LEVELS else "info")
    ready_file = ReadyFile.from_variables(os.environ)
    ready_file.delete()  # the file of an earlier run would be valid while the application is imported
    try:
        environment = WorkerEnvironment.from_variables(os.environ)
        forget_source(os.environ)  # before any code of the application runs
        worker = Worker(build_parts(import_app(app_reference), environment, ready_file=ready_file))
    except ConfigurationError as error:
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


def _check(app_reference: str) -> NoReturn:
    """Import the application and exit. Needs no environment and builds no session."""
    try:
        import_app(app_reference)
    except ConfigurationError as error:
        sys.stderr.write(f"osrdyne-worker: {error.message}\n")
        sys.exit(ExitCode.INVALID_CONFIGURATION)
    sys.exit(ExitCode.STOPPED)


async def _run(worker: Worker) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    await worker.run(_log_and_exit)


def _log_and_exit(reason: ExitReason) -> NoReturn:
    """Log the reason as the last line: the controller sends the last lines to the callers of a failed worker."""
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
