"""`osrdyne dev` ends by a signal in any phase: during its start, and when its terminal is closed."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from daemon_process import OSRDYNE, PATIENCE, ROOT, until
from own_home import commands_of, processes_of

pytestmark = pytest.mark.one_rabbitmq

COMMAND = [OSRDYNE, "dev", "--set", "api.port=0", "--app", "workers.examples.echo:app"]


@dataclass
class Terminal:
    """The terminal of the command, whose output is read without waiting."""

    descriptor: int
    shown: str = ""

    def read(self) -> str:
        with suppress(OSError):  # nothing to read, or the command has ended
            self.shown += os.read(self.descriptor, 65_536).decode(errors="replace")
        return self.shown

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


@pytest.fixture
def started(home: dict[str, str], tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Terminal]]:
    (tmp_path / "run").mkdir(mode=0o700)
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    process = subprocess.Popen(
        COMMAND,
        cwd=ROOT,
        env={**home, "TERM": "xterm"},  # Rich shows no progress on a terminal without abilities.
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # ignored if the tests run with `nohup`
    )
    os.close(theirs)
    terminal = Terminal(ours)
    yield process, terminal
    for left in processes_of(home):
        with suppress(psutil.NoSuchProcess):
            left.kill()
    process.wait(PATIENCE)
    terminal.close()


def assert_nothing_left(home: dict[str, str]) -> None:
    assert commands_of(home) == []
    assert os.listdir(home["TMPDIR"]) == []  # noqa: PTH208 — names only
    assert not (Path(home["XDG_RUNTIME_DIR"]) / "osrdyne" / "dev.yaml").exists()


async def test_interrupt_during_the_start_ends_it_at_once(
    started: tuple[subprocess.Popen[bytes], Terminal], home: dict[str, str]
) -> None:
    process, terminal = started
    await until(lambda: "Starting RabbitMQ" in terminal.read() and any(Path(home["TMPDIR"]).iterdir()), "the start")
    process.send_signal(signal.SIGINT)
    await until(lambda: terminal.read() and process.poll() is not None, "it ends")
    assert process.returncode == 130, terminal.shown
    assert "osrdyne dev is up" not in terminal.shown
    assert "Traceback" not in terminal.shown
    assert_nothing_left(home)


@pytest.mark.nightly
async def test_terminal_that_is_closed_ends_the_workers_too(
    started: tuple[subprocess.Popen[bytes], Terminal], home: dict[str, str], tmp_path: Path
) -> None:
    process, terminal = started
    await until(lambda: "Ctrl-C stops everything" in terminal.read() or process.poll() is not None, "it is up")

    async def call(key: str) -> None:
        command = [OSRDYNE, "call", key, "/echo", "-d", "{}"]
        answer = await asyncio.to_thread(
            subprocess.run,
            command,
            cwd=tmp_path,
            env=home,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert answer.returncode == 0, answer.stderr

    await call("k")
    assert any("osrdyne-worker" in " ".join(command) for command in commands_of(home))
    terminal.close()
    await call("after the terminal")  # The log line of its worker cannot be written.
    process.send_signal(signal.SIGHUP)  # as the kernel does for the terminal of a session
    await asyncio.to_thread(process.wait, PATIENCE)
    assert process.returncode == 0
    assert_nothing_left(home)
