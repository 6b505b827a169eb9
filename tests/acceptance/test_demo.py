"""Demos, as `make` runs them: every step succeeds, and no process is left."""

import re
import subprocess
import sys

import pytest
from daemon_process import ROOT
from own_home import processes_of

DEMOS = {
    "demo": [
        r"cold start of .* in parts:\s+process .* jvm .* session .* load .* first_query",
        "49 further keys have answered",
        r"its memory with its JVM: \d+ MiB, \d+ MiB per key",
        "all groups gone",
    ],
    "demo_protection": [
        "20 of 20 requests have failed, the circuit of 'billing' is open",
        "(is answered.*){4}",
        "predicted: 125 messages are accepted",
        "measured:  125 messages were accepted",
    ],
    "demo_telemetry --spike 1 --minutes 2 --graph lag.png": [
        "up to 3,600 events wait, and the last of them is stored after 6 minutes",
        r"GET /v1/last: \d+ series of site-1; the newest is .* as in the cold table",
        "the lag grows by 80 events a minute",
        "4,000 confirmed, 200 refused",
        r"5.56 minutes, × 100 = 9.26 h",
        r"cold: ([\d,]+ rows and [\d,]+ invalid events).*warm: \1",
    ],
}


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.one_rabbitmq
@pytest.mark.parametrize("command", DEMOS, ids=lambda command: command.split()[0])
def test_demo_tells_its_story_and_leaves_nothing(home, tmp_path, command):
    name, *options = command.split()
    program = [sys.executable, ROOT / "tools" / f"{name}.py", *options]
    demo = subprocess.run(program, cwd=tmp_path, env=home, capture_output=True, text=True, timeout=1100, check=False)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert demo.stderr == ""
    assert processes_of(home) == []
    assert [told for told in DEMOS[command] if not re.search(told, demo.stdout, re.DOTALL)] == []
    if "--graph" in options:
        assert (tmp_path / "lag.png").read_bytes().startswith(b"\x89PNG")
