"""The command `osrdyne-worker MODULE:ATTRIBUTE`: read the environment, import the application, run it.

Errors are one sentence on stderr; the exit code says what kind (`ending.ExitCode`).
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
from osrdyne_worker.runtime.credentials import forget_source, leave_environment
from osrdyne_worker.runtime.exit import Ending, ExitCode, Stop
from osrdyne_worker.runtime.loading import import_app
from osrdyne_worker.runtime.ready_file import ReadyFile
from osrdyne_worker.worker import Worker

LOG_LEVEL_VARIABLE = "WORKER_LOG_LEVEL"
LOG_LEVELS = ("debug", "info", "warning", "error")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The entry point."""
    parser = argparse.ArgumentParser(prog="osrdyne-worker", description="Run one osrdyne worker.")
    parser.add_argument("app", metavar="MODULE:ATTRIBUTE", help="the osrdyne_worker.App that answers requests")
    parser.add_argument(
        "--check", action="store_true", help="only import the application, and say what is wrong with it"
    )
    parsed = parser.parse_args(arguments)
    app_reference: str = parsed.app
    if parsed.check:
        _check(app_reference)
    leave_environment()
    level = os.environ.get(LOG_LEVEL_VARIABLE, "info").lower()
    configure_logging(level=level if level in LOG_LEVELS else "info")
    ready_file = ReadyFile.from_variables(os.environ)
    ready_file.delete()  # one of a former run would be believed while the application is imported
    try:
        environment = WorkerEnvironment.from_variables(os.environ)
        forget_source(os.environ)  # before any code of the application runs
        worker = Worker(import_app(app_reference), environment, ready_file=ready_file)
    except ConfigurationError as error:
        sys.stderr.write(f"osrdyne-worker: {error.message}\n")
        sys.exit(ExitCode.WRONG_CONFIGURATION)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(worker))
    except BaseExceptionGroup as errors:
        get_logger("worker").error("the worker runtime failed", exc_info=errors)
        # The last line is what callers are told.
        sys.stderr.write("osrdyne-worker: the worker runtime failed unexpectedly; its log has the traceback.\n")
    _exit(ExitCode.BEYOND_HELP)


def _check(app_reference: str) -> NoReturn:
    """No environment is needed, and no session is built."""
    try:
        import_app(app_reference)
    except ConfigurationError as error:
        sys.stderr.write(f"osrdyne-worker: {error.message}\n")
        sys.exit(ExitCode.WRONG_CONFIGURATION)
    sys.exit(ExitCode.STOPPED)


async def _run(worker: Worker) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    await worker.run(_leave)


def _leave(ending: Ending) -> NoReturn:
    """Say why, as the last line: the controller shows the last lines to the callers of a worker that failed."""
    log = get_logger("worker")
    if isinstance(ending, Stop):
        log.info("stopped")
    elif ending.code is ExitCode.START_FAILED:
        log.error("the worker could not start", reason=ending.reason, exit_code=int(ending.code))
    else:
        log.error("the worker ends", reason=ending.reason, exit_code=int(ending.code))
    _exit(ending.code)


def _exit(code: ExitCode) -> NoReturn:
    """End the process now: a thread that hangs in a handler cannot be waited for, and nothing else is left to do."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
