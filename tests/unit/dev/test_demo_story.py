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


@pytest.mark.parametrize(
    ("error", "marker"),
    [
        (BrokerUnavailableError("RabbitMQ is gone."), "RabbitMQ is gone."),
        (TimeoutError(), "TimeoutError"),
        (KeyError("rows"), "KeyError: 'rows'"),
        (None, "all keys answer"),
    ],
)
def test_failure_in_task_groups_is_one_line(
    demo_story: ModuleType, capsys: pytest.CaptureFixture[str], error: Exception | None, marker: str
) -> None:
    async def fail() -> None:
        demo_story.check(error is not None, "all keys answer")
        if error is not None:
            raise error

    async def in_groups() -> None:
        """As a daemon does that fails beside the demo."""
        async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
            outer.create_task(asyncio.sleep(0))
            inner.create_task(fail())

    assert demo_story.run_demo(in_groups()) == 1
    printed = capsys.readouterr()
    lines = [line for line in printed.out.splitlines() if line.startswith("The demo failed: ")]
    assert (len(lines), printed.err) == (1, "")
    assert marker in lines[0]
    assert "Traceback" not in printed.out
    assert demo_story.run_demo(asyncio.sleep(0)) == 0
