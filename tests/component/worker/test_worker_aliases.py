"""Import paths of the former layout: each works for one release, with a warning."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import osrdyne_worker
from osrdyne_worker.main import main


@pytest.mark.parametrize(
    ("alias", "name", "value"),
    [
        ("osrdyne_worker.runtime.app", "App", osrdyne_worker.App),
        ("osrdyne_worker.runtime.call", "RequestError", osrdyne_worker.RequestError),
        ("osrdyne_worker.runtime.main", "main", main),
    ],
)
def test_former_import_path_works_with_a_warning(alias: str, name: str, value: object) -> None:
    sys.modules.pop(alias, None)
    with pytest.warns(DeprecationWarning, match=alias):
        module = importlib.import_module(alias)
    assert getattr(module, name) is value


@pytest.mark.usefixtures("processes")
def test_former_command_works_with_a_warning() -> None:
    command = [sys.executable, "-m", "osrdyne_worker.runtime.main", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, "osrdyne_worker.main" in ended.stderr) == (0, True)
