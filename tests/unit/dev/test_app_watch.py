"""The watch of the application's files in `osrdyne dev`."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from osrdyne.aio.clock import SystemClock
from osrdyne.dev.app_watch import Files, files_of, watch_app
from osrdyne.errors import ConfigurationError

PATIENCE = 60.0


@pytest.mark.parametrize(
    ("app", "watched"),
    [
        ("mine:app", {"mine.py", "helper.py"}),
        ("package.api.web:app", {"package/__init__.py", "package/api/web.py"}),
        ("json:app", set()),
    ],
)
def test_files_of_the_application_are_those_of_its_package_or_beside_its_module(tmp_path, app, watched):
    for name in ("mine.py", "helper.py", "notes.txt", "package/__init__.py", "package/api/web.py", "other/x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert {str(path.relative_to(tmp_path)) for path in files_of(app, tmp_path)} == watched


class Watch:
    """Reads the given states of the files one after the other, and then always the last one."""

    def __init__(self, states: str, *, problem: str | None = None) -> None:
        self.states: Iterator[str] = iter(states)
        self.present = ""
        self.problem = problem
        self.replaced = list[str]()
        self.reports = list[str]()
        self.reported = asyncio.Event()

    def read(self) -> Files:
        self.present = next(self.states, self.present)
        return {Path(self.present): (0, 0)}

    def check(self) -> None:
        if self.problem is not None:
            raise ConfigurationError(self.problem)

    async def replace(self) -> None:
        self.replaced.append(self.present)

    def report(self, text: str) -> None:
        self.reports.append(text)
        self.reported.set()


async def watched(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> Watch:
    monkeypatch.setattr("osrdyne.dev.app_watch.INTERVAL", 0.0)
    watching = asyncio.create_task(
        watch_app(watch.read, check=watch.check, replace=watch.replace, report=watch.report, clock=SystemClock())
    )
    async with asyncio.timeout(PATIENCE):
        await watch.reported.wait()
    watching.cancel()
    await asyncio.wait({watching})
    return watch


@pytest.mark.parametrize(
    ("states", "problem", "replaced"),
    [("aaabcdd", None, ["d"]), ("abb", "no module", [])],
    ids=["once the files rest", "not if the application cannot be used"],
)
async def test_workers_are_replaced(monkeypatch, states, problem, replaced):
    watch = await watched(Watch(states, problem=problem), monkeypatch)
    assert (watch.replaced, len(watch.reports), (problem or "") in watch.reports[0]) == (replaced, 1, True)
