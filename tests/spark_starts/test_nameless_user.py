"""Spark for a user id without a name, in a locale without UTF-8, with a home whose name has a blank."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from spark_fixtures import SHORT_LIVED

pytestmark = pytest.mark.nightly

NAMELESS = 54_321
START = """
import json, os, sys
from osrdyne.protocol.names import Key
from osrdyne_worker import Context
from osrdyne_worker.spark.session import SparkSessions

conf = {"spark.driver.memory": "512m", "spark.driver.extraJavaOptions": sys.argv[1]}
sessions = SparkSessions()
session = sessions.build(Context(key=Key("k"), worker_config={"spark": {"master": "local[1]", "conf": conf}}))
session.range(3).write.parquet("d\u00e4ta")
home = session._jvm.java.lang.System.getProperty("user.home")
print(json.dumps([session.read.parquet("d\u00e4ta").count(), os.path.isdir("d\u00e4ta"), home]))
sessions.close(session)
"""


@pytest.fixture
def home():
    """Not below `tmp_path`, which no other user may enter."""
    with tempfile.TemporaryDirectory(suffix=" home", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def as_nameless(home: Path) -> list[str]:
    """A command that becomes a user without a name; empty if only the locale and the home can be tested."""
    command = ["setpriv", f"--reuid={NAMELESS}", f"--regid={NAMELESS}", "--clear-groups"]
    if os.geteuid() != 0 or subprocess.run([*command, sys.executable, "-c", ""], check=False).returncode != 0:
        return []
    os.chown(home, NAMELESS, NAMELESS)
    return command


@pytest.mark.timeout(500)
@pytest.mark.proves("spark/user-id-without-name")
def test_spark_runs_for_a_user_without_a_name_in_any_locale(home):
    nameless = as_nameless(home)
    done = subprocess.run(
        [*nameless, sys.executable, "-c", START, SHORT_LIVED],
        cwd=home,
        env={**os.environ, "LC_ALL": "C", "HOME": str(home), "TMPDIR": str(home)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows, is_there, found = json.loads(done.stdout)
    assert (rows, is_there) == (3, True)
    assert not nameless or found == str(home)
