"""The end of a demo: its user gets one line that states the reason, and never a traceback."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from osrdyne.errors import BrokerUnavailableError

FILE = Path(__file__).parents[3] / "tools" / "demo_story.py"


@pytest.fixture
def demo_story(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("demo_story", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # its console writes to the captured output
    monkeypatch.setattr(module, "configure_logging", lambda **_: None)  # it would outlive the captured output
    yield module
    logging.disable(logging.NOTSET)


async def in_groups(error: Exception) -> None:
    """Raise it as a daemon does that fails beside the demo: inside two task groups."""

    async def fail() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(raise_it())

    async def raise_it() -> None:
        raise error

    async with asyncio.TaskGroup() as group:
        group.create_task(fail())


@pytest.mark.parametrize(
    ("error", "marker"),
    [
        (BrokerUnavailableError("RabbitMQ is gone."), "RabbitMQ is gone."),
        (TimeoutError(), "TimeoutError"),
        (KeyError("rows"), "KeyError: 'rows'"),
    ],
)
def test_failure_in_task_groups_is_one_line(
    demo_story: ModuleType, capsys: pytest.CaptureFixture[str], error: Exception, marker: str
) -> None:
    assert demo_story.run_demo(in_groups(error)) == 1
    printed = capsys.readouterr()
    assert (len(printed.out.strip().splitlines()), printed.err) == (1, "")
    assert marker in printed.out


def test_failed_check_is_one_line_and_a_story_without_failure_ends_with_code_0(
    demo_story: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    async def story(answers: bool) -> None:
        demo_story.check(answers, "all keys answer")

    assert [demo_story.run_demo(story(answers)) for answers in (False, True)] == [1, 0]
    assert "The demo failed: all keys answer" in capsys.readouterr().out
