"""Linux processes, identified so that a recycled pid is never mistaken for a worker.

A process is identified by its pid and its start time in clock ticks since boot, which no clock adjustment changes.
Signals are sent through a pidfd, which always refers to the same process. Used by the subprocess driver only. All
functions return within microseconds, except `ask_all_to_end` and `kill_all`, which wait for the end of processes.
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
from osrdyne.drivers.shared import signal_name
from osrdyne.errors import DriverUnavailableError

_KILL_TIMEOUT = 5.0
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_START_TIME_FIELD = 19  # of /proc/PID/stat after the command's closing bracket: field 22 of proc(5)


def boot_id() -> str:
    """The id of the present boot of the host. Start times are comparable within one boot only."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if it does not exist (a zombie still exists)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError as error:
        _raise_if_exhausted(error)
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
        """Open the process `pid` that started at `ticks` (None: at any time); None if that process is gone."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        except OSError as error:
            raise unavailable(error) from error
        try:
            # Read after the pidfd was opened: from then on the pid cannot pass to another process unnoticed.
            found = start_ticks(pid)
        except BaseException:
            os.close(fd)
            raise
        if found is None or (ticks is not None and found != ticks):
            os.close(fd)
            return None
        return cls(pid, found, fd)

    def is_gone(self) -> bool:
        """Whether it has ended; a zombie has."""
        return _is_readable(self.fd, timeout=0.0)

    def send(self, number: signal.Signals) -> None:
        """Send a signal. A process that is gone, or runs as another user by now (`sudo`), gets none."""
        with suppress(ProcessLookupError, PermissionError):
            # By pidfd and never by pid: the pid may belong to another process by now.
            signal.pidfd_send_signal(self.fd, number)

    def reap(self) -> Exit | None:
        """How a process that is gone ended; None if it is not a child of this daemon, so that the exit is unknown."""
        try:
            # The kernel reports an exit to the parent only. Workers of an earlier daemon are not our children.
            result = os.waitid(os.P_PIDFD, self.fd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return None
        if result is None:
            return None
        if result.si_code == os.CLD_EXITED:
            return Exit(code=result.si_status)
        return Exit(signal=signal_name(result.si_status))

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
    """The pids of the parent of a process, the parent of that one, and so on; empty if the process is gone."""
    try:
        return {parent.pid for parent in psutil.Process(pid).parents()}
    except psutil.Error:
        return set()


def environment_of(pid: int) -> dict[str, str] | None:
    """The environment with which a process was started; None if it is gone or belongs to another user."""
    try:
        return psutil.Process(pid).environ()
    except psutil.Error:
        return None
    except OSError as error:
        _raise_if_exhausted(error)
        return None


def members(leaders: Iterable[ProcessHandle], *, carries_mark: Callable[[dict[str, str]], bool]) -> set[int]:
    """The pids of all processes of the workers whose main processes are `leaders`, without the main processes.

    These are the processes whose environment carries a worker's mark, and those in the session of a leader that still
    runs or is a zombie: its pid cannot have passed to another process.
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
    """Send SIGTERM to the processes that `list_pids` returns, and wait at most `grace` seconds until all have ended."""
    _signal_all(list_pids, signal.SIGTERM, timeout=grace)


def kill_all(list_pids: Callable[[], set[int]], *, patient: bool = True) -> None:
    """Kill the processes that `list_pids` returns, and list again until none of them runs, because they may fork.

    Raises `DriverUnavailableError` if a process does not end within a few seconds, or at once if not `patient`. After
    the deadline the processes are listed one more time: on a busy host a listing takes long, and the killed processes
    may have ended meanwhile.
    """
    deadline, is_over = time.monotonic() + (_KILL_TIMEOUT if patient else 0.0), False
    while pids := _signal_all(list_pids, signal.SIGKILL, timeout=max(0.0, deadline - time.monotonic())):
        if not is_over:
            is_over = time.monotonic() > deadline
        else:
            names = ", ".join(map(str, pids))
            raise DriverUnavailableError(f"The processes {names} of a worker were killed, but still run.")


def _signal_all(list_pids: Callable[[], set[int]], number: signal.Signals, *, timeout: float) -> list[int]:
    """Signal the processes that `list_pids` returns, and wait until they have ended; returns the pids that ran."""
    handles: list[ProcessHandle] = []
    try:
        _open_all(list_pids(), handles)
        # Listed again, now that the handles are open: a pid may have passed to another process in between.
        confirmed = list_pids() if handles else set()
        deadline = time.monotonic() + timeout
        for handle in handles:
            if handle.pid in confirmed:
                handle.send(number)
        for handle in handles:
            if handle.pid in confirmed:
                _is_readable(handle.fd, timeout=max(0.0, deadline - time.monotonic()))
        return [handle.pid for handle in handles]
    finally:
        for handle in handles:
            handle.close()


def _open_all(pids: Iterable[int], handles: list[ProcessHandle]) -> None:
    """Append a handle for each process that runs. On an error `handles` has those that are open, to be closed."""
    for pid in pids:
        handle = ProcessHandle.open(pid)
        if handle is not None and handle.is_gone():
            handle.close()
        elif handle is not None:
            handles.append(handle)


def _is_readable(fd: int, *, timeout: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def _raise_if_exhausted(error: OSError) -> None:
    """Raise `DriverUnavailableError` if the daemon has no more file descriptors or memory: the process may run then,
    and must not count as gone."""
    if error.errno in _EXHAUSTED:
        raise unavailable(error) from error


def unavailable(error: OSError) -> DriverUnavailableError:
    """The error of a driver call whose access to a process failed."""
    remedy = " Raise the limit of open files (ulimit -n, LimitNOFILE)." if error.errno == errno.EMFILE else ""
    return DriverUnavailableError(f"Cannot observe the worker processes: {error.strerror}.{remedy}")
