"""Groups of jobs: the properties of a thread that decide about the group and the pool of its jobs, and what Spark's
status tracker reports about a group: its progress, its memory, and its stray tasks.

A stray task continues although its group has ended. Used by `session` and by pipelines; Spark Connect has no status
tracker. Spark's events about tasks may be late, and Spark drops some under load.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

POOL = "spark.scheduler.pool"
"""Property of a thread: the pool of Spark's fair scheduler. Each key of a pooled process has its own."""
GROUP = "spark.jobGroup.id"
"""Property of a thread: the group of its jobs, by which they are cancelled."""
JOB_PROPERTIES = (POOL, GROUP, "spark.job.interruptOnCancel")

_MAX_ENDED = 100
"""Ended groups that are checked, with one or more calls to the JVM each."""
_MAX_TASKS = 100
"""Running tasks of a stage that are checked."""
_CHECKS = 3
"""Checks without a task after which a group is forgotten: the event of a task's start may be late."""


def job_properties(session: Any, names: Iterable[str] = JOB_PROPERTIES) -> Mapping[str, str]:
    """The properties of this thread that are set; empty with Spark Connect, which has none."""
    if not hasattr(session, "_jsparkSession"):
        return {}
    values = {name: session.sparkContext.getLocalProperty(name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def set_job_properties(session: Any, properties: Mapping[str, str]) -> None:
    """Set the properties of another thread in this one. A new thread has none: its jobs would run in Spark's default
    pool and in no group."""
    for name, value in properties.items():
        session.sparkContext.setLocalProperty(name, value)


def progress_of(session: Any, group_id: str) -> Mapping[str, int]:
    """Running jobs of the group, and the tasks of all its jobs so far."""
    tracker = session.sparkContext.statusTracker()
    jobs = _jobs(tracker, group_id)
    stages = _stages(tracker, jobs)
    return {
        "jobs": sum(job.status == "RUNNING" for job in jobs),
        "tasks_done": sum(stage.numCompletedTasks for stage in stages),
        "tasks_total": sum(stage.numTasks for stage in stages),
    }


def job_progress_of(session: Any, group_id: str) -> Mapping[str, int]:
    """Running jobs of the group, and the stages, tasks and read rows of all its jobs so far (`JobProgress`)."""
    tracker = session.sparkContext.statusTracker()
    jobs = _jobs(tracker, group_id)
    store = session.sparkContext._jsc.sc().statusStore()
    found = [store.lastStageAttempt(stage.stageId) for stage in _stages(tracker, jobs)]
    # A later job names the stages whose results it uses again: Spark skips them, and they never have a finished task.
    stages = [stage for stage in found if stage.status().toString() != "SKIPPED"]
    return {
        "jobs": sum(job.status == "RUNNING" for job in jobs),
        "stages_done": sum(stage.status().toString() == "COMPLETE" for stage in stages),
        "stages_total": len(stages),
        "tasks_done": sum(stage.numCompleteTasks() for stage in stages),
        "tasks_total": sum(stage.numTasks() for stage in stages),
        "rows": sum(stage.inputRecords() for stage in stages),
    }


class EndedGroups:
    """The last groups that were cancelled or failed, each until none of its tasks runs. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[str, int] = {}
        """With the number of checks since the last one that found a task."""

    def add(self, group_id: str) -> None:
        with self._lock:
            self._groups[group_id] = 0
            for oldest in list(self._groups)[:-_MAX_ENDED]:
                del self._groups[oldest]

    def stray_tasks(self, session: Any) -> Mapping[str, int]:
        """The number of stray tasks by group. Tasks of an active stage do not count: a job waits for them."""
        with self._lock:
            groups = dict(self._groups)
        if not groups:
            return {}
        tracker = session.sparkContext.statusTracker()
        active = set(tracker.getActiveStageIds())
        strays: dict[str, int] = {}
        for group_id, checks in groups.items():
            stages = [stage for stage in _stages(tracker, _jobs(tracker, group_id)) if stage.numActiveTasks > 0]
            self._record(group_id, 0 if stages else checks + 1, before=checks)
            if count := sum(stage.numActiveTasks for stage in stages if stage.stageId not in active):
                strays[group_id] = count
        return strays if strays and _any_task_runs(session) else {}

    def _record(self, group_id: str, checks: int, *, before: int) -> None:
        with self._lock:
            if self._groups.get(group_id) != before:
                return  # removed or added again during the check
            if checks == _CHECKS:
                del self._groups[group_id]
            else:
                self._groups[group_id] = checks


def memory_held(session: Any, groups: Iterable[str]) -> Mapping[str, int]:
    """Bytes of the heap that each group holds according to Spark: the execution memory (sorts, joins, hash tables) of
    its tasks in this JVM, and the results of finished tasks of its jobs. Objects that functions create are not counted.
    """
    tracker = session.sparkContext.statusTracker()
    return {group: _memory_of_group(session, tracker, group) for group in groups}


def _memory_of_group(session: Any, tracker: Any, group_id: str) -> int:
    jvm, store = session._jvm, session.sparkContext._jsc.sc().statusStore()
    memory = jvm.org.apache.spark.SparkEnv.get().memoryManager()
    running = jvm.java.util.ArrayList([jvm.org.apache.spark.status.api.v1.TaskStatus.RUNNING])
    held = 0
    for stage in _stages(tracker, [job for job in _jobs(tracker, group_id) if job.status == "RUNNING"]):
        data = store.lastStageAttempt(stage.stageId)
        held += data.resultSize()
        tasks = store.taskList(
            stage.stageId, data.attemptId(), 0, _MAX_TASKS, jvm.scala.Option.empty(), True, running
        ).iterator()
        while tasks.hasNext():
            held += memory.getExecutionMemoryUsageForTask(tasks.next().taskId())
    return held


def _jobs(tracker: Any, group_id: str) -> list[Any]:
    jobs = [tracker.getJobInfo(job_id) for job_id in tracker.getJobIdsForGroup(group_id)]
    return [job for job in jobs if job is not None]


def _stages(tracker: Any, jobs: Iterable[Any]) -> list[Any]:
    stages = [tracker.getStageInfo(stage_id) for stage_id in {stage_id for job in jobs for stage_id in job.stageIds}]
    return [stage for stage in stages if stage is not None]


def _any_task_runs(session: Any) -> bool:
    """Whether the scheduler, which does not depend on events, has a running task. True if unknown."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    try:
        running = session.sparkContext._jsc.sc().taskScheduler().runningTasksByExecutors().valuesIterator()
        while running.hasNext():
            if running.next() > 0:
                return True
    except Py4JError:
        return True
    return False
