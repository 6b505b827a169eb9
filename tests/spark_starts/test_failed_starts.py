"""Starts of Spark that fail, and sessions that are lost: the caller gets the cause."""

import json
import subprocess
import sys
from typing import Any

import pytest
from spark_fixtures import SHORT_LIVED

from osrdyne.client import StartFailedError
from tests.acceptance.daemon_process import OSRDYNE

pytestmark = pytest.mark.nightly

START = """
import json, sys
from osrdyne.errors import StartFailedError
from osrdyne.protocol.names import Key
from osrdyne_worker import Context
from osrdyne_worker.spark.session import SparkSessions

sessions = SparkSessions()
try:
    session = sessions.build(Context(key=Key("k"), worker_config={"spark": json.loads(sys.argv[1])}))
except StartFailedError as error:
    print(error.message)
    sys.exit()
try:
    session._jvm.java.util.ArrayList(2**31 - 10)
except Exception:
    pass
print(sessions.is_alive(session), sessions.loss_reason(session))
sessions.close(session)
"""


DEAF = """
import sys, time
from osrdyne.protocol.names import Key
from osrdyne_worker import Context
from osrdyne_worker.spark.java import gateway
from osrdyne_worker.spark.session import SparkSessions

conf = {"spark.driver.memory": "512m", "spark.driver.extraJavaOptions": sys.argv[1]}
sessions = SparkSessions()
session = sessions.build(Context(key=Key("k"), worker_config={"spark": {"master": "local[1]", "conf": conf}}))
assert sessions.is_alive(session)
threads = session._jvm.java.lang.Thread.getAllStackTraces().entrySet().iterator()
while threads.hasNext():
    entry = threads.next()
    if any(frame.getMethodName() == "accept" for frame in entry.getValue()) and any(
        frame.getClassName().startswith("py4j.") for frame in entry.getValue()
    ):
        entry.getKey().stop()  # an Error in the thread, as an OutOfMemoryError is: at its next connection
# As the JVM reports an error of a thread that nothing catches.
session._jvm.java.lang.System.err.println("java.lang.OutOfMemoryError: Java heap space")
gateway.PROBE_INTERVAL, gateway.PROBE_TIMEOUT = 0.2, 1.0
while sessions.is_alive(session):
    session.sql("select 1").collect()
    time.sleep(0.2)
print(sessions.loss_reason(session))
print(session._jvm.java.lang.Math.max(1, 2))
sessions.close(session)
"""


def outcome(conf: dict[str, str]) -> str:
    """What a start with these settings says, or why its session was lost when it needed 8 GB of heap."""
    options = f"{SHORT_LIVED} {conf.pop('options', '')}"
    settings: dict[str, Any] = {
        "master": "local[1]",
        "conf": {"spark.driver.memory": "512m", "spark.driver.extraJavaOptions": options, **conf},
    }
    command = [sys.executable, "-c", START, json.dumps(settings)]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=True).stdout.strip()


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ({"spark.driver.memory": "lots"}, "could not be started: Invalid maximum heap size: -Xmxlots"),
        (
            {"spark.serializer": "org.example.Missing"},
            "could not be started: ClassNotFoundException: org.example.Missing. "
            "Check worker.spark_conf: spark.serializer.",
        ),
    ],
)
@pytest.mark.proves("spark/spark-cannot-start-given")
def test_failed_start_gives_the_message_of_spark(conf, expected):
    assert expected in outcome(conf)


@pytest.mark.timeout(500)
@pytest.mark.proves("spark/jvm-worker-ends-memory")
def test_jvm_that_ended_without_memory_is_reported_as_out_of_memory():
    said = outcome({"options": "-XX:+ExitOnOutOfMemoryError"})
    assert said.startswith("False Spark's Java process ran out of memory (java.lang.OutOfMemoryError: Java heap space)")


@pytest.mark.timeout(500)
@pytest.mark.proves("spark/jvm-accepts-new-connections")
def test_jvm_that_accepts_no_new_connections_is_lost_although_old_ones_go_on():
    run = subprocess.run([sys.executable, "-c", DEAF, SHORT_LIVED], capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr[-3000:]
    reason, answer = run.stdout.splitlines()
    assert reason.startswith("Spark's Java process accepts no new connections")
    assert "ran out of memory (java.lang.OutOfMemoryError: Java heap space)" in reason
    assert answer == "2"


@pytest.mark.timeout(900)
@pytest.mark.proves("spark/spark-cannot-start-given")
async def test_caller_gets_the_message_of_a_spark_that_cannot_start(daemon):
    daemon.write_settings(
        driver={"options": {"command": [str(OSRDYNE.with_name("osrdyne-worker")), "osrdyne_worker.pipelines.sql:app"]}},
        worker={"spark_master": "local[1]", "spark_conf": {"spark.driver.memory": "256m"}},
    )
    await daemon.start()
    async with daemon.client(default_timeout=400.0) as client:
        with pytest.raises(StartFailedError, match=r"spark\.driver\.memory") as caught:
            await client.call("k", "/version")
    assert "exit code 1" in str(caught.value)
