"""Linux processes, named so that a recycled pid is never mistaken for a worker.

A process is a pid and its start time in clock ticks since boot, which no clock adjustment changes. Signals go through a
pidfd, which keeps meaning one process. Used by the subprocess driver only; all of it blocks for microseconds, but for
`ask_all_to_end` and `kill_all`, which wait for the end.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from osrdyne.drivers.base import Exit
from osrdyne.errors import DriverUnavailableError

_KILL_TIMEOUT = 5.0
_START_TIME_FIELD = 19  # of /proc/PID/stat after the command's closing bracket: field 22 of proc(5)


def boot_id() -> str:
    """Changes with every boot: start times are comparable within one boot only."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None when there is none (a zombie still has one)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(stat.rpartition(b")")[2].split()[_START_TIME_FIELD])


@dataclass(frozen=True, slots=True)
class ProcessHandle:
    """An open pidfd. The owner closes it."""

    pid: int
    ticks: int
    fd: int

    @classmethod
    def open(cls, pid: int, ticks: int | None = None) -> ProcessHandle | None:
        """A handle of the process `pid` that started at `ticks` (None: whenever); None when that one is gone."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        except OSError as error:
            raise _unavailable(error) from error
        # Read with the pidfd open: the pid cannot be given to another process between both.
        found = start_ticks(pid)
        if found is None or (ticks is not None and found != ticks):
            os.close(fd)
            return None
        return cls(pid, found, fd)

    def is_gone(self) -> bool:
        """Whether it has ended, waited for or not."""
        return _is_readable(self.fd, timeout=0.0)

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if the process is still there."""
        with suppress(ProcessLookupError):
            # By pidfd and never by pid: a pid may belong to another process by now.
            signal.pidfd_send_signal(self.fd, number)

    def reap(self) -> Exit | None:
        """How a process that is gone ended; None if it is not our child: then the system does not report it."""
        try:
            # Only a child of this daemon has an exit code for it: workers of an earlier daemon have none.
            result = os.waitid(os.P_PIDFD, self.fd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return None
        if result is None:
            return None
        if result.si_code == os.CLD_EXITED:
            return Exit(code=result.si_status)
        return Exit(signal=signal.Signals(result.si_status).name)

    def close(self) -> None:
        os.close(self.fd)


def session_leaders() -> list[int]:
    """The pids of all processes that lead a session, as every worker does; the oldest process first."""
    leaders = []
    for pid in psutil.pids():
        with suppress(OSError):
            if os.getsid(pid) == pid:
                leaders.append((start_ticks(pid) or 0, pid))
    return [pid for _, pid in sorted(leaders)]


def ancestors(pid: int) -> set[int]:
    """The pids of its parent, that one's parent, and so on; empty when it is gone."""
    try:
        return {parent.pid for parent in psutil.Process(pid).parents()}
    except psutil.Error:
        return set()


def environment_of(pid: int) -> dict[str, str] | None:
    """The environment a process was started with; None when it is gone or another user's."""
    try:
        return psutil.Process(pid).environ()
    except (psutil.Error, OSError):
        return None


def members(leaders: Iterable[ProcessHandle], *, carries_mark: Callable[[dict[str, str]], bool]) -> set[int]:
    """Every process that belongs to one of the workers that `leaders` lead, the leaders excepted.

    Those whose environment carries a worker's mark, and those in the session of a leader whose pid cannot have been
    given to another process, because it still runs or has not been waited for.
    """
    pids = psutil.pids()
    sessions: dict[int, set[int]] = defaultdict(set)
    for pid in pids:
        with suppress(OSError):
            sessions[os.getsid(pid)].add(pid)
    found = {pid for pid in pids if (environment := environment_of(pid)) is not None and carries_mark(environment)}
    for leader in leaders:
        if start_ticks(leader.pid) == leader.ticks:
            found |= sessions[leader.pid] - {leader.pid}
    return found


def ask_all_to_end(list_pids: Callable[[], set[int]], *, grace: float) -> None:
    """Send SIGTERM to what `list_pids` names; wait for its end, so many seconds for all together."""
    _signal_all(list_pids, signal.SIGTERM, timeout=grace)


def kill_all(list_pids: Callable[[], set[int]], *, patient: bool = True) -> None:
    """Kill what `list_pids` names, again until it names nothing that runs, so that no process escapes by forking.

    Raises `DriverUnavailableError` when something does not end within a few seconds; at once if not `patient`. It looks
    once more when the time is over: on a busy machine to look takes long, and what was killed has ended meanwhile.
    """
    deadline, is_over = time.monotonic() + (_KILL_TIMEOUT if patient else 0.0), False
    while pids := _signal_all(list_pids, signal.SIGKILL, timeout=max(0.0, deadline - time.monotonic())):
        if not is_over:
            is_over = time.monotonic() > deadline
        else:
            names = ", ".join(map(str, pids))
            raise DriverUnavailableError(f"The processes {names} of a worker were killed, but are still running.")


def _signal_all(list_pids: Callable[[], set[int]], number: signal.Signals, *, timeout: float) -> list[int]:
    """Signal what `list_pids` names, and wait for its end; returns the pids that there were."""
    handles = _open_all(list_pids())
    # Asked again, now that the handles pin the processes: a pid may have been given to another process in between.
    confirmed = list_pids() if handles else set()
    deadline = time.monotonic() + timeout
    for handle in handles:
        if handle.pid in confirmed:
            handle.send(number)
    for handle in handles:
        if handle.pid in confirmed:
            _is_readable(handle.fd, timeout=max(0.0, deadline - time.monotonic()))
        handle.close()
    return [handle.pid for handle in handles]


def _open_all(pids: Iterable[int]) -> list[ProcessHandle]:
    handles = []
    for pid in pids:
        handle = ProcessHandle.open(pid)
        if handle is not None and handle.is_gone():
            handle.close()
        elif handle is not None:
            handles.append(handle)
    return handles


def _is_readable(fd: int, *, timeout: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def _unavailable(error: OSError) -> DriverUnavailableError:
    remedy = " Raise the limit of open files (ulimit -n, LimitNOFILE)." if error.errno == errno.EMFILE else ""
    return DriverUnavailableError(f"Cannot watch a worker process: {error.strerror}.{remedy}")
