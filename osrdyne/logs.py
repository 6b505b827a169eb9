"""Logging with structlog: JSON on a pipe, colours on a terminal.

Each entry point configures it once. The name of an event is a constant phrase; every variable value is a key of the
event.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO

import structlog

Logger = structlog.typing.FilteringBoundLogger

_URI_PASSWORD = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s:/@]*:)\S*@", re.IGNORECASE)

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")  # A message may have tabs and several lines.


def mask_uri(text: str) -> str:
    """Replace the password of every URI in `text` by `***`.

    A password may contain `/`, `:` and `@` unencoded, so everything up to the last `@` before a blank is masked, which
    may be too much.
    """
    return _URI_PASSWORD.sub(r"\1***@", text) if "://" in text else text


def _mask_line(_: Any, __: str, line: Any) -> str:
    return mask_uri(line)


def configure_logging(*, level: str = "info", json: bool | None = None, stream: TextIO | None = None) -> None:
    """Set up logging for this process. `json=None`: JSON unless the stream is a terminal."""
    terminal = (stream or sys.stderr).isatty()
    configure_events(level, as_json=not terminal if json is None else json, stream=stream)
    # Of libraries only critical records: the AMQP client logs connection URLs, and expected failures as errors, which
    # osrdyne logs with context.
    logging.basicConfig(level=logging.CRITICAL, stream=stream, force=True)


def _escape_control_characters(_: Any, __: str, event: Any) -> Any:
    """Escape control characters in the message of an application, which may quote a caller. structlog escapes the other
    values."""
    text = event.get("event")
    return event | {"event": _CONTROL.sub(_escaped, text)} if isinstance(text, str) else event


def _escaped(found: re.Match[str]) -> str:
    return repr(found[0])[1:-1]


_COMMON: tuple[structlog.typing.Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)


def _rendering(*, as_json: bool, stream: TextIO | None) -> list[structlog.typing.Processor]:
    """Return the processors that render an event as a line. The finished line is masked, so that nested values and
    tracebacks are masked, too."""
    if as_json:
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(), _mask_line]
    # A plain traceback: the default one prints local variables, which may be credentials.
    plain = structlog.dev.plain_traceback
    colors = (stream or sys.stderr).isatty()
    return [
        _escape_control_characters,
        structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain),
        _mask_line,
    ]


# Levels of libraries whose records the author of an application does not need.
QUIET_LIBRARIES: Mapping[str, str] = {
    "asyncio": "warning",
    # The HTTP client logs each URL, whose path or query may hold a secret.
    "httpx": "warning",
    "py4j": "warning",
}


def configure_application_logs(
    levels: Mapping[str, str], *, json: bool | None = None, stream: TextIO | None = None
) -> None:
    """Write the records of Python's `logging` as events; `component` is the name of the logger.

    `levels`: the level of each logger, and `root` for all others (default `info`).
    """
    as_json = not (stream or sys.stderr).isatty() if json is None else json
    handler = logging.StreamHandler(stream)
    remove = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[remove, *_rendering(as_json=as_json, stream=stream)],
            foreign_pre_chain=[*_COMMON, _name_component],
        )
    )
    chosen = {"root": "info", **QUIET_LIBRARIES, **levels}
    logging.basicConfig(
        level=logging.getLevelNamesMapping()[chosen.pop("root").upper()], handlers=[handler], force=True
    )
    for name, level in chosen.items():
        logging.getLogger(name).setLevel(logging.getLevelNamesMapping()[level.upper()])


def _name_component(_: Any, __: str, event: Any) -> Any:
    record: logging.LogRecord = event["_record"]
    return {"component": record.name, **event}


class LineLogger(structlog.PrintLogger):
    """Writes each event as a line. A line that cannot be written is dropped, as in Python's `logging`: the program goes
    on if its disk is full, or its terminal or pipe is closed."""

    def msg(self, message: str) -> None:
        with suppress(OSError):
            super().msg(message)

    log = debug = info = warn = warning = error = critical = fatal = exception = failure = err = msg


def configure_events(level: str, *, as_json: bool, stream: TextIO | None = None) -> None:
    """Set up structlog, and no other logging. `stream=None`: standard error at the time of each event."""
    structlog.configure(
        processors=[*_COMMON, *_rendering(as_json=as_json, stream=stream)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=lambda *_: LineLogger(stream or sys.stderr),
        cache_logger_on_first_use=False,
    )


def get_logger(name: str, **bound: Any) -> Logger:
    """Return a logger whose events have `component=name` and the given keys.

    If the program has not configured structlog, warnings are written to standard error: structlog's default writes all
    events to standard output.
    """
    if not structlog.is_configured():
        configure_events("warning", as_json=False)
    logger: Logger = structlog.get_logger(component=name, **bound)
    return logger
