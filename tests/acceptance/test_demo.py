"""Demos, as `make` runs them: every step succeeds, and no process is left."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_process import ROOT
from own_home import processes_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200), pytest.mark.one_rabbitmq]


def output_of(name: str, *options: str, home: dict[str, str], directory: Path) -> str:
    """What a demo prints, if it succeeds and leaves nothing."""
    command = [sys.executable, ROOT / "tools" / name, *options]
    demo = subprocess.run(command, cwd=directory, env=home, capture_output=True, text=True, timeout=1100, check=False)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert demo.stderr == ""
    assert processes_of(home) == []
    return demo.stdout


def test_demo_tells_its_story(home, tmp_path):
    output = output_of("demo.py", home=home, directory=tmp_path)
    assert "all groups gone" in output
    parts = r"cold start of .* in parts:\s+process .* jvm .* session .* load .* first_query"
    assert re.search(parts, output, re.DOTALL)
    assert "49 further keys have answered" in output
    assert re.search(r"its memory with its JVM: \d+ MiB, \d+ MiB per key", output)


def test_circuit_recovers_and_quota_runs_out_after_the_predicted_number_of_messages(home, tmp_path):
    output = output_of("demo_protection.py", home=home, directory=tmp_path)
    assert "20 of 20 requests have failed, the circuit of 'billing' is open" in output
    assert output.count("is answered") == 4
    assert "predicted: 125 messages are accepted" in output
    assert "measured:  125 messages were accepted" in output


def test_demo_of_telemetry_shows_the_examples_and_draws_a_graph(home, tmp_path):
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
