"""The order in which `make test` takes the files."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).parents[1]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TESTS / "plugins")
    return importlib.import_module("slow_first")


def test_slowest_files_come_first_and_unit_tests_last(plugin: ModuleType) -> None:
    files = [("unit", "test_a.py"), ("spark", "test_b.py"), ("acceptance", "test_c.py"), ("acceptance", "test_demo.py")]
    assert sorted(files, key=plugin.rank) == files[::-1]


def test_files_and_folders_that_are_named_exist(plugin: ModuleType) -> None:
    assert all((TESTS / folder).is_dir() for folder in plugin.SLOW)
    assert all(list(TESTS.glob(f"*/{name}")) for name in plugin.FILES)
