"""The driver of docs/how-to/write-a-driver.md passes the suite as docs/how-to/test-a-driver.md prints it."""

import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.one_rabbitmq, pytest.mark.usefixtures("processes"), pytest.mark.nightly]

GUIDES = Path(__file__).parents[2] / "docs" / "how-to"

PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

for page in (GUIDES / "write-a-driver.md", GUIDES / "test-a-driver.md"):
    for number, code in enumerate(PYTHON.findall(page.read_text("utf-8"))):
        exec(compile(code, f"{page.name}, block {number + 1}", "exec", dont_inherit=True), globals())
