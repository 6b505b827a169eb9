"""Describe an exception of Spark in one line, for the answer to a request whose query failed.

Used by the session factory for all handlers, and by pipelines. A caller never receives a Java or Python stack, nor the
plan that Spark appends to its messages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from py4j.protocol import Py4JJavaError, Py4JNetworkError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException, PySparkException

from osrdyne.logs import mask_uri
from osrdyne_worker.app.errors import RequestError
from osrdyne_worker.spark.failures import missing_jars
from osrdyne_worker.spark.failures.exhaustion import exhaustion
from osrdyne_worker.spark.failures.store_errors import StoreFailure, store_failure
from osrdyne_worker.spark.java.jvm import causes

_CONDITION = re.compile(r"\[([A-Z][A-Z0-9_.]*)\]\s*")
_JAVA_CLASS = re.compile(r"^(?:[a-z_][\w$]*\.)+[A-Z][\w$]*:\s*")
_SQL_STATE = re.compile(r"\s*SQLSTATE: (\w{5}).*$")
_HEADER = re.compile(r"CSV header does not conform to the schema.*?Header: ([^\n]*)\n\s*Schema: ([^\n]*)", re.DOTALL)
_MAX_LENGTH = 1_000
_TRACEBACK = "Traceback (most recent call last):"
_PYTHON_CONDITION = "PYTHON_EXCEPTION"
_PYTHON_SQL_STATE = "38000"

SPARK_GONE = "SPARK_GONE"
"""The condition of a lost connection to the JVM."""
_NOT_PARQUET = "is not a Parquet file"
"""In the message of Parquet about a file of another kind."""
_MAX_LINES = 8
"""Lines of a message of Spark before its SQLSTATE that are kept."""

CALL_FROM = "Call From "
"""In the message of a failed call of Hadoop to another host: `Call From HOST to HOST:PORT failed on …`."""


@dataclass(frozen=True, slots=True)
class SparkFailure:
    """`condition` is Spark's error class, such as `DIVIDE_BY_ZERO`; `is_query`: the query is at fault."""

    condition: str
    message: str
    sql_state: str | None = None
    is_query: bool = False
    exhausted: bool = False
    """The query has exhausted memory, or a limit on results; Spark itself is healthy."""
    store: StoreFailure | None = None
    """The failure of S3 that is the cause."""
    exception: str | None = None
    """The class of the exception that a Python function of the query has raised."""

    @property
    def code(self) -> int:
        """The HTTP-like code."""
        return 413 if self.condition == "answer_too_large" else 400 if self.is_query else 500

    def refusal(self) -> RequestError:
        """The error for the caller, with the SQLSTATE and the Python exception as details."""
        details = {"sql_state": self.sql_state, "exception": self.exception}
        return RequestError(
            self.message, self.code, self.condition, {name: value for name, value in details.items() if value}
        )


def describe(error: BaseException) -> SparkFailure | None:
    """Describe `error`; None if it does not come from Spark."""
    if isinstance(error, PySparkException):
        text, condition, sql_state = str(error), error.getCondition(), error.getSqlState()
    elif isinstance(error, Py4JJavaError):
        text, condition, sql_state = _root_message(error), None, None
    elif isinstance(error, Py4JNetworkError):  # not its base class: a call with wrong arguments raises that
        text, condition, sql_state = "The connection to Spark's Java process was lost.", SPARK_GONE, None
    else:
        return None
    store = store_failure(_all_messages(error) or text) if "s3a" in f"{text} {error}" else None
    if store is not None:
        return SparkFailure(condition="OBJECT_STORE", message=store.message, store=store)
    exhausted = exhaustion(error)
    if exhausted is not None:
        return SparkFailure(condition=exhausted.condition, message=exhausted.message, exhausted=True)
    if _TRACEBACK in text and condition in (None, _PYTHON_CONDITION):
        exception, message = _python_error(text)
        return SparkFailure(_PYTHON_CONDITION, message, sql_state=_PYTHON_SQL_STATE, exception=exception)
    line = _first_line(text)
    found = _CONDITION.search(line)
    state = _SQL_STATE.search(line)
    condition = condition or (found[1] if found else "SPARK_ERROR")
    sql_state = sql_state or (state[1] if state else None)
    message = _SQL_STATE.sub("", line[found.end() :] if found else line).strip()[:_MAX_LENGTH]
    if condition.startswith("FAILED_READ_FILE") and (header := _HEADER.search(_all_messages(error))) is not None:
        # Names of columns only. Other causes may quote values, which a filter may leave out.
        message = f"{message} The header of the file is {header[1].strip()}, and the columns are {header[2].strip()}."
    if condition.startswith("FAILED_READ_FILE") and _NOT_PARQUET in _all_messages(error):
        message = f"{message} It is not a Parquet file: set options.pathGlobFilter, to *.parquet for example."
    remedy = missing_jars.remedy(text[:_MAX_LENGTH])
    return SparkFailure(
        condition=condition,
        message=f"{message.rstrip('.')}. {remedy}" if remedy else message or condition,
        sql_state=sql_state,
        # SQLSTATE 21: wrong number of rows; 22: invalid data in an expression; 42: invalid name or syntax.
        is_query=isinstance(error, AnalysisException) or (sql_state or "").startswith(("21", "22", "42")),
    )


def _root_message(error: Py4JJavaError) -> str:
    """The message of the deepest cause that has one; prefers an error of Spark itself."""
    text = ""
    for cause in causes(error.java_exception):
        message = str(cause.toString())
        # The address is only in this message of Hadoop: the message of its cause is "Connection refused".
        if _CONDITION.search(message) or CALL_FROM in message:
            return message
        text = message or text
    return text


def _all_messages(error: BaseException) -> str:
    """The exceptions of Java in `error`, one in a line; empty for an exception of Python alone."""
    origin = error.java_exception if isinstance(error, Py4JJavaError) else getattr(error, "_origin", None)
    return "\n".join(str(cause.toString()) for cause in causes(origin))


def _python_error(text: str) -> tuple[str, str]:
    """The class and the message of the exception at the end of the last traceback in `text`.

    The lines of a traceback are indented, the exception below it is not; the lines of Java's stack are indented again.
    """
    lines = iter(text.rpartition(_TRACEBACK)[2].splitlines()[1:])
    found = next((line for line in lines if line and not line[0].isspace()), "")
    for line in lines:  # a message of several lines
        if not line or line[0].isspace():
            break
        found += f" {line}"
    exception = found.partition(":")[0].strip()
    return exception, mask_uri(found.strip()[:_MAX_LENGTH]) or "A Python function of the request failed."


def _first_line(text: str) -> str:
    """The first line of text, without the name of the Java class in front; a message of Spark up to its SQLSTATE."""
    lines = [line.strip() for line in text.splitlines()]
    for place, line in enumerate(lines):
        stripped = _JAVA_CLASS.sub("", line)
        if not stripped or stripped.startswith("at "):
            continue
        if _CONDITION.match(stripped):
            message = lines[place : place + _MAX_LINES]
            last = next((number for number, part in enumerate(message) if "SQLSTATE:" in part), 0)
            return " ".join([stripped, *message[1 : last + 1]])
        return stripped
    return ""
