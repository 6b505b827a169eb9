"""`osrdyne dev` in one terminal, `osrdyne call` without options in another; Ctrl-C leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from daemon_process import OSRDYNE, PATIENCE, until
from own_home import processes_of
from spark_fixtures import SHORT_LIVED

pytestmark = [pytest.mark.one_rabbitmq, pytest.mark.usefixtures("java")]

JAVA_OPTIONS = "spark.driver.extraJavaOptions"
START_LIMIT = 400.0
"""Seconds for a cold start of Spark on a busy machine."""


@pytest.fixture
def stack(home: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "run").mkdir(mode=0o700)
    with (tmp_path / "dev.log").open("wb") as log:
        process = subprocess.Popen(
            [OSRDYNE, "dev", "--set", "api.port=0", "--set", f"worker.spark_conf.{JAVA_OPTIONS}={SHORT_LIVED}"],
            cwd=tmp_path,
            env=home,
            stdout=log,
            stderr=log,
        )
    yield process
    for left in processes_of(home):
        with suppress(psutil.NoSuchProcess):
            left.kill()
    process.wait(PATIENCE)


@pytest.mark.timeout(900)
async def test_stack_of_one_command_answers_another_and_leaves_nothing(
    stack: subprocess.Popen[bytes], home: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "dev.log"
    announcement = tmp_path / "run" / "osrdyne" / "dev.yaml"
    await until(lambda: "osrdyne dev is up" in log.read_text() or stack.poll() is not None, "it is up")
    assert stack.poll() is None, log.read_text()
    assert announcement.stat().st_mode & 0o077 == 0
    query = '{"query": "select count(*) as items from lineitem"}'
    answer = subprocess.run(
        [OSRDYNE, "call", "tpch/sf=0.001", "/sql", "-d", query],
        cwd=tmp_path,
        env=home,
        capture_output=True,
        text=True,
        timeout=START_LIMIT,
        check=False,
    )
    assert (answer.returncode, answer.stderr) == (0, "1 row\n"), log.read_text()
    assert "items" in answer.stdout
    assert "6005" in answer.stdout
    listed = subprocess.run(
        [OSRDYNE, "groups", "list"], cwd=tmp_path, env=home, capture_output=True, text=True, timeout=PATIENCE,
        check=True,
    )  # fmt: skip
    assert "tpch/sf=0.001" in listed.stdout
    assert any("java" in process.name() for process in processes_of(home))
    stack.send_signal(signal.SIGINT)
    assert stack.wait(PATIENCE) == 0, log.read_text()
    assert [process.cmdline()[:3] for process in processes_of(home)] == []
    assert not announcement.exists()
    assert os.listdir(home["TMPDIR"]) == []  # noqa: PTH208 — names only
    assert "Traceback" not in log.read_text()
