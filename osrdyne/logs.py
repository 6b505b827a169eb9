"""Logging: structlog events with constant phrases, JSON on a pipe and colours on a terminal.

Called once by each entry point. Everything variable is a key of the event, never part of the phrase.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from typing import Any, TextIO

import structlog

Logger = structlog.typing.FilteringBoundLogger

_URI_PASSWORD = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s:/@]*:)\S*@", re.IGNORECASE)

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")  # A message may have tabs and several lines.


def mask_uri(text: str) -> str:
    """Replace the password of every URI in `text` by `***`.

    Masks too much rather than too little: a password may contain `/`, `:` and `@` unencoded, so everything up to the
    last `@` before a blank is masked.
    """
    return _URI_PASSWORD.sub(r"\1***@", text) if "://" in text else text


def _mask_line(_: Any, __: str, line: Any) -> str:
    return mask_uri(line)


def configure_logging(*, level: str = "info", json: bool | None = None, stream: TextIO | None = None) -> None:
    """Set up logging for this process. `json=None` means: JSON unless the stream is a terminal."""
    terminal = (stream or sys.stderr).isatty()
    configure_events(level, as_json=not terminal if json is None else json, stream=stream)
    # Libraries that log by themselves: only what needs a person. The AMQP client logs connection URLs (censored) and
    # expected failures as errors; our own layers report those with context.
    logging.basicConfig(level=logging.CRITICAL, stream=stream, force=True)


def _escape_control_characters(_: Any, __: str, event: Any) -> Any:
    """In the message of an application, which may quote a caller; structlog escapes the other values."""
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
    """From an event to a line. The line is masked when it is finished: nested values and tracebacks too."""
    if as_json:
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(), _mask_line]
    # A plain traceback: the default one prints local variables, credentials among them.
    plain = structlog.dev.plain_traceback
    colors = (stream or sys.stderr).isatty()
    return [
        _escape_control_characters,
        structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain),
        _mask_line,
    ]


# Levels of libraries whose records are of no use to the author of an application.
QUIET_LIBRARIES: Mapping[str, str] = {
    "asyncio": "warning",
    # The HTTP client logs each URL, whose path or query may hold a secret.
    "httpx": "warning",
    "py4j": "warning",
}


def configure_application_logs(
    levels: Mapping[str, str], *, json: bool | None = None, stream: TextIO | None = None
) -> None:
    """Write what an application logs with Python's `logging` as events; `component` is the name of the logger.

    `levels`: the level of each logger, `root` for all others (`info` if not given).
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


def configure_events(level: str, *, as_json: bool, stream: TextIO | None = None) -> None:
    """Set up structlog, and no other logging. `stream=None`: whatever standard error is when something is written."""
    structlog.configure(
        processors=[*_COMMON, *_rendering(as_json=as_json, stream=stream)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=lambda *_: structlog.PrintLogger(stream or sys.stderr),
        cache_logger_on_first_use=False,
    )


def get_logger(name: str, **bound: Any) -> Logger:
    """A logger whose events carry `component=name` and the given keys.

    In a program that has not configured structlog, warnings go to standard error: structlog's own default would
    print everything to standard output.
    """
    if not structlog.is_configured():
        configure_events("warning", as_json=False)
    logger: Logger = structlog.get_logger(component=name, **bound)
    return logger
