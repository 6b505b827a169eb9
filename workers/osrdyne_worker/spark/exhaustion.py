"""What a request has exhausted, read from the exception that Spark raised: memory, or a Python worker of its own.

Used by `session` for every application and by `errors` for pipelines. Pure text: no pyspark is imported, because the
session's module is imported before Spark is known to be there.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_TEXT = 200_000
"""Characters of an exception that are read; the cause stands at its beginning or ends one of its first stacks."""


@dataclass(frozen=True, slots=True)
class Exhaustion:
    """`condition` is a word for programs, `message` one line that names the cause and the remedy."""

    condition: str
    message: str
    code: int = 500


_CAUSES = (
    (
        ("bigger than spark.driver.maxResultSize", "larger than spark.driver.maxResultSize"),
        Exhaustion(
            "answer_too_large",
            "The result is larger than a worker collects (spark.driver.maxResultSize): ask for fewer rows or columns.",
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
    """What `error` says was exhausted; None when it says something else."""
    text = str(error)[:MAX_TEXT]
    for words, cause in _CAUSES:
        if any(word in text for word in words):
            return cause
    return None
