"""The session of a worker: job groups, cancelling, and the JVM's end."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import psutil
import pytest
from asking import SLOW, active_jobs, wait_for

from osrdyne.errors import ConfigurationError
from osrdyne.protocol.names import Key
from osrdyne.protocol.progress import JobProgress
from osrdyne_worker import Context, RequestError
from osrdyne_worker.pipelines.views.caching import BackgroundCaching
from osrdyne_worker.spark.failures.errors import describe
from osrdyne_worker.spark.java.heap import JvmHeap
from osrdyne_worker.spark.session import SparkSessions


@pytest.fixture
def thread(spark):
    with ThreadPoolExecutor(2) as executor:
        yield executor
        spark.sparkContext.cancelAllJobs()


def active_tasks(spark: Any) -> int:
    tracker = spark.sparkContext.statusTracker()
    stages = [tracker.getStageInfo(stage_id) for stage_id in tracker.getActiveStageIds()]
    return sum(stage.numActiveTasks for stage in stages if stage is not None)


@pytest.mark.nightly
@pytest.mark.proves("spark/spark-s-tasks-continue")
def test_task_that_does_not_react_to_being_cancelled_is_a_stray(sessions, spark, thread, tmp_path):
    # Spark interrupts the task, which does not end a read from another process. The test ends it by closing the pipe.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    stubborn = spark.sparkContext._jsc.parallelize(["row"], 1).pipe(f"cat {pipe}")
    try:
        running = thread.submit(sessions.run_in_group, spark, "stubborn", stubborn.collect)
        wait_for(lambda: active_tasks(spark) == 1 or running.done())
        assert sessions.stray_tasks(spark) == {}
        sessions.cancel(spark, "stubborn")
        assert running.exception(timeout=240) is not None
        wait_for(lambda: sessions.stray_tasks(spark) == {"stubborn": 1})
    finally:
        os.close(writer)
    wait_for(lambda: sessions.stray_tasks(spark) == {})


def test_cancelled_group_stops_its_job_and_leaves_the_other(sessions, spark, thread):
    slow = thread.submit(sessions.run_in_group, spark, "one", lambda: spark.sql(SLOW).toArrow())
    wait_for(lambda: sessions.progress(spark, "one")["jobs"] == 1)
    sessions.cancel(spark, "two")
    assert sessions.run_in_group(spark, "three", lambda: spark.range(5).count()) == 5
    assert sessions.progress(spark, "one")["jobs"] == 1
    sessions.cancel(spark, "one")
    failure = describe(slow.exception(timeout=240) or ValueError())
    assert failure is not None
    assert "cancelled" in failure.message.lower()
    wait_for(lambda: not active_jobs(spark))


def test_job_of_a_group_cancelled_before_it_started_does_not_run(sessions, spark):
    def work():
        sessions.cancel(spark, "early")
        return spark.range(5).collect()

    with pytest.raises(Exception, match="cancel"):
        sessions.run_in_group(spark, "early", work)


def test_progress_counts_the_tasks_of_the_group(sessions, spark):
    sessions.run_in_group(spark, "counted", lambda: spark.range(0, 100, 1, 3).rdd.count())
    wait_for(lambda: sessions.progress(spark, "counted") == {"jobs": 0, "tasks_done": 3, "tasks_total": 3})
    assert sessions.progress(spark, "never seen") == {"jobs": 0, "tasks_done": 0, "tasks_total": 0}


def test_progress_of_jobs_has_stages_tasks_and_rows(sessions, spark, tmp_path):
    spark.range(0, 1000, 1, 4).write.parquet(str(tmp_path / "table"))
    table = spark.read.parquet(str(tmp_path / "table"))
    assert sessions.job_progress(spark, "two stages") == asdict(JobProgress())
    sessions.run_in_group(spark, "two stages", lambda: table.groupBy((table.id % 7).alias("k")).count().collect())

    def is_complete():
        found = JobProgress(**sessions.job_progress(spark, "two stages"))
        done = found.stages_done == found.stages_total >= 2 and found.tasks_done == found.tasks_total >= 2
        return done and found.jobs == 0 and found.rows == 1000

    wait_for(is_complete)


def test_thread_belongs_to_its_group_while_it_works_and_none_is_left(sessions, spark):
    name = 'a,b "c" é漢🚄\n'
    assert sessions.run_in_group(spark, name, lambda: spark.range(5).count()) == 5
    assert spark.sparkContext.getLocalProperty("spark.jobGroup.id") is None
    before = threading.active_count()
    for place in range(5):
        sessions.run_in_group(spark, f"group {place}", lambda: spark.range(1).collect())
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    ("function", "argument", "code"),
    [(bytearray, 10**15, "out_of_memory"), (lambda number: os.kill(os.getpid(), number), 9, "python_worker_crashed")],
    ids=["memory", "killed"],
)
@pytest.mark.proves("spark/python-function-spark-exhausts")
def test_python_function_that_ends_its_process_is_named(sessions, spark, function, argument, code):
    failing = spark.sparkContext.parallelize([argument], 1).map(function)
    with pytest.raises(RequestError) as caught:
        sessions.run_in_group(spark, code, failing.collect)
    assert caught.value.error_code == code
    assert sessions.run_in_group(spark, "after it", lambda: spark.range(5).count()) == 5


def test_invalid_share_of_the_heap_is_refused(sessions):
    for share in ("much", "1.5"):
        context = Context(key=Key("k"), worker_config={"spark": {"conf": {"spark.osrdyne.maxHeapUse": share}}})
        with pytest.raises(ConfigurationError, match=r"spark\.osrdyne\.maxHeapUse"):
            SparkSessions().build(context)


def test_session_is_alive_reachable_by_this_host_only_and_knows_its_heap(sessions, spark):
    assert sessions.is_alive(spark)
    assert spark.sparkContext.uiWebUrl is None
    assert spark.conf.get("spark.driver.bindAddress") == "127.0.0.1"
    heap = JvmHeap(spark._jvm)
    before = heap.use()
    heap.collect()
    assert 0 < heap.use().used <= before.maximum
    assert 0 < before.share < 1


CHILD = """
import sys, threading
from osrdyne.protocol.names import Key
from osrdyne_worker import Context
from osrdyne_worker.spark.java.heap import JvmHeap
from osrdyne_worker.spark.session import SparkSessions

conf = {"spark.driver.memory": "512m", "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}
conf |= {"spark.hadoop.fs.s3a.secret.key": "hunter2-in-the-clear"}
sessions = SparkSessions()
session = sessions.build(Context(key=Key("k"), worker_config={"spark": {"master": "local[1]", "conf": conf}}))
assert session.sparkContext._jsc.hadoopConfiguration().get("fs.s3a.secret.key") == "hunter2-in-the-clear"
print(sessions.is_alive(session), flush=True)
if sys.stdin.readline() == "close\\n":
    sessions.close(session)
    print(sessions.is_alive(session), flush=True)
    sys.stdin.readline()
"""


class ChildWithSpark:
    """A process with a Spark of its own, as a worker is."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.says() == "True"
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.jvms = [child for child in children if "java" in child.name()]
        assert self.jvms

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def is_alive_after_close(self) -> bool:
        assert self.process.stdin is not None
        self.process.stdin.write("close\n")
        self.process.stdin.flush()
        return self.says() == "True"

    def jvm_ended(self) -> bool:
        return not any(jvm.is_running() and jvm.status() != psutil.STATUS_ZOMBIE for jvm in self.jvms)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def child():
    found = ChildWithSpark()
    yield found
    found.end()


def test_closed_session_leaves_no_jvm_and_secrets_were_not_on_its_command_line(child):
    assert not any("hunter2" in word for jvm in child.jvms for word in jvm.cmdline())
    assert not child.is_alive_after_close()
    assert child.jvm_ended()


@pytest.mark.nightly
def test_killed_worker_leaves_no_jvm(child):
    os.kill(child.process.pid, signal.SIGKILL)
    child.process.wait(120)
    wait_for(child.jvm_ended)


@pytest.mark.nightly
def test_dead_jvm_is_noticed(child):
    for jvm in child.jvms:
        jvm.kill()
    assert not child.is_alive_after_close()


def test_cancelled_request_does_not_end_caching_and_the_release_of_its_key_does(sessions, spark, thread):
    frame = spark.sql("select id from range(0, 1000000000000, 1, 1) where id % 7 = 8")
    background = BackgroundCaching(spark, "key", {"slow_view": frame}, lambda: None)
    background.request_ended()
    wait_for(lambda: sessions.progress(spark, background._group)["jobs"] == 1)
    running = thread.submit(sessions.run_in_group, spark, "request", lambda: spark.sql(SLOW).toArrow())
    wait_for(lambda: sessions.progress(spark, "request")["jobs"] == 1)
    sessions.cancel(spark, "request")
    assert running.exception(timeout=240) is not None
    assert sessions.progress(spark, background._group)["jobs"] == 1
    background.close(drop=True)
    assert background.wait(240)
    wait_for(lambda: sessions.progress(spark, background._group)["jobs"] == 0)
    assert not spark.catalog.isCached("osrdyne_cached_slow_view")
