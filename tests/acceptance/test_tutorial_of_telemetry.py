"""The tutorial "From device to dashboard query": its files and commands work as they stand on the page."""

import json
import re
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from daemon_process import PATIENCE, ROOT, free_port, until
from own_home import kill_processes_of, processes_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200), pytest.mark.one_rabbitmq]

PAGE = ROOT / "docs" / "tutorials" / "device-to-query.md"
_BLOCK = re.compile(r"(?:Save this as `(?P<file>[^`]+)`(?:[^\n]*\n)+?\n)?```(?P<kind>\w+)\n(?P<text>.*?)```", re.DOTALL)
_DAEMON = re.compile(r"^osrdyne (dev|run) .*$", re.MULTILINE)
SPARK_START = 400.0
"""Seconds for a start of Spark on a busy machine."""


def rows(table: str) -> list[list[str]]:
    """The words of each line, without the rules between them."""
    return [words for line in table.splitlines() if (words := line.strip("─ \n").split())]


class Tutorial:
    """A reader of the page, with directories and ports of their own."""

    def __init__(self, home: dict[str, str], directory: Path) -> None:
        self.directory = directory
        (directory / "run").mkdir(mode=0o700)
        path = f"{Path(sys.executable).parent}:{home['PATH']}"
        environment = {**home, "PATH": path, "PYTHONPATH": str(ROOT)}  # the page is read in a clone
        self._place: dict[str, Any] = {"cwd": directory, "env": environment}
        self._changes = {
            "/tmp/telemetry": str(directory / "telemetry"),
            "~/.local/state/osrdyne/dev.yaml": str(directory / "run" / "osrdyne" / "dev.yaml"),
            "osrdyne dev": "osrdyne dev --set api.port=0",
            "port: 4243": f"port: {free_port()}",
            "port: 4244": f"port: {free_port()}",
        }
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        """By the file of their configuration."""
        self._blocks = list(_BLOCK.finditer(PAGE.read_text(encoding="utf-8")))

    def shown(self, start: str) -> list[list[str]]:
        """The table on the page that starts like this."""
        [text] = [one["text"] for one in self._blocks if one["kind"] == "text" and one["text"].startswith(start)]
        return rows(text)

    def until(self, command: str) -> str:
        """Follow the page up to the block of commands that contains this one. The output of that block."""
        while self._blocks:
            file, kind, text = self._blocks.pop(0).group("file", "kind", "text")
            if kind == "yaml":
                (self.directory / file).write_text(self._changed(text), encoding="utf-8")
            elif kind == "bash":
                output = self.run(text)
                if command in text:
                    return output
        raise AssertionError(command)

    def run(self, commands: str) -> str:
        """Run the commands in a shell; one that starts a daemon goes on in the background."""
        command = ["bash", "-ec", self._changed(_DAEMON.sub("", commands))]
        ended = subprocess.run(command, **self._place, capture_output=True, text=True, timeout=SPARK_START, check=False)
        assert ended.returncode == 0, f"{commands}\n{ended.stdout}{ended.stderr}"
        if daemon := _DAEMON.search(commands):
            words = shlex.split(self._changed(daemon[0]))
            with (self.directory / f"{words[-1]}.log").open("ab") as log:
                self.daemons[words[-1]] = subprocess.Popen(words, **self._place, stdout=log, stderr=log)
        return ended.stdout

    def stop(self, config: str) -> None:
        daemon = self.daemons[config]
        daemon.send_signal(signal.SIGINT)
        assert daemon.wait(PATIENCE) == 0, (self.directory / f"{config}.log").read_text()

    def lag(self) -> int | None:
        """The messages that the table `warm` does not have; None before it has any."""
        readers = json.loads(self.run("osrdyne telemetry lag -o json"))
        return next((int(one["messages"]) for one in readers if one["reader"] == "warm"), None)

    def has_no_groups(self, config: str) -> bool:
        return json.loads(self.run(f"osrdyne groups list --config {config} -o json")) == []

    def _changed(self, text: str) -> str:
        for page, ours in self._changes.items():
            text = text.replace(page, ours)
        return text


@pytest.fixture
def tutorial(home, tmp_path):
    tutorial = Tutorial(home, tmp_path)
    yield tutorial
    kill_processes_of(home)
    for daemon in tutorial.daemons.values():
        daemon.wait(PATIENCE)


async def test_commands_of_the_tutorial_work_in_their_order(tutorial, home):
    simulated, queried = tutorial.shown("kind"), tutorial.shown("key")
    tutorial.until("osrdyne dev")
    announced = tutorial.directory / "run" / "osrdyne" / "dev.yaml"
    await until(announced.exists, "osrdyne dev is up")
    output = tutorial.until("telemetry simulate")
    # Without the durations.
    assert [row[:5] for row in rows(output)[: len(simulated)]] == [row[:5] for row in simulated]

    tutorial.until("osrdyne run --config ingest.yaml")
    await until(lambda: tutorial.lag() == 0, "the table has the whole log", timeout=SPARK_START, interval=2)

    tutorial.until("osrdyne run --config queries.yaml")
    log = tutorial.directory / "queries.yaml.log"
    await until(lambda: '"leading"' in log.read_text(), "the pool of the queries is there")
    output = tutorial.until("osrdyne call")
    assert rows(output)[: len(queried)] == queried
    assert "temperature" in tutorial.until("osrdyne last")

    tutorial.until("osrdyne groups stop")
    for config in ("queries.yaml", "ingest.yaml"):
        await until(partial(tutorial.has_no_groups, config), "the groups are gone", interval=1)
        tutorial.stop(config)
    tutorial.stop("plant.yaml")
    assert [process.cmdline()[:3] for process in processes_of(home)] == []
