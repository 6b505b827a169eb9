"""Options, directories and environment of the subprocess driver: the parts that need no process."""

import errno
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from osrdyne.aio.clock import SystemClock
from osrdyne.config.models import DriverSettings
from osrdyne.drivers.base import DriverContext
from osrdyne.drivers.registry import create_driver
from osrdyne.drivers.subprocess.environment import Marks, carries_mark, worker_variables
from osrdyne.drivers.subprocess.logs import LogFiles
from osrdyne.drivers.subprocess.options import SubprocessOptions, log_directory, state_directory
from osrdyne.drivers.subprocess.state import slot_name
from osrdyne.errors import ConfigurationError
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.names import WorkerId
from osrdyne.testing.driver_conformance import KEY, make_spec
from osrdyne.testing.keys import ODD_KEYS

CONTEXT = DriverContext(pool="blue", stack="localhost:5672//", clock=SystemClock(), worker_command=("worker",))
STATE = Path("/state/blue")


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"comand": ["x"]}, "comand"),
        ({"command": []}, "command"),
        ({"command": ["a\0"]}, "command"),
        ({"environment": {"WORKER_KEY": "x"}}, "environment: WORKER_KEY"),
        ({"environment": {"A=B": "x"}}, "environment: 'A=B'"),
        ({"inherit": ["A B"]}, "inherit: 'A B'"),
        ({"inherit": ["WORKER_*"]}, "inherit: WORKER_*"),
        ({"log_max_bytes": "1kB"}, "log_max_bytes"),
        ({"log_retention": "soon"}, "log_retention"),
    ],
    ids=str,
)
def test_wrong_option_is_refused_with_its_path(options, path):
    with pytest.raises(ConfigurationError, match=re.escape(f"driver.options.{path}")):
        create_driver(DriverSettings(name="subprocess", options=options), CONTEXT)


def test_directories_are_of_one_pool_of_one_broker(monkeypatch):
    def state_of(stack=CONTEXT.stack, **options):
        return state_directory(SubprocessOptions(**options), replace(CONTEXT, stack=stack))

    assert state_of(state_directory="/var/lib/x") == Path("/var/lib/x/blue")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/osrdyne:/var/lib/other")  # systemd
    assert state_of().parent == Path("/var/lib/osrdyne")
    monkeypatch.delenv("STATE_DIRECTORY")
    monkeypatch.setenv("XDG_STATE_HOME", "/home/me/state")
    first, second = state_of(stack="a:5672//"), state_of(stack="b:5672//")
    assert first != second
    assert {first.parent, second.parent} == {Path("/home/me/state/osrdyne")}
    assert log_directory(SubprocessOptions(log_directory="/var/log/osrdyne"), STATE) == Path("/var/log/osrdyne/blue")
    assert log_directory(SubprocessOptions(), STATE) == STATE / "logs"


def test_slot_names_are_file_names_and_differ():
    names = [slot_name(key, slot) for key in ODD_KEYS.values() for slot in (0, 1)]
    assert len(set(names)) == 2 * len(ODD_KEYS)
    assert all("/" not in name and len(name.encode()) <= 110 for name in names)


def make_marks(key=KEY):
    return Marks(state=STATE, key=key, slot=3, worker_id=WorkerId("w1"), spec_hash="abc", generation="3.14")


def test_marks_are_read_back_from_the_environment_and_others_are_not_ours():
    for key in ODD_KEYS.values():
        variables = {**make_marks(key).to_variables(), "WORKER_ID": "w1"}
        assert Marks.from_variables(variables, STATE) == make_marks(key)
        marked = [carries_mark(variables, STATE, frozenset({WorkerId(worker)})) for worker in ("w1", "w2")]
        assert marked == [True, False]
        for name, other in (("STATE_DIRECTORY", "/state/green"), ("KEY", "not/encoded"), ("SLOT", "x")):
            assert Marks.from_variables({**variables, f"OSRDYNE_{name}": other}, STATE) is None
    assert not carries_mark({}, STATE)


@pytest.mark.proves("reference-defects/10-two-pools-one")
def test_worker_reads_what_it_was_given(tmp_path):
    uri_file = tmp_path / "uri"
    for key in ODD_KEYS.values():
        spec = make_spec(key, note="漢")
        uri_file.write_text(spec.environment.amqp_uri)
        given = worker_variables(spec, make_marks(key), daemon={}, extra={}, uri_file=uri_file)
        read = WorkerEnvironment.from_variables({name.decode(): value.decode() for name, value in given.items()})
        assert read == spec.environment


def test_worker_inherits_what_is_named_and_nothing_else_of_the_daemon():
    daemon = {
        b"PATH": b"/bin", b"LC_ALL": b"C.UTF-8", b"PYTHONPATH": b"\xff", b"AWS_REGION": b"eu", b"GOOGLE_TOKEN": b"g",
        b"AWS_SECRET_ACCESS_KEY": b"hidden", b"RABBITMQ_PASSWORD": b"hidden", b"https_proxy": b"http://u:hidden@proxy",
        b"OSRDYNE__BROKER__URI": b"amqp://u:hidden@h", b"WORKER_X": b"y", b"LISTEN_FDS": b"1", b"NOTIFY_SOCKET": b"/n",
    }  # fmt: skip
    own = {"inherit": ("AWS_REGION", "GOOGLE_*"), "extra": {"PATH": "/opt/bin"}}
    given = worker_variables(make_spec(), make_marks(), daemon=daemon, uri_file=Path("/uri"), **own)
    assert (given[b"PATH"], given[b"LC_ALL"], given[b"PYTHONPATH"]) == (b"/opt/bin", b"C.UTF-8", b"\xff")
    assert (given[b"AWS_REGION"], given[b"GOOGLE_TOKEN"], given[b"PYTHONUNBUFFERED"]) == (b"eu", b"g", b"1")
    assert not [name for name, value in given.items() if b"hidden" in value]
    assert not {b"WORKER_X", b"LISTEN_FDS", b"NOTIFY_SOCKET", b"WORKER_AMQP_URI"} & given.keys()


def make_logs(directory, *, old_files):
    return LogFiles(directory=directory, max_bytes=10, old_files=old_files, retention=60.0)


def write(logs, text):
    fd = logs.open_new("a.0")
    os.write(fd, text)
    os.close(fd)


def test_old_logs_are_kept_up_to_their_number(tmp_path):
    logs = make_logs(tmp_path, old_files=2)
    for number in range(5):
        write(logs, b"%d\n" % number)
    kept = {"a.0.log": "4\n", "a.0.log.1": "3\n", "a.0.log.2": "2\n"}
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == kept
    logs = make_logs(tmp_path / "none", old_files=0)
    write(logs, b"x" * 11)
    logs.rotate("a.0")
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "none").iterdir()] == [("a.0.log", b"")]


def test_rotation_that_fails_on_a_full_disk_keeps_the_old_logs(tmp_path, monkeypatch):
    logs = make_logs(tmp_path, old_files=2)
    for text in (b"first", b"second", b"x" * 11):
        write(logs, text)

    def copy_half(source, target):
        Path(target).write_bytes(b"x" * 5)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", copy_half)
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            logs.rotate("a.0")
    kept = {"a.0.log": "x" * 11, "a.0.log.1": "second", "a.0.log.2": "first"}
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == kept


def test_last_lines_do_not_come_from_an_earlier_worker(tmp_path):
    logs = make_logs(tmp_path, old_files=1)
    write(logs, b"earlier\n")
    before = tmp_path / "a.0.log"
    os.utime(before, (100.0, 100.0))
    write(logs, b"now\n")
    assert logs.tail("a.0", lines=5, since=200.0) == ("now",)
    assert logs.tail("a.0", lines=5, since=50.0) == ("earlier", "now")
    write(logs, b"\xff\xfe bad\n")
    assert logs.tail("a.0", lines=1, since=0.0) == ("\ufffd\ufffd bad",)


def test_line_that_is_cut_by_the_limit_of_the_tail_shows_no_part_of_a_password(tmp_path):
    logs = make_logs(tmp_path, old_files=1)
    read = b"et@broker/\n"  # the tail begins within the password
    long = b"x" * (256 * 1024 - len(read))
    write(logs, b"cannot connect to amqp://user:secr" + read + long)
    assert logs.tail("a.0", lines=5, since=0.0) == (long.decode(),)
