"""The systemd driver under a real systemd: the conformance suite inside its container, and a pool of Spark workers.

The driver's own tests run inside (`systemd/conformance.py`, `systemd/specifics.py`), as an unprivileged user with the
shipped polkit rule, as root, and as a user of the machine with a systemd of their own.
"""

import json
import os
import re
import socket
import time
from collections.abc import Callable

import httpx
import pytest
import yaml
from systemd_container import SOURCE, SystemdContainer

# the first one builds the image, with Java and Spark in it
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2400)]
CONFIG = "/etc/osrdyne/osrdyne.yaml"
KEY = "demo/day=2026-11-20"
PATIENCE = 400.0
BACKEND_AWAY = os.environ.get("OSRDYNE_BACKEND_AWAY", "1")
FILES = r"shopt -s nullglob; printf '%s\n' *.env *.uri | sed '/^$/d'"
"""Of workers: the socket of the API is in the same directory."""
# In a container that may not do everything, systemd 252 leaves what LoadCredential= provides to root.
IN_A_CONTAINER = """
[Service]
LoadCredential=
SupplementaryGroups=adm
"""
SETTINGS = """
driver: {name: systemd, options: {environment: {SPARK_LOCAL_IP: 127.0.0.1}}}
worker:
  spark_master: local[2]
  spark_conf: {spark.ui.enabled: "false", spark.driver.memory: 512m, spark.sql.shuffle.partitions: "2"}
  config:
    base_directory: /srv/osrdyne/data
    datasets: [{key: "demo/day={day}", tables: [{view: numbers, path: "{day}.parquet"}]}]
lifecycle: {settle_delay: 1s, stop_delay: 1s}
"""
UNIT_OF_TESTS = r"""
set -e
cd /etc/systemd/system
program='ExecStart=/opt/osrdyne/bin/python -m osrdyne.testing.conformance_worker'
sed "s|^ExecStart=.*|$program|" osrdyne-worker@.service > osrdyne-worker-conformance@.service
sed "s|^ExecStart=.*|ExecStart=/opt/osrdyne/bin/python -m osrdyne.testing.pooled_process|; s|^UMask=.*|UMask=0000|; \
  /^ProtectSystem=/a ReadWritePaths=/played" osrdyne-worker@.service > osrdyne-worker-pooled@.service
install -d -m 1777 /played
sed 's|^ExecStart=.*|ExecStart=/bin/sleep infinity|' osrdyne-worker@.service > osrdyne-worker-other-people@.service
usermod -aG systemd-journal osrdyne
useradd -m -u 1500 -G systemd-journal tester
install -d -o tester /home/tester/.config/systemd/user
sed "s|^ExecStart=.*|$program|" /src/deploy/systemd/user/osrdyne-worker@.service \
  > /home/tester/.config/systemd/user/osrdyne-worker-conformance@.service
systemctl daemon-reload
loginctl enable-linger tester
"""


@pytest.fixture(scope="module")
def machine():
    container = SystemdContainer()
    try:
        container.start()
        container.run("bash", "-c", UNIT_OF_TESTS)
        yield container
    finally:
        container.close()


def run_inside(machine: SystemdContainer, file: str, *options: str, user: str, manager: str, bus: str) -> int:
    """Run pytest in the container; the number of tests that passed. Anything else than passing is a failure."""
    environment = [
        f"SYSTEMD_MANAGER={manager}", f"SYSTEMD_BUS={bus}", "PYTHONDONTWRITEBYTECODE=1", f"PYTHONPATH={SOURCE}",
        "HOME=/tmp", "XDG_RUNTIME_DIR=/run/user/1500", f"OSRDYNE_BACKEND_AWAY={BACKEND_AWAY}",
    ]  # fmt: skip
    owner = "osrdyne" if user == "osrdyne" else "root"
    machine.run("bash", "-c", f"rm -rf /run/osrdyne && install -d -m 700 -o {owner} /run/osrdyne")
    done = machine.attempt(
        "env", "-C", SOURCE, *environment, "/opt/osrdyne/bin/pytest", "-p", "no:cacheprovider", "-q", "--tb=short",
        "-o", "addopts=", f"tests/docker/systemd/{file}", *options, user=user, timeout=900.0,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    summary = re.search(r"^(\d+) passed(, \d+ deselected)? in ", done.stdout, re.MULTILINE)
    assert summary is not None, done.stdout[-2000:]
    return int(summary[1])


def test_unprivileged_daemon_passes_the_conformance_suite(machine):
    passed = run_inside(
        machine, "conformance.py", "-k", "not WithoutDbus", user="osrdyne", manager="system", bus="auto"
    )
    assert passed >= 75


def test_driver_comes_back_after_dbus_was_away(machine):
    assert run_inside(machine, "conformance.py", "-k", "WithoutDbus", user="root", manager="system", bus="dbus") == 2


@pytest.mark.parametrize(
    "given",
    [{"user": "root", "manager": "system", "bus": "systemctl"}, {"user": "tester", "manager": "user", "bus": "dbus"}],
    ids=["systemctl alone", "systemd of a user"],
)
def test_this_is_enough(machine, given):
    assert run_inside(machine, "conformance.py", "-k", "TestSystemdDriver and not odd and not fifty", **given) >= 32


def test_what_only_systemd_does(machine):
    assert run_inside(machine, "specifics.py", user="root", manager="system", bus="auto") >= 15


# --- a pool of Spark workers, as docs/how-to/run-under-systemd.md installs it


class Pool:
    """The daemon's own unit, and what a person sees of it."""

    def __init__(self, machine: SystemdContainer, api: str) -> None:
        self.machine = machine
        self.api = api

    def is_led(self) -> bool:
        try:
            return "leading in term" in httpx.get(f"{self.api}/ready", trust_env=False, verify=False, timeout=60.0).text
        except httpx.HTTPError:
            return False

    def ask(self) -> object:
        answer = self.machine.run(
            "/opt/osrdyne/bin/osrdyne", "call", "--config", CONFIG, "--output", "json", "--timeout", "8m",
            "--data", json.dumps({"query": "SELECT sum(n) AS total FROM numbers"}), KEY, "/sql", timeout=500.0,
        )  # fmt: skip
        return json.loads(answer)["rows"]

    def osrdyne(self, *arguments: str) -> str:
        return self.machine.run("/opt/osrdyne/bin/osrdyne", *arguments, "--config", CONFIG)

    def assert_credentials_are_out_of_reach(self, instance: str, pid: str) -> None:
        """Worker and JVM have a user of their own, and neither file nor environment with the broker's password."""
        run = self.machine.run
        group = run("systemctl", "show", "-P", "ControlGroup", f"osrdyne-worker@{instance}.service").strip()
        listed = run("bash", "-c", f"cat /sys/fs/cgroup{{,/systemd}}'{group}/cgroup.procs' 2>/dev/null || true").split()
        assert pid in listed and len(listed) > 1, "a worker and Spark's JVM"
        owners = {run("stat", "-c", "%u", f"/proc/{one}").strip() for one in listed}
        daemon = run("systemctl", "show", "-P", "MainPID", "osrdyne.service").strip()
        assert owners.isdisjoint({"0", run("stat", "-c", "%u", f"/proc/{daemon}").strip()})
        [owner] = owners  # a dynamic user's group has the same number
        as_worker = ("setpriv", f"--reuid={owner}", f"--regid={owner}", "--clear-groups")
        shown = [run(*as_worker, "cat", f"/proc/{one}/environ") for one in listed]
        assert all("WORKER_ID" in text and "amqp://" not in text for text in shown)
        assert run(*as_worker, "readlink", f"/proc/{pid}/fd/0").strip() == "/dev/null"
        assert run("bash", "-c", f"cd /run/osrdyne; {FILES}").split() == [f"{instance}.env"]
        assert run("stat", "-c", "%u", f"/var/lib/private/osrdyne-worker/{instance}").strip() in owners

    def workers(self) -> dict[str, str]:
        """The worker units that are up, and their main processes."""
        shown = self.machine.run("systemctl", "show", "--property=Id,MainPID,ActiveState", "osrdyne-worker@*.service")
        units = [dict(line.split("=", 1) for line in block.splitlines()) for block in shown.split("\n\n") if block]
        return {unit["Id"]: unit["MainPID"] for unit in units if unit["ActiveState"] == "active"}


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"this did not happen: {what}"
        time.sleep(0.5)


@pytest.fixture
def pool(machine, broker, pool_id):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    at = {"uri_file": "/etc/osrdyne/uri", "management_uri": broker.management_uri, "scoped_credentials": True}
    settings = {**yaml.safe_load(SETTINGS), "pool": {"id": pool_id}, "broker": at, "api": {"port": port}}
    machine.write(CONFIG, yaml.safe_dump(settings))
    machine.write("/etc/osrdyne/uri", broker.amqp_uri, mode="440")
    machine.run("chgrp", "adm", "/etc/osrdyne/uri")
    machine.write("/etc/systemd/system/osrdyne.service.d/container.conf", IN_A_CONTAINER)
    machine.run("systemctl", "daemon-reload")
    table = "pyarrow.table({'n': range(101)})"
    write = f"import pyarrow, pyarrow.parquet as p; p.write_table({table}, '/srv/osrdyne/data/2026-11-20.parquet')"
    machine.run("install", "-d", "/srv/osrdyne/data")
    machine.run("/opt/osrdyne/bin/python", "-c", write)
    machine.run("bash", "-c", "rm -rf /run/osrdyne")
    machine.run("systemctl", "start", "osrdyne.service")
    pool = Pool(machine, f"http://127.0.0.1:{port}")
    until(pool.is_led, "the daemon leads")
    yield pool
    print(machine.run("journalctl", "--no-pager", "--lines=200", check=False))  # for the report of a failed test
    machine.run("systemctl", "stop", "osrdyne.service", "osrdyne-worker@*.service", check=False)


def test_spark_workers_come_and_go_and_outlive_the_daemon(pool):
    assert pool.ask() == [[5050]]
    [(unit, pid)] = pool.workers().items()
    assert "demo:2Fday:3D2026:2D11:2D20" in unit
    instance = unit.removeprefix("osrdyne-worker@").removesuffix(".service")
    pool.assert_credentials_are_out_of_reach(instance, pid)

    pool.machine.run("systemctl", "restart", "osrdyne.service")
    assert pool.ask() == [[5050]]
    assert pool.workers() == {unit: pid}
    until(pool.is_led, "the next daemon leads")

    assert pool.osrdyne("groups", "logs", KEY).strip()

    pool.osrdyne("groups", "stop", KEY)
    until(
        lambda: pool.machine.run("bash", "-c", f"cd /run/osrdyne; {FILES}") == "",
        "the idle worker has gone and left nothing",
    )
    assert pool.workers() == {}
