"""`docker compose up -d`, then a question that a Spark container answers: the first lines of docker-compose.yml."""

import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from osrdyne.dev.rabbitmq.node_files import free_ports

ROOT = Path(__file__).parents[2]
OSRDYNE = Path(sys.executable).with_name("osrdyne")
UP_TIMEOUT = 1500.0
ANSWER_TIMEOUT = 620.0
"""Seconds for a Spark container to come up and answer; on a machine with nothing else to do it takes thirty."""
CALL = ("call", "--timeout", "10m", "--output", "json")
QUESTION = ("/sql", "-d", json.dumps({"query": "select count(*) as items from lineitem"}))
ROWS = {"0.001": 6005, "0.01": 60175}

pytestmark = pytest.mark.timeout(UP_TIMEOUT)


_PLUGIN = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
COMPOSE = ["docker", "compose"] if _PLUGIN.returncode == 0 else ["docker-compose"]
"""The plugin of the engine, or the program of Debian's package."""


class ComposeStack:
    """One copy of docker-compose.yml, beside any other on the host."""

    def __init__(self) -> None:
        self.name = f"osrdyne-test-{secrets.token_hex(3)}"
        self.amqp_port, management_port, api_port = free_ports(3)
        ports = {"AMQP_PORT": self.amqp_port, "MANAGEMENT_PORT": management_port, "API_PORT": api_port}
        self.variables = {**os.environ, "OSRDYNE_STACK": self.name, **{name: str(port) for name, port in ports.items()}}

    def compose(self, *arguments: str, timeout: float = 300.0) -> str:
        command = [*COMPOSE, "-p", self.name, *arguments]
        return run(command, cwd=ROOT, env=self.variables, timeout=timeout)

    def guest_uri(self) -> str:
        show = ("run", "--rm", "--no-deps", "--entrypoint", "cat", "broker-users", "/broker/guest-password")
        return f"amqp://guest:{self.compose(*show).strip()}@localhost:{self.amqp_port}/"

    def workers(self, *, everything: bool = False) -> list[str]:
        """The keys of this stack's worker containers, as `docker ps` has them."""
        which = ["--filter", f"label=osrdyne.stack={self.name}", "--format", '{{.Label "osrdyne.key"}}']
        return run(["docker", "ps", *(["--all"] if everything else []), *which]).split()

    def leftovers(self) -> list[str]:
        kinds = [run(["docker", kind, "ls", "-q", "-f", f"name={self.name}"]) for kind in ("network", "volume")]
        return [*"".join(kinds).split(), *self.workers(everything=True)]

    def close(self) -> None:
        """Remove all containers and volumes, in any state."""
        subprocess.run([*COMPOSE, "-p", self.name, "kill"], cwd=ROOT, env=self.variables, timeout=300, check=False)
        for identity in run(["docker", "ps", "-aq", "--filter", f"label=osrdyne.stack={self.name}"]).split():
            run(["docker", "rm", "-f", identity])
        self.compose("down", "--volumes")


def run(command: list[str], *, timeout: float = 300.0, **options: object) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **options)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def stack():
    stack = ComposeStack()
    try:
        stack.compose("up", "-d", "--build", timeout=UP_TIMEOUT)
        yield stack
        stack.compose("down", "--volumes")
        assert stack.leftovers() == [], "`down --volumes` leaves nothing but images"
    finally:
        stack.close()


def test_question_from_the_host_is_answered_by_a_container(stack, tmp_path):
    assert "tpch/sf=0.01" not in stack.workers()
    # Who has no other osrdyne that would be asked.
    bare_home = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "OSRDYNE__BROKER__URI": stack.guest_uri()}
    answer = run([str(OSRDYNE), *CALL, "tpch/sf=0.01", *QUESTION], timeout=ANSWER_TIMEOUT, env=bare_home)
    assert json.loads(answer)["rows"] == [[ROWS["0.01"]]]
    assert "tpch/sf=0.01" in stack.workers()


def test_question_from_within_is_answered_and_the_worker_stops_on_request(stack):
    inside = ("exec", "-T", "osrdyne", "osrdyne")
    answer = stack.compose(*inside, *CALL, "tpch/sf=0.001", *QUESTION, timeout=ANSWER_TIMEOUT)
    assert json.loads(answer)["rows"] == [[ROWS["0.001"]]]
    assert "tpch/sf=0.001" in stack.workers()
    stack.compose(*inside, "groups", "stop", "tpch/sf=0.001")
    deadline = time.monotonic() + ANSWER_TIMEOUT
    while "tpch/sf=0.001" in stack.workers(everything=True):
        assert time.monotonic() < deadline, "the container of a stopped group is gone"
        time.sleep(0.5)


def test_api_needs_the_token_and_workers_cannot_reach_it(stack):
    groups = f"http://127.0.0.1:{stack.variables['API_PORT']}/v1/groups"
    assert httpx.get(groups, timeout=60).status_code == 401
    token = stack.compose("run", "--rm", "--no-deps", "--entrypoint", "cat", "api-token", "/api/token").strip()
    assert httpx.get(groups, headers={"authorization": f"Bearer {token}"}, timeout=60).status_code == 200
    [daemon] = run(["docker", "ps", "-q", "--filter", f"publish={stack.variables['API_PORT']}"]).split()
    found = json.loads(run(["docker", "inspect", daemon]))[0]["NetworkSettings"]["Networks"]
    assert list(found) == [f"{stack.name}-backend"]
    probe = f"import socket; socket.create_connection(({found[f'{stack.name}-backend']['IPAddress']!r}, 4242), 5)"
    command = ["docker", "run", "--rm", "--network", f"{stack.name}-workers", "--entrypoint", "python"]
    command += ["osrdyne/controller", "-c", probe]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert tried.returncode == 1
    assert "TimeoutError" in tried.stderr or "OSError" in tried.stderr


def test_doctor_finds_all_that_the_daemon_needs(stack):
    findings = json.loads(stack.compose("exec", "-T", "osrdyne", "osrdyne", "doctor", "--json"))
    wrong = [finding for finding in findings if not finding["ok"] and finding["subject"] != "java"]
    assert wrong == []
