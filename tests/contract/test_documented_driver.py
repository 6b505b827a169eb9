"""The example of docs/how-to/write-a-driver.md passes the conformance suite, taken from the page's own text."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write-a-driver.md"

for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)):
    exec(compile(code, f"{PAGE.name}, block {number + 1}", "exec", dont_inherit=True), globals())
