"""`osrdyne dev` in one terminal, `osrdyne call` without options in another; Ctrl-C leaves nothing. And the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from daemon_process import OSRDYNE, PATIENCE, ROOT, own_environment, until

START_LIMIT = 100.0
"""Seconds for a cold start of Spark on a busy machine."""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A user with a home of their own; what they start is found by `TMPDIR` in its environment."""
    (tmp_path / "tmp").mkdir()
    places = {"XDG_RUNTIME_DIR": "run", "XDG_STATE_HOME": "state", "XDG_CACHE_HOME": "cache", "TMPDIR": "tmp"}
    return own_environment(**{name: str(tmp_path / place) for name, place in places.items()})


def processes_of(environment: dict[str, str]) -> list[psutil.Process]:
    """Every process that was started with this environment, however it is related to us."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == environment["TMPDIR"] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def stack(environment: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "run").mkdir(mode=0o700)
    with (tmp_path / "dev.log").open("wb") as log:
        process = subprocess.Popen(
            [OSRDYNE, "dev", "--set", "api.port=0"], cwd=tmp_path, env=environment, stdout=log, stderr=log
        )
    yield process
    for left in processes_of(environment):
        with suppress(psutil.NoSuchProcess):
            left.kill()
    process.wait(PATIENCE)


async def test_stack_of_one_command_answers_another_and_leaves_nothing(
    stack: subprocess.Popen[bytes], environment: dict[str, str], tmp_path: Path
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
        env=environment,
        capture_output=True,
        text=True,
        timeout=START_LIMIT,
        check=False,
    )
    assert (answer.returncode, answer.stderr) == (0, "1 row\n"), log.read_text()
    assert "items" in answer.stdout
    assert "6005" in answer.stdout
    listed = subprocess.run(
        [OSRDYNE, "groups", "list"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE,
        check=True,
    )  # fmt: skip
    assert "tpch/sf=0.001" in listed.stdout
    assert any("java" in process.name() for process in processes_of(environment))
    stack.send_signal(signal.SIGINT)
    assert stack.wait(PATIENCE) == 0, log.read_text()
    assert [process.cmdline()[:3] for process in processes_of(environment)] == []
    assert not announcement.exists()
    assert os.listdir(environment["TMPDIR"]) == []  # noqa: PTH208 — names only
    assert "Traceback" not in log.read_text()


@pytest.mark.timeout(600)
def test_demo_tells_its_story_and_leaves_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    demo = subprocess.run(
        [sys.executable, ROOT / "tools" / "demo.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "all groups gone" in demo.stdout
    assert demo.stderr == ""
    assert processes_of(environment) == []
