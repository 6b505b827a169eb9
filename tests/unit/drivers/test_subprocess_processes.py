"""Processes as the subprocess driver sees them: what an error of the system says about a process, and what not."""

import errno
import os
import signal
from types import SimpleNamespace

import psutil
import pytest

from osrdyne.drivers.base import Exit
from osrdyne.drivers.subprocess import processes
from osrdyne.drivers.subprocess.processes import ProcessHandle, environment_of, kill_all, start_ticks
from osrdyne.errors import DriverUnavailableError


def fails_with(code):
    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    return fail


@pytest.fixture
def open_files():
    """The number of open file descriptors of this process."""
    return psutil.Process().num_fds


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM], ids=errno.errorcode.get)
@pytest.mark.proves("workers/daemon-subprocess-workers-more")
def test_process_does_not_count_as_gone_while_files_or_memory_are_exhausted(monkeypatch, open_files, code):
    before = open_files()
    monkeypatch.setattr(processes.Path, "read_bytes", fails_with(code))
    with pytest.raises(DriverUnavailableError, match="Cannot observe the worker processes"):
        ProcessHandle.open(os.getpid())
    assert open_files() == before
    monkeypatch.setattr(psutil.Process, "environ", fails_with(code))
    with pytest.raises(DriverUnavailableError, match="Cannot observe the worker processes") as raised:
        environment_of(os.getpid())
    assert ("ulimit -n" in str(raised.value)) is (code == errno.EMFILE)


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESRCH, errno.EACCES], ids=errno.errorcode.get)
def test_process_that_cannot_be_read_for_another_reason_counts_as_gone(monkeypatch, code):
    monkeypatch.setattr(processes.Path, "read_bytes", fails_with(code))
    assert start_ticks(os.getpid()) is None


def test_handles_are_closed_when_not_all_processes_can_be_opened(monkeypatch, open_files):
    before, opened = open_files(), ProcessHandle.open

    def open_first_only(pid, ticks=None):
        if pid != os.getpid():
            raise DriverUnavailableError("no more open files")
        return opened(pid, ticks)

    monkeypatch.setattr(ProcessHandle, "open", open_first_only)
    with pytest.raises(DriverUnavailableError):
        kill_all(lambda: dict.fromkeys([os.getpid(), os.getppid()]))
    assert open_files() == before


def test_end_by_a_signal_names_it_if_it_has_a_name_and_a_process_of_another_user_gets_none(monkeypatch):
    for number, name in ((9, "SIGKILL"), (37, "37")):
        ended = SimpleNamespace(si_code=os.CLD_KILLED, si_status=number)
        monkeypatch.setattr(os, "waitid", lambda *_, ended=ended: ended)
        assert ProcessHandle(1, 1, 0).reap() == Exit(signal=name)
    monkeypatch.setattr(signal, "pidfd_send_signal", fails_with(errno.EPERM))
    handle = ProcessHandle.open(os.getpid())
    handle.send(signal.SIGTERM)  # raises nothing
    handle.close()
