"""The page about drivers says everything that can be set."""

from __future__ import annotations

from pathlib import Path

import pytest

from osrdyne.drivers.registry import known_drivers, load_driver_class

PAGE = (Path(__file__).parents[2] / "docs" / "drivers.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", known_drivers())
def test_every_option_has_a_line_in_the_section_of_its_driver(name):
    section = PAGE.partition(f"\n## `{name}`\n")[2].partition("\n## ")[0]
    options = load_driver_class(name).options_model.model_fields
    assert section
    assert [option for option in options if f"\n| `{option}` |" not in section] == []


def test_every_driver_of_ours_is_described():
    assert [name for name in known_drivers() if f"| `{name}` |" not in PAGE] == []
