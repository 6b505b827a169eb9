"""The demo, as `make demo` runs it: every step succeeds, and no process is left."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_process import ROOT
from own_home import processes_of


@pytest.mark.timeout(1200)
def test_demo_tells_its_story_and_leaves_nothing(home: dict[str, str], tmp_path: Path) -> None:
    demo = subprocess.run(
        [sys.executable, ROOT / "tools" / "demo.py"],
        cwd=tmp_path,
        env=home,
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "all groups gone" in demo.stdout
    assert re.search(r"its cold start: process .* jvm .* session .* load .* first_query", demo.stdout, re.DOTALL)
    assert demo.stderr == ""
    assert processes_of(home) == []
