"""Which Spark tasks count as strays: those of groups that are over, in stages that no job waits for any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError  # type: ignore[import-untyped]

from osrdyne_worker.spark.session import SparkSessions


@dataclass(slots=True)
class Spark:
    """What Spark reports: each group has one job, of one stage. Also its own context and status tracker."""

    active_tasks: dict[str, int] = field(default_factory=dict)
    """By group, as in its reports."""
    wanted: set[str] = field(default_factory=set)
    """Groups whose stage some job waits for."""
    running: Callable[[], int] = lambda: 1
    """Tasks that the scheduler knows of."""
    asked: list[str] = field(default_factory=list)

    @property
    def sparkContext(self) -> Any:
        scheduler = SimpleNamespace(taskScheduler=lambda: SimpleNamespace(runningTasksByExecutors=self._by_executors))
        java = SimpleNamespace(
            sc=lambda: SimpleNamespace(**vars(scheduler), cancelJobGroupAndFutureJobs=lambda group: None),
            clearJobGroup=lambda: None,
        )
        return SimpleNamespace(_jsc=java, statusTracker=lambda: self, setJobGroup=lambda *_, **__: None)

    def _by_executors(self) -> Any:
        counts: Iterator[int] = iter([self.running()])
        left = [True]
        return SimpleNamespace(
            valuesIterator=lambda: SimpleNamespace(hasNext=lambda: bool(left) and left.pop(), next=lambda: next(counts))
        )

    def getActiveStageIds(self) -> list[str]:
        return list(self.wanted)

    def getJobIdsForGroup(self, group: str) -> list[str]:
        self.asked.append(group)
        return [group] if group in self.active_tasks else []

    def getJobInfo(self, job: str) -> Any:
        return SimpleNamespace(stageIds=[job], status="FAILED")

    def getStageInfo(self, stage: str) -> Any:
        return SimpleNamespace(stageId=stage, numActiveTasks=self.active_tasks[stage])


def fail() -> None:
    raise ValueError("on purpose")


def after_a_cancel(spark: Spark) -> SparkSessions:
    sessions = SparkSessions()
    sessions.cancel(spark, "g")
    return sessions


def test_tasks_that_go_on_are_strays_of_a_failed_group_and_not_asked_about_of_one_that_ended_well() -> None:
    """A busy worker has many of the latter, and their last reports may be late."""
    spark, sessions = Spark({"g": 1, "well": 1}), SparkSessions()
    sessions.run_in_group(spark, "well", lambda: None)
    with pytest.raises(ValueError, match="on purpose"):
        sessions.run_in_group(spark, "g", fail)
    assert (sessions.stray_tasks(spark), spark.asked) == ({"g": 1}, ["g"])


def test_stage_that_a_job_waits_for_has_no_strays_and_is_checked_again() -> None:
    spark = Spark({"g": 1}, wanted={"g"})
    sessions = after_a_cancel(spark)
    assert sessions.stray_tasks(spark) == {}
    spark.wanted.clear()
    assert sessions.stray_tasks(spark) == {"g": 1}


def test_group_without_tasks_is_checked_a_few_times_only_because_starts_are_reported_late() -> None:
    spark = Spark({"g": 0})
    sessions = after_a_cancel(spark)
    assert [sessions.stray_tasks(spark) for _ in range(10)] == [{}] * 10
    assert spark.asked == ["g"] * 3
    sessions = after_a_cancel(spark)
    assert sessions.stray_tasks(spark) == {}
    spark.active_tasks["g"] = 1
    assert sessions.stray_tasks(spark) == {"g": 1}


def test_spark_is_believed_unless_its_scheduler_knows_that_no_task_runs() -> None:
    def refuse() -> int:
        raise Py4JError("Method runningTasksByExecutors([]) does not exist")

    for running, strays in ((lambda: 0, {}), (lambda: 2, {"g": 2}), (refuse, {"g": 2})):
        spark = Spark({"g": 2, "another": 3}, running=running)
        assert after_a_cancel(spark).stray_tasks(spark) == strays


def test_number_of_groups_that_are_asked_about_is_bounded() -> None:
    spark, sessions = Spark({f"g{number}": 1 for number in range(500)}), SparkSessions()
    for number in range(500):
        sessions.cancel(spark, f"g{number}")
    assert list(sessions.stray_tasks(spark)) == [f"g{number}" for number in range(400, 500)]


def test_group_that_others_replace_while_it_is_checked_is_still_reported() -> None:
    sessions = SparkSessions()

    class BusySpark(Spark):
        def getStageInfo(self, stage: str) -> Any:
            for number in range(100):
                sessions.cancel(self, f"other{number}")
            return super().getStageInfo(stage)

    spark = BusySpark({"g": 1})
    sessions.cancel(spark, "g")
    assert sessions.stray_tasks(spark) == {"g": 1}
    assert sessions.stray_tasks(spark) == {}
