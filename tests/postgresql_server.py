"""A private PostgreSQL for the tests that need one: a cluster in a temporary directory, gone with the run."""

import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from osrdyne.dev.rabbitmq.node_files import free_ports

PATIENCE = 120.0
UNPRIVILEGED = 65534
"""User and group without rights, for tests that run as root."""
PASSWORD = "p:ä/@ ss"


def programs() -> Path:
    """The directory of the newest PostgreSQL: Debian does not put `initdb` into the PATH."""
    if (found := shutil.which("initdb")) is not None:
        return Path(found).resolve().parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4]))
    assert versions, "PostgreSQL is missing: run make setup"
    return versions[-1].parent


class PostgresqlServer:
    """One server on a port of 127.0.0.1, as a user other than root, whom PostgreSQL refuses."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._programs = programs()
        self._as_user = (
            ["setpriv", f"--reuid={UNPRIVILEGED}", f"--regid={UNPRIVILEGED}", "--clear-groups"]
            if os.geteuid() == 0
            else []
        )
        [self.port] = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None

    def make(self) -> None:
        if self._as_user:
            os.chown(self._directory, UNPRIVILEGED, UNPRIVILEGED)
        password = self._directory / "password"
        password.write_text(PASSWORD, encoding="utf-8")
        password.chmod(0o644)
        self._run(
            "initdb", "--pgdata=data", "--username=osrdyne", "--auth=scram-sha-256", "--pwfile=password",
            "--encoding=UTF8", "--locale=C", "--no-sync",
        )  # fmt: skip

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._as_user, self._programs / program, *arguments]
        ran = subprocess.run(command, cwd=self._directory, capture_output=True, text=True, timeout=PATIENCE)
        assert ran.returncode == 0, ran.stdout + ran.stderr

    def start(self) -> None:
        # Ends with SIGINT at once, without waiting for its clients.
        options = {"fsync": "off", "unix_socket_directories": "", "listen_addresses": "127.0.0.1", "port": self.port}
        settings = [f"--{name}={value}" for name, value in options.items()]
        command = [*self._as_user, self._programs / "postgres", "-D", "data", *settings]
        with (self._directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=self._directory, stdout=subprocess.DEVNULL, stderr=log)
        end = time.monotonic() + PATIENCE
        check = [self._programs / "pg_isready", "--quiet", "--host=127.0.0.1", f"--port={self.port}"]
        while subprocess.run(check, timeout=PATIENCE).returncode != 0:
            assert self._process.poll() is None, (self._directory / "server.log").read_text(errors="replace")
            assert time.monotonic() < end, "PostgreSQL did not start"
            time.sleep(0.05)

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(2)
            self._process.wait(PATIENCE)
            self._process = None

    def uri(self, database: str = "postgres") -> str:
        return f"postgresql://osrdyne:{quote(PASSWORD, safe='')}@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """The URI of an empty database."""
        import psycopg

        name = f"t{secrets.token_hex(6)}"
        with psycopg.connect(self.uri(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.uri(name)


@contextmanager
def running_postgresql() -> Iterator[PostgresqlServer]:
    with tempfile.TemporaryDirectory(prefix="osr-pg-") as directory:
        server = PostgresqlServer(Path(directory))
        server.make()
        try:
            server.start()
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="session")
def postgresql():
    """A server for all tests of this process: make a database of your own in it."""
    with running_postgresql() as server:
        yield server


@pytest.fixture
def database(postgresql):
    """The URI of an empty database."""
    return postgresql.new_database()
