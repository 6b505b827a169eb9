"""A daemon as its users run it, `osrdyne run` in a process of its own, and what tests do to it and see of it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import yaml

from osrdyne.client import AsyncClient
from osrdyne.dev.rabbitmq.node_files import free_ports
from osrdyne.drivers.subprocess.environment import Marks
from osrdyne.drivers.subprocess.processes import environment_of, session_leaders
from tests.fork_server import ForkedProcess

ROOT = Path(__file__).parents[2]
OSRDYNE = Path(sys.executable).with_name("osrdyne")
WORKER = str(OSRDYNE.with_name("osrdyne-worker"))
LAUNCHER = Path(__file__).with_name("echo_launcher.py")
PATIENCE = 150.0
"""Seconds for anything that must happen; a test that needs them has failed."""

NEW_PROCESS = 60.0
"""Seconds after which a process is no longer between its fork and its program."""

LONGEST_INTERVAL = 0.25
"""Seconds between two looks at a condition that takes long."""

T = TypeVar("T")


async def until(
    condition: Callable[[], T | Awaitable[T]], what: str, *, timeout: float = PATIENCE, interval: float | None = None
) -> T:
    """The first true value of `condition`, asked every `interval`; by default the rarer, the longer it takes."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(timeout):
            while True:
                value = condition()
                if isinstance(value, Awaitable):
                    value = await value
                if value:
                    return value
                # Most conditions are requests to a daemon, or a look at all processes of the host.
                growing = min(LONGEST_INTERVAL, max(0.05, (time.monotonic() - began) / 10))
                await asyncio.sleep(growing if interval is None else interval)
    except TimeoutError:
        raise AssertionError(f"this did not happen within {timeout:g} s: {what}") from None


def own_environment(**more: str) -> dict[str, str]:
    """Without the settings of the user who runs the tests."""
    inherited = {name: value for name, value in os.environ.items() if not name.upper().startswith("OSRDYNE")}
    return {**inherited, "COLUMNS": "200", **more}


def free_port() -> int:
    """A free port that no outgoing connection of another process takes meanwhile."""
    return free_ports(1)[0]


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`more` over `base`, section by section."""
    result = dict(base)
    for name, value in more.items():
        before = result.get(name)
        result[name] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return result


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """A worker's main process, as the host shows it."""

    pid: int
    key: str
    worker_id: str


class DaemonProcess:
    """One daemon of one pool; started again after its end it finds the same configuration and state directory."""

    def __init__(
        self,
        directory: Path,
        *,
        amqp_uri: str,
        management_uri: str,
        pool: str,
        settings: Mapping[str, Any],
        launcher: Sequence[str] = (),
    ) -> None:
        """`launcher`: what stands before `osrdyne run` on its command line."""
        self.directory = directory
        self.pool = pool
        self.amqp_uri = amqp_uri
        self.api = f"http://127.0.0.1:{free_port()}"
        self.config = directory / "osrdyne.yaml"
        self.state = directory / "state" / pool
        self.log_file = directory / "daemon.log"
        self.variables: dict[str, str] = {}
        self._log_read = 0
        self._entries: list[dict[str, Any]] = []
        self._marks: dict[tuple[int, int], Marks | None] = {}
        self._faults = directory / "faults.json"
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._launcher = launcher
        worker = [sys.executable, str(LAUNCHER), str(self._faults)]
        base: dict[str, Any] = {
            "pool": {"id": pool},
            # A heartbeat so long that a busy machine costs no lead.
            "broker": {"uri": amqp_uri, "management_uri": management_uri, "retry_interval": "2s"}
            | {"leader_heartbeat": "10s"},
            "driver": {"options": {"command": worker, "cwd": str(ROOT), "state_directory": str(directory / "state")}},
            "worker": {"app": "workers.examples.echo:app", "stop_grace": "5s"},
            "lifecycle": {"settle_delay": "1s", "stop_delay": "1s", "start_attempts": 1},
            "api": {"port": int(self.api.rpartition(":")[2])},
            "log": {"level": "debug", "format": "json"},
        }
        if "name" in settings.get("driver", {}):
            del base["driver"]
        self.settings = merged(base, settings)
        self.write_settings()

    def write_settings(self, **changes: Mapping[str, Any]) -> None:
        self.settings = merged(self.settings, changes)
        self.config.touch(mode=0o600)
        self.config.write_text(yaml.safe_dump(self.settings, allow_unicode=True))

    def set_faults(self, faults: Mapping[str, Mapping[str, Any]]) -> None:
        """What the launcher does to workers of these keys; see `echo_launcher`."""
        self._faults.write_text(json.dumps(faults))

    # --- the process

    @property
    def _launched(self) -> subprocess.Popen[bytes] | ForkedProcess:
        assert self._process is not None
        return self._process

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def launch(self, *arguments: str) -> None:
        """Start it, and wait for nothing."""
        assert not self.is_running
        command = ["run", "-c", str(self.config), *arguments]
        environment = own_environment(**self.variables)
        if not self._launcher:
            self._process = ForkedProcess(command, cwd=self.directory, env=environment, log=self.log_file)
            return
        program, nothing = [*self._launcher, OSRDYNE, *command], subprocess.DEVNULL
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                program, cwd=self.directory, env=environment, stdin=nothing, stdout=log, stderr=log
            )

    async def start(self, *arguments: str) -> None:
        """Start it, and wait until it leads."""
        self.launch(*arguments)
        await self.until_leading()

    async def until_leading(self) -> None:
        async def leads() -> bool:
            assert self.is_running, self.log()
            return bool((await self.get("/v1/leadership")).get("leading"))

        await until(leads, "the daemon leads")

    def kill(self) -> None:
        """kill -9."""
        self.send_signal(signal.SIGKILL)
        self._launched.wait(PATIENCE)

    def send_signal(self, number: int) -> None:
        self._launched.send_signal(number)

    async def wait(self) -> int:
        """The exit code, once it has ended by itself."""
        return await asyncio.to_thread(self._launched.wait, PATIENCE)

    async def stop(self, number: int = signal.SIGTERM) -> int:
        self.send_signal(number)
        return await self.wait()

    async def restart(self) -> None:
        """kill -9, and start again."""
        self.kill()
        await self.start()

    async def close(self) -> None:
        """End the daemon and every worker it has left."""
        if self.is_running:
            self.kill()
        # Again and again: a worker that the daemon was starting when it was killed is found only later.
        await until(self._end_workers, "the workers are gone")

    def _end_workers(self) -> bool:
        """kill -9 each worker and its children; whether there was none."""
        workers = self.workers()
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                main = psutil.Process(worker.pid)
                for process in [*main.children(recursive=True), main]:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
        return not workers

    # --- logs and HTTP answers

    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace") if self.log_file.exists() else ""

    def events(self, event: str, **fields: object) -> list[dict[str, Any]]:
        """The log entries of this event that have these fields."""
        self._read_log()
        return [
            entry
            for entry in self._entries
            if entry.get("event") == event and all(entry.get(name) == value for name, value in fields.items())
        ]

    def _read_log(self) -> None:
        """Parse what is new, up to its last whole line: tests ask many times a second."""
        if not self.log_file.exists():
            return
        with self.log_file.open("rb") as log:
            log.seek(self._log_read)
            lines = log.read().rpartition(b"\n")[0]
        if lines:
            self._log_read += len(lines) + 1
            texts = lines.decode(errors="replace").splitlines()
            self._entries += [json.loads(line) for line in texts if line.startswith("{") and line.endswith("}")]

    async def until_event(self, event: str, *, timeout: float = PATIENCE, **fields: object) -> dict[str, Any]:
        found = await until(
            lambda: self.events(event, **fields), f"the daemon logs {event!r} {fields}", timeout=timeout
        )
        return found[0]

    def http(self, timeout: float = PATIENCE) -> httpx.AsyncClient:
        # It is plain HTTP. With `verify` each client would load all certificates of the machine, which takes 20 ms.
        return httpx.AsyncClient(base_url=self.api, trust_env=False, verify=False, timeout=timeout)

    async def get(self, path: str, **parameters: str) -> dict[str, Any]:
        """What the HTTP API answers; empty without an answer."""
        async with self.http() as http:
            try:
                answer: dict[str, Any] = (await http.get(path, params=parameters)).json()
            except httpx.TransportError:
                return {}
            return answer

    async def groups(self) -> dict[str, dict[str, Any]]:
        return {group["key"]: group for group in (await self.get("/v1/groups")).get("groups", [])}

    async def until_group(self, key: str, condition: Callable[[dict[str, Any]], Any], what: str) -> dict[str, Any]:
        """The group, once it exists and fulfils the condition."""

        async def look() -> dict[str, Any] | None:
            group = (await self.groups()).get(key)
            return group if group is not None and condition(group) else None

        found = await until(look, f"group {key!r}: {what}")
        assert found is not None
        return found

    async def until_gone(self, key: str) -> None:
        """Wait until the daemon has forgotten the group."""

        async def gone() -> bool:
            assert self.is_running
            return key not in await self.groups()

        await until(gone, f"group {key!r} is gone")

    # --- what the host shows

    def workers(self) -> list[SeenWorker]:
        """The main processes of this pool's workers."""
        found = []
        for pid in session_leaders():
            marks = self._marks_of(pid)
            if marks is not None and _is_alive(pid):
                found.append(SeenWorker(pid, str(marks.key), str(marks.worker_id)))
        return found

    def _marks_of(self, pid: int) -> Marks | None:
        """Remembered: to read the environment of every process many times a second takes a core of its own."""
        try:
            started = psutil.Process(pid).create_time()
        except psutil.NoSuchProcess:
            return None
        process = (pid, int(started * 100))
        if process not in self._marks:
            variables = environment_of(pid)
            marks = None if variables is None else Marks.from_variables(variables, self.state)
            if marks is None and time.time() - started < NEW_PROCESS:
                return None  # it may have its parent's environment still
            self._marks[process] = marks
        return self._marks[process]

    def pids(self, key: str) -> list[int]:
        return [worker.pid for worker in self.workers() if worker.key == key]

    @asynccontextmanager
    async def watching_for_twins(self, interval: float = 0.2) -> AsyncIterator[None]:
        """Assert that no key has two workers at any moment."""

        loop = asyncio.get_running_loop()

        async def watch() -> None:
            while True:
                began = loop.time()
                keys = [worker.key for worker in self.workers()]
                twins.update(key for key in keys if keys.count(key) > 1)
                # To look takes long on a busy machine, and must not be all that it does.
                await asyncio.sleep(max(interval, 4 * (loop.time() - began)))

        twins: set[str] = set()
        watching = asyncio.create_task(watch())
        try:
            yield
            assert not watching.done(), watching.exception()
        finally:
            watching.cancel()
        assert not twins

    # --- what its users do

    def client(self, **options: Any) -> AsyncClient:
        return AsyncClient(self.amqp_uri, self.pool, name="osrdyne acceptance test", **options)

    def osrdyne(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another `osrdyne` command with this daemon's configuration, which is found in its directory."""
        program, environment = [OSRDYNE, *arguments], own_environment(**self.variables)
        return subprocess.run(
            program, cwd=self.directory, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )


MakeDaemon = Callable[..., DaemonProcess]
"""The fixture `make_daemon`."""


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
