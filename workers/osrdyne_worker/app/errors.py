"""Errors of handlers, and the one-line description of any exception for the caller of a worker."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path

from osrdyne.errors import OsrdyneError
from osrdyne.logs import mask_uri
from osrdyne.protocol.refusals import KeyRefusal

MAX_LINES = 2
"""py4j names its own call on the first line and the cause on the second."""
MAX_CHARS = 1000


class RequestError(OsrdyneError):
    """Refuses a request: the caller receives `error` with this message, and no traceback is logged.

    `code` is the HTTP-like number, `error_code` a word for programs, `details` further JSON facts for the caller.
    """

    def __init__(
        self,
        message: str,
        code: int = 400,
        error_code: str = "bad_request",
        details: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message, code=code, error_code=error_code)
        self.code = code
        self.error_code = error_code
        self.details = dict(details or {})


def refusal_of_key(error: Exception) -> KeyRefusal | None:
    """The error with which requests of the key are answered if it ended the start; None: the start has failed."""
    if not isinstance(error, RequestError):
        return None
    return KeyRefusal(mask_uri(error.message), error.code, error.error_code, error.details)


def answer_too_large(size: str, size_bytes: int, max_bytes: int) -> RequestError:
    """The refusal of an answer that fits into no message. `size`: in words, such as "has 5 bytes"."""
    return RequestError(
        f"The answer {size}; at most {max_bytes} can be sent. Ask for less at once, or for a stream if it is a table; "
        "the SQL pipeline also has pages (page_size) and /export.",
        413,
        "answer_too_large",
        {"size_bytes": size_bytes, "max_bytes": max_bytes},
    )


class DataChangedError(RequestError):
    """The data has changed since it was loaded, and cannot be read any more.

    If a handler raises it, the worker reloads the data and runs the handler once more. If it raises it again, the
    caller receives `error` with this message.
    """

    def __init__(self, message: str, details: Mapping[str, object] | None = None) -> None:
        super().__init__(message, 503, "data_changed", details)


class CallCancelledError(OsrdyneError):
    """The caller cancelled the request, or its deadline passed: the handler should stop."""


def describe(error: BaseException) -> str:
    """The type and message of an exception in one line, without passwords; errors of osrdyne without their type."""
    if isinstance(error, OsrdyneError):
        return mask_uri(error.message)
    try:
        whole = str(error)
    except Exception:  # py4j reads the text of its exceptions from the JVM, which may have ended
        whole = ""
    lines = [line.strip() for line in whole.splitlines() if line.strip()]
    text = " ".join(lines[:MAX_LINES])[:MAX_CHARS]
    return f"{type(error).__name__}: {mask_uri(text)}" if text else type(error).__name__


def describe_with_place(error: BaseException) -> str:
    """`describe`, with the file and line that raised the exception: for errors in the application's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    # The message of a syntax error has its place; the frames lead to the code that imports.
    if isinstance(error, (OsrdyneError, SyntaxError)) or not frames:
        return describe(error)
    return f"{describe(error)} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
