"""A worker starts its JVM before it imports what takes long. The JVM is a script here."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from osrdyne.errors import StartFailedError
from osrdyne.protocol.names import Key
from osrdyne_worker.app.app import Context, EarlyStart, importing
from osrdyne_worker.spark.java.heap import LIMIT
from osrdyne_worker.spark.java.jvm import Jvm, JvmStartError, StartingJvm
from osrdyne_worker.spark.session import SparkSessions

PATIENCE = 120.0

IMPORTS = """
import sys
from osrdyne_worker.app.app import Context, EarlyStart, importing
from osrdyne_worker.spark import session

class Starting:
    def __init__(self, settings, home):
        print([name for name in ("pyspark", "pyarrow", "numpy", "pandas", "sqlglot") if name in sys.modules])
        print(settings["spark.master"], "accessExternalDTD" in settings["spark.driver.extraJavaOptions"])

    def end(self):
        pass

session.StartingJvm = Starting
early = EarlyStart(Context(key="k", worker_config={"spark": {"master": "local[1]"}}))
importing.set(early)
from osrdyne_worker.pipelines import sql
early.settle(sql.app.sessions)
print(early.is_taken, "pyspark" in sys.modules)
"""


def test_nothing_heavy_is_imported_before_the_jvm_of_the_sql_pipeline():
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.stderr, done.stdout.splitlines()) == ("", ["[]", "local[1] True", "True True"])


class Starts:
    """Counts the JVMs that run, and those that were started. None of them can be connected with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running: list[StartingJvm] = []
        self.count = 0
        starts = self

        class Fake(StartingJvm):
            def __init__(self, settings: dict[str, str], home: Path) -> None:
                self.settings, self._connected, self.home = settings, False, home
                starts.running.append(self)
                starts.count += 1

            def connect(self) -> Jvm:
                raise JvmStartError("this JVM is not real")

            def end(self) -> None:
                starts.running.remove(self)

        for name in ("_gateway", "_jvm", "_active_spark_context"):
            monkeypatch.setattr(SparkContext, name, None)  # tests of Spark may have left a JVM in this process
        monkeypatch.setattr(SparkSession, "_instantiatedSession", None)
        monkeypatch.setattr("osrdyne_worker.spark.session.StartingJvm", Fake)
        monkeypatch.setattr("osrdyne_worker.spark.session.require_reachable", lambda master: None)
        monkeypatch.setattr("osrdyne_worker.spark.java.jvm.require_java", lambda: None)
        for name in ("SPARK_LOCAL_IP", "PYSPARK_PYTHON"):
            monkeypatch.setenv(name, "")  # the code under test sets them


@pytest.fixture
def starts(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return Starts(monkeypatch)


def import_of(master: str, *, is_shared: bool = False, **conf: object) -> EarlyStart:
    config = {"spark": {"master": master, "conf": conf}}
    return EarlyStart(Context(key=Key("k"), worker_config=config), is_shared=is_shared)


def sessions_in(early: EarlyStart | None) -> SparkSessions:
    token = importing.set(early)
    try:
        return SparkSessions()
    finally:
        importing.reset(token)


def test_jvm_of_a_factory_that_the_application_does_not_use_ends(starts, tmp_path):
    early = import_of("local[1]")
    imported, own = sessions_in(early), sessions_in(early)
    assert len(starts.running) == 1  # one JVM, however many factories are made
    early.settle(own)
    assert starts.running == []
    kept = import_of("local-cluster[1,1,512]")
    imported = sessions_in(kept)
    kept.settle(imported)
    assert len(starts.running) == 1
    [directory] = tmp_path.iterdir()
    assert (directory / "jars").is_symlink()  # for the executors
    kept.settle(None)  # the configuration of the application is invalid
    assert (starts.running, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize("master", ["sc://server", "no master"])
def test_session_without_a_jvm_of_the_worker_starts_none(starts, master):
    early = import_of(master)
    sessions_in(early)
    sessions_in(None)  # outside of a starting worker
    assert (starts.running, early.is_taken) == ([], False)


MASTERS = ["local[1]", "local-cluster[1,1,512]", "spark://host:7077", "k8s://https://host", "yarn"]


@pytest.mark.parametrize("is_shared", [False, True], ids=["dedicated", "pooled"])
@pytest.mark.parametrize("master", MASTERS)
def test_session_is_built_in_the_jvm_that_was_started_early(starts, tmp_path, master, is_shared):
    early = import_of(master, is_shared=is_shared)
    sessions = sessions_in(early)
    early.settle(sessions)
    [running] = starts.running
    assert ("spark.scheduler.mode" in running.settings) == is_shared
    with pytest.raises(StartFailedError, match="this JVM is not real"):
        (sessions.build_shared if is_shared else sessions.build)(early.context)
    assert (starts.count, starts.running, list(tmp_path.iterdir())) == (1, [], [])


def test_jvm_that_was_started_early_ends_if_the_application_has_started_spark_itself(starts, monkeypatch):
    settings = SimpleNamespace(set=lambda *_: None)
    session = SimpleNamespace(sparkContext=SimpleNamespace(_gateway=None), conf=settings)
    builder = SimpleNamespace(getOrCreate=lambda: session)
    builder.master = builder.config = lambda *_, **__: builder
    early = import_of("local[1]", **{LIMIT: 0})
    sessions = sessions_in(early)
    early.settle(sessions)
    monkeypatch.setattr("osrdyne_worker.spark.java.jvm.is_started", lambda: True)
    monkeypatch.setattr(SparkSession, "builder", builder)
    assert sessions.build(early.context) is session
    assert (starts.count, starts.running) == (1, [])


@pytest.mark.usefixtures("processes")
def test_jvm_that_exits_leaves_its_message_and_nothing_else(tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    submit = tmp_path / "bin" / "spark-submit"
    submit.parent.mkdir()
    submit.write_text("#!/bin/sh\necho 'Error: no such option' >&2; exit 1\n")
    submit.chmod(0o755)
    starting = StartingJvm({"spark.master": "local"}, tmp_path)
    with pytest.raises(JvmStartError, match="no such option"):
        starting.connect()
    assert list(temporary.iterdir()) == []
    submit.unlink()
    with pytest.raises(OSError, match="spark-submit"):
        StartingJvm({}, tmp_path)
    assert list(temporary.iterdir()) == []
