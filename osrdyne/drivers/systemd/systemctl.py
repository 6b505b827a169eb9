"""systemd through its programs: systemctl while D-Bus is unavailable, journalctl for the output of workers."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence

from osrdyne.aio.clock import Clock
from osrdyne.drivers.systemd.names import UnitEnd
from osrdyne.drivers.systemd.options import ManagerKind
from osrdyne.drivers.systemd.units import CALL_TIMEOUT, ActiveState, SystemdUnits, active_state, refusal, trouble
from osrdyne.errors import DriverUnavailableError
from osrdyne.logs import mask_uri

POLL_INTERVAL = 5.0  # Seconds between two polls of the units; only used without D-Bus, which sends events.
_POLLS = 12  # After so many polls `changes` ends, and the driver tries D-Bus again.
_CATCH_UP_READS = 10
_CATCH_UP_INTERVAL = 0.3
_ENVIRONMENT = {"LC_ALL": "C", "PATH": os.defpath, "SYSTEMD_COLORS": "0"}
_INHERITED = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS", "HOME")


class Systemctl(SystemdUnits):
    """Runs systemctl for every call. For root and for the manager of a user it needs no D-Bus daemon."""

    def __init__(self, manager: ManagerKind, pattern: str, *, clock: Clock) -> None:
        self._manager = manager
        self._pattern = pattern
        self._clock = clock

    async def states(self, pattern: str) -> Mapping[str, ActiveState]:
        found = await self._show(["Id", "ActiveState"], pattern)
        return {unit["Id"]: active_state(unit["ActiveState"]) for unit in found}

    async def end_of(self, unit: str) -> UnitEnd:
        [found] = await self._show(["ExecMainCode", "ExecMainStatus", "Result"], unit)
        return UnitEnd(int(found["ExecMainCode"]), int(found["ExecMainStatus"]), found["Result"])

    async def start(self, unit: str) -> bool:
        code, output = await self._run("start", unit, timeout=None)
        if code and "Job for" not in output:
            raise refusal(output, unit)
        return code == 0

    async def stop(self, unit: str) -> None:
        code, output = await self._run("stop", unit, timeout=None)
        if code and "not loaded" not in output:
            raise trouble(output, unit)

    async def kill(self, unit: str) -> None:
        await self._if_loaded("kill", "--signal=KILL", unit)

    async def forget_failure(self, unit: str) -> None:
        await self._if_loaded("reset-failed", unit)

    async def properties(self, unit: str, names: Sequence[str]) -> Mapping[str, str]:
        """Properties of one unit as systemctl shows them. systemd loads the unit if it is not loaded."""
        [found] = await self._show(names, unit)
        return found

    async def changes(self) -> AsyncIterator[None]:
        before = await self.states(self._pattern)
        for _ in range(_POLLS):
            await self._clock.sleep(POLL_INTERVAL)
            now = await self.states(self._pattern)
            if now != before:
                before = now
                yield

    async def _if_loaded(self, verb: str, *arguments: str) -> None:
        code, output = await self._run(verb, *arguments)
        if code and "not loaded" not in output:
            raise trouble(output, arguments[-1])

    async def _show(self, names: Sequence[str], unit: str) -> list[dict[str, str]]:
        code, output = await self._run("show", f"--property={','.join(names)}", unit)
        if code:
            raise DriverUnavailableError(f"systemctl does not answer: {output}")
        blocks = [block for block in output.split("\n\n") if block.strip()]
        return [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in blocks]

    async def _run(self, verb: str, *arguments: str, timeout: float | None = CALL_TIMEOUT) -> tuple[int, str]:
        scope = "--user" if self._manager is ManagerKind.USER else "--system"
        code, out, err = await run_program(
            "systemctl", scope, "--no-ask-password", "--no-pager", verb, *arguments, timeout=timeout
        )
        return code, (out or err).decode(errors="replace").strip()


class Journal:
    """The output of units. Times are in seconds since the epoch, lines are oldest first.

    A journal that this user may not read yields no lines and no error, so that the end of a worker is recorded anyway;
    `is_readable` detects that.
    """

    def __init__(self, manager: ManagerKind, *, clock: Clock) -> None:
        self._user = "USER_" if manager is ManagerKind.USER else ""
        self._clock = clock

    async def tail(self, unit: str, *, since: float, lines: int, ended: bool) -> tuple[str, ...]:
        """The last lines since a time. `ended`: wait for the last lines of the unit, because they are written late."""
        match = f"_SYSTEMD_{self._user}UNIT={unit}"
        if ended and lines > 0:
            await self._catch_up(match, since=since)
        return await self._read(match, since=since, lines=lines)

    async def lines_of_systemd(self, unit: str, *, since: float) -> tuple[str, ...]:
        """The lines of systemd itself about a unit, such as why a program could not be run."""
        match = f"{self._user}UNIT={unit}"
        await self._catch_up(match, since=since)
        return await self._read(match, since=since, lines=20)

    async def is_readable(self) -> bool:
        """Whether this user may read the output of units."""
        code, _, _ = await run_program("journalctl", "--quiet", "--lines=1", timeout=CALL_TIMEOUT)
        return code == 0

    async def _catch_up(self, match: str, *, since: float) -> None:
        """Have the journal written. Only root may request that; others wait until no further lines appear."""
        code, _, _ = await run_program("journalctl", "--sync", timeout=CALL_TIMEOUT)
        before = None
        for _ in range(_CATCH_UP_READS if code else 0):
            now = await self._read(match, since=since, lines=1)
            if now == before:
                return
            before = now
            await self._clock.sleep(_CATCH_UP_INTERVAL)

    async def _read(self, match: str, *, since: float, lines: int) -> tuple[str, ...]:
        if lines <= 0:
            return ()
        # In reverse, because with --since the first lines would be returned.
        options = ("--quiet", "--output=json", "--all", "--output-fields=MESSAGE", "--reverse")
        _, out, _ = await run_program(
            "journalctl", *options, f"--since=@{since:.6f}", f"--lines={lines}", match, timeout=CALL_TIMEOUT
        )
        messages = (_message(line) for line in reversed(out.splitlines()))
        return tuple(mask_uri(message) for message in messages if message is not None)


def _message(line: bytes) -> str | None:
    """The message of an entry in JSON: text, or a list of bytes if it is not printable UTF-8. None for a truncated
    entry, of a journalctl that was killed."""
    try:
        value = json.loads(line).get("MESSAGE")
    except ValueError:
        return None
    if isinstance(value, list):
        return bytes(byte for byte in value if isinstance(byte, int)).decode(errors="replace")
    return str(value or "")


async def run_program(program: str, *arguments: str, timeout: float | None) -> tuple[int, bytes, bytes]:
    """Run a program of systemd, and kill it after `timeout` seconds. Returns exit code, standard output and error."""
    environment = {**_ENVIRONMENT, **{name: os.environ[name] for name in _INHERITED if name in os.environ}}
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
        )
    except OSError as error:
        raise DriverUnavailableError(f"{program} cannot be run: {error.strerror}.") from error
    try:
        async with asyncio.timeout(timeout):
            out, err = await process.communicate()
    except TimeoutError:
        raise DriverUnavailableError(f"{program} does not answer.") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, out, err
