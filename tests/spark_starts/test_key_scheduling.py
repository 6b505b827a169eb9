"""The keys of a pooled process on the cores of a local Spark: long scans of some keys leave others their share."""

import json
import subprocess
import sys

import pytest

TIMEOUT = 400.0
SCANS = """
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from osrdyne.protocol.names import Key
from osrdyne_worker import Context
from osrdyne_worker.spark.session import SparkSessions

CONF = {"spark.driver.memory": "512m", "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}
SPARK = {"master": "local[2]", "conf": {**CONF, "spark.sql.shuffle.partitions": 2}}
ENDLESS = "select count(*) from range(0, 1000000000000000, 1, 2) where id % 7 = 8"
LONG = "select count(*) from range(0, 160000000000, 1, 400) where id % 7 = 8"

def context(name):
    return Context(key=Key(name), worker_id=name, worker_config={"spark": SPARK})

class OneKey:
    def __init__(self, name):
        self.sessions = sessions.for_key(shared)
        self.threads = ThreadPoolExecutor(1, initializer=self.sessions.enter_thread)
        self.session = self.threads.submit(self.sessions.build, context(name)).result()
        self.name = name

    def ask(self, query):
        run = lambda: self.session.sql(query).collect()
        return self.threads.submit(self.sessions.run_in_group, self.session, self.name, run)

    def tasks(self):
        tracker = shared.sparkContext.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self.name)]
        return [tracker.getStageInfo(stage) for job in jobs for stage in job.stageIds if tracker.getStageInfo(stage)]

def wait_for(condition):
    while not condition():  # the test has a limit
        time.sleep(0.1)

sessions = SparkSessions()
shared = sessions.build_shared(context("process"))
together = shared.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(lambda rows: rows).collect()
keys = [OneKey(name) for name in ("a endless", "b long", "c long", "z short")]
scans, short = keys[:3], keys[3]
scanning = [scans[0].ask(ENDLESS)]
time.sleep(5)  # then its tasks have used so much that they are stopped only for keys that starve
scanning += [key.ask(LONG) for key in scans[1:]]
answers = [short.ask("select id % 2, count(*) from range(100) group by 1").result() for _ in range(5)]
wait_for(lambda: all(sum(stage.numCompletedTasks for stage in key.tasks()) > 0 for key in scans[1:]))
wait_for(lambda: sum(stage.numActiveTasks for key in scans for stage in key.tasks()) <= 2)
answers.append(short.ask("select 1").result())
print(json.dumps({
    "answers": len(answers),
    "together": together,
    "parallelism": shared.sparkContext.defaultParallelism,
    "scans": [scan.done() for scan in scanning],
}), flush=True)
os._exit(0)
"""


@pytest.mark.timeout(TIMEOUT + 60)
@pytest.mark.proves("pooled/long-scans")
def test_long_scans_of_some_keys_leave_cores_to_others_and_to_each_other():
    done = subprocess.run([sys.executable, "-c", SCANS], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "answers": 6,
        "together": [0, 1],
        "parallelism": 2,
        "scans": [False, False, False],
    }
