"""systemd through its own programs: systemctl where D-Bus is not there, journalctl for what workers wrote."""

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
_POLLS = 12
_CHECKS = 10
_CHECK_INTERVAL = 0.3
_NO_ENVIRONMENT = {"LC_ALL": "C", "PATH": os.defpath, "SYSTEMD_COLORS": "0"}


class Systemctl(SystemdUnits):
    """Every call is a process of systemctl. Needs no D-Bus daemon for root and for a user's own manager."""

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
        code, said = await self._run("start", unit, timeout=None)
        if code and "Job for" not in said:
            raise refusal(said, unit)
        return code == 0

    async def stop(self, unit: str) -> None:
        code, said = await self._run("stop", unit, timeout=None)
        if code and "not loaded" not in said:
            raise trouble(said, unit)

    async def kill(self, unit: str) -> None:
        await self._if_loaded("kill", "--signal=KILL", unit)

    async def forget_failure(self, unit: str) -> None:
        await self._if_loaded("reset-failed", unit)

    async def properties(self, unit: str, names: Sequence[str]) -> Mapping[str, str]:
        """Properties of one unit as systemctl shows them; it is loaded for that when it is not."""
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
        code, said = await self._run(verb, *arguments)
        if code and "not loaded" not in said:
            raise trouble(said, arguments[-1])

    async def _show(self, names: Sequence[str], unit: str) -> list[dict[str, str]]:
        code, said = await self._run("show", f"--property={','.join(names)}", unit)
        if code:
            raise DriverUnavailableError(f"systemctl does not answer: {said}")
        blocks = [block for block in said.split("\n\n") if block.strip()]
        return [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in blocks]

    async def _run(self, verb: str, *arguments: str, timeout: float | None = CALL_TIMEOUT) -> tuple[int, str]:
        scope = "--user" if self._manager is ManagerKind.USER else "--system"
        code, out, err = await run_program(
            "systemctl", scope, "--no-ask-password", "--no-pager", verb, *arguments, timeout=timeout
        )
        return code, (out or err).decode(errors="replace").strip()


class Journal:
    """What the processes of a unit wrote. Times are in seconds since the epoch, lines come oldest first.

    A journal that this user may not read is empty; the end of a worker must still be noted. `is_readable` tells the
    two cases apart.
    """

    def __init__(self, manager: ManagerKind, *, clock: Clock) -> None:
        self._user = "USER_" if manager is ManagerKind.USER else ""
        self._clock = clock

    async def tail(self, unit: str, *, since: float, lines: int, ended: bool) -> tuple[str, ...]:
        """The last lines since a time; of a unit that has ended the very last, though the journal is written late."""
        match = f"_SYSTEMD_{self._user}UNIT={unit}"
        if ended and lines > 0:
            await self._catch_up(match, since=since)
        return await self._read(match, since=since, lines=lines)

    async def said_by_systemd(self, unit: str, *, since: float) -> tuple[str, ...]:
        """What systemd itself says about a unit: why a program could not be run, for instance."""
        match = f"{self._user}UNIT={unit}"
        await self._catch_up(match, since=since)
        return await self._read(match, since=since, lines=20)

    async def is_readable(self) -> bool:
        """Whether this user may read what units wrote."""
        code, _, _ = await run_program("journalctl", "--quiet", "--lines=1", timeout=CALL_TIMEOUT)
        return code == 0

    async def _catch_up(self, match: str, *, since: float) -> None:
        """Root may ask the journal to write what it has; others wait until nothing more comes."""
        code, _, _ = await run_program("journalctl", "--sync", timeout=CALL_TIMEOUT)
        before = None
        for _ in range(_CHECKS if code else 0):
            now = await self._read(match, since=since, lines=1)
            if now == before:
                return
            before = now
            await self._clock.sleep(_CHECK_INTERVAL)

    async def _read(self, match: str, *, since: float, lines: int) -> tuple[str, ...]:
        if lines <= 0:
            return ()
        # Backwards, because with --since the journal would give the first lines.
        options = ("--quiet", "--output=json", "--all", "--output-fields=MESSAGE", "--reverse")
        _, out, _ = await run_program(
            "journalctl", *options, f"--since=@{since:.6f}", f"--lines={lines}", match, timeout=CALL_TIMEOUT
        )
        return tuple(mask_uri(_message(json.loads(line).get("MESSAGE"))) for line in reversed(out.splitlines()))


def _message(value: object) -> str:
    """Text, or a list of bytes when it is not all printable UTF-8."""
    if isinstance(value, list):
        return bytes(byte for byte in value if isinstance(byte, int)).decode(errors="replace")
    return str(value or "")


async def run_program(program: str, *arguments: str, timeout: float | None) -> tuple[int, bytes, bytes]:
    """Run a program of systemd to its end: exit code, output, errors. It is killed when the time is over."""
    environment = {**_NO_ENVIRONMENT, **{name: os.environ[name] for name in _PASSED if name in os.environ}}
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


_PASSED = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS", "HOME")
