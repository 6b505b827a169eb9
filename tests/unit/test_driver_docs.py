"""The pages about drivers name everything that can be set, and the example configurations may be used as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from osrdyne.config.models import Settings
from osrdyne.drivers.registry import known_drivers, load_driver_class

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference" / "drivers"
EXAMPLES = [ROOT / "deploy" / "config" / f"{name}.yaml" for name in ("compose", "docker", "kubernetes", "systemd")]


@pytest.mark.parametrize("name", known_drivers())
def test_every_option_has_a_line_on_the_page_of_its_driver(name):
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    options = load_driver_class(name).options_model.model_fields
    assert [option for option in options if f"\n| `{option}` |" not in page] == []


def test_every_driver_of_ours_is_described():
    page = (PAGES / "index.md").read_text(encoding="utf-8")
    assert [name for name in known_drivers() if f"| [`{name}`]({name}.md) |" not in page] == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_configuration_is_right_where_it_is_commented_out(example):
    text = example.read_text(encoding="utf-8")
    switched_on = re.sub(r"^( *)#(?=\w|  \w)", r"\1", text, flags=re.MULTILINE)  # `# words` are for people
    for document in (text, switched_on):
        driver = Settings.model_validate(yaml.safe_load(document)).driver
        load_driver_class(driver.name).options_model.model_validate(driver.options)
