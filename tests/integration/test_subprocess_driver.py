"""What the subprocess driver promises beyond the conformance suite: real processes, killed controllers, odd states."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from osrdyne.aio.clock import SystemClock
from osrdyne.drivers.base import DriverContext, InstanceState
from osrdyne.drivers.subprocess import SubprocessDriver, processes, workers
from osrdyne.drivers.subprocess.options import SubprocessOptions
from osrdyne.drivers.subprocess.processes import ProcessHandle, start_ticks
from osrdyne.drivers.subprocess.state import StateDirectory, slot_name
from osrdyne.errors import DriverUnavailableError, SlotTakenError, StartFailedError
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.conformance_worker import Behaviour
from osrdyne.testing.driver_conformance import (
    AMQP_URI,
    KEY,
    PATIENCE,
    POOL,
    SECRET,
    clean_up,
    eventually,
    exited,
    find,
    is_ready,
    make_spec,
)

pytestmark = [pytest.mark.one_rabbitmq, pytest.mark.usefixtures("processes")]

WORKER = (sys.executable, "-m", "osrdyne.testing.conformance_worker")
NAME = slot_name(KEY, 0)

# A worker with a child in its session, as Spark's JVM is, and two in sessions of their own, as a handler may start.
FAMILY = """
import subprocess, sys, time
code = "import time; time.sleep(600)"
for own_session in (False, True, True):
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=own_session)
    print(child.pid, flush=True)
time.sleep(600)
"""

# A worker whose child tidies up when it is asked to end, as Spark's JVM does.
TIDY = """
import subprocess, sys, time
code = '''
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path("tidy").touch()))
print("ready", flush=True)
time.sleep(600)
'''
child = subprocess.Popen([sys.executable, "-c", code])
time.sleep(600)
"""

# A worker that counts endlessly.
COUNTER = """
import itertools, time
for number in itertools.count():
    print(number, flush=True)
    time.sleep(0.01)
"""


def make_driver(directory, *, command=WORKER, clock=None, **options):
    context = DriverContext(POOL, "localhost:5672//", clock or SystemClock(), tuple(command))
    return SubprocessDriver(SubprocessOptions(state_directory=str(directory), **options), context)


@pytest.fixture
async def make(tmp_path):
    """Makes drivers of one directory; their workers end with the test."""
    made = []

    def make(**options):
        made.append(make_driver(tmp_path, **options))
        return made[-1]

    yield make
    for driver in made:
        await clean_up(driver)


@pytest.fixture
def driver(make):
    return make()


@pytest.fixture
def state(tmp_path):
    state = StateDirectory(tmp_path / POOL)
    state.prepare()
    return state


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def kill_and_wait(pid):
    async def has_ended():
        return not is_running(pid)

    os.kill(pid, signal.SIGKILL)
    await eventually(has_ended, what="the killed process has ended")


def pid_of(instance):
    return int(instance.external_id)


async def lines_of(driver, instance, count):
    async def enough():
        lines = await driver.logs(instance.instance_id, lines=10_000)
        return lines if len(lines) >= count else None

    return await eventually(enough, what=f"the worker has written {count} lines")


# --- processes of a worker


async def test_stop_and_crash_leave_no_child_behind(tmp_path, driver):
    """Nor does a crash while no controller runs."""
    earlier = make_driver(tmp_path)
    started = [await earlier.start(make_spec(slot=slot, behaviour=Behaviour.PARENT)) for slot in range(3)]
    children = [(await is_ready(earlier, instance))["child"] for instance in started]
    assert all(map(is_running, children))
    stopped, crashed, unseen = started
    await earlier.stop(stopped.instance_id, grace=PATIENCE)
    assert not is_running(children[0])
    os.kill(pid_of(crashed), signal.SIGKILL)
    ended = await exited(earlier, crashed)  # before its child has ended, the slot is not free
    assert (is_running(children[1]), ended.exit.signal) == (False, "SIGKILL")
    await earlier.close()
    os.kill(pid_of(unseen), signal.SIGKILL)
    await exited(driver, unseen)
    assert not is_running(children[2])


@pytest.fixture
async def family(make):
    """A running worker with a child in its session and two that lead others; the host has not been scanned yet."""
    driver = make(command=(sys.executable, "-c", FAMILY))
    instance = await driver.start(make_spec())
    yield driver, instance, *map(int, await lines_of(driver, instance, 3))


async def test_child_that_leads_a_session_is_no_worker_and_ends_with_one(family, state, make):
    driver, instance, _, *outer = family
    assert os.getsid(pid_of(instance)) == pid_of(instance) != os.getsid(0)
    assert list(map(os.getsid, outer)) == outer
    assert await driver.list_instances() == [instance]
    state.write(NAME, replace(state.records()[NAME], pid=None, ticks=None))
    restarted = make()  # the start was not recorded
    with pytest.raises(SlotTakenError):
        await restarted.start(make_spec())
    [found] = await restarted.list_instances()
    assert (found.instance_id, found.key, found.worker_id) == (instance.instance_id, instance.key, instance.worker_id)
    assert found.spec_hash == instance.spec_hash
    await driver.stop(instance.instance_id, grace=PATIENCE)
    assert not any(map(is_running, outer))


async def test_end_of_a_child_that_leads_a_session_kills_nothing(family, state):
    """Also of one that was once recorded as a worker."""
    driver, instance, inner, outer, recorded = family
    await driver.list_instances()
    await kill_and_wait(outer)
    assert await driver.list_instances() == [instance]
    assert is_running(pid_of(instance)) and is_running(inner)
    record = replace(state.records()[NAME], pid=recorded, ticks=start_ticks(recorded))
    state.write(f"{NAME}.{instance.worker_id}", record)
    assert len(await driver.list_instances()) == 2
    await kill_and_wait(recorded)
    await driver.list_instances()
    assert is_running(inner)


async def test_child_of_a_crashed_worker_may_tidy_up_first(tmp_path, make):
    driver = make(command=(sys.executable, "-c", TIDY), cwd=str(tmp_path))
    instance = await driver.start(make_spec())
    await lines_of(driver, instance, 1)
    os.kill(pid_of(instance), signal.SIGKILL)
    await exited(driver, instance)
    assert (tmp_path / "tidy").exists()


# --- processes that cannot be killed


@pytest.fixture
def unkillable(monkeypatch):
    """Signals to these pids are lost, as they are to a process that waits for a disk."""
    pids = set()
    send = ProcessHandle.send
    monkeypatch.setattr(ProcessHandle, "send", lambda self, number: None if self.pid in pids else send(self, number))
    monkeypatch.setattr(processes, "_KILL_TIMEOUT", 1.0)
    monkeypatch.setattr(workers, "_LEFTOVER_GRACE", 0.1)
    return pids


async def test_ended_worker_whose_child_cannot_be_killed_keeps_its_slot(tmp_path, driver, unkillable):
    """It is reported, logged once, and holds up no other worker and no next controller."""
    instance, other = [await driver.start(make_spec(slot=slot, behaviour=Behaviour.PARENT)) for slot in range(2)]
    unkillable.add((await is_ready(driver, instance))["child"])
    await is_ready(driver, other)
    await kill_and_wait(pid_of(instance))
    stopping = replace(instance, state=InstanceState.STOPPING)
    with capture_logs() as logged:
        for _ in range(3):
            assert await driver.list_instances() == [stopping, other]
    assert [entry["event"] for entry in logged if entry["log_level"] == "warning"] == ["ended worker keeps its slot"]
    await driver.remove(instance.instance_id)
    with pytest.raises(SlotTakenError):
        await driver.start(make_spec(slot=0))
    restarted = make_driver(tmp_path)
    listed = await restarted.list_instances()
    assert {item.instance_id: item.state for item in listed} == {
        instance.instance_id: InstanceState.STOPPING,
        other.instance_id: InstanceState.RUNNING,
    }
    await restarted.remove(instance.instance_id)
    for one in (driver, driver, restarted):
        with pytest.raises(DriverUnavailableError, match="cannot be killed"):
            await one.stop(instance.instance_id, grace=0)
    await restarted.close()
    await driver.stop(other.instance_id, grace=PATIENCE)
    assert (await find(driver, other.instance_id)).state is InstanceState.EXITED
    unkillable.clear()
    assert (await exited(driver, instance)).exit.signal == "SIGKILL"


def test_killed_process_has_ended_although_looking_for_it_took_all_the_time(monkeypatch):
    monkeypatch.setattr(processes, "_KILL_TIMEOUT", 0.0)
    victim = subprocess.Popen(["/bin/sleep", "600"])

    def look_slowly():
        time.sleep(0.5)
        return {victim.pid}

    processes.kill_all(look_slowly)
    assert victim.wait() == -signal.SIGKILL


# --- controllers that die


async def test_worker_survives_its_killed_controller_and_its_end_is_seen_through_events(tmp_path, driver):
    script, worker = Path(__file__).with_name("controller_process.py"), (sys.executable, "-c", COUNTER)
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), json.dumps(worker)], stdout=subprocess.PIPE, text=True
    ) as controller:
        instance_id = controller.stdout.readline().strip()
        controller.kill()
    [instance] = await driver.list_instances()
    assert (instance.instance_id, instance.state) == (instance_id, InstanceState.RUNNING)
    seen = await lines_of(driver, instance, 1)
    await lines_of(driver, instance, len(seen) + 20)
    with pytest.raises(SlotTakenError):
        await driver.start(make_spec())
    events = aiter(driver.events())
    os.kill(pid_of(instance), signal.SIGKILL)
    await anext(events)
    assert (await exited(driver, instance)).exit.code is None


async def test_start_cut_short_before_its_process_leaves_the_slot_free(driver, state):
    """While one is under way elsewhere, which the lock shows as long as the worker lives, the list is an error."""
    instance = await driver.start(make_spec())
    assert state.lock(NAME) is None
    await driver.stop(instance.instance_id, grace=0)
    await exited(driver, instance)
    state.write(NAME, replace(state.records()[NAME], pid=None, ticks=None, exit=None))
    lock = state.lock(NAME)
    with pytest.raises(DriverUnavailableError, match="is starting a worker"):
        await driver.list_instances()
    os.close(lock)
    assert await driver.list_instances() == []
    assert (await driver.start(make_spec())).state is InstanceState.RUNNING


async def test_lost_records_are_no_obstacle(driver, state, tmp_path):
    """Cut short by a power failure, removed under a running worker, and with the lock: then a slot is filled twice."""
    record, lock = tmp_path / POOL / "records" / f"{NAME}.json", tmp_path / POOL / "locks" / NAME
    earlier = make_driver(tmp_path)
    record.write_bytes(b"")
    assert await earlier.list_instances() == []
    first = await earlier.start(make_spec())
    await is_ready(earlier, first)
    record.unlink()
    assert await earlier.list_instances() == [first]
    assert NAME in state.records()
    await earlier.close()
    record.unlink()
    lock.unlink()
    second = await driver.start(make_spec())
    listed = await driver.list_instances()
    assert {item.instance_id for item in listed} == {first.instance_id, second.instance_id}
    assert {item.slot for item in listed} == {0}


async def test_worker_of_an_earlier_boot_has_ended_and_a_recycled_pid_is_never_touched(driver, state, make):
    await exited(driver, await driver.start(make_spec(behaviour=Behaviour.EXIT)))
    record = replace(state.records()[NAME], exit=None)
    state.write(NAME, replace(record, boot_id="an earlier one"))
    [listed] = await make().list_instances()
    assert (listed.state, listed.exit.code) == (InstanceState.EXITED, None)
    stranger = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
    try:
        state.write(NAME, replace(record, pid=stranger.pid, ticks=1))
        restarted = make()
        [listed] = await restarted.list_instances()
        await restarted.stop(listed.instance_id, grace=0)
        assert (listed.state, stranger.poll()) == (InstanceState.EXITED, None)
    finally:
        stranger.kill()
        stranger.wait()


async def test_worker_whose_record_cannot_be_completed_is_recorded_by_the_next_listing(driver, state, monkeypatch):
    write = StateDirectory.write

    def write_on_a_full_disk(self, name, record):
        if record.pid is not None:
            raise DriverUnavailableError("No space left on device.")
        write(self, name, record)

    monkeypatch.setattr(StateDirectory, "write", write_on_a_full_disk)
    with pytest.raises(DriverUnavailableError):
        await driver.start(make_spec())
    open_files = psutil.Process().num_fds()
    for _ in range(3):
        with pytest.raises(DriverUnavailableError):
            await driver.list_instances()
    assert psutil.Process().num_fds() == open_files
    monkeypatch.setattr(StateDirectory, "write", write)
    [instance] = await driver.list_instances()
    assert (instance.state, state.records()[NAME].pid) == (InstanceState.RUNNING, pid_of(instance))


# --- starts that fail


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"command": ["no-such-program"]}, r"no-such-program: .*driver\.options\.command", id="command"),
        pytest.param({"command": ["/etc/passwd"]}, r"/etc/passwd: .*driver\.options\.command", id="not-executable"),
        pytest.param({"cwd": "/no/such/place"}, r"/no/such/place: .*driver\.options\.cwd", id="cwd"),
        pytest.param({"log_directory": "/etc/passwd"}, r"/etc/passwd.*driver\.options\.log_directory", id="log"),
    ],
)
@pytest.mark.proves("reference-defects/12-failed-start-blocked")
async def test_start_that_cannot_work_names_the_option_and_frees_the_slot(options, message, make):
    driver = make(**options)
    for _ in range(2):
        with pytest.raises(StartFailedError, match=message):
            await driver.start(make_spec())
    assert await driver.list_instances() == []


async def test_check_names_what_is_wrong(tmp_path):
    driver = make_driver(tmp_path / "file" / "x", command=("no-such-program",), cwd="/no/such/place")
    (tmp_path / "file").touch()
    wrong = {finding.subject for finding in await driver.check() if not finding.ok}
    assert wrong == {"worker command", "worker directory", "state directory"}
    await driver.close()


async def test_state_directory_that_others_can_write_to_is_refused(tmp_path):
    (tmp_path / POOL).mkdir()
    (tmp_path / POOL).chmod(0o777)
    driver = make_driver(tmp_path)
    with pytest.raises(DriverUnavailableError, match="can be written by"):
        await driver.start(make_spec())
    await driver.close()


# --- secrets and environment


@pytest.mark.proves("reference-defects/13-password-logs")
async def test_password_is_in_a_private_file_only(driver, tmp_path):
    instance = await driver.start(make_spec())
    variables = (await is_ready(driver, instance))["variables"]
    assert SECRET not in json.dumps(variables)
    assert "WORKER_AMQP_URI" not in variables
    file = Path(variables["WORKER_AMQP_URI_FILE"])
    assert file.read_text() == AMQP_URI
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    holders = [path for path in tmp_path.rglob("*") if path.is_file() and SECRET in path.read_text()]
    assert holders == [file]
    await driver.stop(instance.instance_id, grace=0)
    await exited(driver, instance)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET in path.read_text()]


# --- logs


async def test_grown_log_is_rotated_while_the_worker_writes(tmp_path, make):
    clock = VirtualClock(time=0.0)
    driver = make(command=(sys.executable, "-c", COUNTER), clock=clock, log_max_bytes=4096)
    instance = await driver.start(make_spec())
    log = tmp_path / POOL / "logs" / f"{NAME}.log"

    async def has_grown():
        return log.stat().st_size > 100

    await eventually(has_grown, what="the log has grown")
    with log.open("a") as file:
        file.write("x" * 5000 + "\n")
    await driver.list_instances()
    assert log.stat().st_size < 5000
    assert log.with_name(f"{NAME}.log.1").stat().st_size > 5000
    await eventually(has_grown, what="the worker writes on")
    assert log.read_bytes()[:1] != b"\0"
    lines = await driver.logs(instance.instance_id, lines=10_000)
    assert lines[0] == "0"


async def test_passwords_in_log_lines_are_masked(make):
    driver = make(command=("/bin/echo", f"cannot connect to {AMQP_URI}"))
    instance = await exited(driver, await driver.start(make_spec()))
    assert await driver.logs(instance.instance_id) == ("cannot connect to amqp://worker:***@broker.example:5672/",)


async def test_logs_of_slots_long_unused_are_deleted(tmp_path, make):
    clock = VirtualClock(time=0.0)
    driver = make(clock=clock, log_retention="1h")
    ended = await exited(driver, await driver.start(make_spec(behaviour=Behaviour.EXIT)))
    log = tmp_path / POOL / "logs" / f"{NAME}.log"
    stranger = log.with_name("notes.txt")
    stranger.touch()
    await driver.remove(ended.instance_id)
    clock.jump(log.stat().st_mtime + 3599)
    await clock.advance(61)
    await driver.list_instances()
    assert not log.exists()
    assert stranger.exists()
