"""Recognise from an exception of Spark what a request has exhausted: memory, a result limit, or its Python process.

Used by `session` for all applications and by `errors` for pipelines. Reads text only and does not import pyspark: the
module of the session is imported before Spark is known to be installed.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_TEXT = 200_000
"""Characters of an exception that are read; the cause is at its beginning or at the end of one of its first stacks."""


@dataclass(frozen=True, slots=True)
class Exhaustion:
    """`condition` is an error code for programs, `message` one line with the cause and the remedy."""

    condition: str
    message: str
    code: int = 500


_CAUSES = (
    (
        ("bigger than spark.driver.maxResultSize", "larger than spark.driver.maxResultSize"),
        Exhaustion(
            "answer_too_large",
            "The result is above the limit of a worker (spark.driver.maxResultSize): ask for fewer rows or columns, or "
            "for a stream; the SQL pipeline also has pages (page_size) and /export.",
            413,
        ),
    ),
    (
        ("Python worker exited unexpectedly", "Python worker process terminated", "PYTHON_WORKER_EXITED"),
        Exhaustion(
            "python_worker_crashed",
            "A Python process in which Spark ran a function of this request was killed or crashed; most often it ran "
            "out of memory. Let the function use less memory, or give the worker more.",
        ),
    ),
    (
        (
            "java.lang.OutOfMemoryError",
            "memory.OutOfMemoryException",
            "SparkOutOfMemoryError",
            "UNABLE_TO_ACQUIRE_MEMORY",
        ),
        Exhaustion(
            "out_of_memory",
            "The request ran out of memory in Spark's Java process: let it use less data at once, or raise "
            "spark.driver.memory.",
        ),
    ),
    (
        ("\nMemoryError", " MemoryError", "ArrowMemoryError"),
        Exhaustion(
            "out_of_memory",
            "The request ran out of memory in a Python process of Spark: let its function use less memory, or raise "
            "spark.executor.pyspark.memory.",
        ),
    ),
)


def exhaustion(error: BaseException) -> Exhaustion | None:
    """The exhausted resource that `error` names; None for any other error."""
    text = str(error)[:MAX_TEXT]
    for words, cause in _CAUSES:
        if any(word in text for word in words):
            return cause
    return None
