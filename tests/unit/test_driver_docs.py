"""The page about drivers says everything that can be set."""

from __future__ import annotations

from pathlib import Path

import pytest

from osrdyne.drivers.registry import known_drivers
from osrdyne.drivers.subprocess_options import SubprocessOptions

PAGE = (Path(__file__).parents[2] / "docs" / "drivers.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("option", SubprocessOptions.model_fields)
def test_every_option_of_subprocess_has_a_line(option):
    assert f"\n| `{option}` |" in PAGE


def test_every_driver_of_ours_is_described():
    assert [name for name in known_drivers() if f"| `{name}` |" not in PAGE] == []
