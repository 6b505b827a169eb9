"""`osrdyne dev` in one terminal, `osrdyne call` without options in another; it ends by a signal in any phase."""

import asyncio
import os
import pty
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from daemon_process import OSRDYNE, PATIENCE, ROOT, until
from own_home import commands_of, kill_processes_of, processes_of
from spark_fixtures import SHORT_LIVED

pytestmark = pytest.mark.one_rabbitmq

ECHO = ["--app", "workers.examples.echo:app"]
SPARK = ["--set", f"worker.spark_conf.spark.driver.extraJavaOptions={SHORT_LIVED}"]
MINE = ["--app", "mine:app"]
APP = """
from osrdyne_worker import App, Call
app = App()

@app.handler("/version")
async def version(call: Call) -> dict[str, int]:
    return {"version": VERSION}
"""
START_LIMIT = 400.0
"""Seconds for a cold start of Spark on a busy machine."""


@dataclass
class Dev:
    """The command in a terminal of its own, whose output is read without waiting."""

    process: subprocess.Popen[bytes]
    descriptor: int
    shown: str = ""

    async def until_shown(self, text: str) -> None:
        await until(lambda: text in self.read() or self.process.poll() is not None, text, timeout=START_LIMIT)
        assert self.process.poll() is None, self.shown

    def read(self) -> str:
        with suppress(OSError):  # nothing to read, or the command has ended
            while output := os.read(self.descriptor, 65_536):
                self.shown += output.decode(errors="replace")
        return self.shown


@pytest.fixture
def dev(request, home, tmp_path):
    """With the echo worker, or with other options by `@pytest.mark.parametrize(..., indirect=True)`."""
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "mine.py").write_text(APP.replace("VERSION", "1"))
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    process = subprocess.Popen(
        [OSRDYNE, "dev", "--set", "api.port=0", *getattr(request, "param", ECHO)],
        cwd=tmp_path,
        # Rich shows no progress on a terminal without abilities.
        env={**home, "TERM": "xterm", "PYTHONPATH": f"{ROOT}:{ROOT / 'workers'}"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    yield Dev(process, ours)
    kill_processes_of(home)
    process.wait(PATIENCE)
    os.close(ours)


async def osrdyne(dev: Dev, home: dict[str, str], *arguments: str) -> str:
    """The output of another command of the same user. The terminal is read meanwhile: a full one stops what writes."""
    options: dict[str, Any] = {"cwd": home["TMPDIR"], "env": home, "capture_output": True, "text": True}
    running = asyncio.create_task(asyncio.to_thread(subprocess.run, [OSRDYNE, *arguments], **options))
    await until(lambda: dev.read() is not None and running.done(), "the command ends", timeout=START_LIMIT)
    done = await running
    assert done.returncode == 0, done.stderr + dev.shown
    return str(done.stdout)


def assert_nothing_left(dev: Dev, home: dict[str, str]) -> None:
    assert "Traceback" not in dev.shown
    assert commands_of(home) == []
    assert os.listdir(home["TMPDIR"]) == []  # noqa: PTH208 — names only
    assert not announcement_of(home).exists()


def announcement_of(home: dict[str, str]) -> Path:
    return Path(home["XDG_RUNTIME_DIR"]) / "osrdyne" / "dev.yaml"


async def interrupt(dev: Dev) -> int | None:
    """Ctrl-C; the exit code."""
    dev.process.send_signal(signal.SIGINT)
    await until(lambda: dev.read() and dev.process.poll() is not None, "it ends")
    return dev.process.returncode


async def test_interrupt_during_the_start_ends_it_at_once(dev, home):
    await until(lambda: "Starting RabbitMQ" in dev.read() and any(Path(home["TMPDIR"]).iterdir()), "the start")
    assert await interrupt(dev) == 130, dev.shown
    assert "osrdyne dev is up" not in dev.shown
    assert_nothing_left(dev, home)


@pytest.mark.proves("workers/dev-killed")
async def test_kill_leaves_no_worker(dev, home):
    await dev.until_shown("Ctrl-C stops everything")
    await osrdyne(dev, home, "call", "k", "/echo", "-d", "{}")
    assert any("osrdyne-worker" in " ".join(command) for command in commands_of(home))
    dev.process.kill()
    await until(lambda: commands_of(home) == [], "RabbitMQ and the worker have ended")


@pytest.mark.parametrize("dev", [MINE], indirect=True, ids=["own application"])
async def test_changed_application_answers_without_a_restart(dev, home, tmp_path):
    """One that cannot be imported leaves the present worker as it is."""

    async def version():
        return (await osrdyne(dev, home, "call", "k", "/version", "-d", "", "-o", "json")).strip()

    await dev.until_shown("osrdyne dev is up")
    assert await version() == '{"version":1}'
    (tmp_path / "mine.py").write_text("import nothing_of_this_name\n")
    await dev.until_shown("nothing_of_this_name")
    assert await version() == '{"version":1}'
    (tmp_path / "mine.py").write_text(APP.replace("VERSION", "2"))
    async with asyncio.timeout(PATIENCE):
        while await version() != '{"version":2}':
            await asyncio.sleep(0.1)


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("java")
@pytest.mark.parametrize("dev", [SPARK], indirect=True, ids=["spark"])
async def test_stack_of_one_command_answers_another_and_leaves_nothing(dev, home):
    await dev.until_shown("osrdyne dev is up")
    assert announcement_of(home).stat().st_mode & 0o077 == 0
    query = '{"query": "select count(*) as items from lineitem"}'
    answer = await osrdyne(dev, home, "call", "tpch/sf=0.001", "/sql", "-d", query)
    assert "items" in answer
    assert "6005" in answer
    assert "tpch/sf=0.001" in await osrdyne(dev, home, "groups", "list")
    assert any("java" in process.name() for process in processes_of(home))
    assert await interrupt(dev) == 0, dev.shown
    assert_nothing_left(dev, home)
