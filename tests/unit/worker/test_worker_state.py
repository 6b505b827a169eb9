"""When a worker gives up on its session, stray tasks, its ready file, and a control exchange that it cannot use."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from structlog.testing import capture_logs
from worker_environments import worker_environment

from osrdyne.amqp import Consumer
from osrdyne.errors import BrokerError, BrokerNotFoundError, BrokerUnavailableError
from osrdyne_worker.runtime.control import ControlWarnings, listen
from osrdyne_worker.runtime.ready_file import NO_READY_FILE, ReadyFile
from osrdyne_worker.runtime.session_health import SILENCE_TIMEOUT, SessionHealth
from osrdyne_worker.spark.session import SparkSessions

Look = tuple[float, dict[str, int]]
STRAY = {"g": 1}


@pytest.mark.parametrize(
    ("idle", "looks", "tolerated"),
    [
        (True, [(now, STRAY) for now in (0.0, 5.0, 29.0, 30.0)], [True, True, True, False]),
        (False, [(now, STRAY) for now in (0.0, 5.0, 119.0, 120.0)], [True, True, True, False]),
        (True, [(0, STRAY), (20, {}), (40, STRAY), (60, STRAY)], [True] * 4),
        (True, [(now, {f"g{now // 10}": 1}) for now in range(0, 200, 5)], [True] * 40),
        # The session did not answer in between, and its figures may be old.
        (True, [(now, STRAY) for now in (0.0, 100.0, 105.0)], [True, True, False]),
    ],
    ids=["idle", "busy", "ended in time", "one after the other", "two looks far apart"],
)
def test_stray_tasks_are_tolerated_for_a_while_only(idle, looks, tolerated):
    watch = SessionHealth(30.0)
    reasons = [watch.answered(strays=strays, idle=idle, now=now) for now, strays in looks]
    assert [reason is None for reason in reasons] == tolerated


def test_silence_that_lasts_is_the_end_of_a_session_and_an_answer_ends_the_silence():
    watch = SessionHealth(30.0)
    assert watch.timed_out(now=0.0) is None
    watch.answered(strays={}, idle=True, now=10.0)
    reasons = [watch.timed_out(now=20.0 + silent) for silent in (0.0, SILENCE_TIMEOUT - 1, SILENCE_TIMEOUT)]
    assert [reason is None for reason in reasons] == [True, True, False]


def test_ready_file_comes_and_goes_and_an_error_is_reported(tmp_path):
    path = tmp_path / "ready"
    file = ReadyFile.from_variables({"WORKER_READY_FILE": str(path)})
    file.write()
    assert path.exists()
    for _ in range(2):
        file.delete()
        assert not path.exists()
    with capture_logs() as entries:
        ReadyFile(tmp_path / "missing" / "ready").write()
    assert [entry["log_level"] for entry in entries] == ["error"]
    assert ReadyFile.from_variables({"WORKER_READY_FILE": ""}) == NO_READY_FILE


MISSING = BrokerNotFoundError("Could not bind: no exchange 'p-ctl-xchg'")
REFUSED = BrokerUnavailableError("the queue is locked")


class Outages:
    """The connection, the clock and the credit of a worker. Every attempt to listen fails, every third one after it has
    listened; the connection ends after `most` of them."""

    def __init__(self, most: int, error: BrokerError) -> None:
        self.is_closed = False
        self.attempts, self.most = 0, most
        self.error = error
        self.delays: list[float] = []
        self.available: list[bool | None] = []

    async def channel(self) -> AsyncMock:
        self.attempts += 1
        channel, consumer = AsyncMock(), Consumer("control")
        consumer.end(self.error)
        channel.consume.return_value = consumer
        channel.declare_queue.side_effect = self.error if self.attempts % 3 else None
        return channel

    async def sleep(self, seconds: float) -> None:
        self.delays.append(seconds)
        self.is_closed = self.attempts == self.most

    def listening(self, available: bool | None) -> None:
        self.available.append(available)

    async def run(self, *, has_credit: bool) -> list[str]:
        """The warnings."""
        credit: Any = self if has_credit else None
        given: Any = {"routing_keys": (), "on_listening": lambda: None, "on_forged": lambda: None, "clock": self}
        with capture_logs() as logs:
            await listen(self, worker_environment(), print, warnings=ControlWarnings(), credit=credit, **given)
        return [entry["event"] for entry in logs if entry["log_level"] == "warning"]


@pytest.mark.parametrize(
    ("error", "warnings", "available"), [(MISSING, 1, False), (REFUSED, 3, None)], ids=["missing", "refused"]
)
async def test_missing_exchange_is_one_warning_and_delays_begin_anew(error, warnings, available):
    outages = Outages(6, error)
    assert len(await outages.run(has_credit=False)) == warnings
    assert [round(delay) for delay in outages.delays] == [1, 2, 1, 2, 4, 1]
    outages = Outages(1, error)
    await outages.run(has_credit=True)
    assert outages.available[-1] is available, "no stream begins, which would end after a minute without credit"


@dataclass(slots=True)
class Spark:
    """What Spark reports: each group has one job, of one stage. Also its context and status tracker. `active_tasks`: by
    group, as in its reports; `wanted`: groups whose stage some job waits for; `running`: tasks that the scheduler
    knows of."""

    active_tasks: dict[str, int] = field(default_factory=dict)
    wanted: set[str] = field(default_factory=set)
    running: Callable[[], int] = lambda: 1
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
        counts = [self.running()]
        return SimpleNamespace(valuesIterator=lambda: SimpleNamespace(hasNext=lambda: bool(counts), next=counts.pop))

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


def test_tasks_that_go_on_are_strays_of_a_failed_group_and_not_asked_about_of_one_that_ended_well():
    """A busy worker has many of the latter, and their last reports may be late."""
    spark, sessions = Spark({"g": 1, "well": 1}), SparkSessions()
    sessions.run_in_group(spark, "well", lambda: None)
    with pytest.raises(ValueError, match="on purpose"):
        sessions.run_in_group(spark, "g", fail)
    assert (sessions.stray_tasks(spark), spark.asked) == ({"g": 1}, ["g"])


def test_group_without_tasks_is_checked_a_few_times_only_because_starts_are_reported_late():
    spark = Spark({"g": 0})
    sessions = after_a_cancel(spark)
    assert [sessions.stray_tasks(spark) for _ in range(10)] == [{}] * 10
    assert spark.asked == ["g"] * 3
    sessions = after_a_cancel(spark)
    assert sessions.stray_tasks(spark) == {}
    spark.active_tasks["g"] = 1
    assert sessions.stray_tasks(spark) == {"g": 1}
    spark.wanted.add("g")
    assert sessions.stray_tasks(spark) == {}, "a job waits for its stage"
    spark.wanted.clear()
    assert sessions.stray_tasks(spark) == {"g": 1}


def test_spark_is_believed_unless_its_scheduler_knows_that_no_task_runs():
    def refuse():
        raise Py4JError("Method runningTasksByExecutors([]) does not exist")

    for running, strays in ((lambda: 0, {}), (lambda: 2, {"g": 2}), (refuse, {"g": 2})):
        spark = Spark({"g": 2, "another": 3}, running=running)
        assert after_a_cancel(spark).stray_tasks(spark) == strays


def test_groups_that_are_asked_about_are_bounded_and_none_is_lost_while_it_is_checked():
    sessions = SparkSessions()

    class BusySpark(Spark):
        def getStageInfo(self, stage: str) -> Any:
            for number in range(500):
                sessions.cancel(self, f"other{number}")
            return super().getStageInfo(stage)

    spark = BusySpark({"g": 1})
    sessions.cancel(spark, "g")
    assert sessions.stray_tasks(spark) == {"g": 1}
    others = [f"other{number}" for number in range(500)]
    assert list(sessions.stray_tasks(Spark(dict.fromkeys(others, 1)))) == others[400:]
