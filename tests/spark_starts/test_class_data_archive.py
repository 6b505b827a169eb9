"""The class data sharing archive on a real JVM: made by the command, used by a session, only slower when damaged."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.nightly

START = """
import json
from pathlib import Path
from osrdyne.protocol.names import Key
from osrdyne_worker import Context
from osrdyne_worker.spark.java import jvm
from osrdyne_worker.spark.session import SparkSessions

conf = {"spark.driver.memory": "512m", "spark.driver.extraJavaOptions": "-Dmine=yes"}
sessions = SparkSessions()
session = sessions.build(Context(key=Key("k"), worker_config={"spark": {"master": "local[1]", "conf": conf}}))
mapped = Path(f"/proc/{jvm.process().pid}/maps").read_text()
print(json.dumps({
    "archives": sorted({"/" + line.partition("/")[2] for line in mapped.splitlines() if line.endswith(".jsa")}),
    "mine": session._jvm.java.lang.System.getProperty("mine"),
    "rows": session.range(7).count(),
}))
sessions.close(session)
"""
START_TIMEOUT = 400.0
TRAINING_TIMEOUT = 1200.0


def started(variables: Mapping[str, str]) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", START],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.timeout(TRAINING_TIMEOUT + 2 * START_TIMEOUT)
def test_archive_is_made_once_used_by_workers_and_not_needed(tmp_path):
    variables = {"XDG_CACHE_HOME": str(tmp_path / "a home"), "SPARK_LOCAL_IP": "127.0.0.1"}
    command = [Path(sys.executable).with_name("osrdyne"), "spark", "warm-archive"]

    def warm():
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=TRAINING_TIMEOUT,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return Path(done.stdout.strip())

    archive = warm()
    made = archive.stat()
    assert made.st_size > 50 * 2**20, "the training run has loaded most of Spark's classes"
    assert [path.name for path in archive.parent.iterdir()] == [archive.name]
    assert warm() == archive
    assert archive.stat().st_mtime_ns == made.st_mtime_ns, "one that is there is not made again"

    with_archive = started(variables)
    assert str(archive) in with_archive["archives"]
    assert (with_archive["mine"], with_archive["rows"]) == ("yes", 7)

    os.truncate(archive, made.st_size // 3)  # a JVM would crash on it
    damaged = started(variables)
    assert str(archive) not in damaged["archives"]
    assert (damaged["mine"], damaged["rows"]) == ("yes", 7)
