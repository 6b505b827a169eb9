"""How long Spark's tasks have run, in seconds on one core: of a whole application, and of each key of a pooled process.

Used by `session` and `key_sessions`, for the reports of a worker. Spark's events about tasks may be late, and Spark
drops some under load: the figures are for an overview of the cost, not for a bill.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from osrdyne_worker.spark.java.janino import compiled_class


class ApplicationTimes:
    """The time of all tasks of an application that have ended, from Spark's list of executors."""

    def __init__(self) -> None:
        # Spark forgets ended executors, the oldest ones first.
        self._milliseconds: dict[str, int] = {}

    def seconds(self, session: Any) -> float:
        executors = session.sparkContext._jsc.sc().statusStore().executorList(False).iterator()
        while executors.hasNext():
            executor = executors.next()
            name, took = str(executor.id()), int(executor.totalDuration())
            self._milliseconds[name] = max(took, self._milliseconds.get(name, 0))
        return sum(self._milliseconds.values()) / 1000


class PoolTimes:
    """The time of the tasks in each scheduler pool, from a listener in the JVM."""

    def __init__(self, session: Any) -> None:
        context = session.sparkContext
        gateway = context._gateway
        listener = compiled_class(gateway, files(__package__) / "TaskTimes.java")
        self._listener = listener.getDeclaredConstructor(gateway.new_array(gateway.jvm.Class, 0)).newInstance(
            gateway.new_array(gateway.jvm.Object, 0)
        )
        context._jsc.sc().addSparkListener(self._listener)

    def seconds(self, pool: str) -> float:
        return int(self._listener.of(pool)) / 1000
