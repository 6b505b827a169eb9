"""What a pooled process reads about its memory in a container with a memory limit, on a real engine."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.docker.conftest import ROOT

LIMIT = 96 << 20
DATA = 48 << 20
PROGRAM = f"""
import json
from osrdyne_worker.pooled.memory import memory_limit
before = memory_limit()
data = bytearray(b"x") * {DATA}
after = memory_limit()
print(json.dumps([before.used, after.used, after.total, after.scope]))
"""


def read_in_container(image: str) -> tuple[int, int, int, str]:
    command = [
        "docker", "run", "--rm", "--memory", str(LIMIT), "--volume", f"{ROOT}/workers:/workers:ro",
        "--env", "PYTHONPATH=/app:/workers", image, "python", "-c", PROGRAM,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    before, after, total, scope = json.loads(done.stdout)
    return before, after, total, scope


@pytest.mark.proves("pooled/host-cgroup-process-short")
def test_limit_of_a_container_is_that_of_its_cgroup(conformance_image: str) -> None:
    """Its own cgroup, which it shares with no other container."""
    before, after, total, scope = read_in_container(conformance_image)
    assert (total, scope.split()[0]) == (LIMIT, "cgroup")
    assert after - before > DATA // 2
    assert after <= LIMIT
