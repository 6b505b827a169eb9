"""A container whose first process is systemd, with osrdyne installed in it as `docs/how-to/run-under-systemd.md` says.

The network is the host's, so that the container sees the tests' broker. Needs a Docker engine; nothing is skipped.
"""

import secrets
import subprocess
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMAGE = "osrdyne-test/systemd"
SOURCE = "/src"
BUILD_TIMEOUT = 900.0
UP_TIMEOUT = 240.0
EXTRAS = ("spark", "systemd")
TEST_TOOLS = ("pytest>", "pytest-asyncio", "pytest-timeout", "hypothesis")

INSTALL = f"""
set -e
/opt/osrdyne/bin/pip install -q --no-deps --no-build-isolation --no-index --root-user-action=ignore -e {SOURCE}
cd {SOURCE}/deploy/systemd
install -m 644 -D osrdyne.sysusers.conf /etc/sysusers.d/osrdyne.conf
systemd-sysusers
install -m 644 system/*.service /etc/systemd/system/
install -m 644 50-osrdyne.rules /etc/polkit-1/rules.d/
systemctl daemon-reload
"""


def requirements() -> str:
    """What `pip install osrdyne[spark,systemd]` would install, and the tools of the tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    tools = [line for line in extras["dev"] if line.startswith(TEST_TOOLS)]
    needed = [*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra]), *tools]
    return " ".join(line.partition(";")[0].strip() for line in needed)


class SystemdContainer:
    """One container, from `start` to `close`."""

    def __init__(self) -> None:
        self.name = f"osrdyne-test-systemd-{secrets.token_hex(4)}"

    def start(self) -> None:
        """Build the image unless it is cached, start the container, install osrdyne."""
        folder = Path(__file__).with_name("systemd")
        argument = f"REQUIREMENTS={requirements()}"
        _docker("build", "-q", "-t", IMAGE, "--build-arg", argument, str(folder), timeout=BUILD_TIMEOUT)
        _docker(
            "run", "-d", "--rm", "--name", self.name, "--network", "host", "--cap-add", "SYS_ADMIN",
            "--security-opt", "seccomp=unconfined", "--tmpfs", "/run", "--tmpfs", "/run/lock", "--tmpfs", "/tmp:exec",
            "-v", "/sys/fs/cgroup:/sys/fs/cgroup:rw", "--cgroupns", "host", "-v", f"{ROOT}:{SOURCE}:ro", IMAGE,
        )  # fmt: skip
        self._wait_until_up()
        self.run("bash", "-c", INSTALL)

    def close(self) -> None:
        _docker("rm", "-f", self.name, check=False)

    def run(self, *command: str, user: str | None = None, timeout: float = 240.0, check: bool = True) -> str:
        """Run a command in the container and return what it printed."""
        return self.attempt(*command, user=user, timeout=timeout, check=check).stdout

    def attempt(
        self, *command: str, user: str | None = None, timeout: float = 240.0, check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Like `run`, with the exit code and the errors."""
        as_user = ("--user", user) if user else ()
        return _docker("exec", *as_user, self.name, *command, timeout=timeout, check=check)

    def write(self, path: str, text: str, *, mode: str = "644", owner: str = "root") -> None:
        """Write a file in the container."""
        command = f"install -D -m {mode} -o {owner} /dev/stdin '{path}'"
        subprocess.run(
            ["docker", "exec", "-i", self.name, "bash", "-c", command], input=text, text=True, check=True, timeout=180
        )

    def _wait_until_up(self) -> None:
        until = time.monotonic() + UP_TIMEOUT
        while time.monotonic() < until:
            state = self.attempt("systemctl", "is-system-running").stdout.strip()
            if state in {"running", "degraded"}:
                return
            time.sleep(0.2)
        raise AssertionError("systemd did not come up in its container.")


def _docker(*arguments: str, timeout: float = 240.0, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout, check=False)
    assert not check or done.returncode == 0, f"docker {arguments[0]}: {done.stdout[-6000:]}{done.stderr[-3000:]}"
    return done
