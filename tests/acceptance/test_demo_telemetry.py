"""The demo of telemetry, as `make` runs it but shorter: every step succeeds, and no process is left."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_demo import output_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200), pytest.mark.one_rabbitmq]


def test_demo_of_telemetry_shows_the_examples_and_draws_a_graph(home: dict[str, str], tmp_path: Path) -> None:
    graph = tmp_path / "lag.png"
    options = ("--spike", "1", "--minutes", "2", "--graph", str(graph))
    output = output_of("demo_telemetry.py", *options, home=home, directory=tmp_path)
    assert "up to 3,600 events wait, and the last of them is stored after 6 minutes" in output
    assert re.search(r"GET /v1/last: \d+ series of site-1; the newest is .* as in the cold table", output, re.DOTALL)
    assert "the lag grows by 80 events a minute" in output
    assert "4,000 confirmed, 200 refused" in output
    assert "5.56 minutes, × 100 = 9.26 h" in output
    stored = re.findall(r"(cold|warm): ([\d,]+) rows and ([\d,]+) invalid events", output)
    assert [name for name, _, _ in stored] == ["cold", "warm"]
    assert stored[0][1:] == stored[1][1:]
    assert graph.read_bytes().startswith(b"\x89PNG")
