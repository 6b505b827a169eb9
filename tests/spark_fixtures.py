"""Fixtures of the tests on Spark: one small Spark for each process of the run, and the TPC-H tables at a tiny scale.

`tests/conftest.py` loads them for every folder. Spark is imported where it is used: most tests do without it.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key
from osrdyne_worker import Call, Context

if TYPE_CHECKING:
    pass

SHORT_LIVED = "-XX:TieredStopAtLevel=1"
"""An option of the JVM: optimising code for later takes more processor time than these tests are there."""
SMALL_SPARK: dict[str, Any] = {
    "master": "local[2]",
    "conf": {
        "spark.driver.memory": "768m",
        "spark.driver.extraJavaOptions": f"{SHORT_LIVED} -XX:+UseSerialGC",  # a tenth less processor time than G1
        "spark.sql.shuffle.partitions": 2,
        "spark.default.parallelism": 2,
    },
}

MakeCall = Callable[..., Call]


@pytest.fixture(scope="session")
def sessions():
    from osrdyne_worker.pipelines.sql import sessions

    return sessions


@pytest.fixture(scope="session")
def spark(java, sessions):
    """The session that all tests share, built as a worker builds its own."""
    session = sessions.build(Context(key=Key("tests"), pool="tests", worker_config={"spark": SMALL_SPARK}))
    yield session
    sessions.close(session)


@pytest.fixture(scope="session")
def tpch(tmp_path_factory):
    """A directory with `sf=0.001/<table>.parquet` for the eight tables of TPC-H."""
    directory = tmp_path_factory.mktemp("tpch")
    generator = Path(sys.executable).with_name("tpchgen-cli")
    arguments = ["parquet", "-s", "0.001", "--output-dir", str(directory / "sf=0.001")]
    subprocess.run([generator, *arguments], check=True, capture_output=True, timeout=300)
    return directory


@pytest.fixture(scope="session")
def tpch_config(tpch):
    tables = sorted(path.stem for path in (tpch / "sf=0.001").iterdir())
    return {
        "datasets": [
            {
                "key": "tpch/sf={scale}",
                "tables": [{"view": table, "path": f"{tpch}/sf={{scale}}/{table}.parquet"} for table in tables],
            }
        ]
    }


@pytest.fixture(scope="session")
def make_call(spark):
    """Builds a call of a worker for `key`: its data is opened as at start, in a session with views of its own."""

    from osrdyne_worker.pipelines.sql import open_data

    def build(config, key, *, accept=None):
        context = Context(key=Key(key), pool="tests", config=config, session=spark.newSession())
        context = replace(context, state=open_data(context))
        headers = {} if accept is None else {"accept": accept}
        return Call(context, Request(key=key, body=b"", headers=headers))

    return build


@pytest.fixture(scope="session")
def tpch_call(make_call, tpch_config):
    """A call of the worker for the TPC-H data, shared by the tests that only ask."""
    return make_call(tpch_config, "tpch/sf=0.001")
